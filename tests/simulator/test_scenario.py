from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.control.autoscaling.autoscaler import Autoscaler
from baton.control.autoscaling.observer import ObserverOptions
from baton.control.state.service_rules import ServiceRules
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.domain.tenant import Tenant
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.placement.port import Disaggregate
from baton.policy.prefix_cache.index import IndexOptions
from baton.policy.scaling.fixed import Static
from baton.policy.scaling.options import AutoscalerOptions
from baton.simulator.fleet.plans import UNBOUNDED_LIMITS, timing_priors
from baton.simulator.fleet.replica import ReportingOptions
from baton.simulator.outcome import Outcome, mean
from baton.simulator.scenario import (
    ClosedLoop,
    Kill,
    Scenario,
    ScheduledEvent,
    SetBandwidth,
    SetRole,
    Simulation,
    SimulationResult,
    Start,
    Stop,
    StopReplica,
    simulate,
    throttled_reporting,
)
from baton.simulator.workloads.arrivals import UserLoad
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.simulator.scenes import (
    ENGINE,
    LinearStepTiming,
    pool,
    scenario,
    simultaneous_trace,
    trace,
)

PAIR = (pool(Role.PREFILL, 1), pool(Role.DECODE, 1))
SPLIT = Disaggregate.ALWAYS


def served(run: SimulationResult) -> int:
    return sum(outcome.ok for outcome in run.outcomes)


# ---------------------------------------------------------------------- users


def of_users(
    requests: Trace, users: int, think_s: float, duration_s: float | None = None
) -> SimulationResult:
    loop = ClosedLoop(load=UserLoad(users=users, think_s=think_s), duration_s=duration_s, seed=3)
    return simulate(scenario(*PAIR), requests, closed_loop=loop)


def alike(count: int) -> Trace:
    return simultaneous_trace(count, prompt_tokens=200, output_tokens=20)


def in_flight_at(run: SimulationResult, at_s: float) -> int:
    return sum(
        outcome.arrived_at_s <= at_s < outcome.arrived_at_s + outcome.e2e_s
        for outcome in run.outcomes
    )


@pytest.mark.parametrize(("users", "think_s"), [(1, 0.0), (7, 0.0), (5, 1.5), (40, 0.3)])
def test_users_send_by_the_law_of_interactive_response_times(users: int, think_s: float) -> None:
    run = of_users(alike(600), users, think_s)
    assert served(run) == 600
    assert max(in_flight_at(run, outcome.arrived_at_s) for outcome in run.outcomes) <= users
    arrivals_s = [outcome.arrived_at_s for outcome in run.outcomes]
    assert arrivals_s == sorted(arrivals_s)
    answer_s = sum(outcome.e2e_s for outcome in run.outcomes) / 600
    rate_per_s = 599 / (arrivals_s[-1] - arrivals_s[0])
    assert rate_per_s == pytest.approx(users / (think_s + answer_s), rel=0.1)


def test_users_send_for_as_long_as_they_are_told_and_are_answered() -> None:
    whole = of_users(alike(600), 5, 1.5)
    half_s = whole.outcomes[300].arrived_at_s
    run = of_users(alike(600), 5, 1.5, duration_s=half_s)
    assert len(run.outcomes) == pytest.approx(300, abs=2)
    assert all(outcome.ok for outcome in run.outcomes)
    assert max(outcome.arrived_at_s for outcome in run.outcomes) <= half_s


def test_a_duration_without_requests_ends() -> None:
    assert of_users(alike(9), 1, 1e6, duration_s=0.001).outcomes == ()


def test_a_user_ends_a_session_before_another() -> None:
    requests = tuple(
        TraceRequest(0.0, 100 + number, 3, session_id=f"s{number % 3}") for number in range(9)
    )
    run = of_users(Trace(name="sessions", requests=requests), 1, 0.0)
    assert [outcome.prompt_tokens - 100 for outcome in run.outcomes] == [0, 3, 6, 1, 4, 7, 2, 5, 8]


