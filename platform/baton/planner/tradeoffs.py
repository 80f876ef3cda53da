"""Interactivity against throughput, in closed form: of all shapes, and by speculative decoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from baton.perf.model.speculative import best_draft_length, expected_tokens, speedup
from baton.perf.step_timing import StepBatch, StepTiming, attention_pairs
from baton.planner.rates.closed_form import (
    MeanRequest,
    decode_rate,
    decode_s,
    mixed_rate,
    prefill_rate,
)
from baton.planner.result import Candidate, Speculation, SpeculationPoint, Tradeoff
from baton.planner.shapes.fleets import FleetKind
from baton.planner.shapes.space import Duty, EngineShape

_MAX_TPOT_S = 0.2
"""Five tokens a second, as fast as people read aloud."""
_STEPS = 10


def pareto_front(trades: Iterable[Tradeoff]) -> tuple[Tradeoff, ...]:
    """The trade-offs that no other dominates, the fastest for users first."""
    frontier: list[Tradeoff] = []
    ranked = sorted(
        trades, key=lambda trade: (-trade.tokens_per_s_per_user, -trade.tokens_per_s_per_gpu)
    )
    for tradeoff in ranked:
        if not frontier or tradeoff.tokens_per_s_per_gpu > frontier[-1].tokens_per_s_per_gpu:
            frontier.append(tradeoff)
    return tuple(frontier)


def closed_form_tradeoffs(
    fitting: Mapping[Duty, Sequence[EngineShape]], mix: MeanRequest
) -> Iterator[Tradeoff]:
    """Throughput of every shape at several speeds for users, without queues.

    A disaggregated trade-off includes the prefill accelerators that its decode shape needs.
    """
    decode_instances = fitting[Duty.DECODE]
    if not decode_instances:
        return
    fastest_s = min(
        decode_s(decode_instance.settings.timing, 1, mix.context_tokens)
        for decode_instance in decode_instances
    )
    ratio = (_MAX_TPOT_S / fastest_s) ** (1 / _STEPS) if fastest_s < _MAX_TPOT_S else 1.0
    prefill_gpus = min(
        (
            engine_shape.gpus / prefill_rate(engine_shape.settings, mix)
            for engine_shape in fitting[Duty.PREFILL]
        ),
        default=None,
    )
    for step in range(_STEPS + 1):
        tpot_s = fastest_s * ratio**step * (1 + 1e-9)
        for engine_shape in fitting[Duty.BOTH]:
            rate = mixed_rate(engine_shape.settings, mix, tpot_s)
            yield from _tradeoff(
                FleetKind.COLOCATED,
                engine_shape,
                mix,
                tpot_s,
                engine_shape.gpus / rate if rate else None,
            )
        for decode_instance in decode_instances:
            rate = decode_rate(decode_instance.settings, mix, tpot_s)
            gpu_s = (
                None
                if not rate or prefill_gpus is None
                else prefill_gpus + decode_instance.gpus / rate
            )
            yield from _tradeoff(FleetKind.DISAGGREGATED, decode_instance, mix, tpot_s, gpu_s)


def _tradeoff(
    kind: FleetKind, engine_shape: EngineShape, mix: MeanRequest, tpot_s: float, gpu_s: float | None
) -> Iterator[Tradeoff]:
    """`gpu_s` is the accelerator-seconds of one request; None if it cannot be served."""
    if gpu_s is not None:
        yield Tradeoff(
            kind=kind,
            label=engine_shape.label,
            tokens_per_s_per_gpu=mix.output_tokens / gpu_s,
            tokens_per_s_per_user=1 / tpot_s,
            simulated=False,
        )


def simulated_tradeoffs(candidates: Iterable[Candidate]) -> Iterator[Tradeoff]:
    """Trade-offs of the simulated fleets, at every rate that they sustained."""
    for candidate in candidates:
        for trial in candidate.search_result.trials:
            if trial.holds and trial.tpot.p50_s > 0:
                yield Tradeoff(
                    kind=candidate.fleet.kind,
                    label=candidate.fleet.label,
                    tokens_per_s_per_gpu=candidate.tokens_per_s_per_gpu(trial),
                    tokens_per_s_per_user=1 / trial.tpot.p50_s,
                    simulated=True,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How tokens are drafted for speculative decoding."""

    acceptance: float
    """Probability that a drafted token is accepted."""
    drafted: int
    """Tokens drafted for each step."""
    draft_cost: float
    """Time to draft one token, in steps that decode one token."""

    def __post_init__(self) -> None:
        if not 0 < self.acceptance < 1 or not 1 <= self.drafted <= _MAX_DRAFTED:
            raise ValueError(
                f"got an acceptance of {self.acceptance:g} and {self.drafted} drafted tokens,"
                f" expected more than 0 and less than 1, and 1 to {_MAX_DRAFTED}"
            )
        if not 0 <= self.draft_cost <= 1:
            raise ValueError(f"got a cost of {self.draft_cost:g} steps, expected 0 to 1")


