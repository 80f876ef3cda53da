from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from baton.domain.commands import RequestRecord
from baton.domain.fleet import Role
from baton.domain.handoff import HandoffMode
from baton.domain.request import Phase, Request
from baton.domain.value import evolve
from baton.engine.sim import SimSettings, expected_tokens
from baton.policy.placement.port import Disaggregate
from baton.simulator.fleet.fleet import FleetOptions, VirtualFleet
from baton.simulator.fleet.replica import ReportingOptions
from benchmarks._arrivals import closed_loop, open_loop, poisson_times
from tests.control.world import check_record
from tests.simulator.fleets import ENGINE, JOINED_S, ReceivedTokens, coordinator, fleet, requests

EXACT = FleetOptions(latency_s=0.01, latency_spread=0.0)


def wanted(request: Request, settings: SimSettings = ENGINE) -> tuple[int, ...]:
    return expected_tokens(
        request.prompt_token_ids, request.max_tokens, model="sim", settings=settings
    )


def send_at_once(made: VirtualFleet, sent: list[Request]) -> None:
    for number, request in enumerate(sent):
        made.send(request, number % len(made.ingresses))


def ttft_s(record: RequestRecord) -> float:
    assert record.first_token_at_s is not None
    return record.first_token_at_s - record.arrived_at_s


def leases_out(made: VirtualFleet) -> None:
    """Let time pass until whatever was left behind has expired."""
    made.run(until_s=made.timeline.now_s + ENGINE.lease_s + 1)


# ---------------------------------------------------------------------- the same tokens
@pytest.mark.parametrize("disaggregate", list(Disaggregate))
def test_every_way_through_the_fleet_gives_the_expected_tokens(
    disaggregate: Disaggregate,
) -> None:
    tokens = ReceivedTokens()
    made = fleet(
        replicas={Role.PREFILL: 2, Role.DECODE: 2},
        tokens=tokens,
        coordinators=[coordinator(0, disaggregate)],
    )
    sent = requests(40, groups=4)
    open_loop(made, sent, poisson_times(50.0, 40, random.Random(1), start_s=JOINED_S))
    made.run(until_ended=40, until_s=60.0)
    assert {record.outcome for record in made.records} == {Phase.FINISHED}
    assert tokens.by_request == {request.request_id: wanted(request) for request in sent}
    modes = {record.routes[-1].mode for record in made.records}
    if disaggregate is Disaggregate.ALWAYS:
        assert modes == {HandoffMode.PULL}
    if disaggregate is Disaggregate.NEVER:
        assert modes == {HandoffMode.LOCAL}
    leases_out(made)
    made.check_idle()


@pytest.mark.parametrize("seed", [1, 2])
def test_every_request_ends_once_whichever_replicas_die_and_join(seed: int) -> None:
    tokens = ReceivedTokens()
    made = fleet(
        replicas={Role.PREFILL: 2, Role.DECODE: 3},
        options=FleetOptions(seed=seed),
        coordinators=[
            coordinator(n, resume_timeout_s=20.0, queue_timeout_s=20.0) for n in range(2)
        ],
        tokens=tokens,
    )
    rng = random.Random(seed)
    sent = requests(120, groups=6, seed=seed, max_tokens=30)
    open_loop(
        made,
        sent,
        poisson_times(40.0, len(sent), rng, start_s=JOINED_S),
        lambda request: int(request.request_id[1:]) % 2,
    )
    everyone = list(made.replicas.values())
    for round_ in range(6):
        victim = rng.choice(everyone).facts
        at_s = JOINED_S + 0.4 * (round_ + 1)
        made.timeline.call_at(at_s, partial(strike, made, victim.replica_id))
        made.timeline.call_at(at_s + 0.3, partial(revive, made, victim.replica_id, victim.role))
    while len(made.records) < len(sent):
        made.run(until_s=made.timeline.now_s + 0.1)
        made.check_integrity()
        assert made.timeline.now_s < 120
    assert {record.outcome for record in made.records} == {Phase.FINISHED}
    assert tokens.by_request == {request.request_id: wanted(request) for request in sent}
    assert any(record.resumes for record in made.records)
    for record in made.records:
        check_record(record)
    leases_out(made)
    made.check_idle()


def strike(made: VirtualFleet, name: str) -> None:
    if name in made.replicas:
        made.kill(name)


