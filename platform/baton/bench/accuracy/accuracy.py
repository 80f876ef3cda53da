"""Judges the model by measured rows: predicts each, and says how far off it is, and which way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from baton.bench.accuracy.measurements import MeasuredRow
from baton.bench.accuracy.plausibility import why_impossible
from baton.bench.accuracy.recipes import recipe_of, weights_of
from baton.domain.errors import BatonError, OutOfRange
from baton.perf.capacity import closed_loop
from baton.perf.fitting.calibration import (
    Calibration,
    Conditions,
    Error,
    Kind,
    Observation,
    Residual,
    calibrate_jointly,
    error_of,
)
from baton.perf.hardware.catalogue import accelerator
from baton.perf.hardware.efficiency import Efficiency, of_engine
from baton.perf.model import memory
from baton.perf.model.known_models import shape_of
from baton.perf.steps.roofline import Roofline, activations_of, is_narrow
from baton.simulator.outcome import mean
from baton.simulator.single_engine import serve
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.trace import TraceRequest

SATURATED_TTFT_S = 4.0
"""Rows with longer times to first tokens tell of queues for memory, not of the engine's speed."""
_BLOCK_SIZE_TOKENS = 16
_FIRST_TOKEN_S = 0.007
"""From an engine's first token to its client where nothing was calibrated.
Source: fit to vLLM's rows on H100 (InferenceX)."""


class Judged(NamedTuple):
    """One row and what the model makes of it."""

    row: MeasuredRow
    ttft: Residual
    tpot: Residual
    simulated: bool
    """By the simulated engine; else by the closed loop that calibration uses."""
    impossible: str | None = None
    """Why it cannot be, whatever the model says; see `bench.plausibility`."""

    @property
    def saturated(self) -> bool:
        """Whether it is left out of the headline."""
        return self.row.ttft_s >= SATURATED_TTFT_S


class NotJudged(NamedTuple):
    """One row that nothing can be said of."""

    row: MeasuredRow
    why: str
    """The same for all rows of a kind."""
    at: str = ""
    """What of this row it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Of all rows: none is dropped, each is in one of the two."""

    judged: tuple[Judged, ...]
    not_judged: tuple[NotJudged, ...]

    @property
    def counted(self) -> tuple[Judged, ...]:
        """Those that are not saturated."""
        return tuple(one for one in self.judged if not one.saturated)

    @property
    def plausible(self) -> tuple[Judged, ...]:
        """Those of the counted that can be."""
        return tuple(one for one in self.counted if one.impossible is None)

    def beside_impossible(self) -> tuple[Judged, ...]:
        """Those that can be, of sweeps of which others cannot: what spoiled those may be in them.

        A sweep is the rows of one engine, version, model and device.
        """
        spoiled = {_sweep(one.row) for one in self.counted if one.impossible is not None}
        return tuple(one for one in self.plausible if _sweep(one.row) in spoiled)

    def errors(self, rows: Iterable[Judged] | None = None) -> tuple[Error, Error]:
        """Of times to first tokens and per output token; of all rows that are not saturated."""
        of = self.counted if rows is None else list(rows)
        return error_of([one.ttft for one in of]), error_of([one.tpot for one in of])

    def groups(self) -> dict[tuple[str, str, str], tuple[Judged, ...]]:
        """The rows that are not saturated, by engine, model and device."""
        grouped: dict[tuple[str, str, str], list[Judged]] = defaultdict(list)
        for one in self.counted:
            row = one.row
            engine = f"{row.backend} {row.version}".strip()
            grouped[engine, row.model, f"{row.system} tp{row.tp}"].append(one)
        return {key: tuple(rows) for key, rows in sorted(grouped.items())}


def _sweep(row: MeasuredRow) -> tuple[str, str, str, str]:
    return row.backend, row.version, row.model, row.system


Calibrations = Mapping[str, Calibration]
"""By engine ("vllm", "trtllm"): what kernels take is alike in all of them."""


def calibrated(rows: Sequence[MeasuredRow]) -> dict[str, Calibration]:
    """One calibration for each engine that has rows which can be fitted to, fitted together."""
    usable = [row for row in rows if unfit(row) is None]
    engines = sorted({row.backend for row in usable})
    if not engines:
        return {}
    return calibrate_jointly(partial(_observed, usable), {one: of_engine(one) for one in engines})


def unfit(row: MeasuredRow) -> str | None:
    """Why nothing is fitted to a row; None when it is."""
    if row.disaggregated:
        return "it measured separate pools"
    if row.ttft_s >= SATURATED_TTFT_S:
        return f"its time to first token of {row.ttft_s:.1f} s is a queue's"
    try:
        if why_impossible(row) is not None:
            return "it implies more than its devices can compute"
    except BatonError as error:
        return str(error)
    if not recipe_of(row).by_engine(row):
        return "the server in front of the engine was more than half busy"
    return None


