"""Faults in virtual time: the live decisions, simulated engines that make every token, no sockets.

Here a fault is exact, and the same seed gives the same events; what the links add to it is in
`data_plane`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from baton.control.coordinator import Coordinator
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import Delivery, RequestRecord
from baton.domain.fleet import Role
from baton.domain.handoff import Leg, LegFailure
from baton.domain.leg_record import LegOutcome, LegRecord
from baton.domain.request import Phase, Request
from baton.domain.retry_reasons import RetryReason
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.simulator.engine.port import VirtualEngine
from baton.simulator.engine.settings import SimSettings
from baton.simulator.engine.tokens import expected_tokens
from baton.simulator.fleet.fleet import HEARTBEAT_TIMEOUT_S, FleetOptions, VirtualFleet
from benchmarks._arrivals import open_loop, poisson_times
from tests.chaos.case import Bound, Engines, Figure, Outcome, at_least, at_most, case, exactly

LIMITS = CoordinatorLimits()
ENGINE = SimSettings(max_len_tokens=2048)
FROZEN_S = 10.0
DETECTED_AFTER_S = LIMITS.recovery.heartbeat_timeout_s * 7 / 6
"""The heartbeat timeout, and the time between two checks."""
_SETTLED_S = 1.0
_PROMPT_TOKENS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRun:
    """The load, and its fleet."""

    rate_per_s: float = 50.0
    requests: int = 1000
    prefill: int = 2
    decode: int = 4
    coordinators: int = 2
    output_tokens: int = 48
    seed: int = 7

    @property
    def arrivals_s(self) -> float:
        """About how long requests arrive."""
        return self.requests / self.rate_per_s


class SimulatedRun:
    """A fleet, its clients, and what they got."""

    def __init__(self, run: FleetRun, limits: CoordinatorLimits = LIMITS) -> None:
        self.run = run
        self.tokens: dict[str, list[int]] = {}
        self.fleet = VirtualFleet(FleetOptions(seed=run.seed))
        self.coordinators = [
            Coordinator(
                limits=limits, placer=PredictedPlacer(PredictedOptions(), seed=seed), seed=seed
            )
            for seed in range(run.coordinators)
        ]
        for coordinator in self.coordinators:
            self.fleet.add_coordinator(coordinator, self._on_delivery)
        for role, count in ((Role.PREFILL, run.prefill), (Role.DECODE, run.decode)):
            for number in range(count):
                self.join(f"{role}-{number}")
        self.fleet.run(until_s=_SETTLED_S)
        self.requests = _requests(run)

    def join(self, replica_id: str) -> None:
        """A replica begins, or begins again."""
        role = Role(replica_id.partition("-")[0])
        self.fleet.add_replica(replica_id, ENGINE, role=role, pool=str(role))

    def schedule(self, at_s: float, action: Callable[[], None]) -> None:
        """Let something happen so long after the first request."""
        self.fleet.timeline.call_at(_SETTLED_S + at_s, action)

    def run_to_end(self) -> tuple[RequestRecord, ...]:
        """Let all of it happen, and what is left be tidied up; the records, in order of arrival."""
        rng = random.Random(self.run.seed)
        times_s = poisson_times(self.run.rate_per_s, len(self.requests), rng, start_s=_SETTLED_S)
        count = self.run.coordinators
        open_loop(
            self.fleet, self.requests, times_s, lambda request: int(request.request_id[1:]) % count
        )
        ends_s = self.run.arrivals_s + 120.0
        self.fleet.run(until_ended=len(self.requests), until_s=_SETTLED_S + ends_s)
        self.fleet.run(until_s=self.fleet.timeline.now_s + FROZEN_S + ENGINE.lease_s + 5.0)
        self.fleet.check_idle()
        return tuple(sorted(self.fleet.records, key=lambda request: request.arrived_at_s))

    def wrong_streams(self) -> int:
        """Streams that are not the beginning of what the model says."""
        count = 0
        for request in self.requests:
            actual = self.tokens.get(request.request_id, [])
            expected = expected_tokens(
                request.prompt_token_ids, request.max_tokens, model="sim", settings=ENGINE
            )
            count += tuple(actual) != expected[: len(actual)]
        return count

    def retries(self, reason: RetryReason) -> int:
        """How often all coordinators tried again for this reason."""
        return sum(
            dict(coordinator.retry_totals().retries)[reason] for coordinator in self.coordinators
        )

    def _on_delivery(self, delivery: Delivery) -> None:
        self.tokens.setdefault(delivery.request_id, []).extend(delivery.token_ids)


class FailingEngine:
    """An engine that fails every leg it is given, until the fault ends."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self.is_failing = True

    def add(self, leg: Leg, *, now_s: float) -> LegFailure | None:
        """Refuse a leg as an engine does that has lost its device."""
        if self.is_failing:
            return LegFailure.ENGINE_ERROR
        return self._engine.add(leg, now_s=now_s)

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