def revive(made: VirtualFleet, name: str, role: Role) -> None:
    if name not in made.replicas:
        made.add_replica(name, ENGINE, role=role, pool=str(role))


def test_a_killed_replica_is_lost_to_all_and_its_request_continues_elsewhere() -> None:
    tokens = ReceivedTokens()
    made = fleet(
        replicas={Role.MIXED: 2}, coordinators=[coordinator(0), coordinator(1)], tokens=tokens
    )
    (request,) = requests(1, max_tokens=60)
    made.send(request)
    made.run(until_s=JOINED_S + 0.1)
    (victim,) = (name for name, it in made.replicas.items() if it.load().running_requests)
    made.kill(victim)
    made.run(until_s=JOINED_S + 0.11)
    for ingress in made.ingresses:
        assert victim not in ingress.coordinator.fleet(made.timeline.now_s).replicas
    made.run(until_ended=1)
    assert made.records[0].resumes == 1
    assert tokens.by_request == {"r0": wanted(request)}


# ---------------------------------------------------------------------- time, in closed form
def test_a_request_alone_takes_its_steps_and_two_messages() -> None:
    made = fleet(replicas={Role.MIXED: 1}, options=EXACT)
    (request,) = requests(1, prompt_tokens=300, max_tokens=5)
    made.send(request)
    made.run(until_ended=1)
    (record,) = made.records
    prefill_s = ENGINE.step_s(prefill_tokens=300, decode_requests=0)
    decode_s = ENGINE.step_s(prefill_tokens=0, decode_requests=1)
    assert ttft_s(record) == pytest.approx(2 * 0.01 + prefill_s)
    assert record.ended_at_s - record.arrived_at_s == pytest.approx(
        2 * 0.01 + prefill_s + 4 * decode_s
    )


def test_a_handoff_takes_set_up_bytes_and_its_messages() -> None:
    made = fleet(
        replicas={Role.PREFILL: 1, Role.DECODE: 1},
        options=EXACT,
        coordinators=[coordinator(0, Disaggregate.ALWAYS)],
    )
    (request,) = requests(1, prompt_tokens=320)
    made.send(request)
    made.run(until_ended=1)
    prefill_s = ENGINE.step_s(prefill_tokens=320, decode_requests=0)
    transfer_s = ENGINE.transfer_s(20 * ENGINE.kv_block_bytes)
    decode_s = ENGINE.step_s(prefill_tokens=0, decode_requests=1)
    (record,) = made.records
    assert ttft_s(record) == pytest.approx(4 * 0.01 + prefill_s + transfer_s + decode_s)


def waits_s(times_s: list[float], service_s: float) -> list[float]:
    """How long each waits for one server with constant service.

    Source: Lindley, The theory of queues with a single server, 1952.
    """
    free_at_s, found = 0.0, []
    for at_s in times_s:
        found.append(max(0.0, free_at_s - at_s))
        free_at_s = max(free_at_s, at_s) + service_s
    return found


def test_every_wait_in_a_queue_is_that_of_one_server_with_constant_service() -> None:
    engine = replace(ENGINE, max_running_requests=1, max_waiting_requests=100_000)
    made = fleet(replicas={Role.MIXED: 1}, engine=engine, options=replace(EXACT, latency_s=0.0))
    service_s = engine.step_s(prefill_tokens=100, decode_requests=0)
    times_s = list(poisson_times(0.7 / service_s, 300, random.Random(5), start_s=JOINED_S))
    open_loop(made, requests(300, prompt_tokens=100, max_tokens=1), times_s)
    made.run(until_ended=300)
    waited_s = [ttft_s(record) - service_s for record in made.records]
    assert waited_s == pytest.approx(waits_s(times_s, service_s), abs=1e-9)


# ---------------------------------------------------------------------- reports
def test_load_reports_arrive_as_late_as_they_are_set_to() -> None:
    late = FleetOptions(
        latency_s=0.0,
        reporting=ReportingOptions(report_interval_s=0.1, load_delay_s=0.5),
        latency_spread=0.0,
    )
    made = fleet(replicas={Role.MIXED: 1}, options=late)
    (request,) = requests(1, max_tokens=200)
    made.send(request)

    def running() -> int:
        view = made.ingresses[0].coordinator.fleet(made.timeline.now_s).replicas["mixed-0"]
        return view.load.running_requests

    made.run(until_s=JOINED_S + 0.45)
    assert made.replicas["mixed-0"].load().running_requests == 1
    assert running() == 0
    made.run(until_s=JOINED_S + 0.7)
    assert running() == 1


