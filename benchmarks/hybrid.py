"""Whether baton's hybrid keeps up with the better of colocation and the best static split.

On the same four replicas (Llama-3.1-70B in FP8, four H100 each), simulated: for three traces and a
grid of 6 x 6 objectives, the highest rate at which 90 % of the requests meet both. Colocated
replicas prefill in chunks (the better of 512 and 2,048 tokens a step); static splits send every
prompt through the prefill pool (the best of 1:3 to 3:1). Hybrid is baton's placement aiming at the
cell's objectives, with the pools of the best split of its cell, or one prefill replica fewer, or
none at all; requests are split where that is predicted to be better. It is tried without and with
its admission, which rejects requests that are predicted to miss: those count as missed. What it
carries without is reported, too: no other policy has an admission here.

Objectives are multiples of what a request alone takes: of the time to the first token of a prompt
longer than 90 % of the trace's, and of a step at its mean context. Prints one JSON object as the
last line of stdout, writes it to `benchmarks/results/hybrid.json`. Progress goes to stderr.

With `--levels` hybrid's own highest rate is not looked for, only how far it gets among a few
multiples of the better rival's: a quarter of the runs. What each trace gave is kept as soon as it
is known.

    python -m benchmarks.hybrid --data FOLDER [--trace NAME]... [--window-requests 1200] [--levels]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

from baton.perf.step_timing import StepBatch, attention_pairs
from baton.simulator.outcome import Objectives, attainment, quantile
from baton.simulator.workloads.trace import Trace
from benchmarks._hybrid_runs import (
    COLOCATED,
    REPLICAS,
    STATIC,
    TARGET,
    TraceLoad,
    Variant,
    attainment_curves,
    capacity,
    engine_settings,
    geometric_rates,
    highest_rate,
    hybrid_variant,
    read_traces,
    run,
)
from benchmarks._program import RESULTS, say
from benchmarks._provenance import provenance
from benchmarks._statistics import round_floats
from benchmarks.fidelity import DATA_VARIABLE, find_data_folder

TTFT_SCALES = (2.0, 3.0, 4.0, 6.0, 10.0, 20.0)
TPOT_SCALES = (1.25, 1.5, 2.0, 3.0, 5.0, 8.0)
RATE_LEVELS = (0.8, 0.9, 0.95, 0.98, 1.0, 1.1, 1.2, 1.3)
"""Of the better rival's rate."""

Cell = dict[str, float | str]


