"""What simulated engines say of the time that a leg took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.domain.fleet import Role
from baton.domain.handoff import LegKind, LegOutput, LegTimes
from baton.policy.placement.port import Disaggregate
from baton.simulator.engine.leg_timer import LegTimer
from baton.simulator.fleet.engines import EngineSettings
from baton.simulator.v1.core import V1Core
from baton.telemetry.requests.waterfall import Part, waterfall
from tests.control.world import check_record
from tests.simulator import cores, v1_cores
from tests.simulator.fleets import ENGINE, coordinator, fleet, requests

STEP_S = v1_cores.LinearStepTiming().per_step_s


def said(outputs: list[tuple[float, LegOutput]], leg_id: str) -> list[LegTimes]:
    return [
        output.times
        for _, output in outputs
        if output.leg_id == leg_id and output.times is not None
    ]


def test_a_counted_leg_waits_until_a_step_takes_it_in_and_then_computes_until_its_first() -> None:
    core = v1_cores.new_core()
    for name in "abcd":
        core.add(v1_cores.leg(name, 4, 3), now_s=0.0)
    core.add(v1_cores.leg("late", 4, 2), now_s=0.0)  # four seats
    outputs = v1_cores.run_until_idle(core)
    first_at_s = next(at_s for at_s, output in outputs if output.leg_id == "late")
    free_at_s = next(at_s for at_s, output in outputs if output.finish is not None)
    (times,) = said(outputs, "late")
    assert times.queue_s == pytest.approx(free_at_s)
    assert times.compute_s == pytest.approx(first_at_s - free_at_s)
    assert said(outputs, "a")[0].queue_s == 0.0


def test_a_counted_leg_that_comes_during_a_step_waits_for_its_end() -> None:
    core = v1_cores.new_core()
    core.add(v1_cores.leg("a", 16, 1), now_s=0.0)
    took_s = core.begin(0.0, horizon_s=1.0)
    assert took_s is not None
    core.add(v1_cores.leg("b", 4, 1), now_s=took_s / 4)
    core.finish(took_s)
    (times,) = said(v1_cores.run_until_idle(core, took_s), "b")
    assert times.queue_s == pytest.approx(took_s * 3 / 4)


def pulled(core: V1Core, began_at_s: float, arrived_at_s: float) -> LegTimes:
    prompt = v1_cores.prefill("p", 30)
    ticket = v1_cores.run_prefill(v1_cores.new_core(engine_id="p0"), prompt)
    core.add(v1_cores.decode("d", prompt.prompt_token_ids, ticket), now_s=began_at_s)
    assert core.begin(began_at_s, horizon_s=1.0) is None
    core.pop_commands()
    core.pull_done("d", blocks=ticket.blocks, duration_s=0.1, source_kept=True)
    (times,) = said(v1_cores.run_until_idle(core, arrived_at_s), "d")
    return times


def test_the_time_of_a_pull_is_queue_time() -> None:
    times = pulled(v1_cores.new_core(), 1.0, 1.75)
    assert times.queue_s == pytest.approx(0.75)
    assert 0 < times.compute_s < 2 * STEP_S


def test_a_counted_leg_that_was_put_back_says_so_at_its_end() -> None:
    core = v1_cores.new_core(replace(v1_cores.SETTINGS, kv_blocks=12))
    core.add(v1_cores.leg("a", 16, 16), now_s=0.0)
    core.add(v1_cores.leg("b", 16, 16), now_s=0.0)
    outputs = v1_cores.run_until_idle(core)
    first, last = said(outputs, "b")
    assert (first.preemptions, last.preemptions) == (0, 1)
    assert last[:2] == first[:2]
    assert len(said(outputs, "a")) == 1


def test_a_token_exact_engine_says_the_same() -> None:
    core = cores.new_core()
    core.add(cores.local_leg("a", max_tokens=2), now_s=1.0)  # 30 tokens: two steps of 16
    now_s, told = 1.5, []
    while (step := core.begin_step(now_s)) is not None:
        now_s += step.duration_s
        told += [(now_s, output) for output in core.finish_step(now_s)]
    (times,) = said(told, "a")
    assert times == pytest.approx((0.5, told[0][0] - 1.5, 0))


def test_a_token_exact_leg_that_was_put_back_says_so_at_its_end() -> None:
    core = cores.new_core(replace(cores.SETTINGS, kv_blocks=18, max_len_tokens=72))
    core.add(cores.local_leg("a", (5,) * 30, max_tokens=12), now_s=0.0)
    core.add(cores.local_leg("b", (6,) * 30, max_tokens=12), now_s=0.0)
    told = [(0.0, output) for output in cores.run_until_idle(core)]
    assert [times.preemptions for times in said(told, "b")] == [0, 1]


def test_an_engine_that_is_not_told_the_time_says_nothing_of_it() -> None:
    core = v1_cores.new_core()
    core.add(v1_cores.leg("a", 4, 3))
    exact = cores.new_core()
    exact.add(cores.local_leg("a", max_tokens=2))
    assert said(v1_cores.run_until_idle(core), "a") == []
    assert said([(0.0, output) for output in cores.run_until_idle(exact)], "a") == []


def test_a_leg_that_was_put_back_before_its_first_output_was_scheduled_once() -> None:
    watch = LegTimer(1.0)
    watch.on_scheduled(2.0)
    watch.preemptions += 1
    watch.on_scheduled(5.0)
    assert watch.on_first_output(6.0) == LegTimes(1.0, 4.0, 1)
    assert watch.on_last_output() is None


COUNTED = replace(
    v1_cores.SETTINGS, kv_blocks=512, max_len_tokens=2048, max_batched_tokens=256, lease_s=30.0
)


@pytest.mark.parametrize("engine", [ENGINE, COUNTED], ids=["token-exact", "counted"])
def test_in_a_simulated_fleet_all_legs_say_their_times_and_no_bar_is_guessed(
    engine: EngineSettings,
) -> None:
    made = fleet(
        replicas={Role.PREFILL: 1, Role.DECODE: 1},
        engine=engine,
        coordinators=[coordinator(0, Disaggregate.ALWAYS)],
    )
    for request in requests(12):
        made.send(request)
    made.run(until_ended=12, until_s=60.0)
    for record in made.records:
        check_record(record)
        assert [leg.kind for leg in record.legs] == [LegKind.PREFILL, LegKind.DECODE]
        for leg in record.legs:
            assert leg.engine_times is not None
            assert leg.first_output_at_s is not None
            waited_s = leg.first_output_at_s - leg.started_at_s
            assert leg.engine_times.queue_s + leg.engine_times.compute_s <= waited_s + 1e-9
        bars = waterfall(record)
        assert not any(bar.is_estimated for bar in bars)
        assert {Part.PREFILL, Part.TRANSFER, Part.DECODE} <= {bar.part for bar in bars}
    queued = [waterfall(record)[0] for record in made.records]
    assert sum(bar.part is Part.QUEUE or bar.part is Part.INGRESS_WAIT for bar in queued) > 6