def test_coordinators_learn_what_is_cached_where() -> None:
    made = fleet(
        replicas={Role.MIXED: 4},
    )
    first, second = requests(2, prompt_tokens=800, groups=1)
    made.send(first)
    made.run(until_ended=1)
    made.run(until_s=made.timeline.now_s + 1)
    made.send(evolve(second, arrived_at_s=made.timeline.now_s))
    made.run(until_ended=2)
    before, after = made.records
    assert after.routes[-1].decode_replica_id == before.routes[-1].decode_replica_id
    assert after.cached_tokens == 600 // 16 * 16


def test_a_draining_replica_gets_nothing_new_and_ends_what_it_has() -> None:
    made = fleet(
        replicas={Role.MIXED: 2},
    )
    made.send(requests(1, max_tokens=60)[0])
    made.run(until_s=JOINED_S + 0.1)
    (busy,) = (name for name, it in made.replicas.items() if it.load().running_requests)
    made.replicas[busy].drain()
    made.run(until_s=JOINED_S + 0.15)
    later = [
        evolve(request, request_id=f"later-{request.request_id}") for request in requests(6, seed=9)
    ]
    send_at_once(made, later)
    made.run(until_ended=7)
    decoders = {record.request_id: record.routes[-1].decode_replica_id for record in made.records}
    assert decoders.pop("r0") == busy
    assert busy not in decoders.values()


def test_messages_of_a_former_life_do_not_count_for_the_new_one() -> None:
    slow = FleetOptions(
        latency_s=0.001, reporting=ReportingOptions(report_interval_s=0.05, load_delay_s=0.5)
    )
    made = fleet(replicas={Role.MIXED: 1}, options=slow)
    made.send(requests(1, max_tokens=500)[0])
    made.run(until_s=JOINED_S + 0.3)
    made.kill("mixed-0")
    revive(made, "mixed-0", Role.MIXED)
    made.run(until_s=JOINED_S + 0.31)
    made.check_integrity()
    made.run(until_ended=1, until_s=60.0)
    assert made.records[0].outcome is Phase.FINISHED


# ---------------------------------------------------------------------- arrivals
def test_a_closed_loop_keeps_as_many_in_flight_as_there_are_clients() -> None:
    made = fleet(
        replicas={Role.MIXED: 2},
    )
    closed_loop(made, iter(requests(50)), clients=7)
    seen = set()
    while len(made.records) < 50:
        made.run(until_s=made.timeline.now_s + 0.003)
        if len(made.records) <= 50 - 7:
            seen.add(len(made.ingresses[0].coordinator.phases()))
    assert seen == {7}


def test_poisson_arrivals_have_their_rate_and_their_spread() -> None:
    times_s = list(poisson_times(20.0, 4000, random.Random(1)))
    gaps_s = [b - a for a, b in zip([0.0, *times_s], times_s, strict=False)]
    assert times_s[-1] / 4000 == pytest.approx(1 / 20, rel=0.05)
    variance = sum((gap - 0.05) ** 2 for gap in gaps_s) / len(gaps_s)
    assert variance == pytest.approx(0.05**2, rel=0.15)


# ---------------------------------------------------------------------- deadlines and latencies
def test_a_deadline_passes_though_nothing_happens() -> None:
    made = fleet(replicas={}, coordinators=[coordinator(0, queue_timeout_s=3.0)])
    made.send(requests(1)[0])
    made.run(until_ended=1, until_s=60.0)
    (record,) = made.records
    assert record.outcome is Phase.EVICTED
    assert record.ended_at_s == JOINED_S + 3.0


def test_each_pair_has_a_latency_of_its_own() -> None:
    made = fleet(replicas={Role.MIXED: 8}, options=FleetOptions(latency_s=0.01, latency_spread=0.5))
    send_at_once(made, requests(8))
    made.run(until_ended=8)
    ttfts_s = {round(ttft_s(record), 9) for record in made.records}
    assert len(ttfts_s) == 8
    prefill_s = ENGINE.step_s(prefill_tokens=200, decode_requests=0)
    assert all(0.01 <= value - prefill_s <= 0.03 for value in ttfts_s)