# -------------------------------------------------------------------- frozen


@case(
    "F3-virtual",
    "A prefill and a decode replica stopped for 10 s at 50 requests/s, one after the other",
    engines=Engines.VIRTUAL,
    minutes=2,
)
def frozen(_: Path) -> Outcome:
    """Streams are carried over when nothing is heard; it is tried with one request afterwards."""
    return freeze(FleetRun(requests=1500))


def freeze(run: FleetRun) -> Outcome:
    """Freeze one replica of each pool."""
    simulated, freezes = (
        SimulatedRun(run),
        {"decode-0": run.arrivals_s / 6, "prefill-0": run.arrivals_s / 2},
    )
    for replica_id, at_s in freezes.items():
        simulated.schedule(at_s, partial(simulated.fleet.freeze, replica_id, FROZEN_S))
    records = simulated.run_to_end()
    legs_to_frozen = sum(
        leg.replica_id == replica_id
        and at_s + DETECTED_AFTER_S <= leg.started_at_s - _SETTLED_S < at_s + FROZEN_S
        for leg in _legs(records)
        for replica_id, at_s in freezes.items()
    )
    stall_bound = "longest gap in a stream beyond the time to notice, s"
    return Outcome(
        bounds=(
            *_all_served(simulated, records),
            at_most(stall_bound, round(_longest_gap_s(records) - DETECTED_AFTER_S, 3), 0.5),
            exactly("legs sent to a frozen replica once it was noticed", legs_to_frozen, 0),
            at_least("streams carried over", simulated.retries(RetryReason.UNRESPONSIVE), 1),
        ),
        figures={
            "seconds_to_notice": round(DETECTED_AFTER_S, 3),
            "liveness_of_the_link_s": HEARTBEAT_TIMEOUT_S,
            **_figures(simulated, records),
        },
    )


# -------------------------------------------------------------------- lost


@case(
    "F8-virtual",
    "Half of the fleet lost at one moment at 50 requests/s",
    engines=Engines.VIRTUAL,
    minutes=2,
)
def half_killed(_: Path) -> Outcome:
    """One failure, many streams: no retry is denied."""
    return kill_half(FleetRun())


def kill_half(run: FleetRun) -> Outcome:
    """Kill every other replica."""
    simulated = SimulatedRun(run)
    killed = [
        replica for replica in simulated.fleet.replicas if int(replica.rpartition("-")[2]) % 2
    ]

    def kill() -> None:
        for replica_id in killed:
            simulated.fleet.kill(replica_id)

    simulated.schedule(run.arrivals_s / 3, kill)
    records = simulated.run_to_end()
    denied_retries = sum(
        coordinator.retry_totals().denied for coordinator in simulated.coordinators
    )
    return Outcome(
        bounds=(
            *_all_served(simulated, records),
            exactly("denied retries", denied_retries, 0),
            at_least("streams carried over", simulated.retries(RetryReason.REPLICA_LOST), 1),
            at_most("longest gap in a stream, s", round(_longest_gap_s(records), 3), 0.5),
        ),
        figures={"replicas_lost": len(killed), **_figures(simulated, records)},
    )


@case(
    "F1-virtual-flapping",
    "A decode replica that dies and comes back every 2.5 s for a minute",
    engines=Engines.VIRTUAL,
    minutes=3,
)
def flapping(_: Path) -> Outcome:
    """It is left alone for longer each time, so it breaks ever fewer streams."""
    return flap(FleetRun(requests=3000))


def flap(run: FleetRun, *, interval_s: float = 2.5, restart_after_s: float = 0.25) -> Outcome:
    """Kill one replica again and again."""
    simulated, times = SimulatedRun(run), int(run.arrivals_s / interval_s)
    for number in range(1, times):
        simulated.schedule(number * interval_s, partial(simulated.fleet.kill, "decode-0"))
        simulated.schedule(
            number * interval_s + restart_after_s, partial(simulated.join, "decode-0")
        )
    records = simulated.run_to_end()
    half_s = _SETTLED_S + run.arrivals_s / 2
    failed_legs = [leg for leg in _legs(records) if leg.outcome is LegOutcome.FAILED]
    first_half = sum(leg.ended_at_s < half_s for leg in failed_legs)
    return Outcome(
        bounds=(
            *_all_served(simulated, records),
            at_most(
                "streams broken in the second half", len(failed_legs) - first_half, first_half / 2
            ),
        ),
        figures={
            "times_lost": times - 1,
            "streams_broken_in_the_first_half": first_half,
            **_figures(simulated, records),
        },
    )


