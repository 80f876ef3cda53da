"""The shapes of an engine that a planner looks at: those that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from baton.domain.errors import DoesNotFit
from baton.perf.hardware.accelerators import Accelerator
from baton.perf.model.memory import fit
from baton.perf.steps.roofline import Roofline
from baton.planner.problem import Offer, Question
from baton.simulator.v1.settings import V1Settings

_DEEPER = (2, 4, 8)
"""Pipeline stages that are tried where no shape that was asked for fits."""


class Duty(StrEnum):
    """What a replica does of a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One replica's shape: an engine over so many accelerators."""

    accelerator: Accelerator
    tp: int
    pp: int
    settings: V1Settings
    price_per_hour: float | None = None
    """Of all its accelerators."""

    @property
    def gpus(self) -> int:
        """How many accelerators it takes."""
        return self.tp * self.pp

    @property
    def chunk_tokens(self) -> int:
        """The token budget of a step."""
        return self.settings.max_batched_tokens

    @property
    def label(self) -> str:
        """The shape in words: `h100_sxm tp4`."""
        stages = f" pp{self.pp}" if self.pp > 1 else ""
        return f"{self.accelerator.name} tp{self.tp}{stages}"

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What tells it from the others of the same question."""
        return self.accelerator.name, self.tp, self.pp, self.chunk_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A shape that was left out, and why."""

    label: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What can be chosen from, for each duty."""

    fitting: dict[Duty, tuple[Instance, ...]]
    misfits: tuple[Misfit, ...] = ()


def shapes(question: Question) -> Shapes:
    """Every shape of the question's space that fits, and why the others do not."""
    misfits: list[Misfit] = []
    found = _all(question, question.space.pipeline, misfits)
    if not any(found.values()):
        deeper = tuple(one for one in _DEEPER if one not in question.space.pipeline)
        found = _all(question, deeper, misfits)
    return Shapes(fitting=found, misfits=tuple(dict.fromkeys(misfits)))


def _all(
    question: Question, pipeline: tuple[int, ...], misfits: list[Misfit]
) -> dict[Duty, tuple[Instance, ...]]:
    chunks = {
        Duty.PREFILL: (question.space.prefill_chunk,),
        Duty.DECODE: (question.space.decode_chunk,),
        Duty.BOTH: question.space.mixed_chunks,
    }
    splits: list[tuple[Offer, int, int]] = []
    for offer, pp, tp in product(question.offers, pipeline, question.space.tensor):
        why = _cannot_split(question, offer, tp, pp)
        if why is None:
            splits.append((offer, tp, pp))
        else:
            misfits.append(Misfit(label=_label(offer, tp, pp), why=why))
    return {
        duty: tuple(
            one
            for offer, tp, pp in splits
            for chunk in budgets
            for one in _fitting(question, offer, (tp, pp, chunk), misfits)
        )
        for duty, budgets in chunks.items()
    }


def _cannot_split(question: Question, offer: Offer, tp: int, pp: int) -> str | None:
    """Why the model cannot be, or is not to be, split like this; None when it can."""
    model, gpus = question.model, tp * pp
    if model.heads % tp:
        return f"{model.heads} attention heads cannot be split over {tp}"
    if tp > offer.accelerator.per_node:
        return f"a node has {offer.accelerator.per_node}"
    if model.layers < pp:
        return f"{model.layers} layers cannot be split over {pp} stages"
    most = [one for one in (question.gpus, offer.available) if one is not None]
    if most and gpus > min(most):
        return f"there are only {min(most)}"
    return None


def _fitting(
    question: Question, offer: Offer, split: tuple[int, int, int], misfits: list[Misfit]
) -> Iterator[Instance]:
    tp, pp, chunk = split
    try:
        yield instance(question, offer, tp=tp, pp=pp, chunk_tokens=chunk)
    except DoesNotFit as error:
        misfits.append(Misfit(label=_label(offer, tp, pp), why=str(error)))


def instance(question: Question, offer: Offer, *, tp: int, pp: int, chunk_tokens: int) -> Instance:
    """One shape, timed by the roofline.

    Raises:
        DoesNotFit: the model does not fit into the memory of so many.
    """
    model, accelerator, space = question.model, offer.accelerator, question.space
    room = fit(
        model,
        accelerator,
        tp=tp,
        pp=pp,
        weights=question.weights,
        kv=question.kv,
        utilization=space.utilization,
        max_batched_tokens=chunk_tokens,
        max_running_requests=space.max_running_requests,
    )
    settings = V1Settings(
        timing=Roofline(model, accelerator, tp=tp, pp=pp, weights=question.weights, kv=question.kv),
        kv_blocks=room.kv_blocks(space.block_size_tokens),
        kv_block_bytes=max(1, round(model.kv_bytes(space.block_size_tokens, question.kv))),
        block_size_tokens=space.block_size_tokens,
        max_len_tokens=model.max_len_tokens,
        max_running_requests=space.max_running_requests,
        max_batched_tokens=chunk_tokens,
        pipeline_stages=pp,
        transfer_bytes_per_s=accelerator.network_bytes_per_s * tp * pp,
    )
    price = offer.price
    return Instance(
        accelerator=accelerator,
        tp=tp,
        pp=pp,
        settings=settings,
        price_per_hour=None if price is None else price * tp * pp,
    )


def _label(offer: Offer, tp: int, pp: int) -> str:
    return f"{offer.accelerator.name} tp{tp}" + (f" pp{pp}" if pp > 1 else "")
