"""LoRA adapters in the simulated engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from baton.control.coordinator import Coordinator
from baton.control.state.limits import CoordinatorLimits
from baton.control.state.service_rules import ServiceRules
from baton.domain.fleet import Role
from baton.domain.handoff import Leg, LegFailure, LegKind
from baton.domain.request import Phase, Request
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.policy.admission.slo_classes import SloClasses
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.simulator.engine.core import SimCore
from baton.simulator.engine.settings import SimSettings
from baton.simulator.engine.tokens import expected_tokens, model_key
from baton.simulator.fleet.fleet import FleetOptions, VirtualFleet
from benchmarks._arrivals import open_loop, poisson_times
from tests.simulator.cores import (
    PROMPT,
    SETTINGS,
    decode_leg,
    local_leg,
    new_core,
    pulled_tokens,
    run_until_idle,
    tokens_of,
)
from tests.simulator.fleets import JOINED_S

ROOM = replace(SETTINGS, adapter_slots=2, adapters_per_batch=1, adapter_load_s=0.5)


def adapted(leg_id: str, adapter: str | None, *, max_tokens: int = 1) -> Leg:
    return evolve(local_leg(leg_id, max_tokens=max_tokens), adapter=adapter)


def first_step_s(core: SimCore, leg: Leg) -> float:
    assert core.add(leg) is None
    step = core.begin_step(0.0)
    assert step is not None
    core.finish_step(step.duration_s)
    run_until_idle(core)
    return step.duration_s


def test_the_first_leg_with_an_adapter_waits_for_it_and_the_next_does_not() -> None:
    core = new_core(ROOM)
    cold_s = first_step_s(core, adapted("a", "ada"))
    core.reset_cache()
    warm_s = first_step_s(core, adapted("b", "ada"))
    assert cold_s - warm_s == pytest.approx(0.5)
    told = core.load().adapters
    assert (told.loaded, told.hits, told.loads, told.loading_s) == (("ada",), 1, 1, 0.5)


def test_loading_an_adapter_is_no_part_of_step_times() -> None:
    core = new_core(ROOM)
    cold_s = first_step_s(core, adapted("a", "ada"))
    assert core.load().steps.busy_s < cold_s - 0.4


def test_an_adapter_changes_what_is_generated() -> None:
    core = new_core(ROOM)
    for leg_id, adapter in (("none", None), ("one", "ada"), ("two", "bob")):
        core.add(adapted(leg_id, adapter, max_tokens=6))
        found = tokens_of(run_until_idle(core), leg_id)
        wanted = expected_tokens(PROMPT, 6, model=model_key("tiny", adapter), settings=ROOM)
        assert found == wanted
    assert model_key("tiny", "ada") != model_key("tiny", "bob") != model_key("tiny", None)


def test_prefixes_of_adapters_are_never_shared() -> None:
    core = new_core(ROOM)
    for leg_id, adapter in (("a", None), ("b", "ada"), ("c", "bob")):
        core.add(adapted(leg_id, adapter))
        (output,) = run_until_idle(core)
        assert output.cached_tokens == 0
    core.add(adapted("d", "ada"))
    (output,) = run_until_idle(core)
    assert output.cached_tokens == 28


def test_no_more_adapters_run_together_than_fit_and_others_pass_those_that_wait() -> None:
    core = new_core(ROOM)
    for leg_id, adapter in (("a", "ada"), ("b", "bob"), ("c", None)):
        assert core.add(adapted(leg_id, adapter, max_tokens=4)) is None
    ends = [output.leg_id for output in run_until_idle(core) if output.finish is not None]
    assert ends == ["a", "c", "b"]


def test_a_handoff_between_two_adapters_is_decoded_from_as_by_any_engine() -> None:
    prefill = new_core(ROOM, "p")
    prefill.add(evolve(adapted("p", "ada"), kind=LegKind.PREFILL))
    (output,) = run_until_idle(prefill)
    assert output.kv_handle is not None
    leg, ticket = decode_leg("d", output.kv_handle)
    for adapter, alike in (("bob", False), ("ada", True)):
        tokens = pulled_tokens(evolve(leg, adapter=adapter), ticket, settings=ROOM)
        alone = expected_tokens(PROMPT, 3, model=model_key("tiny", adapter), settings=ROOM)
        assert (tokens == alone) is alike


def test_an_engine_without_room_for_adapters_refuses_them() -> None:
    assert new_core().add(adapted("a", "ada")) is LegFailure.REJECTED


def test_cache_events_name_the_adapter() -> None:
    core = new_core(ROOM)
    core.add(adapted("a", "ada"))
    run_until_idle(core)
    assert {getattr(event, "adapter", None) for event in core.pop_events()} == {"ada"}


# --------------------------------------------------------------------------- pressure on adapters
TTFT_S = 0.8
ENGINE = SimSettings(max_len_tokens=2048, adapter_slots=1, adapters_per_batch=1, adapter_load_s=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """What comes to which fleet."""

    names: int = 3
    weights: Sequence[float] | None = None
    rate_per_s: float = 4.0
    requests: int = 100
    output_tokens: int = 16
    engine: SimSettings = ENGINE
    replicas: int = 5
    ingresses: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What became of it."""

    refused: int
    late: int
    loads: int


def coordinator(seed: int, ttft_s: float | None = TTFT_S) -> Coordinator:
    return Coordinator(
        limits=CoordinatorLimits(),
        placer=PredictedPlacer(PredictedOptions(ttft_slo_s=ttft_s), seed=seed),
        rules=ServiceRules(slos=SloClasses(classes={"default": Slo(ttft_s=ttft_s)})),
        seed=seed,
    )


