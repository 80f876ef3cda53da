"""From the runs of the routing benchmark to the figures that are quoted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks._statistics import RepeatSpread

HEADLINE_LOAD = "grouped"
"""The load whose figures are quoted by policy alone; those of the others are under their names."""

Metrics = Mapping[str, float]
Repeats = Mapping[str, Sequence[Metrics]]


def summarize(runs: Mapping[str, Repeats]) -> dict[str, object]:
    """The median of every figure, by policy; those of other loads than the first under its name."""
    medians_by_policy: dict[str, object] = {}
    for load, policies in runs.items():
        medians = {name: _medians(repeats) for name, repeats in policies.items()}
        medians_by_policy |= medians if load == HEADLINE_LOAD else {load: medians}
    return medians_by_policy


def _medians(repeats: Sequence[Metrics]) -> dict[str, object]:
    spreads = {
        name: RepeatSpread.from_values([figures[name] for figures in repeats])
        for name in repeats[0]
    }
    medians: dict[str, object] = {name: spread.median for name, spread in spreads.items()}
    return medians | {
        "min": {name: spread.min for name, spread in spreads.items()},
        "max": {name: spread.max for name, spread in spreads.items()},
    }


def compare(runs: Mapping[str, Repeats]) -> dict[str, object]:
    """How baton's figures relate to those of the Dynamo formula, repeat by repeat: medians."""
    ratios_by_load = {}
    for load, policies in runs.items():
        if not {"baton", "dynamo"} <= policies.keys():
            continue
        pairs = list(zip(policies["baton"], policies["dynamo"], strict=True))
        ratios_by_load[load] = {
            name: RepeatSpread.from_values(
                [ours[name] / theirs[name] for ours, theirs in pairs]
            ).median
            for name in ("ttft_p50_s", "ttft_mean_s", "ttft_p90_s", "e2e_p50_s", "requests_per_s")
        }
    return {"baton_over_dynamo": ratios_by_load}
