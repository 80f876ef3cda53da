"""Answers that are packed say the same, and stay small."""

from __future__ import annotations

from baton.domain.demand import CoordinatorReport, Tally
from baton.domain.fleet import Role
from baton.serving.ray.packing import pack, pack_reports, unpack, unpack_reports

INLINE_BYTES = 100 * 1024
"""What Ray still puts into its own message."""


def test_plain_values_come_back_and_others_as_text() -> None:
    told = {"a": [1, 2.5, None, True], "role": Role.DECODE, "left": {1, 2}.__len__}
    (number, role, left) = unpack(pack(told)).values()  # type: ignore[attr-defined]
    assert (number, role) == ([1, 2.5, None, True], "decode")
    assert isinstance(left, str)


def test_what_was_not_packed_is_left_as_it_is() -> None:
    assert unpack({"generation": 3}) == {"generation": 3}
    assert unpack_reports({"generation": 3}) == ()
    assert unpack_reports(pack_reports.__name__) == ()


def test_six_hundred_ticks_with_all_their_numbers_go_into_a_message() -> None:
    inputs = {f"input_{number}_tokens_per_s": number * 1.37 for number in range(20)}
    pools = [{"pool": pool, "have": 2, "desired": 3, "inputs": inputs} for pool in ("p", "d")]
    ticks = [{"age_s": age * 2.013, "paused_reason": "", "pools": pools} for age in range(600)]
    assert len(pack({"ticks": ticks})) < INLINE_BYTES


def test_a_report_of_a_thousand_tenants_comes_back_and_goes_into_a_message() -> None:
    rows = tuple(
        Tally("default", f"tenant-{number}", "m", "decode", evaluated=number, gpu_s=number / 7)
        for number in range(1000)
    )
    report = CoordinatorReport(coordinator_id="i", at_s=1.0, tallies=rows)
    sent = pack_reports((report,))
    assert len(sent) < INLINE_BYTES
    assert unpack_reports(sent) == (report,)
