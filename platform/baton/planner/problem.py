"""The planner's question: model, accelerators, traffic and objectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.perf.hardware.accelerators import Accelerator, Dtype
from baton.perf.hardware.efficiency import DEFAULT_EFFICIENCY, Efficiency
from baton.perf.model.shape import ModelShape
from baton.simulator.outcome import Objectives
from baton.simulator.workloads.arrivals import UserLoad
from baton.simulator.workloads.trace import Trace, TraceRequest

DEFAULT_OBJECTIVES = Objectives(ttft_s=30.0, tpot_s=1.0)
"""For objectives that are not given: without any, a queue could grow forever. 30 s is a
coordinator's default first token timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorOffer:
    """An available accelerator."""

    accelerator: Accelerator
    price_per_hour: float | None = None
    """Of one; None for the data sheet's price, if any."""
    available: int | None = None
    """How many there are; None for no limit of its own."""

    @property
    def price(self) -> float | None:
        """Dollars per hour of one; None if unknown."""
        if self.price_per_hour is not None:
            return self.price_per_hour
        return self.accelerator.price_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """Objectives of some of the requests."""

    objectives: Objectives
    attainment: float = 0.9
    """The fraction of them that must meet all objectives together."""
    name: str | None = None
    """The `slo_class` of those requests; None for all that no other class names."""

    def __post_init__(self) -> None:
        if not 0 < self.attainment < 1:
            raise ValueError(f"attainment is {self.attainment}, expected between 0 and 1, as 0.9")
        for term in ("ttft_s", "tpot_s", "e2e_s"):
            limit = getattr(self.objectives, term)
            if limit is not None and not limit > 0:
                raise ValueError(f"objective {term} is {limit}, expected more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEffort:
    """Extent of the simulations: more takes longer and errs less."""

    min_requests: int = 400
    """Of a run; more where that many are served at once."""
    confirmation_requests: int = 3000
    """The fewest of runs that confirm a fleet's rate: shorter runs may see no burst, or end before
    a queue is long."""
    rank_requests: int = 800
    """The most, per rank, of runs of a replica alone, and of a part of a fleet of groups."""
    precision: float = 0.05
    """Tolerance of rates, as a fraction."""
    simulated_fleets: int = 1
    """Whole fleets simulated of each kind; hybrids, with the roughest estimates, get one more."""
    shapes_per_duty: int = 2
    max_simulated_replicas: int = 4
    """Larger fleets are simulated as a part with about the same proportions, if there is one of
    this size."""
    sensitivity: bool = True


QUICK_SEARCH = SearchEffort(
    min_requests=200,
    confirmation_requests=1500,
    rank_requests=500,
    precision=0.08,
    shapes_per_duty=1,
    max_simulated_replicas=3,
    sensitivity=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Engine shapes to consider."""

    tensor_parallel_sizes: tuple[int, ...] = (1, 2, 4, 8)
    pipeline_parallel_sizes: tuple[int, ...] = (1,)
    """If no shape fits with these, more stages are tried."""
    data_parallel_sizes: tuple[int, ...] = (1,)
    """Ranks that share experts, for models with experts. Above 1, no deployment starts them."""
    mixed_chunk_tokens: tuple[int, ...] = (512, 2048, 8192)
    prefill_chunk_tokens: int = 8192
    decode_chunk_tokens: int = 2048
    """Token budget of a decode replica, which limits the prompts that it prefills."""
    max_running_requests: int = 512
    """vLLM captures CUDA graphs up to this size."""
    block_size_tokens: int = 16
    gpu_memory_utilization: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """One question; with a rate and a number of GPUs, it asks for the fewest GPUs for the rate."""

    model: ModelShape
    offers: tuple[AcceleratorOffer, ...]
    traffic: Trace
    """Arrivals, lengths and shared prompts; thinned or superposed for other rates."""
    classes: tuple[SloClass, ...]
    rate_per_s: float | None = None
    """Required rate; None for the highest rate on the GPUs."""
    users: UserLoad | None = None
    """Required users instead of a rate."""
    gpus: int | None = None
    """Available in all; None for as many as the rate needs."""
    weights_dtype: Dtype = Dtype.BF16
    kv_dtype: Dtype = Dtype.BF16
    efficiency: Efficiency = DEFAULT_EFFICIENCY
    """Of engines' kernels and host code; a calibration's, if there is one."""
    space: SearchSpace = SearchSpace()
    effort: SearchEffort = SearchEffort()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.demand is None and self.gpus is None:
            raise ValueError("neither a rate nor a number of GPUs is given, expected one or both")
        if self.rate_per_s is not None and self.users is not None:
            raise ValueError("both a rate and users are given, expected one of them")
        for name in ("rate_per_s", "gpus"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, expected more than 0")
        min_requests = 2
        if len(self.traffic) < min_requests or not self.traffic.span_s:
            raise ValueError(
                f"trace {self.traffic.name!r} has {len(self.traffic)} requests in"
                f" {self.traffic.span_s:g} s, expected at least 2, and some time between them"
            )
        if not self.offers or not self.classes:
            raise ValueError(
                "no accelerators or no objectives are given, expected at least one each"
            )
        if len({class_.name for class_ in self.classes}) < len(self.classes):
            raise ValueError("two classes of objectives have the same name")

    @property
    def demand(self) -> float | None:
        """Required load: requests per second, or users if they are given; None for the highest."""
        return self.rate_per_s if self.users is None else float(self.users.users)

    def load_of(self, rate_per_s: float, answer_s: float) -> float:
        """The load that a rate is, in the unit of `demand`, where answers take `answer_s`."""
        return rate_per_s if self.users is None else self.users.users_at(rate_per_s, answer_s)

    def rate_of_demand(self, answer_s: float) -> float | None:
        """Requests per second of the required load, where answers take `answer_s`."""
        return self.rate_per_s if self.users is None else self.users.rate_per_s(answer_s)

    @property
    def objectives(self) -> Objectives:
        """The strictest objectives of all classes, each by itself: those of placement."""
        class_objectives = [class_.objectives for class_ in self.classes]
        return Objectives(
            ttft_s=_strictest([class_objective.ttft_s for class_objective in class_objectives]),
            tpot_s=_strictest([class_objective.tpot_s for class_objective in class_objectives]),
            e2e_s=_strictest([class_objective.e2e_s for class_objective in class_objectives]),
        )


def _strictest(limits: Sequence[float | None]) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)


def class_of(request: TraceRequest, classes: Sequence[SloClass]) -> SloClass:
    """The class that a request names, else the class without a name, else the first."""
    matching = [class_ for class_ in classes if class_.name == request.slo_class]
    return next(
        iter([*matching, *(class_ for class_ in classes if class_.name is None)]), classes[0]
    )
