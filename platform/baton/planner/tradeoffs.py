"""Interactivity against throughput: the Pareto front of all shapes, in closed form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from baton.planner.rates.closed_form import (
    MeanRequest,
    decode_rate,
    decode_s,
    mixed_rate,
    prefill_rate,
)
from baton.planner.result import Candidate, Tradeoff
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