@pytest.mark.parametrize(("users", "think_s"), [(0, 1.0), (-1, 1.0), (1, -0.1), (1, float("inf"))])
def test_users_that_there_cannot_be_are_refused(users: int, think_s: float) -> None:
    with pytest.raises(ValueError, match="users with a think time"):
        UserLoad(users=users, think_s=think_s)


# ---------------------------------------------------------------------- the same story
def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    def run_of(seed: int) -> SimulationResult:
        made = scenario(pool(Role.PREFILL, 2), pool(Role.DECODE, 3), seed=seed, coordinators=2)
        return simulate(made, trace(150, rate_per_s=60.0, groups=4))

    assert run_of(1) == run_of(1)
    assert run_of(1).outcomes != run_of(2).outcomes


def told(hash_seed: int) -> bytes:
    """What another process, which hashes strings in another way, makes of a scenario."""
    code = """
from baton.domain.fleet import Role
from baton.simulator.scenario import simulate
from tests.simulator.scenes import pool, scenario, trace
made = scenario(pool(Role.PREFILL, 3), pool(Role.DECODE, 9), coordinators=3)
print(simulate(made, trace(60, rate_per_s=80.0, groups=4)))
"""
    found = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": found},
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        timeout=60,
    ).stdout


def test_a_run_does_not_depend_on_how_a_process_hashes_strings() -> None:
    run_of = told(1)
    assert run_of
    assert run_of == told(2)


@pytest.mark.parametrize("groups", [0, 5])
def test_many_steps_at_once_are_the_same_as_one_at_a_time(groups: int) -> None:
    def outcomes(patience_s: float) -> SimulationResult:
        reporting = ReportingOptions(max_step_run_s=patience_s, report_cache=groups > 0)
        one = scenario(pool(Role.MIXED, 1), reporting=reporting)
        return simulate(one, trace(120, rate_per_s=15.0, groups=groups))

    jumps, steps = outcomes(100.0), outcomes(1e-9)
    assert jumps.event_count < 0.7 * steps.event_count
    for outcome, other in zip(jumps.outcomes, steps.outcomes, strict=True):
        assert outcome.ttft_s == pytest.approx(other.ttft_s, rel=1e-6)
        assert outcome.e2e_s == pytest.approx(other.e2e_s, rel=1e-6)
        assert outcome.cached_tokens == other.cached_tokens


def test_an_objective_of_the_itl_is_met_in_many_steps_at_once_as_in_one_at_a_time() -> None:
    def is_met(limit_s: float, stretch_s: float) -> list[bool]:
        slo = Slo(itl_p99_s=limit_s)
        made = scenario(
            pool(Role.MIXED, 2),
            rules=ServiceRules(slos=SloClasses(classes={"default": slo})),
            reporting=ReportingOptions(max_step_run_s=stretch_s),
        )
        return [outcome.slo_met for outcome in simulate(made, trace(40)).outcomes]

    for limit_s, min_met, max_met in ((0.2, 40, 40), (0.012, 1, 39), (1e-3, 0, 5)):
        met = is_met(limit_s, 100.0)
        assert met == is_met(limit_s, 1e-9)
        assert min_met <= sum(met) <= max_met


# ---------------------------------------------------------------------- closed forms
def test_a_handoff_takes_its_prefill_its_bytes_and_its_messages() -> None:
    made = scenario(*PAIR, disaggregate=SPLIT, latency_s=0.01)
    run = simulate(made, simultaneous_trace(1, prompt_tokens=320, output_tokens=5))
    (one,) = run.outcomes
    timing = LinearStepTiming()
    prefill_s = timing.per_step_s + 320 * timing.per_prefill_token_s
    transfer_s = ENGINE.transfer_setup_s + 20 * ENGINE.kv_block_bytes / ENGINE.transfer_bytes_per_s
    assert one.ttft_s == pytest.approx(
        4 * 0.01 + prefill_s + transfer_s + timing.per_step_s + timing.per_decode_s, rel=0.2
    )
    assert one.ttft_s > 4 * 0.008 + prefill_s + transfer_s + timing.per_step_s
    assert (run.handoffs, run.resumes, one.ok, one.output_tokens) == (1, 0, True, 5)


