"""Engine shapes of a search space that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """An engine over a number of accelerators."""

    accelerator: Accelerator
    tp: int
    pp: int
    settings: V1Settings
    price_per_hour: float | None = None

    @property
    def gpus(self) -> int:
        """Number of accelerators."""
        return self.tp * self.pp

    @property
    def chunk_tokens(self) -> int:
        """The token budget of a step."""
        return self.settings.max_batched_tokens

    @property
    def label(self) -> str:
        """For people: `h100_sxm tp4`."""
        stages = f" pp{self.pp}" if self.pp > 1 else ""
        return f"{self.accelerator.name} tp{self.tp}{stages}"

    @property
    def key(self) -> tuple[str, int, int, int]:
        """Unique among the shapes of a question."""
        return self.accelerator.name, self.tp, self.pp, self.chunk_tokens


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
    splits: list[tuple[AcceleratorOffer, int, int]] = []
    for offer, pp, tp in product(
        question.offers, pipeline_sizes, question.space.tensor_parallel_sizes
    ):
        reason = _split_problem(question, offer, tp, pp)
        if reason is None:
            splits.append((offer, tp, pp))
        else:
            rejected.append(RejectedShape(label=_label(offer, tp, pp), reason=reason))
    return {
        duty: tuple(
            shape
            for offer, tp, pp in splits
            for chunk in budgets
            for shape in _shape_if_it_fits(question, offer, (tp, pp, chunk), rejected)
        )
        for duty, budgets in chunks.items()
    }


def _split_problem(
    question: PlanningProblem, offer: AcceleratorOffer, tp: int, pp: int
) -> str | None:
    """Why the model cannot be split like this; None if it can."""
    model, gpus = question.model, tp * pp
    if model.heads % tp:
        return f"{model.heads} attention heads cannot be split over {tp}"
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
    split: tuple[int, int, int],
    rejected: list[RejectedShape],
) -> Iterator[EngineShape]:
    tp, pp, chunk = split
    try:
        yield build_engine_shape(question, offer, tp=tp, pp=pp, chunk_tokens=chunk)
    except InsufficientMemory as error:
        rejected.append(RejectedShape(label=_label(offer, tp, pp), reason=str(error)))


def build_engine_shape(
    question: PlanningProblem, offer: AcceleratorOffer, *, tp: int, pp: int, chunk_tokens: int
) -> EngineShape:
    """One shape, timed by the roofline.

    Raises:
        InsufficientMemory: the model does not fit.
    """
    model, accelerator, space = question.model, offer.accelerator, question.space
    memory_fit = fit(
        model,
        accelerator,
        tp=tp,
        pp=pp,
        weights=question.weights_dtype,
        kv=question.kv_dtype,
        utilization=space.gpu_memory_utilization,
        max_batched_tokens=chunk_tokens,
        max_running_requests=space.max_running_requests,
    )
    block_tokens = model.block_tokens(space.block_size_tokens, question.kv_dtype, tp)
    settings = V1Settings(
        timing=Roofline(
            model,
            accelerator,
            tp=tp,
            pp=pp,
            weights=question.weights_dtype,
            kv=question.kv_dtype,
            efficiency=question.efficiency,
        ),
        kv_blocks=memory_fit.kv_blocks(block_tokens),
        kv_block_bytes=max(1, round(model.kv_bytes(block_tokens, question.kv_dtype))),
        block_size_tokens=block_tokens,
        request_blocks=model.request_blocks(block_tokens, question.kv_dtype),
        max_len_tokens=model.max_len_tokens,
        max_running_requests=space.max_running_requests,
        max_batched_tokens=chunk_tokens,
        pipeline_stages=pp,
        transfer_bytes_per_s=accelerator.network_bytes_per_s * tp * pp,
    )
    price = offer.price
    return EngineShape(
        accelerator=accelerator,
        tp=tp,
        pp=pp,
        settings=settings,
        price_per_hour=None if price is None else price * tp * pp,
    )


def _label(offer: AcceleratorOffer, tp: int, pp: int) -> str:
    return f"{offer.accelerator.name} tp{tp}" + (f" pp{pp}" if pp > 1 else "")