def main() -> int:
    """Run the grid; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--trace", action="append", default=[])
    parser.add_argument("--window-requests", type=int, default=1200)
    parser.add_argument("--levels", action="store_true", help="only at multiples of the better")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "hybrid.json")
    options = parser.parse_args()
    folder = find_data_folder(options.data, os.environ)
    if folder is None:
        parser.error(
            f"no data: --data or {DATA_VARIABLE} must name a folder with perf/ and traces/"
        )
    began_s = time.monotonic()
    traces = read_traces(folder)
    names = options.trace or list(traces)
    cells: dict[str, list[Cell]] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
        for name in names:
            compare = _compare_levels if options.levels else _compare_cell
            cells[name] = run_grid(name, traces[name], pool, options.window_requests, compare)
            result = summarize(cells) | {"simulated": True, "took_s": time.monotonic() - began_s}
            settings = {"window_requests": options.window_requests, "levels": options.levels}
            document = round_floats(result | settings | {"cells": cells} | provenance(), 4)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(round_floats(result, 4)))
    return 0


def summarize(cells: Mapping[str, Sequence[Cell]]) -> dict[str, object]:
    """The worst cell, how many lose, and how many gain a fifth; unserved cells apart."""
    served = [
        (name, cell) for name, grid_ in cells.items() for cell in grid_ if float(cell["better"]) > 0
    ]
    # Rounded: of 0.98 times a rate, that rate is 0.98 again.
    ratios, no_admission_ratios = (
        [round(float(cell[key]) / float(cell["better"]), 6) for _, cell in served]
        for key in ("hybrid", "hybrid_no_admission")
    )
    return {
        "cells": sum(len(grid_) for grid_ in cells.values()),
        "cells_that_somebody_serves": len(served),
        "hybrid_worst_ratio": min(ratios, default=float("nan")),
        "hybrid_median_ratio": quantile(ratios, 0.5),
        "share_not_2_percent_under": _fraction_at_least(ratios, 0.98),
        "share_a_fifth_over": _fraction_at_least(ratios, 1.2),
        "no_admission_worst_ratio": min(no_admission_ratios, default=float("nan")),
        "no_admission_share_not_2_percent_under": _fraction_at_least(no_admission_ratios, 0.98),
        "no_admission_share_a_fifth_over": _fraction_at_least(no_admission_ratios, 1.2),
        "losing": [
            {"trace": name, **cell}
            for (name, cell), ratio in zip(served, ratios, strict=True)
            if ratio < 0.98  # noqa: PLR2004 - as documented
        ],
    }


def _fraction_at_least(ratios: Sequence[float], threshold: float) -> float:
    return fmean(ratio >= threshold for ratio in ratios) if ratios else float("nan")


# -------------------------------------------------------------------- one trace


def run_grid(
    name: str,
    trace: Trace,
    pool: ProcessPoolExecutor,
    window_requests: int,
    compare: Callable[[CellJob], Cell],
) -> list[Cell]:
    """Every cell of a trace."""
    cells = objectives_grid(trace)
    max_rate = max_request_rate(trace)
    rates = geometric_rates(max_rate / 8, max_rate * 1.5)
    load = TraceLoad(trace=trace, window_s=window_requests / (max_rate / 2))
    say(f"{name}: at most about {max_rate:.2f} requests/s; {load.window_s:.0f} s of it")
    rivals = (*COLOCATED, *STATIC)
    curves_by_rival = pool.map(
        partial(_attainment_curves, load=load, cells=cells, rates=rates), rivals
    )
    sustained = {
        arm: [capacity(share) for share in shares]
        for arm, shares in zip(rivals, curves_by_rival, strict=True)
    }
    for arm, found in sustained.items():
        say(f"{name}, {arm.name}: {' '.join(f'{value:.2f}' for value in found)}")
    best_rivals = [
        (_best_variant(COLOCATED, sustained, number), _best_variant(STATIC, sustained, number))
        for number in range(len(cells))
    ]
    jobs = [(cell, pair, rates, load) for cell, pair in zip(cells, best_rivals, strict=True)]
    return list(pool.map(compare, jobs))


def _attainment_curves(
    variant: Variant, *, load: TraceLoad, cells: Sequence[Objectives], rates: Sequence[float]
) -> list[dict[float, float]]:
    return attainment_curves(variant, load, cells, rates)


BestVariant = tuple[float, Variant]


@dataclass(frozen=True, slots=True)
class HybridResult:
    """What hybrid comes to in a cell, in requests a second."""

    max_rate: float
    max_rate_without_admission: float
    variant: Variant
    """The one with the most."""


CellJob = tuple[Objectives, tuple[BestVariant, BestVariant], list[float], TraceLoad]


def _best_variant(
    variants: Sequence[Variant], sustained: Mapping[Variant, Sequence[float]], cell_index: int
) -> BestVariant:
    return max(
        ((sustained[arm][cell_index], arm) for arm in variants),
        key=lambda sustained_rate: sustained_rate[0],
    )


def _compare_cell(job: CellJob) -> Cell:
    """One cell: both rivals, and the best of hybrid's pools."""
    cell, (colocated, static), rates, load = job
    best_rival_rate = max(colocated[0], static[0])
    sustained = [
        (sustained_rate(variant, cell, load, rates, guess=best_rival_rate), variant)
        for variant in (
            *_hybrid_variants(colocated, static),
            *_hybrid_variants(colocated, static, has_admission=True),
        )
    ]
    max_without_admission = max(rate for rate, variant in sustained if not variant.has_admission)
    max_rate, variant = max(sustained, key=lambda sustained_rate: sustained_rate[0])
    return _to_cell(cell, colocated, static, HybridResult(max_rate, max_without_admission, variant))


def _compare_levels(job: CellJob) -> Cell:
    """One cell, hybrid only at multiples of the better rival's rate."""
    cell, (colocated, static), _, load = job
    best_rival_rate = max(colocated[0], static[0])
    if not best_rival_rate:
        return _to_cell(
            cell, colocated, static, HybridResult(0.0, 0.0, hybrid_variant(static[1].prefill))
        )

    def meets_target(arm: Variant, level: float) -> bool:
        return attainment(run(arm, load.at_rate(level * best_rival_rate), cell), cell) >= TARGET

    level_without_admission, variant = highest_level(
        _hybrid_variants(colocated, static), meets_target
    )
    level, variant = extend_level(
        level_without_admission,
        variant,
        _hybrid_variants(colocated, static, has_admission=True),
        meets_target,
    )
    return _to_cell(
        cell,
        colocated,
        static,
        HybridResult(level * best_rival_rate, level_without_admission * best_rival_rate, variant),
    )