@pytest.mark.parametrize(
    ("max_pulls", "after"),
    [
        pytest.param(8, (4, 4, 4, 4), id="all at once"),
        pytest.param(1, (1, 2, 3, 4), id="one at a time, the first blocks sooner"),
    ],
)
def test_handoffs_into_one_replica_share_its_interface(
    max_pulls: int, after: tuple[int, ...]
) -> None:
    slow = replace(ENGINE, transfer_bytes_per_s=1e9, transfer_setup_s=0.0, max_pulls=max_pulls)
    made = scenario(
        pool(Role.PREFILL, 4, slow), pool(Role.DECODE, 1, slow), disaggregate=SPLIT, latency_s=0.0
    )
    run = simulate(made, simultaneous_trace(4, prompt_tokens=1600, output_tokens=2))
    prefill_s = LinearStepTiming().per_step_s + 1600 * LinearStepTiming().per_prefill_token_s
    alone_s = 100 * ENGINE.kv_block_bytes / 1e9
    waits_s = sorted(outcome.ttft_s - prefill_s for outcome in run.outcomes)
    assert waits_s == pytest.approx([pulls * alone_s for pulls in after], rel=0.06)


def test_a_slower_interface_slows_what_is_under_way() -> None:
    slow = replace(ENGINE, transfer_bytes_per_s=1e8, transfer_setup_s=0.0)
    pools = (pool(Role.PREFILL, 1, slow), pool(Role.DECODE, 1, slow))
    change = SetBandwidth(at_s=0.5, replica_id="decode-0", bytes_per_s=5e7)
    made = scenario(*pools, disaggregate=SPLIT, latency_s=0.0, scheduled_events=(change,))
    run = simulate(made, simultaneous_trace(1, prompt_tokens=1600, output_tokens=2))
    begun_s = LinearStepTiming().per_step_s + 1600 * LinearStepTiming().per_prefill_token_s
    left_bytes = 100 * ENGINE.kv_block_bytes - 1e8 * (0.5 - begun_s)
    assert run.outcomes[0].ttft_s == pytest.approx(0.5 + left_bytes / 5e7, rel=0.01)


def test_the_longest_gap_is_that_of_the_tokens_and_not_of_the_messages() -> None:
    alone = simulate(
        scenario(pool(Role.MIXED, 1)), simultaneous_trace(1, prompt_tokens=16, output_tokens=100)
    )
    (one,) = alone.outcomes
    assert one.max_itl_s == pytest.approx(one.tpot_s, rel=0.02)
    assert one.e2e_s == pytest.approx(one.ttft_s + 99 * one.tpot_s)
    longer = TraceRequest(0.2, 6000, 2)
    late = Trace(name="t", requests=(TraceRequest(0.0, 16, 100), longer))
    beside = simulate(scenario(pool(Role.MIXED, 1)), late)
    prefill_s = LinearStepTiming().per_step_s + 6000 * LinearStepTiming().per_prefill_token_s
    assert beside.outcomes[0].max_itl_s == pytest.approx(prefill_s, rel=0.05)


# ---------------------------------------------------------------------- what happens to replicas
def test_a_replica_that_is_asked_for_serves_when_its_weights_are_loaded() -> None:
    made = scenario(
        pool(Role.MIXED, 0), scheduled_events=(Start(at_s=1.0, pool="mixed", replicas=2),)
    )
    run = simulate(made, simultaneous_trace(4, prompt_tokens=100, output_tokens=4))
    assert served(run) == 4
    assert all(4.0 < outcome.ttft_s < 4.1 for outcome in run.outcomes)
    assert run.replica_seconds["mixed"] == pytest.approx(2 * (run.ended_at_s - 1.0))
    starting = {sample.pools[0].starting for sample in run.timeline if 1.0 < sample.at_s < 4.0}
    assert starting == {2}
    last = run.timeline[-1].pools[0]
    assert (last.replicas, last.starting) == (2, 0)


