from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.sim import SimSettings, expected_tokens
from baton.simulator.engine.tokens import TokenStream

SETTINGS = SimSettings()
PROMPTS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60)


def after(prompt: list[int], count: int, model: str = "tiny") -> tuple[int, ...]:
    return expected_tokens(prompt, count, model=model, settings=SETTINGS)


@given(prompt=PROMPTS, done=st.integers(0, 20))
def test_a_sequence_goes_on_the_same_from_any_point(prompt: list[int], done: int) -> None:
    whole = after(prompt, 20)
    assert after([*prompt, *whole[:done]], 20 - done) == whole[done:]


@given(prompt=PROMPTS, index=st.integers(0, 59))
def test_a_lost_or_repeated_token_changes_what_follows(prompt: list[int], index: int) -> None:
    index %= len(prompt)
    lost = prompt[:index] + prompt[index + 1 :]
    repeated = prompt[: index + 1] + prompt[index:]
    follows = after(prompt, 16)
    assert after(repeated, 16) != follows
    assert after(lost, 16) != follows


@given(prompt=PROMPTS, first=st.integers(0, 59), second=st.integers(0, 59))
def test_swapped_tokens_change_what_follows(prompt: list[int], first: int, second: int) -> None:
    first, second = first % len(prompt), second % len(prompt)
    swapped = list(prompt)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert (after(swapped, 16) == after(prompt, 16)) == (swapped == prompt)


def test_every_token_is_a_printable_id() -> None:
    tokens = after([5, 6, 7], 3000)
    assert set(tokens) == set(range(3, 97))


def test_the_tokens_of_two_models_differ() -> None:
    assert after([5, 6, 7], 16, "one") != after([5, 6, 7], 16, "two")


def test_the_context_ends_a_sequence() -> None:
    settings = SimSettings(max_len_tokens=10)
    assert len(expected_tokens([3] * 7, 100, model="tiny", settings=settings)) == 3


@pytest.mark.parametrize("min_tokens", [0, 5])
def test_an_end_token_is_drawn_with_its_probability_but_not_before_min_tokens(
    min_tokens: int,
) -> None:
    settings = SimSettings(eos_probability=0.25)
    lengths = []
    for seed in range(400):
        tokens = expected_tokens(
            [seed, 8], 1000, model="tiny", settings=settings, min_tokens=min_tokens
        )
        assert tokens.index(settings.eos_token_id) == len(tokens) - 1
        lengths.append(len(tokens))
    assert min(lengths) == min_tokens + 1
    # Geometric with mean 1 / 0.25; the mean of 400 has a standard deviation of 0.17.
    assert sum(lengths) / len(lengths) - min_tokens == pytest.approx(4, abs=0.7)


def test_the_state_of_a_long_sequence_is_no_larger() -> None:
    short, long = (TokenStream("tiny", SETTINGS, [9] * n) for n in (1, 100_000))
    assert short._state.bit_length() <= 64
    assert long._state.bit_length() <= 64
