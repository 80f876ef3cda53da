"""From the seconds of single transfers to the figures that are quoted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TypeAlias

from benchmarks._statistics import RepeatSpread, quantile, ratios

Seconds: TypeAlias = dict[str, dict[int, list[float]]]
"""By contender and size in MiB, in the order in which they were measured."""

_MIB = 1 << 20
_MIN_BANDWIDTH_MIB = 16
"""Smaller transfers take less than a millisecond and tell of latency, not of bandwidth."""


def gbps(size_mib: int, seconds: float) -> float:
    """10^9 bytes a second."""
    return size_mib * _MIB / seconds / 1e9


def speed_ratio(seconds: Seconds, ours: str, baseline: str) -> dict[int, RepeatSpread]:
    """How many times as fast as `baseline`, by size.

    Each transfer against its neighbour in time.
    """
    return {
        size: RepeatSpread.from_values(ratios(theirs, seconds[ours][size]))
        for size, theirs in seconds[baseline].items()
    }


def worst_median(by_size: Mapping[int, RepeatSpread]) -> float:
    """The worst median among the sizes that are about bandwidth."""
    return min(spread.median for size, spread in by_size.items() if size >= _MIN_BANDWIDTH_MIB)


def medians_by_size(seconds: Seconds) -> dict[str, dict[str, float]]:
    """Median GB/s by size, then contender."""
    sizes = sorted({size for by_size in seconds.values() for size in by_size})
    return {str(size): medians(seconds, size) for size in sizes}


def medians(seconds: Seconds, size_mib: int) -> dict[str, float]:
    """Median GB/s of everybody who took part in a size."""
    return {
        name: gbps(size_mib, quantile(by_size[size_mib], 0.5))
        for name, by_size in seconds.items()
        if size_mib in by_size
    }


def summarize(seconds: Seconds) -> dict[str, object]:
    """The figures that are quoted: each ratio is the worst of the sizes from 16 MiB on."""
    pairs = {
        "ratio_to_bare_nixl": ("baton", "bare"),
        "ratio_to_bare_blocks": ("baton", "bare_blocks"),
        "ratio_to_calm_nixl": ("baton", "calm"),
        "ratio_to_bare_nixl_tcp": ("baton_tcp", "bare_tcp"),
        "ratio_to_memcpy": ("baton", "memcpy"),
    }
    ratios_by_name = {
        name: speed_ratio(seconds, ours, base) for name, (ours, base) in pairs.items()
    }
    return {name: worst_median(by_size) for name, by_size in ratios_by_name.items()} | {
        "gbps_by_size": medians_by_size(seconds),
        "spread": {
            name: {str(size): asdict(spread) for size, spread in by_size.items()}
            for name, by_size in ratios_by_name.items()
        },
    }


def format_size(seconds: Seconds, size_mib: int) -> str:
    """One size for the progress display."""
    figures = ", ".join(f"{name} {fast:.2f}" for name, fast in medians(seconds, size_mib).items())
    return f"{size_mib} MiB, GB/s: {figures}"
