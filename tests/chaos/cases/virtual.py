"""Faults in virtual time: the live decisions, simulated engines that make every token, no sockets.

Here a fault is exact, and the same seed tells the same story; what the links add to it is in
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
from baton.domain.leg_record import LegEnd, LegStory
from baton.domain.request import Phase, Request
from baton.domain.retry_reasons import Trouble
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.simulator.engine.port import VirtualEngine
from baton.simulator.engine.settings import SimSettings
from baton.simulator.engine.tokens import expected_tokens
from baton.simulator.fleet.fleet import LIVENESS_S, FleetOptions, VirtualFleet
from benchmarks._arrivals import open_loop, poisson_times
from tests.chaos.case import Bound, Engines, Figure, Outcome, at_least, at_most, case, exactly

LIMITS = CoordinatorLimits()
ENGINE = SimSettings(max_len_tokens=2048)
FROZEN_S = 10.0
NOTICED_S = LIMITS.recovery.silence_s * 7 / 6
"""The bound on silence, and the time between two looks."""
_SETTLED_S = 1.0
_PROMPT_TOKENS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """How much is sent, and to whom."""

    rate_per_s: float = 50.0
    requests: int = 1000
    prefill: int = 2
    decode: int = 4
    coordinators: int = 2
    output_tokens: int = 48
    seed: int = 7

    @property
    def lasts_s(self) -> float:
        """About how long requests arrive."""
        return self.requests / self.rate_per_s


class Theatre:
    """A fleet, its clients, and what they got."""

    def __init__(self, play: Play, limits: CoordinatorLimits = LIMITS) -> None:
        self.play = play
        self.tokens: dict[str, list[int]] = {}
        self.fleet = VirtualFleet(FleetOptions(seed=play.seed))
        self.coordinators = [
            Coordinator(
                limits=limits, placer=PredictedPlacer(PredictedOptions(), seed=seed), seed=seed
            )
            for seed in range(play.coordinators)
        ]
        for one in self.coordinators:
            self.fleet.add_coordinator(one, self._take)
        for role, count in ((Role.PREFILL, play.prefill), (Role.DECODE, play.decode)):
            for number in range(count):
                self.join(f"{role}-{number}")
        self.fleet.run(until_s=_SETTLED_S)
        self.sent = _requests(play)

    def join(self, replica_id: str) -> None:
        """A replica begins, or begins again."""
        role = Role(replica_id.partition("-")[0])
        self.fleet.add_replica(replica_id, ENGINE, role=role, pool=str(role))

    def at(self, at_s: float, what: Callable[[], None]) -> None:
        """Let something happen so long after the first request."""
        self.fleet.timeline.at(_SETTLED_S + at_s, what)

    def perform(self) -> tuple[RequestRecord, ...]:
        """Let all of it happen, and what is left be tidied up; the records, in order of arrival."""
        rng = random.Random(self.play.seed)
        times_s = poisson_times(self.play.rate_per_s, len(self.sent), rng, start_s=_SETTLED_S)
        count = self.play.coordinators
        open_loop(self.fleet, self.sent, times_s, lambda one: int(one.request_id[1:]) % count)
        ends_s = self.play.lasts_s + 120.0
        self.fleet.run(ended=len(self.sent), until_s=_SETTLED_S + ends_s)
        self.fleet.run(until_s=self.fleet.timeline.now_s + FROZEN_S + ENGINE.lease_s + 5.0)
        self.fleet.check_idle()
        return tuple(sorted(self.fleet.records, key=lambda one: one.arrived_at_s))

    def wrong_streams(self) -> int:
        """Streams that are not the beginning of what the model says."""
        wrong = 0
        for request in self.sent:
            got = self.tokens.get(request.request_id, [])
            wanted = expected_tokens(
                request.prompt_token_ids, request.max_tokens, model="sim", settings=ENGINE
            )
            wrong += tuple(got) != wanted[: len(got)]
        return wrong

    def second_tries(self, trouble: Trouble) -> int:
        """How often all coordinators tried again for this reason."""
        return sum(dict(one.recoveries().second_tries)[trouble] for one in self.coordinators)

    def _take(self, delivery: Delivery) -> None:
        self.tokens.setdefault(delivery.request_id, []).extend(delivery.token_ids)


class Failing:
    """An engine that fails every leg it is given, for as long as it is told to."""

    def __init__(self, engine: VirtualEngine) -> None:
        self._engine = engine
        self.fails = True

    def add(self, leg: Leg, *, now_s: float) -> LegFailure | None:
        """Refuse a leg as an engine does that has lost its device."""
        if self.fails:
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
    return freeze(Play(requests=1500))


def freeze(play: Play) -> Outcome:
    """Freeze one replica of each pool."""
    theatre, freezes = Theatre(play), {"decode-0": play.lasts_s / 6, "prefill-0": play.lasts_s / 2}
    for replica_id, at_s in freezes.items():
        theatre.at(at_s, partial(theatre.fleet.freeze, replica_id, FROZEN_S))
    records = theatre.perform()
    sent_to = sum(
        leg.replica_id == replica_id
        and at_s + NOTICED_S <= leg.began_at_s - _SETTLED_S < at_s + FROZEN_S
        for leg in _legs(records)
        for replica_id, at_s in freezes.items()
    )
    stall = "longest gap in a stream beyond the time to notice, s"
    return Outcome(
        bounds=(
            *_all_served(theatre, records),
            at_most(stall, round(_longest_gap_s(records) - NOTICED_S, 3), 0.5),
            exactly("legs sent to a frozen replica once it was noticed", sent_to, 0),
            at_least("streams carried over", theatre.second_tries(Trouble.SILENT), 1),
        ),
        figures={
            "seconds_to_notice": round(NOTICED_S, 3),
            "liveness_of_the_link_s": LIVENESS_S,
            **_figures(theatre, records),
        },
    )


# -------------------------------------------------------------------- lost


@case(
    "F8-virtual",
    "Half of the fleet lost at one moment at 50 requests/s",
    engines=Engines.VIRTUAL,
    minutes=2,
)
def half_lost(_: Path) -> Outcome:
    """One failure, many streams: none of them is refused its second try."""
    return lose_half(Play())


def lose_half(play: Play) -> Outcome:
    """Kill every other replica."""
    theatre = Theatre(play)
    lost = [one for one in theatre.fleet.replicas if int(one.rpartition("-")[2]) % 2]

    def kill() -> None:
        for replica_id in lost:
            theatre.fleet.kill(replica_id)

    theatre.at(play.lasts_s / 3, kill)
    records = theatre.perform()
    refused = sum(one.recoveries().refused for one in theatre.coordinators)
    return Outcome(
        bounds=(
            *_all_served(theatre, records),
            exactly("second tries refused", refused, 0),
            at_least("streams carried over", theatre.second_tries(Trouble.LOST), 1),
            at_most("longest gap in a stream, s", round(_longest_gap_s(records), 3), 0.5),
        ),
        figures={"replicas_lost": len(lost), **_figures(theatre, records)},
    )


@case(
    "F1-virtual-flapping",
    "A decode replica that dies and comes back every 2.5 s for a minute",
    engines=Engines.VIRTUAL,
    minutes=3,
)
def flapping(_: Path) -> Outcome:
    """It is left alone for longer each time, so it breaks ever fewer streams."""
    return flap(Play(requests=3000))


def flap(play: Play, *, every_s: float = 2.5, back_after_s: float = 0.25) -> Outcome:
    """Kill one replica again and again."""
    theatre, times = Theatre(play), int(play.lasts_s / every_s)
    for number in range(1, times):
        theatre.at(number * every_s, partial(theatre.fleet.kill, "decode-0"))
        theatre.at(number * every_s + back_after_s, partial(theatre.join, "decode-0"))
    records = theatre.perform()
    half_s = _SETTLED_S + play.lasts_s / 2
    broken = [leg for leg in _legs(records) if leg.end is LegEnd.BROKEN]
    before = sum(leg.ended_at_s < half_s for leg in broken)
    return Outcome(
        bounds=(
            *_all_served(theatre, records),
            at_most("streams broken in the second half", len(broken) - before, before / 2),
        ),
        figures={
            "times_lost": times - 1,
            "streams_broken_in_the_first_half": before,
            **_figures(theatre, records),
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
    """No storm of second tries; service is back as soon as the replicas are."""
    return fail_everything(Play())


def fail_everything(play: Play, *, lasts_s: float = 10.0) -> Outcome:
    """Have every engine fail for a while."""
    theatre, begins_s = Theatre(play), play.lasts_s / 4
    failing: list[Failing] = []

    def begin() -> None:
        for replica in theatre.fleet.replicas.values():
            failing.append(Failing(replica.engine))
            replica.engine = cast("VirtualEngine", failing[-1])

    def end() -> None:
        for one in failing:
            one.fails = False

    theatre.at(begins_s, begin)
    theatre.at(begins_s + lasts_s, end)
    records = theatre.perform()
    from_s, until_s = _SETTLED_S + begins_s, _SETTLED_S + begins_s + lasts_s
    begun = sum(from_s <= leg.began_at_s < until_s for leg in _legs(records))
    arrived = sum(from_s <= one.arrived_at_s < until_s for one in records)
    retries = LIMITS.recovery.retries
    floor = retries.floor * play.coordinators * (lasts_s / retries.window_s + 1)
    late = [one for one in records if one.arrived_at_s >= until_s + 1.0]
    unserved = sum(one.outcome is not Phase.FINISHED for one in late)
    whose = "legs begun meanwhile, for each request that arrived"
    most = 1 + retries.fraction + floor / max(1, arrived)
    return Outcome(
        bounds=(
            at_most(whose, round(begun / max(1, arrived), 3), round(most, 3)),
            exactly("requests unserved that came 1 s after it was over, or later", unserved, 0),
            at_least("requests that came after it", len(late), 1),
            exactly("streams with wrong tokens", theatre.wrong_streams(), 0),
        ),
        figures={"arrived_meanwhile": arrived, **_figures(theatre, records)},
        note="the bound is 1 + the budget's fraction + its floor, over what arrived",
    )


# -------------------------------------------------------------------- what is looked at


def _requests(play: Play) -> list[Request]:
    rng = random.Random(play.seed)
    return [
        Request(
            request_id=f"r{number}",
            prompt_token_ids=tuple(rng.randbytes(_PROMPT_TOKENS)),
            max_tokens=play.output_tokens,
            arrived_at_s=0.0,
        )
        for number in range(play.requests)
    ]


def _legs(records: tuple[RequestRecord, ...]) -> list[LegStory]:
    return [leg for record in records for leg in record.legs]


def _longest_gap_s(records: tuple[RequestRecord, ...]) -> float:
    return max(record.worst_gap_s for record in records)


def _all_served(theatre: Theatre, records: tuple[RequestRecord, ...]) -> tuple[Bound, ...]:
    unserved = sum(record.outcome is not Phase.FINISHED for record in records)
    return (
        exactly("requests that ended exactly once", len(records), theatre.play.requests),
        exactly("requests that were not served", unserved, 0),
        exactly("streams with wrong tokens", theatre.wrong_streams(), 0),
    )


def _figures(theatre: Theatre, records: tuple[RequestRecord, ...]) -> Mapping[str, Figure]:
    first = [r.first_token_at_s - r.arrived_at_s for r in records if r.first_token_at_s is not None]
    tries = {str(one): theatre.second_tries(one) for one in Trouble}
    return {
        "requests": theatre.play.requests,
        "longest_first_token_s": round(max(first, default=0.0), 3),
        "longest_gap_s": round(_longest_gap_s(records), 3),
        "second_tries": ", ".join(f"{one} {count}" for one, count in tries.items() if count),
        "second_tries_refused": sum(one.recoveries().refused for one in theatre.coordinators),
        "circuits_opened": sum(one.recoveries().openings for one in theatre.coordinators),
    }
