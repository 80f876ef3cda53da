"""Whether baton's hybrid keeps up with the better of colocation and the best static split.

On the same four replicas (Llama-3.1-70B in FP8, four H100 each), simulated: for three traces and a
grid of 6 x 6 objectives, the highest rate at which 90 % of the requests meet both. Colocated
replicas prefill in chunks (the better of 512 and 2,048 tokens a step); static splits send every
prompt through the prefill pool (the best of 1:3 to 3:1). Hybrid is baton's placement aiming at the
cell's objectives, with the pools of the best split of its cell, or one prefill replica fewer, or
none at all; requests are split where that is predicted to be better. It is tried without and with
its admission, which turns away at once who is predicted to miss: those count as missed. What it
carries without is told, too: nobody else has an admission here.

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

from baton.perf.step_timing import StepBatch, chunk_pairs
from baton.simulator.outcome import Objectives, attainment, quantile
from baton.simulator.workloads.trace import Trace
from benchmarks._hybrid_runs import (
    COLOCATED,
    REPLICAS,
    STATIC,
    TARGET,
    Arm,
    Load,
    capacity,
    engine,
    highest,
    hybrid,
    ladder,
    read_loads,
    run,
    rungs,
)
from benchmarks._program import RESULTS, say
from benchmarks._provenance import provenance
from benchmarks._statistics import rounded
from benchmarks.fidelity import DATA, data_folder

TTFT_SCALES = (2.0, 3.0, 4.0, 6.0, 10.0, 20.0)
TPOT_SCALES = (1.25, 1.5, 2.0, 3.0, 5.0, 8.0)
LEVELS = (0.8, 0.9, 0.95, 0.98, 1.0, 1.1, 1.2, 1.3)
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
    folder = data_folder(options.data, os.environ)
    if folder is None:
        parser.error(f"no data: --data or {DATA} must name a folder with perf/ and traces/")
    began_s = time.monotonic()
    traces = read_loads(folder)
    names = options.trace or list(traces)
    cells: dict[str, list[Cell]] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
        for name in names:
            compare = _compare_levels if options.levels else _compare
            cells[name] = grid(name, traces[name], pool, options.window_requests, compare)
            result = summarize(cells) | {"simulated": True, "took_s": time.monotonic() - began_s}
            asked = {"window_requests": options.window_requests, "levels": options.levels}
            whole = rounded(result | asked | {"cells": cells} | provenance(), 4)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(rounded(result, 4)))
    return 0


def summarize(cells: Mapping[str, Sequence[Cell]]) -> dict[str, object]:
    """The worst cell, how many lose, and how many gain a fifth; cells that nobody serves apart."""
    served = [
        (name, cell) for name, grid_ in cells.items() for cell in grid_ if float(cell["better"]) > 0
    ]
    # Rounded: of 0.98 times a rate, that rate is 0.98 again.
    ratios, open_ = (
        [round(float(cell[key]) / float(cell["better"]), 6) for _, cell in served]
        for key in ("hybrid", "hybrid_no_admission")
    )
    return {
        "cells": sum(len(grid_) for grid_ in cells.values()),
        "cells_that_somebody_serves": len(served),
        "hybrid_worst_ratio": min(ratios, default=float("nan")),
        "hybrid_median_ratio": quantile(ratios, 0.5),
        "share_not_2_percent_under": _share(ratios, 0.98),
        "share_a_fifth_over": _share(ratios, 1.2),
        "no_admission_worst_ratio": min(open_, default=float("nan")),
        "no_admission_share_not_2_percent_under": _share(open_, 0.98),
        "no_admission_share_a_fifth_over": _share(open_, 1.2),
        "losing": [
            {"trace": name, **cell}
            for (name, cell), ratio in zip(served, ratios, strict=True)
            if ratio < 0.98  # noqa: PLR2004 - as documented
        ],
    }


def _share(ratios: Sequence[float], least: float) -> float:
    return fmean(ratio >= least for ratio in ratios) if ratios else float("nan")


# -------------------------------------------------------------------- one trace


def grid(
    name: str,
    trace: Trace,
    pool: ProcessPoolExecutor,
    window_requests: int,
    compare: Callable[[Asked], Cell],
) -> list[Cell]:
    """Every cell of a trace."""
    cells = objectives(trace)
    most = bound(trace)
    rates = rungs(most / 8, most * 1.5)
    load = Load(trace=trace, window_s=window_requests / (most / 2))
    say(f"{name}: at most about {most:.2f} requests/s; {load.window_s:.0f} s of it")
    rivals = (*COLOCATED, *STATIC)
    climbed = pool.map(partial(_climb, load=load, cells=cells, rates=rates), rivals)
    sustained = {
        arm: [capacity(share) for share in shares]
        for arm, shares in zip(rivals, climbed, strict=True)
    }
    for arm, found in sustained.items():
        say(f"{name}, {arm.name}: {' '.join(f'{one:.2f}' for one in found)}")
    better = [
        (_best(COLOCATED, sustained, number), _best(STATIC, sustained, number))
        for number in range(len(cells))
    ]
    asked = [(cell, pair, rates, load) for cell, pair in zip(cells, better, strict=True)]
    return list(pool.map(compare, asked))


def _climb(
    arm: Arm, *, load: Load, cells: Sequence[Objectives], rates: Sequence[float]
) -> list[dict[float, float]]:
    return ladder(arm, load, cells, rates)


Best = tuple[float, Arm]


@dataclass(frozen=True, slots=True)
class Ours:
    """What hybrid comes to in a cell, in requests a second."""

    most: float
    without_admission: float
    arm: Arm
    """The one with the most."""


Asked = tuple[Objectives, tuple[Best, Best], list[float], Load]


def _best(arms: Sequence[Arm], sustained: Mapping[Arm, Sequence[float]], number: int) -> Best:
    return max(((sustained[arm][number], arm) for arm in arms), key=lambda one: one[0])


def _compare(asked: Asked) -> Cell:
    """One cell: both rivals, and the best of hybrid's pools."""
    cell, (colocated, static), rates, load = asked
    better = max(colocated[0], static[0])
    found = [
        (sustained_by(arm, cell, load, rates, near=better), arm)
        for arm in (*_arms(colocated, static), *_arms(colocated, static, admits=True))
    ]
    without = max(rate for rate, arm in found if not arm.admits)
    most, arm = max(found, key=lambda one: one[0])
    return _told(cell, colocated, static, Ours(most, without, arm))


