"""The comparison of two load generators: what both are sent, and when they agree."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import pytest

from baton.simulator.workloads.formats import read_trace
from benchmarks.bench_agreement import (
    BATON,
    CLOSED,
    COMPARED_METRICS,
    OPEN,
    VLLM,
    AgreementLoad,
    compare_tools,
    write_trace,
)

SAME = dict.fromkeys(COMPARED_METRICS, 2.0)
OWN = dict.fromkeys(
    (
        *("ttft_from_send_mean_s", "ttft_from_send_p50_s", "late_mean_s"),
        *("client_busy", "client_us_per_token"),
    ),
    0.1,
)


def pair(*, valid: float = 1.0, **figures: float) -> dict[str, dict[str, float]]:
    return {VLLM: dict(SAME), BATON: SAME | OWN | {"valid": valid} | figures}


def test_figures_within_two_percent_agree() -> None:
    told = compare_tools({OPEN: [pair(ttft_mean_s=2.039)], CLOSED: [pair(tpot_p50_s=1.961)]})
    assert told["agrees"]
    assert told["worst"] == pytest.approx(0.0195)


@pytest.mark.parametrize("name", COMPARED_METRICS)
def test_each_figure_further_off_is_named(name: str) -> None:
    told = compare_tools({OPEN: [pair(**{name: 2.05})]})
    assert not told["agrees"]
    assert list(told["off"]) == [f"open {name}"]


def test_the_median_of_the_repeats_is_evaluated() -> None:
    assert compare_tools({OPEN: [pair(), pair(e2e_mean_s=9.0), pair()]})["agrees"]
    assert not compare_tools({OPEN: [pair(e2e_mean_s=9.0), pair(e2e_mean_s=9.0), pair()]})["agrees"]


def test_pairs_that_were_disturbed_are_left_out_and_counted_if_others_are_left() -> None:
    told = compare_tools({OPEN: [pair(valid=0.0, e2e_mean_s=9.0), pair()]})
    assert told["agrees"]
    assert (told["pairs"], told["disturbed_pairs"]) == ({OPEN: 1}, {OPEN: 1})
    assert not compare_tools({OPEN: [pair(valid=0.0, e2e_mean_s=9.0)]})["agrees"]


def test_both_tools_get_the_same_requests_and_no_text_twice(tmp_path: Path) -> None:
    load = AgreementLoad(name=OPEN, requests=30, rate_per_s=20.0, concurrency=None)
    fresh = count(1)

    def made() -> list[tuple[float, int, int, tuple[int, ...]]]:
        file = write_trace(tmp_path, load, random.Random(3), fresh)
        read = read_trace("t", file.read_text().splitlines())
        assert read.block_tokens == 512
        return [request[:4] for request in read.requests]

    first, second = made(), made()
    assert [item[:3] for item in first] == [item[:3] for item in second]
    assert first[0][0] == 0
    assert not {item[3] for item in first} & {item[3] for item in second}
