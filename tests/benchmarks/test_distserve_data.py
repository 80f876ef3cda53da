from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks._distserve_data import (
    LONGEST_TOKENS,
    Lengths,
    at_quantile,
    capacity_tokens,
    humaneval,
    poisson,
    sharegpt,
)


def _drawn(draw: Lengths, count: int = 4000) -> list[tuple[int, int]]:
    rng = random.Random(1)
    return [draw(rng) for _ in range(count)]


def test_a_quantile_lies_between_its_neighbours() -> None:
    assert at_quantile((0, 10, 40), 0.0) == 0
    assert at_quantile((0, 10, 40), 0.25) == 5
    assert at_quantile((0, 10, 40), 0.75) == 25
    assert at_quantile((0, 10, 40), 1.0) == 40


def test_sharegpt_is_as_long_as_what_was_served() -> None:
    drawn = _drawn(sharegpt)
    assert fmean(prompt for prompt, _ in drawn) == pytest.approx(750, rel=0.05)
    assert fmean(output for _, output in drawn) == pytest.approx(176, rel=0.07)
    assert max(prompt + output for prompt, output in drawn) < LONGEST_TOKENS


def test_humaneval_has_the_means_of_the_paper() -> None:
    drawn = _drawn(humaneval)
    assert fmean(prompt for prompt, _ in drawn) == pytest.approx(171.3, rel=0.04)
    assert fmean(output for _, output in drawn) == pytest.approx(98.2, rel=0.06)
    assert min(min(one) for one in drawn) >= 1


def test_requests_are_the_same_at_any_rate_and_arrive_at_it() -> None:
    slow = poisson(sharegpt, 1.0, requests=2000, seed=3)
    fast = poisson(sharegpt, 4.0, requests=2000, seed=3)
    assert [one[1:3] for one in slow] == [one[1:3] for one in fast]
    assert fast[-1].at_s == pytest.approx(slow[-1].at_s / 4)
    assert slow[-1].at_s == pytest.approx(2000, rel=0.08)


def test_an_unknown_capacity_is_said(tmp_path: Path) -> None:
    table = tmp_path / "perf" / "distserve" / "max_num_tokens.csv"
    table.parent.mkdir(parents=True)
    table.write_text("model,tp,pp,max_num_tokens\nfacebook/opt-13b,2,1,163008\n")
    assert capacity_tokens(tmp_path, "facebook/opt-13b", tp=2, pp=1) == 163_008
    with pytest.raises(KeyError, match="tp 1, pp 2"):
        capacity_tokens(tmp_path, "facebook/opt-13b", tp=1, pp=2)