def a_fleet(given: Pressure, seed: int) -> VirtualFleet:
    fleet = VirtualFleet(FleetOptions(seed=seed))
    for number in range(given.ingresses):
        fleet.add_coordinator(coordinator(seed + number))
    for number in range(given.replicas):
        fleet.add_replica(f"mixed-{number}", given.engine, role=Role.MIXED, pool="mixed")
    fleet.run(until_s=JOINED_S)
    return fleet


def requests(given: Pressure, seed: int) -> list[Request]:
    rng = random.Random(seed)
    names = [f"adapter-{number}" for number in range(given.names)]
    wanted = rng.choices(names, given.weights, k=given.requests)
    return [
        Request(
            request_id=f"r{number}",
            prompt_token_ids=tuple(rng.randbytes(200)),
            max_tokens=given.output_tokens,
            arrived_at_s=0.0,
            adapter=name,
        )
        for number, name in enumerate(wanted)
    ]


def found(fleet: VirtualFleet) -> Found:
    fleet.check_idle()
    ends = Counter(record.outcome for record in fleet.records)
    now_s = fleet.timeline.now_s
    told = [replica.engine.load(now_s).adapters for replica in fleet.replicas.values()]
    waits = [
        record.first_token_at_s - record.arrived_at_s
        for record in fleet.records
        if record.first_token_at_s is not None
    ]
    return Found(
        refused=ends[Phase.SHED] + ends[Phase.EVICTED],
        late=sum(wait_s > TTFT_S for wait_s in waits),
        loads=sum(adapter.loads for adapter in told),
    )


def served(given: Pressure, seed: int = 0, *, kill_at_s: float | None = None) -> Found:
    """Serve it; at `kill_at_s` the replica dies that has the most wanted adapter."""
    fleet = a_fleet(given, seed)
    sent = requests(given, seed)
    turns = {item.request_id: number % given.ingresses for number, item in enumerate(sent)}
    rng = random.Random(seed)
    times_s = poisson_times(given.rate_per_s, given.requests, rng, start_s=JOINED_S)
    open_loop(fleet, sent, times_s, lambda item: turns[item.request_id])
    if kill_at_s is not None:
        fleet.timeline.call_at(kill_at_s, lambda: fleet.kill(_having(fleet, "adapter-0")))
    fleet.run(until_ended=given.requests, until_s=3600.0)
    fleet.run(until_s=fleet.timeline.now_s + 60.0)
    return found(fleet)


def _having(fleet: VirtualFleet, adapter: str) -> str:
    now_s = fleet.timeline.now_s
    told = {name: replica.engine.load(now_s).adapters for name, replica in fleet.replicas.items()}
    return next(name for name, adapters in told.items() if adapter in adapters.loaded)


@pytest.mark.parametrize("seed", range(4))
def test_five_idle_replicas_with_a_slot_each_refuse_nothing_for_three_adapters(seed: int) -> None:
    assert served(Pressure(requests=21), seed) == Found(refused=0, late=0, loads=3)


def test_an_adapter_that_cannot_be_loaded_in_time_is_loaded_all_the_same() -> None:
    # No fleet could be in time for the first requests, so that is no reason to refuse them.
    slow = replace(ENGINE, adapter_load_s=2.0)
    came = served(Pressure(engine=slow))
    assert came.refused == 0
    assert came.late <= 20
    assert came.loads == 3


def test_long_streams_with_one_adapter_do_not_keep_another_from_its_replica() -> None:
    assert served(Pressure(output_tokens=400, rate_per_s=12.0)) == Found(refused=0, late=0, loads=3)


@pytest.mark.parametrize("rate_per_s", [30.0, 1e6])
def test_a_burst_does_not_load_one_adapter_everywhere(rate_per_s: float) -> None:
    came = served(Pressure(rate_per_s=rate_per_s, requests=30, output_tokens=50))
    assert (came.refused, came.late) == (0, 0)
    assert came.loads <= 4


def test_a_popular_adapter_leaves_unpopular_ones_their_places() -> None:
    given = Pressure(weights=(8, 1, 1), rate_per_s=12.0, requests=200, output_tokens=200)
    came = served(given)
    assert (came.refused, came.late) == (0, 0)
    assert came.loads <= 5


def test_more_adapters_than_slots_are_served_while_replicas_have_time_to_load() -> None:
    came = served(Pressure(names=6, requests=200))
    assert (came.refused, came.late) == (0, 0)


def test_two_slots_hold_what_fits_into_them() -> None:
    two = replace(ENGINE, adapter_slots=2, adapters_per_batch=2)
    came = served(Pressure(names=8, engine=two, requests=200, output_tokens=200))
    assert (came.refused, came.late) == (0, 0)
    assert came.loads == 8


def test_a_request_that_would_wait_for_other_adapters_is_not_admitted_late() -> None:
    # Eight adapters take turns on five engines that run one at a time: some must be refused, but
    # none may be told after its objective has passed, or computed in vain.
    two = replace(ENGINE, adapter_slots=2, adapters_per_batch=1)
    came = served(Pressure(names=8, engine=two, requests=200, output_tokens=200))
    assert came.late == 0
    assert came.refused < 60


def test_a_lost_replica_costs_one_more_load() -> None:
    came = served(Pressure(requests=40), kill_at_s=JOINED_S + 5.0)
    assert came.refused == 0
    assert came.loads <= 3  # the dead replica's are not counted


def test_two_ingresses_that_cannot_see_each_others_requests_refuse_hardly_anything() -> None:
    came = served(Pressure(requests=200, ingresses=2))
    assert came.refused <= 2
    assert came.loads <= 6
