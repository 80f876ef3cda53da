"""The planner's answer: the best fleet, the reasons, the alternatives and the sensitivity."""

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
    """Kinds of bottlenecks."""

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
    """The bottleneck of a fleet, with evidence."""

    constraint: Constraint
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A fleet that was simulated, whole or in part."""

    fleet: PlannedFleet
    simulated_fleet: PlannedFleet
    """The fleet, or a part with its proportions."""
    scale_factor: float
    """Estimated rate of the fleet over that of the simulated part."""
    estimate_per_s: float
    """By the rates of single replicas."""
    search_result: RateSearchResult

    @property
    def rate_per_s(self) -> float:
        """Requests per second of the whole fleet within the objectives."""
        return self.search_result.rate_per_s * self.scale_factor

    @property
    def best_trial(self) -> Trial | None:
        """The simulated part at that rate; None if every rate was too high."""
        return self.search_result.best_trial

    @property
    def rate_per_gpu(self) -> float:
        """Requests per second of one accelerator."""
        return self.search_result.rate_per_s / self.simulated_fleet.gpus

    @property
    def answer_s(self) -> float:
        """Mean time of a whole answer at that rate; 0 if no rate is sustained."""
        return 0.0 if self.best_trial is None else self.best_trial.e2e_s

    def load(self, question: PlanningProblem) -> float:
        """The load that the fleet carries: requests per second, or users if the question has."""
        return question.load_of(self.rate_per_s, self.answer_s)

    def meets_demand(self, question: PlanningProblem) -> bool:
        """Whether the fleet carries the required load; False without one."""
        return question.demand is not None and self.load(question) >= question.demand

    def tokens_per_s_per_gpu(self, trial: Trial) -> float:
        """Output tokens per second of one accelerator, over all pools, in one trial."""
        return trial.tokens_per_s / self.simulated_fleet.gpus

    def cost_per_million_tokens(self, rate_per_s: float | None = None) -> float | None:
        """Dollars for a million output tokens at this rate, or at the fleet's maximum.

        None without prices or without a rate.
        """
        price, trial = self.fleet.price_per_hour, self.best_trial
        if price is None or trial is None or not trial.output_tokens:
            return None
        served_rate = self.rate_per_s if rate_per_s is None else min(rate_per_s, self.rate_per_s)
        return price / _PER_HOUR_S / (served_rate * trial.output_tokens) * _MILLION


@dataclass(frozen=True, slots=True, kw_only=True)
class Tradeoff:
    """Interactivity for users against throughput of accelerators."""

    kind: FleetKind
    label: str
    tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    simulated: bool
    """Otherwise in closed form, without queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The effect of a change to the question."""

    parameter: str
    change: float
    """As a factor: 1.2 for a fifth more."""
    rate_per_s: float | None = None
    """Rate of the same fleet after the change."""
    attainment: float | None = None
    """Attainment of the same fleet, if the rate changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreachableObjective:
    """An objective that no configuration can meet."""

    objective: str
    limit_s: float
    physical_s: float
    """Lower bound by the accelerators' data sheets."""
    modelled_s: float
    """Predicted time of an idle engine with the best shape."""
    shape: str
    operation: str

    @property
    def is_physical(self) -> bool:
        """Whether even the data sheets exclude the objective."""
        return self.physical_s > self.limit_s

    @property
    def factor(self) -> float:
        """The best time as a multiple of the objective."""
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
class SpeculationPoint:
    """Speculative decoding in steps of a number of streams, in closed form."""

    streams: int
    step_s: float
    """Without it: one token for each stream."""
    gain: float
    """How many times faster tokens come; below 1 they come more slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The effect of speculative decoding in the decoding pool of a fleet."""

    acceptance: float
    """Probability that a drafted token is accepted."""
    drafted: int
    """Tokens drafted for each step."""
    draft_cost: float
    """Time to draft one token, in steps that decode one token."""
    expected_tokens: float
    """Tokens of a step for each stream."""
    pool: str
    points: tuple[SpeculationPoint, ...]
    at_load: SpeculationPoint
    """With the streams of one replica at the fleet's rate."""
    break_even_streams: int | None
    """From this number of streams on it is no gain; None if it is one with `max_num_seqs`."""
    best_drafted: int
    """Number of drafted tokens with the greatest gain at load; 0 where none is a gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The plan with other types of weights or KV cache."""

    weights: str
    kv: str
    plan: Plan | None
    """None if it cannot be planned."""
    reason: str = ""
    """Why it cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The required load as a rate."""

    rate_per_s: float
    answer_s: float | None = None
    """For users: the mean time of an answer, by which the rate follows. If the best fleet carries
    them, it is that at their rate; otherwise that at the best fleet's own rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer to one question. All rates are simulated."""

    question: PlanningProblem
    mix: MeanRequest
    best: Candidate | None
    """None if no fleet meets the objectives at any rate."""
    meets_rate: bool
    verdict: str
    """Whether to disaggregate, with the evidence, in one sentence."""
    demand: Demand | None = None
    """None without a required load, and for users if no fleet meets the objectives."""
    candidates: tuple[Candidate, ...] = ()
    bottleneck: Bottleneck | None = None
    gpus_needed: int | None = None
    """For the rate, if the budget does not suffice; extrapolated."""
    tradeoffs: tuple[Tradeoff, ...] = ()
    """The Pareto front, and the simulated trade-offs."""
    sensitivity: tuple[Sensitivity, ...] = ()
    unreachable_objectives: tuple[UnreachableObjective, ...] = ()
    rejected_shapes: tuple[RejectedShape, ...] = ()
    runs: int = 0

    @property
    def gpus(self) -> int | None:
        """GPUs of the best fleet."""
        return None if self.best is None else self.best.fleet.gpus
