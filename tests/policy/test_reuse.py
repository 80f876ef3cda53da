"""What a cached token is worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.fleet.fleet_model import PrefixReuse


def test_nothing_is_worth_anything_before_the_first_prompt() -> None:
    assert (PrefixReuse().hit_fraction, PrefixReuse().reuses_per_token) == (0.0, 0.0)


def test_two_thirds_cached_is_two_uses_for_each_token_computed() -> None:
    reuse = PrefixReuse()
    for _ in range(10):
        reuse.observe(200, 300)
    assert reuse.hit_fraction == pytest.approx(2 / 3)
    assert reuse.reuses_per_token == pytest.approx(2)


def test_what_was_long_ago_is_forgotten() -> None:
    reuse = PrefixReuse()
    for _ in range(1000):
        reuse.observe(10_000, 10_000)
    for _ in range(1000):
        reuse.observe(0, 10_000)
    assert reuse.hit_fraction < 0.01


def test_what_cannot_be_is_not_believed() -> None:
    reuse = PrefixReuse()
    reuse.observe(1, 2)
    for cached, prompt in ((3, 2), (-1, 2)):
        reuse.observe(cached, prompt)
    assert reuse.hit_fraction == 0.5


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), max_size=30))
def test_the_worth_is_always_bounded(prompts: list[tuple[int, int]]) -> None:
    reuse = PrefixReuse()
    for cached, prompt in prompts:
        reuse.observe(cached, prompt)
        assert 0 <= reuse.reuses_per_token <= 4
        assert 0 <= reuse.hit_fraction <= 1