def test_a_replica_that_is_stopped_ends_its_work_and_is_paid_until_then() -> None:
    made = scenario(
        pool(Role.MIXED, 2), scheduled_events=(Stop(at_s=0.1, pool="mixed", replicas=1),)
    )
    first = simultaneous_trace(2, prompt_tokens=100, output_tokens=200).requests
    later = tuple(TraceRequest(0.2 + 0.1 * n, 100, 50) for n in range(20))
    run = simulate(made, Trace(name="t", requests=first + later))
    assert (served(run), run.resumes) == (22, 0)
    ended_s = run.outcomes[1].e2e_s
    assert run.replica_seconds["mixed"] == pytest.approx(run.ended_at_s + ended_s, rel=0.02)
    assert run.timeline[-1].pools[0].replicas == 1


def test_a_replica_that_is_stopped_keeps_the_blocks_that_are_being_pulled() -> None:
    slow = replace(ENGINE, transfer_bytes_per_s=1e8)
    pools = (pool(Role.PREFILL, 1, slow), pool(Role.DECODE, 1, slow))
    stop = Stop(at_s=0.3, pool="prefill")
    made = scenario(*pools, disaggregate=SPLIT, scheduled_events=(stop,))
    run = simulate(made, simultaneous_trace(1, prompt_tokens=1600, output_tokens=2))
    (one,) = run.outcomes
    assert (run.handoffs, run.resumes) == (1, 0)
    assert one.ttft_s > 1.0
    assert run.replica_seconds["prefill"] == pytest.approx(one.ttft_s, abs=0.1)


def test_an_idle_replica_that_is_stopped_leaves_at_once() -> None:
    stop = StopReplica(at_s=0.5, replica_id="mixed-1")
    made = scenario(pool(Role.MIXED, 2), scheduled_events=(stop,))
    run = simulate(made, simultaneous_trace(1, prompt_tokens=100, output_tokens=4, at_s=2.0))
    assert run.replica_seconds["mixed"] == pytest.approx(0.5 + run.ended_at_s)


def test_streams_of_a_dead_replica_resume_with_their_sent_tokens() -> None:
    made = scenario(pool(Role.MIXED, 2), scheduled_events=(Kill(at_s=0.6, replica_id="mixed-0"),))
    run = simulate(made, simultaneous_trace(2, prompt_tokens=100, output_tokens=200))
    assert (served(run), run.resumes) == (2, 1)
    assert {outcome.output_tokens for outcome in run.outcomes} == {200}
    # Recomputing 0.6 s of tokens takes one prefill, not 0.6 s.
    assert abs(run.outcomes[0].e2e_s - run.outcomes[1].e2e_s) < 0.1


def test_a_role_that_changes_moves_new_work_and_leaves_the_old_alone() -> None:
    flip = SetRole(at_s=0.5, replica_id="prefill-0", role=Role.DECODE)
    made = scenario(
        pool(Role.PREFILL, 2), pool(Role.DECODE, 1), disaggregate=SPLIT, scheduled_events=(flip,)
    )
    requests = tuple(TraceRequest(0.02 * n, 200, 60) for n in range(100))
    stage = Simulation(made, Trace(name="t", requests=requests))
    stage.run(iter(Trace(name="t", requests=requests).to_requests()))
    run = stage.result()
    assert (served(run), run.resumes) == (100, 0)
    assert stage.fleet.replicas["prefill-0"].facts.role is Role.DECODE
    running = [sample.pools[0].running for sample in run.timeline if 0.8 < sample.at_s < 1.5]
    assert max(running) > 3  # streams, which a prefill replica has none of


def test_happenings_to_replicas_that_are_gone_do_not_happen() -> None:
    gone: tuple[ScheduledEvent, ...] = (
        Kill(at_s=0.1, replica_id="mixed-1"),
        Kill(at_s=0.2, replica_id="mixed-1"),
        SetRole(at_s=0.2, replica_id="mixed-1", role=Role.DECODE),
        SetBandwidth(at_s=0.2, replica_id="mixed-1", bytes_per_s=1.0),
        StopReplica(at_s=0.3, replica_id="mixed-1"),
    )
    run = simulate(
        scenario(pool(Role.MIXED, 2), scheduled_events=gone),
        simultaneous_trace(1, prompt_tokens=10, output_tokens=100),
    )
    assert served(run) == 1


