"""From the runs of the routing benchmark to the figures that are quoted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks._statistics import Spread

TOP = "grouped"
"""The load whose figures are quoted by policy alone; those of the others are under their names."""

Figures = Mapping[str, float]
Repeats = Mapping[str, Sequence[Figures]]


def summarize(runs: Mapping[str, Repeats]) -> dict[str, object]:
    """The median of every figure, by policy; those of other loads than the first under its name."""
    found: dict[str, object] = {}
    for load, policies in runs.items():
        medians = {name: _medians(repeats) for name, repeats in policies.items()}
        found |= medians if load == TOP else {load: medians}
    return found


def _medians(repeats: Sequence[Figures]) -> dict[str, object]:
    spreads = {name: Spread.of([figures[name] for figures in repeats]) for name in repeats[0]}
    medians: dict[str, object] = {name: spread.median for name, spread in spreads.items()}
    return medians | {
        "min": {name: spread.min for name, spread in spreads.items()},
        "max": {name: spread.max for name, spread in spreads.items()},
    }


def compare(runs: Mapping[str, Repeats]) -> dict[str, object]:
    """How baton's figures relate to those of the Dynamo formula, repeat by repeat: medians."""
    found = {}
    for load, policies in runs.items():
        if not {"baton", "dynamo"} <= policies.keys():
            continue
        pairs = list(zip(policies["baton"], policies["dynamo"], strict=True))
        found[load] = {
            name: Spread.of([ours[name] / theirs[name] for ours, theirs in pairs]).median
            for name in ("ttft_p50_s", "ttft_mean_s", "ttft_p90_s", "e2e_p50_s", "requests_per_s")
        }
    return {"baton_over_dynamo": found}
