"""The content of a report: runs of requests, their objectives, and their origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from baton.simulator.outcome import Objectives, Outcome


class Evidence(StrEnum):
    """The origin of figures."""

    MEASURED = "measured"
    SIMULATED = "simulated"

    @property
    def mark(self) -> str:
        """The letter beside a figure."""
        return "M" if self is Evidence.MEASURED else "S"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSample:
    """A fleet at one time."""

    at_s: float
    replicas: Mapping[str, int]
    """In service, by pool."""
    queued: int
    """Requests that wait, in engines or for a replica."""
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSummary:
    """Actions of an autoscaler in a run."""

    device_hours: float
    """Of all replicas, from request to end."""
    actions: int
    """Starts, stops and flips, of any number of replicas."""
    actions_per_hour: float
    reversals_per_hour: float
    """Actions that undo the previous action of the same pool."""
    ticks: int
    paused_ticks: int
    """That decided nothing, because an input was missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run."""

    name: str
    """E.g. a policy; runs with one name at several rates are one line."""
    outcomes: Sequence[Outcome]
    devices: float
    """GPUs, or engines without GPUs; the average if that changed."""
    offered_per_s: float | None = None
    """None uses the rate of arrivals."""
    samples: tuple[FleetSample, ...] = ()
    event_counts: Mapping[str, int] = field(default_factory=dict)
    scaling: ScalingSummary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Attainment by offered rate, or by scale of the objectives."""

    name: str
    points: tuple[tuple[float, float], ...]
    """In order: (requests per second and device, or scale; share that met the objectives)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tradeoff:
    """Speed for users against throughput of devices."""

    name: str
    user_tokens_per_s: float
    """Of one request in decode: 1 / TPOT."""
    device_tokens_per_s: float
    label: str = ""
    is_pareto_optimal: bool = False
    """No other is better in both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A report's content. Missing curves and tradeoffs are computed from the results."""

    title: str
    evidence: Evidence
    command: str
    facts: Mapping[str, str] = field(default_factory=dict)
    answer: tuple[str, ...] = ()
    """The answer, then its reasons; a page shows them first."""
    notes: tuple[str, ...] = ()
    error_bands: Mapping[str, object] = field(default_factory=dict)
    """Of predicted times, by accelerator; plain values."""
    objectives: Objectives = field(default_factory=Objectives)
    target: float = 0.9
    device: str = "GPU"
    """The unit of `devices`."""
    results: tuple[RunResult, ...] = ()
    rate_curves: tuple[Curve, ...] = ()
    scale_curves: tuple[Curve, ...] = ()
    """If each scale of the objectives was a run; else one run is evaluated at all."""
    tradeoffs: tuple[Tradeoff, ...] = ()
    tables: tuple[Table, ...] = ()
    has_result_tables: bool = True
    """Whether tables are made from the results, in addition to `tables`."""
    definitions: tuple[str, ...] = ()

    @property
    def has_objectives(self) -> bool:
        """Whether there is any objective."""
        limits = (self.objectives.ttft_s, self.objectives.tpot_s, self.objectives.e2e_s)
        return any(limit is not None for limit in limits)
