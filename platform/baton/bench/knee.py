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

    first_per_s: float
    target: float
    tolerance: float = 0.05
    """How far apart, as a share, the highest rate that keeps the promise and the lowest that breaks
    it may be."""
    most_runs: int = 16


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
    broken_at_per_s: float | None
    """The lowest that broke it; None when none did."""
    bracketed: bool
    """Whether the knee is known to lie between the two, near enough."""
    says: str
    probes: tuple[Probe, ...]


@dataclass(slots=True)
class KneeSearch:
    """Asks for rates one after another."""

    options: KneeOptions
    probes: list[Probe] = field(default_factory=list)

    def next_rate(self) -> float | None:
        """The rate to try next; None when there is nothing more to find out."""
        if not self.probes:
            return self.options.first_per_s
        if len(self.probes) >= self.options.most_runs:
            return None
        kept, broken = self._kept(), self._broken()
        if kept is None:
            assert broken is not None, "a rate neither kept nor broke the promise"
            return broken.rate_per_s / 2
        if broken is None:
            return kept * 2
        if broken.rate_per_s <= kept * (1 + self.options.tolerance):
            return None
        return math.sqrt(kept * broken.rate_per_s)

    def tell(self, rate_per_s: float, attainment: float, *, valid: bool) -> None:
        """What came of a rate."""
        self.probes.append(Probe(rate_per_s, attainment, valid))

    def knee(self) -> Knee:
        """What is known so far."""
        kept, broken = self._kept(), self._broken()
        near = (
            kept is not None
            and broken is not None
            and broken.valid
            and broken.rate_per_s <= kept * (1 + self.options.tolerance)
        )
        return Knee(
            rate_per_s=kept,
            broken_at_per_s=None if broken is None else broken.rate_per_s,
            bracketed=near,
            says=self._says(kept, broken, near=near),
            probes=tuple(self.probes),
        )

    def _says(self, kept: float | None, broken: Probe | None, *, near: bool) -> str:
        if kept is None and broken is None:
            return "nothing was tried"
        if kept is None and broken is not None:
            return (
                f"not bracketed: even {broken.rate_per_s:.4g}/s, the lowest rate tried,"
                f" {_missed(broken, self.options.target)}"
            )
        if broken is None:
            return f"not bracketed: at least {kept:.4g}/s, the highest rate tried"
        if near:
            return f"between {kept:.4g}/s and {broken.rate_per_s:.4g}/s"
        if not broken.valid:
            return (
                f"not bracketed: at least {kept:.4g}/s; at {broken.rate_per_s:.4g}/s the client,"
                " not the endpoint, was what was measured"
            )
        return (
            f"not near enough: between {kept:.4g}/s and {broken.rate_per_s:.4g}/s after"
            f" {len(self.probes)} runs"
        )

    def _kept(self) -> float | None:
        kept = [one.rate_per_s for one in self.probes if self._keeps(one)]
        return max(kept, default=None)

    def _broken(self) -> Probe | None:
        broken = [one for one in self.probes if not self._keeps(one)]
        return min(broken, key=lambda one: one.rate_per_s, default=None)

    def _keeps(self, one: Probe) -> bool:
        return one.valid and one.attainment >= self.options.target


def _missed(one: Probe, target: float) -> str:
    if not one.valid:
        return "is more than the client can send"
    return f"met the objectives for {one.attainment:.1%} of requests, wanted {target:.4g}"
