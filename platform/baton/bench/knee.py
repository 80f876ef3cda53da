"""Finds the highest rate that reaches the target attainment, in few runs.

*Theory of operation.* From the first rate on the search doubles until a rate fails, or halves until
one passes. Then it bisects on a scale of ratios until both ends are close enough. A rate at which
the client was the bottleneck does not describe the endpoint: higher rates are not tried, and the
knee is then a lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class KneeOptions:
    """Limits of the search."""

    initial_rate_per_s: float
    target: float
    tolerance: float = 0.05
    """Distance, as a share, between the highest passing and the lowest failing rate."""
    max_runs: int = 16


@dataclass(frozen=True, slots=True)
class Probe:
    """A tried rate."""

    rate_per_s: float
    attainment: float
    valid: bool
    """Whether the endpoint, not the client, was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """The result of a search."""

    rate_per_s: float | None
    """The highest passing rate."""
    lowest_failing_per_s: float | None
    is_bracketed: bool
    """Whether the knee is between the two, within the tolerance."""
    description: str
    probes: tuple[Probe, ...]


@dataclass(slots=True)
class KneeSearch:
    """Proposes rates one after another."""

    options: KneeOptions
    probes: list[Probe] = field(default_factory=list)

    def next_rate(self) -> float | None:
        """The rate to try next; None at the end of the search."""
        if not self.probes:
            return self.options.initial_rate_per_s
        if len(self.probes) >= self.options.max_runs:
            return None
        passing_per_s, failing = self._highest_passing(), self._lowest_failing()
        if passing_per_s is None:
            assert failing is not None, "a rate neither met nor missed the SLO"
            return failing.rate_per_s / 2
        if failing is None:
            return passing_per_s * 2
        if failing.rate_per_s <= passing_per_s * (1 + self.options.tolerance):
            return None
        return math.sqrt(passing_per_s * failing.rate_per_s)

    def add_probe(self, rate_per_s: float, attainment: float, *, valid: bool) -> None:
        """Add the result of a rate."""
        self.probes.append(Probe(rate_per_s, attainment, valid))

    def knee(self) -> Knee:
        """The result so far."""
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
                f"not bracketed: at least {passing_per_s:.4g}/s; at {failing.rate_per_s:.4g}/s the"
                " client, not the endpoint, was what was measured"
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
        return min(failing, key=lambda probe: probe.rate_per_s, default=None)

    def _passes(self, probe: Probe) -> bool:
        return probe.valid and probe.attainment >= self.options.target


def _describe_miss(probe: Probe, target: float) -> str:
    if not probe.valid:
        return "is more than the client can send"
    return f"met the objectives for {probe.attainment:.1%} of requests, expected {target:.4g}"
