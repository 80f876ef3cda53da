"""Engine shapes of a search space that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import NamedTuple

from baton.domain.errors import InsufficientMemory
from baton.perf.hardware.accelerators import Accelerator
from baton.perf.model.memory import fit
from baton.perf.steps.roofline import Roofline
from baton.planner.problem import AcceleratorOffer, PlanningProblem
from baton.simulator.v1.settings import V1Settings

_FALLBACK_PIPELINE_SIZES = (2, 4, 8)
"""Pipeline stages to try if no requested shape fits."""


class Duty(StrEnum):
    """The phases that a replica runs."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Split(NamedTuple):
    """How a model is divided among the devices of a replica."""

    tp: int
    pp: int
    dp: int = 1
    ep: bool = False

    @property
    def devices(self) -> int:
        """Of one replica."""
        return self.tp * self.pp * self.dp

    @property
    def label(self) -> str:
        """As `tp4`, with `pp2`, `dp8` and `ep` where there are such."""
        others = [f"{name}{size}" for name, size in (("pp", self.pp), ("dp", self.dp)) if size > 1]
        return " ".join([f"tp{self.tp}", *others, *(["ep"] if self.ep else [])])


ShapeKey = tuple[str, Split, int]
"""Accelerator, split, and token budget of a rank's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """An engine over a number of accelerators."""

    accelerator: Accelerator
    tp: int
    pp: int
    dp: int = 1
    """Ranks that attend for their own requests and share the experts."""
    ep: bool = False
    """Whether a device has whole experts."""
    settings: V1Settings
    price_per_hour: float | None = None

    @property
    def gpus(self) -> int:
        """Number of accelerators."""
        return self.tp * self.dp * self.pp

    @property
    def stage_gpus(self) -> int:
        """Accelerators that compute a layer together."""
        return self.tp * self.dp

    @property
    def split(self) -> Split:
        """How the model is divided."""
        return Split(self.tp, self.pp, self.dp, self.ep)

    @property
    def is_startable(self) -> bool:
        """Whether `baton up` starts it: a replica has one engine core, and so no ranks."""
        return self.dp == 1

    @property
    def chunk_tokens(self) -> int:
        """The token budget of a step of one rank."""
        return self.settings.max_batched_tokens // self.dp

    @property
    def max_running_requests(self) -> int:
        """The limit of streams of one rank."""
        return self.settings.max_running_requests // self.dp

    @property
    def vllm_arguments(self) -> str:
        """The split as arguments of `vllm serve`."""
        sizes = {"tensor": self.tp, "pipeline": self.pp, "data": self.dp}
        arguments = [f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1]
        return " ".join([*arguments, *(["--enable-expert-parallel"] if self.ep else [])])

    @property
    def label(self) -> str:
        """For people: `h100_sxm tp4`."""
        return f"{self.accelerator.name} {self.split.label}"

    @property
    def key(self) -> ShapeKey:
        """Unique among the shapes of a question."""
        return self.accelerator.name, self.split, self.chunk_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedShape:
    """A shape that cannot be used, and why."""

    label: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeCatalogue:
    """Shapes to choose from, by duty."""

    shapes_by_duty: dict[Duty, tuple[EngineShape, ...]]
    rejected: tuple[RejectedShape, ...] = ()


def enumerate_shapes(question: PlanningProblem) -> ShapeCatalogue:
    """Every shape of the question's space that fits, and the rejected shapes."""
    rejected: list[RejectedShape] = []
    shapes_by_duty = _shapes_by_duty(question, question.space.pipeline_parallel_sizes, rejected)
    if not any(shapes_by_duty.values()):
        pipeline_sizes = tuple(
            value
            for value in _FALLBACK_PIPELINE_SIZES
            if value not in question.space.pipeline_parallel_sizes
        )
        shapes_by_duty = _shapes_by_duty(question, pipeline_sizes, rejected)
    return ShapeCatalogue(shapes_by_duty=shapes_by_duty, rejected=tuple(dict.fromkeys(rejected)))


def _shapes_by_duty(
    question: PlanningProblem, pipeline_sizes: tuple[int, ...], rejected: list[RejectedShape]
) -> dict[Duty, tuple[EngineShape, ...]]:
    chunks = {
        Duty.PREFILL: (question.space.prefill_chunk_tokens,),
        Duty.DECODE: (question.space.decode_chunk_tokens,),
        Duty.BOTH: question.space.mixed_chunk_tokens,
    }
    splits: list[tuple[AcceleratorOffer, Split]] = []
    for offer, split in product(question.offers, _splits(question, pipeline_sizes)):
        reason = _split_problem(question, offer, split)
        if reason is None:
            splits.append((offer, split))
        else:
            rejected.append(RejectedShape(label=_label(offer, split), reason=reason))
    return {
        duty: tuple(
            shape
            for offer, split in splits
            for chunk in budgets
            for shape in _shape_if_it_fits(question, offer, split, chunk, rejected)
        )
        for duty, budgets in chunks.items()
    }


