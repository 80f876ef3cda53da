"""What the benchmark of an ingress makes of what it sees, and how its data plane is named."""

from __future__ import annotations

from itertools import count

from benchmarks._data_plane import pool_of
from benchmarks.ingress import _highest, quoted


def test_one_run_is_quoted_as_it_is_and_several_by_median_and_spread() -> None:
    assert quoted([{"us_per_token": 7.0}]) == {"us_per_token": 7.0}
    runs = [{"us_per_token": value} for value in (9.0, 5.0, 6.0)]
    assert quoted(runs) == {"us_per_token": [6.0, 5.0, 9.0]}


def test_the_highest_is_read_before_and_while_something_is_done() -> None:
    reads = count(1)
    falling = iter((7, 3, 5))
    assert _highest(lambda: next(falling, 1), lambda: None) == 7
    assert _highest(lambda: next(reads), lambda: None) >= 1


def test_replicas_are_named_after_their_pools() -> None:
    assert pool_of("mixed-12") == "mixed"
    assert pool_of("long-prompts-0") == "long-prompts"
