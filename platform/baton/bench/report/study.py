"""What a report shows: runs of requests, judged by objectives, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from baton.simulator.outcome import Objectives, Outcome


class Evidence(StrEnum):
    """How figures were come by."""

    MEASURED = "measured"
    SIMULATED = "simulated"

    @property
    def mark(self) -> str:
        """The letter that stands beside a figure."""
        return "M" if self is Evidence.MEASURED else "S"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSample:
    """A fleet at one time."""

    at_s: float
    """Since the first arrival."""
    replicas: Mapping[str, int]
    """That serve, by pool."""
    queued: int
    """Requests that wait, in engines or for one."""
    running: int
    """Requests in the engines' batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSummary:
    """What an autoscaler did in a run."""

    device_hours: float
    """Of all replicas, from being asked for to being gone."""
    actions: int
    """Starts, stops and flips, however many replicas at a time."""
    actions_per_hour: float
    reversals_per_hour: float
    """Actions that go back on the one before it of the same pool."""
    ticks: int
    paused_ticks: int
    """That decided nothing, since something could not be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One run."""

    name: str
    """What was run, e.g. a policy; runs of one name at several rates are one line."""
    outcomes: Sequence[Outcome]
    """In order of arrival."""
    devices: float
    """GPUs, or engines where there are none, that it ran on; on average when that changed."""
    offered_per_s: float | None = None
    """Requests per second that were asked for; None for what they happened to be."""
    samples: tuple[FleetSample, ...] = ()
    event_counts: Mapping[str, int] = field(default_factory=dict)
    """Of what happened besides, e.g. handoffs."""
    scaling: ScalingSummary | None = None
    """None where nobody scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Attainment against offered rate, or against the scale of the objectives."""

    name: str
    points: tuple[tuple[float, float], ...]
    """In order: (requests per second and device, or scale; share that met the objectives)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tradeoff:
    """What users get against what devices give."""

    name: str
    user_tokens_per_s: float
    """Of one request while it decodes: 1 / TPOT."""
    device_tokens_per_s: float
    """Output tokens per second and device."""
    label: str = ""
    is_pareto_optimal: bool = False
    """Nothing else is better in both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Anything else to show, as text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A report's content. Curves and trades that are not given are made from the results."""

    title: str
    evidence: Evidence
    command: str
    """That makes this again."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Where it comes from: trace, seed, model, version."""
    notes: tuple[str, ...] = ()
    """What a reader must know to judge the figures."""
    objectives: Objectives = field(default_factory=Objectives)
    target: float = 0.9
    """The share of requests that shall meet the objectives."""
    device: str = "GPU"
    """What `devices` counts."""
    results: tuple[RunResult, ...] = ()
    rate_curves: tuple[Curve, ...] = ()
    scale_curves: tuple[Curve, ...] = ()
    """Where each scale of the objectives was a run of its own; else one run is judged by all."""
    tradeoffs: tuple[Tradeoff, ...] = ()
    tables: tuple[Table, ...] = ()
    has_result_tables: bool = True
    """Whether the usual ones are made from the results; not where `tables` have all figures."""
    definitions: tuple[str, ...] = ()
    """Of the words in it; none for the usual ones."""

    @property
    def has_objectives(self) -> bool:
        """Whether there is any objective to judge by."""
        limits = (self.objectives.ttft_s, self.objectives.tpot_s, self.objectives.e2e_s)
        return any(limit is not None for limit in limits)
