"""What the benchmark of wake-ups makes of what it sees."""

from __future__ import annotations

import pytest

from benchmarks.from_zero import Wake, summary

WELL = Wake(slo_class="chat", statuses=(200, 200), first_token_s=4.0)


def test_both_requests_of_a_wake_up_have_to_be_served() -> None:
    refused = Wake(slo_class="chat", statuses=(200, 503), first_token_s=5.0, why="no replica")
    figures = summary([WELL, refused], 0, [])
    assert (figures["wakes"], figures["served"], figures["problems"]) == (2, 1, ["no replica"])
    assert (figures["first_token_min_s"], figures["first_token_max_s"]) == (4.0, 5.0)


def test_a_stream_that_broke_off_was_not_served() -> None:
    assert not Wake(slo_class="", statuses=(200, 200), first_token_s=1.0, why="data: {}").served


@pytest.mark.parametrize("downs", [0, 3])
def test_a_deployment_that_a_balancer_took_out_is_told_of(downs: int) -> None:
    assert summary([WELL], downs, [7])["balancer_downs"] == downs
