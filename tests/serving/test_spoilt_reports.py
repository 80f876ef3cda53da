"""A report that says nonsense, says nothing new or does not come: the loop holds and says why."""

from __future__ import annotations

import pytest

from tests.chaos.cases.surroundings import corrupted_reports, paused_while

SOME = (
    "absent",
    "stale",
    "demand.requests nan",
    "pool.kv_used_fraction inf",
    "queued -1",
    "at_s nan",
)


@pytest.mark.parametrize("way", SOME)
async def test_the_loop_holds_while_a_report_is_spoilt_and_goes_on_after_it(way: str) -> None:
    assert await paused_while(corrupted_reports()[way]) == (True, True)