happenings = st.one_of(
    st.builds(Start, at_s=st.floats(0, 4), pool=st.sampled_from(["prefill", "decode"])),
    st.builds(Stop, at_s=st.floats(0, 4), pool=st.sampled_from(["prefill", "decode"])),
    st.builds(
        Kill,
        at_s=st.floats(0, 4),
        replica_id=st.sampled_from(["prefill-0", "decode-0", "decode-1"]),
    ),
    st.builds(
        SetRole,
        at_s=st.floats(0, 4),
        replica_id=st.sampled_from(["prefill-0", "prefill-1", "decode-0", "decode-1"]),
        role=st.sampled_from(list(Role)),
    ),
    st.builds(
        SetBandwidth,
        at_s=st.floats(0, 4),
        replica_id=st.sampled_from(["prefill-0", "decode-0"]),
        bytes_per_s=st.floats(1e8, 1e11),
    ),
)


@settings(max_examples=25)
@given(
    st.lists(happenings, max_size=6),
    st.integers(0, 3),
    st.sampled_from([Disaggregate.AUTO, Disaggregate.ALWAYS]),
    st.sampled_from([0, 3]),
)
def test_no_request_is_lost_and_nothing_is_left_in_any_run(
    happens: list[ScheduledEvent], seed: int, disaggregate: Disaggregate, groups: int
) -> None:
    # Somebody is always there in the end.
    happens = [*happens, Start(at_s=4.0, pool="decode", replicas=1)]
    tight = replace(ENGINE, kv_blocks=120, max_running_requests=8)
    made = scenario(
        pool(Role.PREFILL, 2, tight),
        pool(Role.DECODE, 2, tight),
        disaggregate=disaggregate,
        scheduled_events=tuple(happens),
        seed=seed,
        coordinators=2,
    )
    sent = trace(60, rate_per_s=25.0, seed=seed, groups=groups)
    stage = Simulation(made, sent)
    stage.run(sent.to_requests())
    run = stage.result()
    assert len(run.outcomes) == 60
    assert served(run) == 60, run.route_reasons
    wanted = [request.output_tokens for request in sent.requests]
    assert [outcome.output_tokens for outcome in run.outcomes] == wanted
    stage.fleet.run(until_s=run.ended_at_s + 2 * ENGINE.lease_s)
    stage.fleet.check_idle()


# ---------------------------------------------------------------------- what is kept of it
def test_outcomes_are_in_order_of_arrival_and_not_of_their_ends() -> None:
    requests = (TraceRequest(0.0, 100, 300), TraceRequest(0.1, 100, 2), TraceRequest(0.2, 50, 5))
    run = simulate(scenario(pool(Role.MIXED, 1)), Trace(name="t", requests=requests))
    assert [outcome.output_tokens for outcome in run.outcomes] == [300, 2, 5]
    assert [outcome.arrived_at_s for outcome in run.outcomes] == [0.0, 0.1, 0.2]


def test_a_run_that_is_cut_off_reports_waiting_requests_and_not_future_ones() -> None:
    requests = (TraceRequest(0.0, 100, 1000), TraceRequest(0.5, 9000, 5), TraceRequest(9.0, 1, 1))
    run = simulate(scenario(pool(Role.MIXED, 1)), Trace(name="t", requests=requests), until_s=0.6)
    first, second = run.outcomes
    assert not first.ok
    assert 10 < first.output_tokens < 1000
    assert first.e2e_s == pytest.approx(0.6)
    assert (second.ok, second.output_tokens, second.ttft_s) == (False, 0, float("inf"))
    assert run.ended_at_s == 0.6


def test_a_request_that_no_engine_takes_has_not_been_served() -> None:
    short = replace(ENGINE, max_len_tokens=100)
    run = simulate(
        scenario(pool(Role.MIXED, 1, short)),
        simultaneous_trace(1, prompt_tokens=500, output_tokens=5),
    )
    (one,) = run.outcomes
    assert (one.ok, one.ttft_s, run.timeline[-1].ended) == (False, float("inf"), 1)