def highest_level(
    variants: Sequence[Variant], meets_target: Callable[[Variant, float], bool]
) -> tuple[float, Variant]:
    """The highest of `RATE_LEVELS` that an arm holds, and which; 0 when none holds the lowest.

    The first arm is asked from 1 on, up or down; the others only whether they go beyond the best
    so far.
    """
    first, *others = variants
    levels_to_one = [level for level in RATE_LEVELS if level <= 1]
    level = next((level for level in reversed(levels_to_one) if meets_target(first, level)), 0.0)
    return extend_level(
        level, first, variants if level == max(levels_to_one) else others, meets_target
    )


def extend_level(
    level: float,
    variant: Variant,
    variants: Sequence[Variant],
    meets_target: Callable[[Variant, float], bool],
) -> tuple[float, Variant]:
    """How far others get beyond the level that one has reached, and the one that gets furthest."""
    for other in variants:
        for higher in [value for value in RATE_LEVELS if value > level]:
            if not meets_target(other, higher):
                break
            level, variant = higher, other
    return level, variant


def _hybrid_variants(
    colocated: BestVariant, static: BestVariant, *, has_admission: bool = False
) -> list[Variant]:
    """Hybrid's pools for a cell, the likeliest first."""
    static_variant, colocated_variant = static[1], colocated[1]
    variants = [
        hybrid_variant(static_variant.prefill, has_admission=has_admission),
        hybrid_variant(0, colocated_variant.step_tokens, has_admission=has_admission),
    ]
    return variants + (
        [hybrid_variant(static_variant.prefill - 1, has_admission=has_admission)]
        if static_variant.prefill > 1
        else []
    )


def _to_cell(
    cell: Objectives, colocated: BestVariant, static: BestVariant, hybrid_result: HybridResult
) -> Cell:
    best_rival_rate = max(colocated[0], static[0])
    say(
        f"  {cell.ttft_s:.2f} s, {cell.tpot_s:.3f} s: {best_rival_rate:.2f} ->"
        f" {hybrid_result.max_rate_without_admission:.2f}, {hybrid_result.max_rate:.2f} by"
        f" {hybrid_result.variant.name}"
    )
    return {
        "ttft_s": cell.ttft_s or 0.0,
        "tpot_s": cell.tpot_s or 0.0,
        "colocated": colocated[0],
        "colocated_best": colocated[1].name,
        "static": static[0],
        "static_best": static[1].name,
        "better": best_rival_rate,
        "hybrid": hybrid_result.max_rate,
        "hybrid_best": hybrid_result.variant.name,
        "hybrid_no_admission": hybrid_result.max_rate_without_admission,
    }


def sustained_rate(
    variant: Variant, cell: Objectives, load: TraceLoad, rates: Sequence[float], *, guess: float
) -> float:
    """The highest rate that an arm aiming at a cell sustains."""
    return highest_rate(
        lambda rate: attainment(run(variant, load.at_rate(rate), cell), cell), rates, guess=guess
    )


# -------------------------------------------------------------------- what is asked for


def objectives_grid(trace: Trace) -> list[Objectives]:
    """The grid."""
    prompt = round(quantile([request.prompt_tokens for request in trace.requests], 0.9))
    ttft_s, tpot_s = single_request_times_s(prompt, round(_mean_context(trace)))
    return [
        Objectives(ttft_s=ttft * ttft_s, tpot_s=tpot * tpot_s)
        for ttft, tpot in product(TTFT_SCALES, TPOT_SCALES)
    ]


def single_request_times_s(prompt_tokens: int, context_tokens: int) -> tuple[float, float]:
    """What a request alone takes until its first token, and for each one after that."""
    steps = engine_settings(8192, 16).timing
    prompt = StepBatch(
        prefill_tokens=prompt_tokens,
        prefill_requests=1,
        prefill_pairs=attention_pairs(prompt_tokens, 0),
        finished_prefills=1,
    )
    decode = StepBatch(decode_requests=1, decode_context_tokens=context_tokens)
    return steps.step_s(prompt), steps.step_s(decode)


def max_request_rate(trace: Trace) -> float:
    """About the requests a second beyond which all replicas together cannot keep up."""
    prompt = round(fmean(request.prompt_tokens for request in trace.requests))
    output = fmean(request.output_tokens for request in trace.requests)
    context = _mean_context(trace)
    settings = engine_settings(8192, 16)
    kv_tokens = settings.kv_blocks * settings.block_size_tokens
    batch = max(1, min(256, int(kv_tokens / context)))
    decode = StepBatch(decode_requests=batch, decode_context_tokens=round(batch * context))
    request_device_s = (
        single_request_times_s(prompt, 1)[0] + output * settings.timing.step_s(decode) / batch
    )
    return REPLICAS / request_device_s


def _mean_context(trace: Trace) -> float:
    return fmean(request.prompt_tokens + request.output_tokens / 2 for request in trace.requests)


if __name__ == "__main__":
    sys.exit(main())
