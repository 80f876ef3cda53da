"""Requests as they might have been: drawn by chance, with everything that is kept of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from baton.domain.commands import RequestRecord
from baton.domain.handoff import (
    HandoffMode,
    HitSource,
    LegKind,
    LegTimes,
    PlacementDecision,
    Route,
    RouteOption,
    RouteReason,
)
from baton.domain.leg_record import LegOutcome, LegRecord
from baton.domain.request import Phase
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.policy.admission.slo_evaluation import evaluate_slo

CLASSES = (
    Slo(name="interactive", ttft_s=0.5, tpot_s=0.05, attainment_target=0.99),
    Slo(name="batch", ttft_s=10.0, tpot_s=0.2, attainment_target=0.9),
)
TENANTS = ("acme", "globex", "initech")
_SHORT_TOKENS = 400
"""Prompts with no more than so many to compute are prefilled where they are decoded."""


class _Seconds(NamedTuple):
    """What a request spends until its first token."""

    held_s: float
    queue_s: float
    prefill_s: float
    moved_s: float
    start_s: float


def random_record(
    rng: random.Random, ended_at_s: float, sources: Sequence[str], targets: Sequence[str]
) -> RequestRecord:
    """One that has finished at that time."""
    prompt, output = int(rng.lognormvariate(6.6, 0.9)), int(rng.lognormvariate(4.9, 0.7)) + 2
    cached = int(prompt * rng.choice((0.0, 0.0, 0.3, 0.85)))
    is_local = prompt - cached < _SHORT_TOKENS
    seconds = _seconds(rng, prompt, cached, is_local=is_local)
    decode_s = (output - 1) * rng.gauss(0.026, 0.004)
    arrived_s = ended_at_s - sum(seconds) - decode_s
    route = _route(rng.choice(sources), rng.choice(targets), is_local=is_local)
    decision = PlacementDecision(
        route=route,
        policy="predicted",
        at_s=arrived_s + seconds.held_s,
        options=_options(
            route, seconds._replace(queue_s=seconds.queue_s * rng.uniform(0.5, 1.3)), cached
        ),
        options_considered=len(sources) * len(targets),
    )
    record = RequestRecord(
        request_id=f"chatcmpl-{rng.randrange(16**8):08x}-{rng.randrange(16**4):04x}",
        outcome=Phase.FINISHED,
        reason=rng.choice(("stop", "stop", "length")),
        routes=(route,),
        decisions=(decision,),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        resumes=0,
        arrived_at_s=arrived_s,
        first_token_at_s=arrived_s + sum(seconds),
        last_token_at_s=ended_at_s,
        ended_at_s=ended_at_s,
        prefill_done_at_s=None if is_local else arrived_s + sum(seconds[:3]),
        handed_off_blocks=0 if is_local else prompt // 16,
        tenant=rng.choice(TENANTS),
        slo=CLASSES[rng.random() > 0.78],
        max_itl_s=0.064,
        queue_wait_s=seconds.held_s,
        gpu_s=seconds.prefill_s + decode_s / 30,
    )
    legs = _legs(record, seconds, has_times=rng.random() > 0.12)
    return evolve(record, slo_result=evaluate_slo(record, record.slo), legs=legs)


def _seconds(rng: random.Random, prompt: int, cached: int, *, is_local: bool) -> _Seconds:
    return _Seconds(
        held_s=rng.expovariate(4.0) if rng.random() > 0.9 else 0.0004,
        queue_s=rng.expovariate(30.0) * (9.0 if rng.random() > 0.95 else 1.0),
        prefill_s=0.012 + (prompt - cached) / 14000,
        moved_s=0.0 if is_local else 0.002 + prompt * 131072 / 14e9,
        start_s=0.0 if is_local else 0.021,
    )


def _route(source: str, target: str, *, is_local: bool) -> Route:
    return Route(
        mode=HandoffMode.LOCAL if is_local else HandoffMode.PULL,
        prefill_replica_id=None if is_local else source,
        decode_replica_id=target,
        reason=RouteReason.LOCAL_FASTER if is_local else RouteReason.DISAGGREGATED,
    )


def _legs(record: RequestRecord, seconds: _Seconds, *, has_times: bool) -> tuple[LegRecord, ...]:
    """One, or a prefill and a decode leg; not every engine says how long it computed."""
    (route,) = record.routes
    began_s = record.arrived_at_s + seconds.held_s
    prefilled_s = began_s + seconds.queue_s + seconds.prefill_s
    first_s = prefilled_s + seconds.moved_s + seconds.start_s

    def leg(kind: LegKind, replica_id: str, at_s: tuple[float, float, float]) -> LegRecord:
        compute_s = seconds.start_s if kind is LegKind.DECODE else seconds.prefill_s
        return LegRecord(
            leg_id=str(kind),
            kind=kind,
            replica_id=replica_id,
            route_index=0,
            started_at_s=at_s[0],
            first_output_at_s=at_s[1],
            last_output_at_s=at_s[2],
            ended_at_s=at_s[2],
            prompt_tokens=record.prompt_tokens,
            fetched_tokens=record.prompt_tokens if kind is LegKind.DECODE else 0,
            cached_tokens=record.cached_tokens,
            output_tokens=0 if kind is LegKind.PREFILL else record.output_tokens,
            engine_times=LegTimes(0.0, compute_s) if has_times else None,
            outcome=LegOutcome.COMPLETED,
        )

    target, ended_s = route.decode_replica_id, record.ended_at_s
    if route.prefill_replica_id is None:
        return (leg(LegKind.LOCAL, target, (began_s, first_s, ended_s)),)
    return (
        leg(LegKind.PREFILL, route.prefill_replica_id, (began_s, prefilled_s, prefilled_s)),
        leg(LegKind.DECODE, target, (prefilled_s, first_s, ended_s)),
    )


def _options(route: Route, seconds: _Seconds, cached: int) -> tuple[RouteOption, ...]:
    """The chosen one, and the other way to run it, which costs more."""
    chosen = RouteOption(
        mode=route.mode,
        prefill_replica_id=route.prefill_replica_id,
        decode_replica_id=route.decode_replica_id,
        hit_tokens=cached,
        hit_source=HitSource.REPORTED if cached else HitSource.NONE,
        hit_age_s=1.2 if cached else 0.0,
        queue_s=seconds.queue_s,
        prefill_s=seconds.prefill_s,
        transfer_s=seconds.moved_s,
        decode_s=seconds.start_s,
        interference_s=0.004,
    )
    if route.prefill_replica_id is None:
        return (_with_cost(chosen),)
    local = evolve(
        chosen,
        mode=HandoffMode.LOCAL,
        prefill_replica_id=None,
        transfer_s=0.0,
        decode_s=0.0,
        interference_s=0.19,
    )
    return (_with_cost(chosen), _with_cost(local))


def _with_cost(option: RouteOption) -> RouteOption:
    return evolve(option, cost_s=option.ttft_s + option.interference_s)