def _splits(question: PlanningProblem, pipeline_sizes: tuple[int, ...]) -> Iterator[Split]:
    """Of a model with experts also those with whole experts on a device; all groups have these.

    A group of ranks without pipeline stages: vLLM's guides advise none.
    """
    has_experts, space = question.model.experts is not None, question.space
    for pp, tp in product(pipeline_sizes, space.tensor_parallel_sizes):
        yield Split(tp, pp)
        if has_experts and tp > 1:
            yield Split(tp, pp, ep=True)
    if has_experts:
        for dp, tp in product(space.data_parallel_sizes, space.tensor_parallel_sizes):
            if dp > 1:
                yield Split(tp, 1, dp, ep=True)


def _split_problem(question: PlanningProblem, offer: AcceleratorOffer, split: Split) -> str | None:
    """Why the model cannot be split like this; None if it can."""
    model, gpus = question.model, split.devices
    tp, pp = split.tp, split.pp
    if model.heads % tp:
        return f"{model.heads} attention heads cannot be split over {tp}"
    if split.ep and model.experts is not None and model.experts.count < tp * split.dp:
        return f"{model.experts.count} experts cannot be divided among {tp * split.dp}"
    if tp > offer.accelerator.devices_per_node:
        return f"a node has {offer.accelerator.devices_per_node}"
    if model.layers < pp:
        return f"{model.layers} layers cannot be split over {pp} stages"
    gpu_limits = [value for value in (question.gpus, offer.available) if value is not None]
    if gpu_limits and gpus > min(gpu_limits):
        return f"there are only {min(gpu_limits)}"
    return None


def _shape_if_it_fits(
    question: PlanningProblem,
    offer: AcceleratorOffer,
    split: Split,
    chunk_tokens: int,
    rejected: list[RejectedShape],
) -> Iterator[EngineShape]:
    try:
        yield build_engine_shape(question, offer, split, chunk_tokens=chunk_tokens)
    except InsufficientMemory as error:
        rejected.append(RejectedShape(label=_label(offer, split), reason=str(error)))


def build_engine_shape(
    question: PlanningProblem, offer: AcceleratorOffer, split: Split, *, chunk_tokens: int
) -> EngineShape:
    """One shape, timed by the roofline.

    Raises:
        InsufficientMemory: the model does not fit.
    """
    model, accelerator, space = question.model, offer.accelerator, question.space
    memory_fit = fit(
        model,
        accelerator,
        **split._asdict(),
        weights=question.weights_dtype,
        kv=question.kv_dtype,
        utilization=space.gpu_memory_utilization,
        max_batched_tokens=chunk_tokens,
        max_running_requests=space.max_running_requests,
    )
    block_tokens = model.block_tokens(space.block_size_tokens, question.kv_dtype, split.tp)
    rank = V1Settings(
        timing=Roofline(
            model,
            accelerator,
            tp=split.tp,
            pp=split.pp,
            dp=split.dp,
            ep=split.tp * split.dp if split.ep else 1,
            weights=question.weights_dtype,
            kv=question.kv_dtype,
            efficiency=question.efficiency,
        ),
        kv_blocks=memory_fit.rank_kv_tokens // block_tokens,
        kv_block_bytes=max(1, round(model.kv_bytes(block_tokens, question.kv_dtype))),
        block_size_tokens=block_tokens,
        request_blocks=model.request_blocks(block_tokens, question.kv_dtype),
        max_len_tokens=model.max_len_tokens,
        max_running_requests=space.max_running_requests,
        max_batched_tokens=chunk_tokens,
        pipeline_stages=split.pp,
        first_token_s=question.efficiency.first_token_s,
        transfer_bytes_per_s=accelerator.network_bytes_per_s * split.tp * split.pp,
    )
    price = offer.price
    return EngineShape(
        accelerator=accelerator,
        **split._asdict(),
        settings=rank.for_ranks(split.dp),
        price_per_hour=None if price is None else price * split.devices,
    )


def _label(offer: AcceleratorOffer, split: Split) -> str:
    return f"{offer.accelerator.name} {split.label}"