def _compare_levels(asked: Asked) -> Cell:
    """One cell, hybrid only at multiples of the better rival's rate."""
    cell, (colocated, static), _, load = asked
    better = max(colocated[0], static[0])
    if not better:
        return _told(cell, colocated, static, Ours(0.0, 0.0, hybrid(static[1].prefill)))

    def held(arm: Arm, level: float) -> bool:
        return attainment(run(arm, load.at(level * better), cell), cell) >= TARGET

    without, arm = reached(_arms(colocated, static), held)
    level, arm = further(without, arm, _arms(colocated, static, admits=True), held)
    return _told(cell, colocated, static, Ours(level * better, without * better, arm))


def reached(arms: Sequence[Arm], held: Callable[[Arm, float], bool]) -> tuple[float, Arm]:
    """The highest of `LEVELS` that an arm holds, and which; 0 when none holds the lowest.

    The first arm is asked from 1 on, up or down; the others only whether they go beyond the best
    so far.
    """
    first, *others = arms
    known = [level for level in LEVELS if level <= 1]
    level = next((level for level in reversed(known) if held(first, level)), 0.0)
    return further(level, first, arms if level == max(known) else others, held)


def further(
    level: float, arm: Arm, others: Sequence[Arm], held: Callable[[Arm, float], bool]
) -> tuple[float, Arm]:
    """How far others get beyond the level that one has reached, and the one that gets furthest."""
    for other in others:
        for higher in [one for one in LEVELS if one > level]:
            if not held(other, higher):
                break
            level, arm = higher, other
    return level, arm


def _arms(colocated: Best, static: Best, *, admits: bool = False) -> list[Arm]:
    """Hybrid's pools for a cell, the likeliest first."""
    split, together = static[1], colocated[1]
    found = [hybrid(split.prefill, admits=admits), hybrid(0, together.budget, admits=admits)]
    return found + ([hybrid(split.prefill - 1, admits=admits)] if split.prefill > 1 else [])


def _told(cell: Objectives, colocated: Best, static: Best, ours: Ours) -> Cell:
    better = max(colocated[0], static[0])
    say(
        f"  {cell.ttft_s:.2f} s, {cell.tpot_s:.3f} s: {better:.2f} ->"
        f" {ours.without_admission:.2f}, {ours.most:.2f} by {ours.arm.name}"
    )
    return {
        "ttft_s": cell.ttft_s or 0.0,
        "tpot_s": cell.tpot_s or 0.0,
        "colocated": colocated[0],
        "colocated_best": colocated[1].name,
        "static": static[0],
        "static_best": static[1].name,
        "better": better,
        "hybrid": ours.most,
        "hybrid_best": ours.arm.name,
        "hybrid_no_admission": ours.without_admission,
    }


def sustained_by(
    arm: Arm, cell: Objectives, load: Load, rates: Sequence[float], *, near: float
) -> float:
    """The highest rate that an arm aiming at a cell sustains."""
    return highest(lambda rate: attainment(run(arm, load.at(rate), cell), cell), rates, near=near)


# -------------------------------------------------------------------- what is asked for


def objectives(trace: Trace) -> list[Objectives]:
    """The grid."""
    prompt = round(quantile([one.prompt_tokens for one in trace.requests], 0.9))
    ttft_s, tpot_s = alone(prompt, round(_mean_context(trace)))
    return [
        Objectives(ttft_s=ttft * ttft_s, tpot_s=tpot * tpot_s)
        for ttft, tpot in product(TTFT_SCALES, TPOT_SCALES)
    ]


def alone(prompt_tokens: int, context_tokens: int) -> tuple[float, float]:
    """What a request alone takes until its first token, and for each one after that."""
    steps = engine(8192, 16).timing
    prompt = StepBatch(
        prefill_tokens=prompt_tokens,
        prefill_requests=1,
        prefill_pairs=chunk_pairs(prompt_tokens, 0),
        finished_prefills=1,
    )
    decode = StepBatch(decode_requests=1, decode_context_tokens=context_tokens)
    return steps.step_s(prompt), steps.step_s(decode)


def bound(trace: Trace) -> float:
    """About the requests a second beyond which all replicas together cannot keep up."""
    prompt = round(fmean(one.prompt_tokens for one in trace.requests))
    output = fmean(one.output_tokens for one in trace.requests)
    context = _mean_context(trace)
    settings = engine(8192, 16)
    room = settings.kv_blocks * settings.block_size_tokens
    batch = max(1, min(256, int(room / context)))
    decode = StepBatch(decode_requests=batch, decode_context_tokens=round(batch * context))
    busy_s = alone(prompt, 1)[0] + output * settings.timing.step_s(decode) / batch
    return REPLICAS / busy_s


def _mean_context(trace: Trace) -> float:
    return fmean(one.prompt_tokens + one.output_tokens / 2 for one in trace.requests)


if __name__ == "__main__":
    sys.exit(main())
