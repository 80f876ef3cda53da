"""What users get against what accelerators give: the front of all shapes, in closed form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from baton.planner.rates.closed_form import Mix, decode_rate, decode_s, mixed_rate, prefill_rate
from baton.planner.result import Candidate, Trade
from baton.planner.shapes.fleets import Kind
from baton.planner.shapes.space import Duty, Instance

_SLOWEST_S = 0.2
"""Per token: five a second, as fast as people read aloud."""
_STEPS = 10


def front(trades: Iterable[Trade]) -> tuple[Trade, ...]:
    """Those that none other beats in one and equals in the other, the fastest for users first."""
    kept: list[Trade] = []
    order = sorted(trades, key=lambda one: (-one.tokens_per_s_per_user, -one.tokens_per_s_per_gpu))
    for one in order:
        if not kept or one.tokens_per_s_per_gpu > kept[-1].tokens_per_s_per_gpu:
            kept.append(one)
    return tuple(kept)


def closed_form(fitting: Mapping[Duty, Sequence[Instance]], mix: Mix) -> Iterator[Trade]:
    """What every shape gives at several speeds for users, without queues.

    A disaggregated trade takes as much of a prefill shape as its decode shape needs.
    """
    decoders = fitting[Duty.DECODE]
    if not decoders:
        return
    fastest_s = min(decode_s(one.settings.timing, 1, mix.context_tokens) for one in decoders)
    ratio = (_SLOWEST_S / fastest_s) ** (1 / _STEPS) if fastest_s < _SLOWEST_S else 1.0
    prefill_gpus = min(
        (one.gpus / prefill_rate(one.settings, mix) for one in fitting[Duty.PREFILL]), default=None
    )
    for step in range(_STEPS + 1):
        tpot_s = fastest_s * ratio**step * (1 + 1e-9)
        for one in fitting[Duty.BOTH]:
            rate = mixed_rate(one.settings, mix, tpot_s)
            yield from _trade(Kind.COLOCATED, one, mix, tpot_s, one.gpus / rate if rate else None)
        for one in decoders:
            rate = decode_rate(one.settings, mix, tpot_s)
            whole = None if not rate or prefill_gpus is None else prefill_gpus + one.gpus / rate
            yield from _trade(Kind.DISAGGREGATED, one, mix, tpot_s, whole)


def _trade(
    kind: Kind, instance: Instance, mix: Mix, tpot_s: float, gpu_s: float | None
) -> Iterator[Trade]:
    """`gpu_s` is how many accelerator-seconds one request takes; None when it cannot be served."""
    if gpu_s is not None:
        yield Trade(
            kind=kind,
            label=instance.label,
            tokens_per_s_per_gpu=mix.output_tokens / gpu_s,
            tokens_per_s_per_user=1 / tpot_s,
            simulated=False,
        )


def simulated(candidates: Iterable[Candidate]) -> Iterator[Trade]:
    """What the simulated fleets gave, at every rate that they carried."""
    for one in candidates:
        for trial in one.measured.trials:
            if trial.holds and trial.tpot.p50_s > 0:
                yield Trade(
                    kind=one.fleet.kind,
                    label=one.fleet.label,
                    tokens_per_s_per_gpu=one.tokens_per_s_per_gpu(trial),
                    tokens_per_s_per_user=1 / trial.tpot.p50_s,
                    simulated=True,
                )
