"""What a planner answers: the fleet to take, why, what else there was, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from baton.planner.problem import Question
from baton.planner.rates.closed_form import Mix
from baton.planner.rates.measure import Measured
from baton.planner.rates.trials import Trial
from baton.planner.shapes.fleets import Fleet, Kind
from baton.planner.shapes.space import Misfit

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
class Binding:
    """What keeps a fleet from carrying more, in figures."""

    constraint: Constraint
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A fleet that was simulated, whole or in part."""

    fleet: Fleet
    cell: Fleet
    """What was simulated: the fleet, or a part of it with its proportions."""
    factor: float
    """How many times what the cell carries the fleet should carry."""
    estimate_per_s: float
    """By what its replicas carry alone."""
    measured: Measured
    """The cell."""

    @property
    def rate_per_s(self) -> float:
        """Requests per second that the whole fleet carries within the objectives."""
        return self.measured.rate_per_s * self.factor

    @property
    def trial(self) -> Trial | None:
        """The cell at that rate; None when no rate was low enough."""
        return self.measured.at_best

    @property
    def rate_per_gpu(self) -> float:
        """Requests per second of one accelerator."""
        return self.measured.rate_per_s / self.cell.gpus

    def tokens_per_s_per_gpu(self, trial: Trial) -> float:
        """Output tokens per second of one accelerator, of all pools together, in one trial."""
        return trial.tokens_per_s / self.cell.gpus

    def cost_per_million_tokens(self, rate_per_s: float | None = None) -> float | None:
        """US dollars for a million output tokens while it carries that, or all it can.

        None without prices, or when it carries nothing.
        """
        price, trial = self.fleet.price_per_hour, self.trial
        if price is None or trial is None or not trial.output_tokens:
            return None
        carried = self.rate_per_s if rate_per_s is None else min(rate_per_s, self.rate_per_s)
        return price / _PER_HOUR_S / (carried * trial.output_tokens) * _MILLION


@dataclass(frozen=True, slots=True, kw_only=True)
class Trade:
    """What users get against what accelerators give."""

    kind: Kind
    label: str
    tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    simulated: bool
    """Else by the closed form, which knows no queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What becomes of the answer when the question was a little wrong."""

    term: str
    change: float
    """As a factor: 1.2 for a fifth more."""
    rate_per_s: float | None = None
    """That the same fleet then carries."""
    attainment: float | None = None
    """What it then attains, where the rate itself changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An objective that no configuration can meet."""

    term: str
    limit_s: float
    """The objective."""
    physical_s: float
    """What the accelerators' data sheets allow at the very best."""
    modelled_s: float
    """What an engine on the best shape is predicted to take, alone."""
    shape: str
    what: str
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
                f"{self.term} of {self.limit_s * 1e3:.4g} ms is physically out of reach:"
                f" {self.what} takes {self.physical_s * 1e3:.3g} ms on {self.shape} at the full"
                f" speed of its data sheet, {self.factor:.2g} times as long"
            )
        return (
            f"{self.term} of {self.limit_s * 1e3:.4g} ms is out of reach: {self.what} is predicted"
            f" to take {self.modelled_s * 1e3:.3g} ms on {self.shape}, {self.factor:.2g} times as"
            f" long (the data sheet alone would allow {self.physical_s * 1e3:.3g} ms)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer to one question. All rates are simulated."""

    question: Question
    mix: Mix
    best: Candidate | None
    """None when no fleet meets the objectives at any rate."""
    enough: bool
    """Whether the best carries the rate that was asked for, if one was."""
    verdict: str
    """Whether to disaggregate, with the evidence, in one sentence."""
    candidates: tuple[Candidate, ...] = ()
    """All that were simulated as fleets, the best first."""
    binding: Binding | None = None
    gpus_needed: int | None = None
    """For the rate, where what there is does not carry it; by extrapolation."""
    trades: tuple[Trade, ...] = ()
    """Those that none other beats in both, and the simulated ones."""
    sensitivity: tuple[Sensitivity, ...] = ()
    out_of_reach: tuple[Bound, ...] = ()
    misfits: tuple[Misfit, ...] = ()
    runs: int = 0
    """Simulations that were run."""

    @property
    def gpus(self) -> int | None:
        """What the best takes."""
        return None if self.best is None else self.best.fleet.gpus
