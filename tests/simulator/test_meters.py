from __future__ import annotations

from baton.simulator.engine.meters import EngineMeters, PullMeter


def test_pulls_are_counted_in_all_and_by_their_source() -> None:
    meter = PullMeter()
    meter.record_pull("a", moved_bytes=10, duration_s=0.5)
    meter.record_pull("b", moved_bytes=4, duration_s=0.25)
    meter.record_pull("a", moved_bytes=1, duration_s=0.25)
    meter.record_pull_failure("b")
    meter.record_expired_leases(2)

    a, b = meter.links
    assert (a.source_id, a.pulls, a.moved_bytes, a.busy_s, a.failures) == ("a", 2, 11, 0.75, 0)
    assert (b.source_id, b.pulls, b.moved_bytes, b.busy_s, b.failures) == ("b", 1, 4, 0.25, 1)
    totals = meter.transfers
    assert (totals.pulls, totals.moved_bytes, totals.busy_s) == (3, 15, 1.0)
    assert (totals.failures, totals.expired_leases) == (1, 2)


def test_the_first_step_is_its_own_average_and_later_ones_move_it() -> None:
    meters = EngineMeters()
    meters.record_step(1.0, prefill_tokens=8, decode_tokens=0, context_tokens=0)
    meters.record_step(2.0, prefill_tokens=0, decode_tokens=3, context_tokens=30)

    assert meters.step_s == 1.2
    assert meters.steps == (2, 3.0, 8, 3, 30, 1, 1)
