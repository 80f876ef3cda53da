"""Finds the highest rate at which a promise is kept, in as few runs as it takes.

Theory of operation: from the first rate on it doubles until the promise is broken, or halves until
it is kept, and then halves what is between, on a scale of ratios, until the two ends are near
enough. A rate at which the client itself was the bottleneck says nothing of the endpoint: nothing
above it is tried, and a knee that would lie below it is only a lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class KneeOptions:
    """How to look."""

    initial_rate_per_s: float
    target: float
    tolerance: float = 0.05
    """How far apart, as a share, the highest rate that keeps the promise and the lowest that breaks
    it may be."""
    max_runs: int = 16


@dataclass(frozen=True, slots=True)
class Probe:
    """A rate that was tried."""

    rate_per_s: float
    attainment: float
    valid: bool
    """Whether it was the endpoint that was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """What was found."""

    rate_per_s: float | None
    """The highest rate that kept the promise; None when none did."""
    lowest_failing_per_s: float | None
    """The lowest that broke it; None when none did."""
    is_bracketed: bool
    """Whether the knee is known to lie between the two, near enough."""
    description: str
    probes: tuple[Probe, ...]


@dataclass(slots=True)
class KneeSearch:
    """Asks for rates one after another."""

    options: KneeOptions
    probes: list[Probe] = field(default_factory=list)

    def next_rate(self) -> float | None:
        """The rate to try next; None when there is nothing more to find out."""
        if not self.probes:
            return self.options.initial_rate_per_s
        if len(self.probes) >= self.options.max_runs:
            return None
        passing_per_s, failing = self._highest_passing(), self._lowest_failing()
        if passing_per_s is None:
            assert failing is not None, "a rate neither kept nor broke the promise"
            return failing.rate_per_s / 2
        if failing is None:
            return passing_per_s * 2
        if failing.rate_per_s <= passing_per_s * (1 + self.options.tolerance):
            return None
        return math.sqrt(passing_per_s * failing.rate_per_s)

    def add_probe(self, rate_per_s: float, attainment: float, *, valid: bool) -> None:
        """What came of a rate."""
        self.probes.append(Probe(rate_per_s, attainment, valid))

    def knee(self) -> Knee:
        """What is known so far."""
        passing_per_s, failing = self._highest_passing(), self._lowest_failing()
        is_close = (
            passing_per_s is not None
            and failing is not None
            and failing.valid
            and failing.rate_per_s <= passing_per_s * (1 + self.options.tolerance)
        )
        return Knee(
            rate_per_s=passing_per_s,
            lowest_failing_per_s=None if failing is None else failing.rate_per_s,
            is_bracketed=is_close,
            description=self._describe(passing_per_s, failing, is_close=is_close),
            probes=tuple(self.probes),
        )

    def _describe(
        self, passing_per_s: float | None, failing: Probe | None, *, is_close: bool
    ) -> str:
        if passing_per_s is None and failing is None:
            return "nothing was tried"
        if passing_per_s is None and failing is not None:
            return (
                f"not bracketed: even {failing.rate_per_s:.4g}/s, the lowest rate tried,"
                f" {_describe_miss(failing, self.options.target)}"
            )
        if failing is None:
            return f"not bracketed: at least {passing_per_s:.4g}/s, the highest rate tried"
        if is_close:
            return f"between {passing_per_s:.4g}/s and {failing.rate_per_s:.4g}/s"
        if not failing.valid:
            return (
                f"not bracketed: at least {passing_per_s:.4g}/s; at {failing.rate_per_s:.4g}/s"
                " the client,"
                " not the endpoint, was what was measured"
            )
        return (
            f"not near enough: between {passing_per_s:.4g}/s and {failing.rate_per_s:.4g}/s after"
            f" {len(self.probes)} runs"
        )

    def _highest_passing(self) -> float | None:
        rates_per_s = [probe.rate_per_s for probe in self.probes if self._passes(probe)]
        return max(rates_per_s, default=None)

    def _lowest_failing(self) -> Probe | None:
        failing = [probe for probe in self.probes if not self._passes(probe)]
        return min(failing, key=lambda level: level.rate_per_s, default=None)

    def _passes(self, probe: Probe) -> bool:
        return probe.valid and probe.attainment >= self.options.target


def _describe_miss(probe: Probe, target: float) -> str:
    if not probe.valid:
        return "is more than the client can send"
    return f"met the objectives for {probe.attainment:.1%} of requests, expected {target:.4g}"