def judge(
    rows: Sequence[MeasuredRow],
    *,
    calibrations: Calibrations | None = None,
    extrapolate: bool = False,
) -> Judgement:
    """Predict every row; by an engine that was not calibrated as if it were vLLM."""
    judged, refused = [], []
    for row in rows:
        try:
            judged.append(_judged(row, calibrations or {}, extrapolate=extrapolate))
        except OutOfRange as error:
            refused.append(NotJudged(row, "far from what the calibration has seen", str(error)))
        except (BatonError, ValueError) as error:
            refused.append(NotJudged(row, str(error)))
    return Judgement(judged=tuple(judged), not_judged=tuple(refused))


def _judged(row: MeasuredRow, calibrations: Calibrations, *, extrapolate: bool) -> Judged:
    if row.disaggregated:
        raise ValueError("it measured separate pools: simulate them with `baton simulate`")
    calibration = calibrations.get(row.backend) or calibrations.get("vllm")
    known = of_engine(row.backend)
    efficiency, first_token_s = known, _FIRST_TOKEN_S
    if calibration is not None:
        first_token_s = calibration.first_token_s
        efficiency = replace(calibration.efficiency, decode_tile=known.decode_tile)
        if not extrapolate:
            calibration.check(_conditions(row), row.name)
    simulated = row.backend == "vllm"
    predict = _simulated if simulated else _looped
    ttft_s, tpot_s = predict(row, efficiency)
    return Judged(
        row,
        Residual(row.name, Kind.FIRST_TOKEN, row.ttft_s, ttft_s + first_token_s),
        Residual(row.name, Kind.OUTPUT_TOKEN, row.tpot_s, tpot_s),
        simulated,
        why_impossible(row),
    )


def _simulated(row: MeasuredRow, efficiency: Efficiency) -> tuple[float, float]:
    """Mean latencies of the simulated engine, which schedules as vLLM does and runs out of memory.

    Raises:
        DoesNotFit: the model does not fit the row's devices.
    """
    recipe, shape = recipe_of(row), shape_of(row.model)
    loop = recipe.loop(row)
    fitted = memory.fit(
        shape,
        accelerator(row.system),
        tp=row.tp,
        pp=row.pp,
        weights=weights_of(row),
        kv=recipe.kv,
        max_batched_tokens=loop.max_batched_tokens,
        max_running_requests=loop.max_running_requests,
    )
    settings = V1Settings(
        timing=_roofline(row, efficiency),
        kv_blocks=fitted.kv_blocks(_BLOCK_SIZE_TOKENS),
        kv_block_bytes=int(_BLOCK_SIZE_TOKENS * shape.kv_token_bytes(recipe.kv)),
        block_size_tokens=_BLOCK_SIZE_TOKENS,
        max_running_requests=loop.max_running_requests,
        max_batched_tokens=loop.max_batched_tokens,
        prefix_caching=False,
        pipeline_stages=row.pp,
    )
    asked = [TraceRequest(0.0, *lengths) for lengths in recipe.lengths(row)]
    outcomes = serve(settings, asked, clients=loop.clients, away_s=loop.away_s)[loop.skipped :]
    ttft_s = mean([one.ttft_s for one in outcomes]) + loop.away_s
    return ttft_s, mean([one.tpot_s for one in outcomes])


def _looped(row: MeasuredRow, efficiency: Efficiency) -> tuple[float, float]:
    seen = _seen(row, efficiency)
    return sum(seen.ttft), sum(seen.tpot)


def _seen(row: MeasuredRow, efficiency: Efficiency) -> closed_loop.Seen:
    recipe = recipe_of(row)
    return closed_loop.run(_roofline(row, efficiency), recipe.lengths(row), recipe.loop(row))


def _observed(
    rows: Sequence[MeasuredRow], efficiencies: Mapping[str, Efficiency]
) -> list[Observation]:
    observed = []
    for row in rows:
        seen, conditions = _seen(row, efficiencies[row.backend]), _conditions(row)
        narrow = is_narrow(activations_of(weights_of(row), accelerator(row.system)))
        for kind, measured_s, parts in (
            (Kind.FIRST_TOKEN, row.ttft_s, seen.ttft),
            (Kind.OUTPUT_TOKEN, row.tpot_s, seen.tpot),
        ):
            observed.append(
                Observation(
                    name=row.name,
                    kind=kind,
                    measured_s=measured_s,
                    parts=parts,
                    conditions=conditions,
                    engine=row.backend,
                    narrow=narrow,
                )
            )
    return observed


def _conditions(row: MeasuredRow) -> Conditions:
    return Conditions(
        prompt_tokens=row.prompt_tokens,
        context_tokens=row.prompt_tokens + row.output_tokens,
        requests=row.concurrency,
        devices=row.tp * row.pp,
    )


def _roofline(row: MeasuredRow, efficiency: Efficiency) -> Roofline:
    return Roofline(
        shape_of(row.model),
        accelerator(row.system),
        tp=row.tp,
        pp=row.pp,
        weights=weights_of(row),
        kv=recipe_of(row).kv,
        efficiency=efficiency,
    )
