"""What a planner is asked: which model, on what, for which traffic, held to which objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.perf.hardware.accelerators import Accelerator, Dtype
from baton.perf.model.shape import ModelShape
from baton.simulator.outcome import Objectives
from baton.simulator.workloads.trace import Trace, TraceRequest

PATIENCE = Objectives(ttft_s=30.0, tpot_s=1.0)
"""What stands for an objective that is not given: without any, a queue could grow for ever. 30 s is
how long a coordinator waits for a first token before it gives a replica up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An accelerator that can be had."""

    accelerator: Accelerator
    price_per_hour: float | None = None
    """Of one; None takes what its data sheet says, if that says anything."""
    available: int | None = None
    """How many there are; None for no limit of its own."""

    @property
    def price(self) -> float | None:
        """What one costs per hour, in US dollars; None when nobody knows."""
        if self.price_per_hour is not None:
            return self.price_per_hour
        return self.accelerator.price_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """What some of the requests are held to."""

    objectives: Objectives
    attainment: float = 0.9
    """The share of them that must meet all objectives together."""
    name: str | None = None
    """The `slo_class` of those requests; None for all that no other class names."""

    def __post_init__(self) -> None:
        if not 0 < self.attainment < 1:
            raise ValueError(f"attainment is {self.attainment}, wanted between 0 and 1, as 0.9")
        for term in ("ttft_s", "tpot_s", "e2e_s"):
            limit = getattr(self.objectives, term)
            if limit is not None and not limit > 0:
                raise ValueError(f"objective {term} is {limit}, wanted more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is simulated: more takes longer and errs less."""

    requests: int = 800
    """The most of one simulated run."""
    least_requests: int = 400
    precision: float = 0.05
    """Rates are found within this fraction."""
    verified: int = 1
    """Fleets of each kind that are simulated as a whole; of hybrids one more, whose estimates are
    the roughest."""
    shapes: int = 2
    """Splits for each duty that get as far as being measured."""
    cell: int = 4
    """Larger fleets are simulated as a part of them with (nearly) the same proportions, where there
    is one of so many replicas."""
    sensitivity: bool = True


QUICK = Effort(
    requests=500, least_requests=200, precision=0.08, shapes=1, cell=3, sensitivity=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Which shapes of an engine are looked at."""

    tensor: tuple[int, ...] = (1, 2, 4, 8)
    pipeline: tuple[int, ...] = (1,)
    """Where nothing fits with these, more stages are tried."""
    mixed_chunks: tuple[int, ...] = (512, 2048, 8192)
    """Token budgets of a step, of engines that do both."""
    prefill_chunk: int = 8192
    decode_chunk: int = 2048
    """Of a decode replica: what a prompt may take of a step, where it is prefilled there."""
    max_running_requests: int = 512
    """As many as vLLM captures CUDA graphs for."""
    block_size_tokens: int = 16
    utilization: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question; with a rate and a number of GPUs, the fewest that carry the rate are sought."""

    model: ModelShape
    offers: tuple[Offer, ...]
    traffic: Trace
    """Arrivals, lengths and what prompts share; it is thinned or laid over itself for other
    rates."""
    classes: tuple[SloClass, ...]
    rate_per_s: float | None = None
    """To be carried; None: as much as the GPUs can."""
    gpus: int | None = None
    """To be had in all; None: as many as the rate needs."""
    weights: Dtype = Dtype.BF16
    kv: Dtype = Dtype.BF16
    space: Space = Space()
    effort: Effort = Effort()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate_per_s is None and self.gpus is None:
            raise ValueError("neither a rate nor a number of GPUs is given, wanted one or both")
        for name in ("rate_per_s", "gpus"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, wanted more than 0")
        enough = 2
        if len(self.traffic) < enough or not self.traffic.span_s:
            raise ValueError(
                f"trace {self.traffic.name!r} has {len(self.traffic)} requests in"
                f" {self.traffic.span_s:g} s, wanted at least 2, and some time between them"
            )
        if not self.offers or not self.classes:
            raise ValueError("no accelerators or no objectives are given, wanted at least one each")
        if len({one.name for one in self.classes}) < len(self.classes):
            raise ValueError("two classes of objectives have the same name")

    @property
    def objectives(self) -> Objectives:
        """The strictest of all classes, each term on its own: what placement aims at."""
        each = [one.objectives for one in self.classes]
        return Objectives(
            ttft_s=_least([one.ttft_s for one in each]),
            tpot_s=_least([one.tpot_s for one in each]),
            e2e_s=_least([one.e2e_s for one in each]),
        )


def _least(limits: Sequence[float | None]) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)


def class_of(request: TraceRequest, classes: Sequence[SloClass]) -> SloClass:
    """The class of a request: the one it names, else the one without a name, else the first."""
    named = [one for one in classes if one.name == request.slo_class]
    return next(iter([*named, *(one for one in classes if one.name is None)]), classes[0])