def test_samples_describe_each_pool_over_time() -> None:
    sent = trace(200, rate_per_s=50.0)
    run = simulate(scenario(*PAIR), sent)
    assert 400 < len(run.timeline) < 1100
    times_s = [sample.at_s for sample in run.timeline]
    assert times_s == sorted(times_s)
    last = run.timeline[-1]
    assert (last.arrived, last.ended) == (200, 200)
    assert [other.pool for other in last.pools] == ["prefill", "decode"]
    assert max(sample.pools[1].running for sample in run.timeline) > 1
    assert max(sample.pools[1].kv_used_fraction for sample in run.timeline) > 0


def test_a_run_that_takes_much_longer_than_its_trace_keeps_as_many_samples() -> None:
    requests = (TraceRequest(0.0, 10, 3000), TraceRequest(2.0, 10, 2))
    run = simulate(scenario(pool(Role.MIXED, 1)), Trace(name="t", requests=requests))
    assert run.ended_at_s > 5 * 2.0
    assert 500 < len(run.timeline) <= 1002
    assert run.timeline[-1].at_s == run.ended_at_s


def test_progress_is_told_up_to_the_end() -> None:
    heard: list[float] = []
    simulate(scenario(pool(Role.MIXED, 1)), trace(50), on_progress=heard.append)
    assert heard == sorted(heard)
    assert heard[-1] == 1.0


def test_an_empty_trace_is_served_at_once() -> None:
    run = simulate(scenario(pool(Role.MIXED, 1)), Trace(name="none", requests=()))
    assert (run.outcomes, run.ended_at_s) == ((), -1.0)


def test_pools_may_be_of_different_shapes() -> None:
    slow = replace(
        ENGINE, timing=LinearStepTiming(per_prefill_token_s=0.001), max_batched_tokens=512
    )
    made = Scenario(
        pools=(
            replace(pool(Role.MIXED, 1, slow), name="slow"),
            replace(pool(Role.MIXED, 1), name="fast"),
        ),
        placer=scenario().placer,
    )
    run = simulate(made, trace(60, rate_per_s=10.0))
    running = [{other.pool: other.running for other in sample.pools} for sample in run.timeline]
    assert sum(entry["fast"] for entry in running) > sum(entry["slow"] for entry in running)


def test_coordinators_with_a_model_of_their_engines_choose_the_faster_one_at_once() -> None:
    slow = replace(ENGINE, timing=LinearStepTiming(per_prefill_token_s=0.001))
    pools = (
        replace(pool(Role.MIXED, 1, slow), name="a-slow"),
        replace(pool(Role.MIXED, 1), name="b-fast"),
    )
    first = simultaneous_trace(1, prompt_tokens=1000, output_tokens=2)
    knowing = simulate(Scenario(pools=pools, placer=scenario().placer), first)
    learning = simulate(Scenario(pools=pools, placer=scenario().placer, priors={}), first)
    assert knowing.outcomes[0].ttft_s < 0.1
    assert learning.outcomes[0].ttft_s >= knowing.outcomes[0].ttft_s


def test_pools_of_equal_engines_have_one_model_and_others_their_own() -> None:
    slow = replace(ENGINE, timing=LinearStepTiming(per_prefill_token_s=0.001))
    pools = (
        replace(pool(Role.PREFILL, 1), name="prefill"),
        replace(pool(Role.DECODE, 1), name="decode"),
        replace(pool(Role.MIXED, 1, slow), name="slow"),
    )
    priors = timing_priors(Scenario(pools=pools, placer=scenario().placer))
    assert priors["prefill"] is priors["decode"]
    assert priors["slow"] != priors["decode"]