# -------------------------------------------------------------------- storms


@case(
    "F1-virtual-storm",
    "Every replica fails every request for 10 s at 50 requests/s",
    engines=Engines.VIRTUAL,
    minutes=1,
)
def storm(_: Path) -> Outcome:
    """No storm of retries; service is back as soon as the replicas are."""
    return fail_everything(FleetRun())


def fail_everything(run: FleetRun, *, duration_s: float = 10.0) -> Outcome:
    """Have every engine fail for a while."""
    simulated, start_s = SimulatedRun(run), run.arrivals_s / 4
    failing: list[FailingEngine] = []

    def begin() -> None:
        for replica in simulated.fleet.replicas.values():
            failing.append(FailingEngine(replica.engine))
            replica.engine = cast("VirtualEngine", failing[-1])

    def end() -> None:
        for engine in failing:
            engine.is_failing = False

    simulated.schedule(start_s, begin)
    simulated.schedule(start_s + duration_s, end)
    records = simulated.run_to_end()
    from_s, until_s = _SETTLED_S + start_s, _SETTLED_S + start_s + duration_s
    legs_begun = sum(from_s <= leg.started_at_s < until_s for leg in _legs(records))
    arrived = sum(from_s <= record.arrived_at_s < until_s for record in records)
    retries = LIMITS.recovery.retry_budget
    floor = retries.min_retries * run.coordinators * (duration_s / retries.window_s + 1)
    arrived_after = [record for record in records if record.arrived_at_s >= until_s + 1.0]
    unserved = sum(request.outcome is not Phase.FINISHED for request in arrived_after)
    description = "legs begun meanwhile, for each request that arrived"
    limit = 1 + retries.ratio + floor / max(1, arrived)
    return Outcome(
        bounds=(
            at_most(description, round(legs_begun / max(1, arrived), 3), round(limit, 3)),
            exactly("requests unserved that came 1 s after it was over, or later", unserved, 0),
            at_least("requests that came after it", len(arrived_after), 1),
            exactly("streams with wrong tokens", simulated.wrong_streams(), 0),
        ),
        figures={"arrived_meanwhile": arrived, **_figures(simulated, records)},
        note="the bound is 1 + the budget's fraction + its floor, over what arrived",
    )


# -------------------------------------------------------------------- what is looked at


def _requests(run: FleetRun) -> list[Request]:
    rng = random.Random(run.seed)
    return [
        Request(
            request_id=f"r{number}",
            prompt_token_ids=tuple(rng.randbytes(_PROMPT_TOKENS)),
            max_tokens=run.output_tokens,
            arrived_at_s=0.0,
        )
        for number in range(run.requests)
    ]


def _legs(records: tuple[RequestRecord, ...]) -> list[LegRecord]:
    return [leg for record in records for leg in record.legs]


def _longest_gap_s(records: tuple[RequestRecord, ...]) -> float:
    return max(record.max_itl_s for record in records)


def _all_served(simulated: SimulatedRun, records: tuple[RequestRecord, ...]) -> tuple[Bound, ...]:
    unserved = sum(record.outcome is not Phase.FINISHED for record in records)
    return (
        exactly("requests that ended exactly once", len(records), simulated.run.requests),
        exactly("requests that were not served", unserved, 0),
        exactly("streams with wrong tokens", simulated.wrong_streams(), 0),
    )


def _figures(simulated: SimulatedRun, records: tuple[RequestRecord, ...]) -> Mapping[str, Figure]:
    first_token_waits_s = [
        r.first_token_at_s - r.arrived_at_s for r in records if r.first_token_at_s is not None
    ]
    retries_by_reason = {str(reason): simulated.retries(reason) for reason in RetryReason}
    return {
        "requests": simulated.run.requests,
        "longest_first_token_s": round(max(first_token_waits_s, default=0.0), 3),
        "longest_gap_s": round(_longest_gap_s(records), 3),
        "second_tries": ", ".join(
            f"{name} {count}" for name, count in retries_by_reason.items() if count
        ),
        "second_tries_refused": sum(
            coordinator.retry_totals().denied for coordinator in simulated.coordinators
        ),
        "circuits_opened": sum(
            coordinator.retry_totals().circuit_openings for coordinator in simulated.coordinators
        ),
    }