def default_draft_cost(layers: int) -> float:
    """One layer's share of a step.

    Source: EAGLE (2401.15077) section 3.1: the draft head is one decoder layer.
    """
    return 1 / layers


def speculation_of(candidate: Candidate, mix: MeanRequest, drafting: Drafting) -> Speculation:
    """The gain of speculative decoding in the fleet's decoding pool.

    A step that checks `d` drafted tokens computes `d + 1` tokens of each stream and reads its
    context once. Prompts in the same steps are left out.
    """
    pool = candidate.fleet.pools[-1]
    settings = pool.engine_shape.settings
    context_tokens = round(mix.context_tokens)

    @cache
    def gain(streams: int) -> float:
        return speedup(
            drafting.acceptance,
            drafting.drafted,
            draft_cost=drafting.draft_cost,
            verify_cost=_verify_cost(settings.timing, streams, context_tokens, drafting.drafted),
        )

    def point(streams: int) -> SpeculationPoint:
        step_s = decode_s(settings.timing, streams, context_tokens)
        return SpeculationPoint(streams=streams, step_s=step_s, gain=gain(streams))

    limit = settings.max_running_requests
    # From the limit down: with long contexts, the gain may fall and rise again.
    gaining = next((streams for streams in range(limit, 0, -1) if gain(streams) > 1), 0)
    at_load = point(max(1, min(limit, round(streams_per_replica(candidate)))))
    return Speculation(
        acceptance=drafting.acceptance,
        drafted=drafting.drafted,
        draft_cost=drafting.draft_cost,
        expected_tokens=expected_tokens(drafting.acceptance, drafting.drafted),
        pool=f"{pool.role} {pool.engine_shape.label}",
        points=tuple(point(streams) for streams in _doubling(limit)),
        at_load=at_load,
        break_even_streams=None if gaining == limit else gaining + 1,
        best_drafted=best_draft_length(
            drafting.acceptance,
            draft_cost=drafting.draft_cost,
            verify_cost=lambda drafted: _verify_cost(
                settings.timing, at_load.streams, context_tokens, drafted
            ),
            max_drafted=_MAX_DRAFTED,
        ),
    )


_MAX_DRAFTED = 16


def _doubling(limit: int) -> Iterator[int]:
    streams = 1
    while streams <= limit:
        yield streams
        streams *= 4


def _verify_cost(timing: StepTiming, streams: int, context_tokens: int, drafted: int) -> float:
    """A step that checks drafted tokens, in steps that decode one token."""
    step = StepBatch(decode_requests=streams, decode_context_tokens=streams * context_tokens)
    checking = StepBatch(
        decode_requests=step.decode_requests,
        decode_context_tokens=step.decode_context_tokens,
        prefill_tokens=streams * drafted,
        prefill_requests=streams,
        prefill_pairs=streams * attention_pairs(drafted, context_tokens),
        finished_prefills=streams * drafted,
    )
    return timing.step_s(checking) / timing.step_s(step)


def streams_per_replica(candidate: Candidate) -> float:
    """Streams that one decoding replica has at the rate that the fleet sustains; 0 without one."""
    trial, pool = candidate.best_trial, candidate.simulated_fleet.pools[-1]
    if trial is None:
        return 0.0
    return trial.rate_per_s * trial.output_tokens * trial.tpot.p50_s / pool.replicas