# ---------------------------------------------------------------------- reports
@pytest.mark.parametrize("max_pulls", [1, 2])
def test_no_more_requests_are_admitted_than_decode_replicas_pull_for(max_pulls: int) -> None:
    ttft_s = 0.5
    decode = replace(ENGINE, max_pulls=max_pulls)
    slos = SloClasses(classes={"default": Slo(ttft_s=ttft_s, tpot_s=1.0)})
    crowd = Trace(
        name="test",
        requests=tuple(TraceRequest(number / 400, 32, 4) for number in range(2000)),
        block_tokens=64,
    )
    run = simulate(
        scenario(
            pool(Role.PREFILL, 6),
            pool(Role.DECODE, 1, decode),
            disaggregate=SPLIT,
            rules=ServiceRules(slos=slos),
            limits=replace(UNBOUNDED_LIMITS, max_pulls=max_pulls),
        ),
        crowd,
    )
    ttfts_s = [outcome.ttft_s for outcome in run.outcomes if outcome.ok]
    assert max(ttfts_s) < 1.02 * ttft_s
    in_time = sum(served_s <= ttft_s for served_s in ttfts_s)
    assert in_time >= 0.99 * len(ttfts_s)
    # In 5 s there are 980 steps of 5.1 ms, each of which begins max_pulls streams.
    assert in_time > 0.9 * 980 * max_pulls


def test_an_index_is_used_for_shared_prefixes_only() -> None:
    made = scenario(pool(Role.MIXED, 2))
    assert (
        sum(outcome.cached_tokens for outcome in simulate(made, trace(40, groups=2)).outcomes) > 0
    )
    assert (
        simulate(made, trace(40)).outcomes
        == simulate(replace(made, index=IndexOptions()), trace(40)).outcomes
    )


def test_large_fleets_report_less_often() -> None:
    assert throttled_reporting(25, 1).report_interval_s == 0.25
    assert throttled_reporting(1000, 1).report_interval_s == 10.0
    assert throttled_reporting(100, 4).report_interval_s == 1.0
    assert throttled_reporting(50, 1).max_step_run_s == 1.0
    assert throttled_reporting(1000, 1).max_step_run_s == 10.0


def test_a_fleet_that_reports_less_often_serves_as_one_that_reports_as_live() -> None:
    def mean_ttft_s(reporting: ReportingOptions) -> float:
        made = scenario(pool(Role.MIXED, 120), reporting=reporting)
        return mean([outcome.ttft_s for outcome in simulate(made, crowd).outcomes])

    crowd = trace(3000, rate_per_s=600.0)
    live, throttled = ReportingOptions(report_unchanged=False), throttled_reporting(1000, 1)
    assert mean_ttft_s(throttled) == pytest.approx(mean_ttft_s(live), rel=0.02)


def test_reports_of_a_large_fleet_are_recent_enough_for_its_autoscaler() -> None:
    options = AutoscalerOptions()
    made = scenario(pool(Role.MIXED, 2000), autoscaler=lambda: Autoscaler(Static(options), options))
    run = simulate(made, trace(30, rate_per_s=1.0))
    assert run.ended_at_s > 20
    assert not [tick for tick in run.ticks if tick.paused_reason and tick.at_s > 4.0]


def test_reports_go_on_in_their_rhythm_after_a_time_without_a_change() -> None:
    def outcomes(max_gap_s: float) -> tuple[tuple[Outcome, ...], int]:
        reporting = ReportingOptions(report_unchanged=False, max_report_gap_s=max_gap_s)
        made = scenario(pool(Role.MIXED, 8), reporting=reporting, coordinators=2)
        run = simulate(made, trace(30, rate_per_s=1.0))
        return run.outcomes, run.event_count

    sleeping, waking = outcomes(float("inf")), outcomes(1e9)
    assert sleeping[0] == waking[0]
    assert sleeping[1] < 0.7 * waking[1]


def test_without_sharing_no_replica_reports_its_cache() -> None:
    assert throttled_reporting(8, 1).report_cache
    assert not throttled_reporting(8, 1, prompts_shared=False).report_cache
    for groups in (0, 2):
        stage = Simulation(scenario(pool(Role.MIXED, 1)), trace(5, groups=groups))
        stage.run(trace(5, groups=groups).to_requests())
        assert stage.fleet.replicas["mixed-0"].facts.cache_events == (groups > 0)


