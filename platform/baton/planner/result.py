"""What a planner answers: the fleet to take, why, what else there was, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from baton.planner.problem import PlanningProblem
from baton.planner.rates.closed_form import MeanRequest
from baton.planner.rates.measure import RateSearchResult
from baton.planner.rates.trials import Trial
from baton.planner.shapes.fleets import FleetKind, PlannedFleet
from baton.planner.shapes.space import RejectedShape

_PER_HOUR_S = 3600.0
_MILLION = 1e6


class Constraint(StrEnum):
    """What keeps a fleet from carrying more."""

    PREFILL_COMPUTE = "prefill compute"
    DECODE_BANDWIDTH = "decode bandwidth"
    SHARED_STEPS = "prompts in the steps of decodes"
    KV_MEMORY = "KV memory"
    BATCH_LIMIT = "max_num_seqs"
    NETWORK = "network"
    BURSTS = "bursts against a tight time to first token"
    NONE = "none seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What keeps a fleet from carrying more, in figures."""

    constraint: Constraint
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A fleet that was simulated, whole or in part."""

    fleet: PlannedFleet
    simulated_fleet: PlannedFleet
    """What was simulated: the fleet, or a part of it with its proportions."""
    scale_factor: float
    """How many times what the cell carries the fleet should carry."""
    estimate_per_s: float
    """By what its replicas carry alone."""
    search_result: RateSearchResult
    """The cell."""

    @property
    def rate_per_s(self) -> float:
        """Requests per second that the whole fleet carries within the objectives."""
        return self.search_result.rate_per_s * self.scale_factor

    @property
    def best_trial(self) -> Trial | None:
        """The cell at that rate; None when no rate was low enough."""
        return self.search_result.best_trial

    @property
    def rate_per_gpu(self) -> float:
        """Requests per second of one accelerator."""
        return self.search_result.rate_per_s / self.simulated_fleet.gpus

    def tokens_per_s_per_gpu(self, trial: Trial) -> float:
        """Output tokens per second of one accelerator, of all pools together, in one trial."""
        return trial.tokens_per_s / self.simulated_fleet.gpus

    def cost_per_million_tokens(self, rate_per_s: float | None = None) -> float | None:
        """US dollars for a million output tokens while it carries that, or all it can.

        None without prices, or when it carries nothing.
        """
        price, trial = self.fleet.price_per_hour, self.best_trial
        if price is None or trial is None or not trial.output_tokens:
            return None
        served_rate = self.rate_per_s if rate_per_s is None else min(rate_per_s, self.rate_per_s)
        return price / _PER_HOUR_S / (served_rate * trial.output_tokens) * _MILLION


@dataclass(frozen=True, slots=True, kw_only=True)
class Tradeoff:
    """What users get against what accelerators give."""

    kind: FleetKind
    label: str
    tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    simulated: bool
    """Else by the closed form, which knows no queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What becomes of the answer when the question was a little wrong."""

    parameter: str
    change: float
    """As a factor: 1.2 for a fifth more."""
    rate_per_s: float | None = None
    """That the same fleet then carries."""
    attainment: float | None = None
    """What it then attains, where the rate itself changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreachableObjective:
    """An objective that no configuration can meet."""

    objective: str
    limit_s: float
    """The objective."""
    physical_s: float
    """What the accelerators' data sheets allow at the very best."""
    modelled_s: float
    """What an engine on the best shape is predicted to take, alone."""
    shape: str
    operation: str
    """What takes that long."""

    @property
    def is_physical(self) -> bool:
        """Whether not even the data sheets allow it."""
        return self.physical_s > self.limit_s

    @property
    def factor(self) -> float:
        """How far it is: how many times the objective the best is."""
        return (self.physical_s if self.is_physical else self.modelled_s) / self.limit_s

    def __str__(self) -> str:
        if self.is_physical:
            return (
                f"{self.objective} of {self.limit_s * 1e3:.4g} ms is physically out of reach:"
                f" {self.operation} takes {self.physical_s * 1e3:.3g} ms on {self.shape} at the"
                " full"
                f" speed of its data sheet, {self.factor:.2g} times as long"
            )
        return (
            f"{self.objective} of {self.limit_s * 1e3:.4g} ms is out of reach: {self.operation}"
            " is predicted"
            f" to take {self.modelled_s * 1e3:.3g} ms on {self.shape}, {self.factor:.2g} times as"
            f" long (the data sheet alone would allow {self.physical_s * 1e3:.3g} ms)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer to one question. All rates are simulated."""

    question: PlanningProblem
    mix: MeanRequest
    best: Candidate | None
    """None when no fleet meets the objectives at any rate."""
    meets_rate: bool
    """Whether the best carries the rate that was asked for, if one was."""
    verdict: str
    """Whether to disaggregate, with the evidence, in one sentence."""
    candidates: tuple[Candidate, ...] = ()
    """All that were simulated as fleets, the best first."""
    bottleneck: Bottleneck | None = None
    gpus_needed: int | None = None
    """For the rate, where what there is does not carry it; by extrapolation."""
    tradeoffs: tuple[Tradeoff, ...] = ()
    """Those that none other beats in both, and the simulated ones."""
    sensitivity: tuple[Sensitivity, ...] = ()
    unreachable_objectives: tuple[UnreachableObjective, ...] = ()
    rejected_shapes: tuple[RejectedShape, ...] = ()
    runs: int = 0
    """Simulations that were run."""

    @property
    def gpus(self) -> int | None:
        """What the best takes."""
        return None if self.best is None else self.best.fleet.gpus