def test_an_unchanged_replica_sends_no_report() -> None:
    def events(*, always: bool) -> int:
        reporting = ReportingOptions(report_unchanged=always)
        quiet = scenario(pool(Role.MIXED, 8), reporting=reporting)
        return simulate(
            quiet, simultaneous_trace(1, prompt_tokens=10, output_tokens=5, at_s=20.0)
        ).event_count

    assert events(always=True) - events(always=False) > 8 * 20 * 3


# ---------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (Kill(at_s=1.0, replica_id="mixed-7"), "nothing is called 'mixed-7', known are mixed-0"),
        (Start(at_s=1.0, pool="mixd"), "nothing is called 'mixd', known are mixed"),
        (SetBandwidth(at_s=1.0, replica_id="mixed-0", bytes_per_s=0.0), "expected more than 0"),
    ],
)
def test_an_impossible_event_is_refused(wrong: ScheduledEvent, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        scenario(pool(Role.MIXED, 1), scheduled_events=(wrong,))


def test_pools_have_names_of_their_own_and_coordinators_are_there() -> None:
    with pytest.raises(ValueError, match="the same name"):
        scenario(pool(Role.MIXED, 1), pool(Role.MIXED, 2))
    with pytest.raises(ValueError, match="coordinators is 0"):
        scenario(pool(Role.MIXED, 1), coordinators=0)
    with pytest.raises(ValueError, match="has -1 replicas"):
        scenario(pool(Role.MIXED, -1))


# ---------- classes and tenants in virtual time: what traces say of them, and what outcomes keep
FAST = Slo(name="fast", ttft_s=0.5)
RULES = ServiceRules(slos=SloClasses(classes={"default": Slo(), "fast": FAST}))


def requests_of(trace: Trace, rules: ServiceRules) -> list[tuple[str, str | None]]:
    asked = trace.to_requests(classes=rules.slos.classes)
    return [(request.tenant, request.slo_class) for request in asked]


def test_requests_ask_only_for_classes_that_the_deployment_has() -> None:
    trace = Trace(
        name="t",
        requests=(
            TraceRequest(0.0, 10, 2, slo_class="fast", tenant="acme"),
            TraceRequest(0.1, 10, 2, slo_class="code"),
            TraceRequest(0.2, 10, 2),
        ),
    )
    assert requests_of(trace, RULES) == [("acme", "fast"), ("default", None), ("default", None)]
    assert {asked for _, asked in requests_of(trace, ServiceRules())} == {None}


def test_outcomes_name_their_tenant_and_a_cut_off_request_got_nothing() -> None:
    trace = Trace(
        name="t",
        requests=(
            TraceRequest(0.0, 10, 2, tenant="acme"),
            TraceRequest(0.1, 10, 2000, slo_class="fast"),
        ),
    )
    run = simulate(scenario(pool(Role.MIXED, 1), rules=RULES), trace, until_s=1.0)
    assert [outcome.tenant for outcome in run.outcomes] == ["acme", "default"]
    assert [outcome.slo_met for outcome in run.outcomes] == [True, False]
    assert run.outcomes[1].slo_class == "fast"


def test_limits_of_a_tenant_are_those_of_all_coordinators_together() -> None:
    rules = ServiceRules(tenants={"acme": Tenant(name="acme", max_in_flight=2)})
    asked = [TraceRequest(0.01 * number, 10, 500, tenant="acme") for number in range(8)]
    trace = Trace(name="t", requests=tuple(asked))
    served = {}
    for coordinators in (1, 2):
        fleet = scenario(pool(Role.MIXED, 1), rules=rules, coordinators=coordinators)
        outcomes = simulate(fleet, trace).outcomes
        served[coordinators] = sum(outcome.slo_met for outcome in outcomes)
    assert served == {1: 2, 2: 2}


def test_the_autoscaler_sees_as_many_ticks_as_a_live_controller() -> None:
    fleet = scenario(pool(Role.MIXED, 1), scaling_interval_s=10.0)
    stage = Simulation(fleet, Trace(name="t", requests=()))
    body = stage._build_scaling_loop(Autoscaler(Static(AutoscalerOptions()), AutoscalerOptions()))
    assert body._observer._options == ObserverOptions.for_interval(10.0)
    assert ObserverOptions.for_interval(10.0).window_s == 150.0
