"""What an engine says of its KV cache: how it finds reusable prefixes, and how large a block is.

*Theory of operation.* Which groups of layers a model has, by which rules they keep blocks and what
a block takes is known to the engine alone, once it has started: it follows from model, options,
attention backends and memory. Neither events nor the message that it is ready say it. So `apply`
gives EngineCore a control call (`CACHE_CALL`) that reads it off the engine's own cache manager and
workers, and `request_cache_report` makes that call and understands the answer. Where anything is
not as it must be, the answer says why. Then nobody listens to the engine's events, for it is not
known what they mean, and the size of a block is that of the model's shape.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from math import lcm
from typing import Any, NamedTuple, Protocol

from vllm.v1.engine.exceptions import EngineDeadError

from baton.domain.cache import CacheGroup, CacheShape, PrefixRequirement
from baton.runtime.process.log_events import log_event

logger = logging.getLogger(__name__)

CACHE_CALL = "baton_cache"
"""The control call."""

_ENGINE_CORE = "vllm.v1.engine.core"
_NEEDS = {
    "FullAttentionManager": PrefixRequirement.ALL,
    "SinkFullAttentionManager": PrefixRequirement.ALL,
    "SlidingWindowManager": PrefixRequirement.TRAILING_BLOCKS,
    "MambaManager": PrefixRequirement.TRAILING_BLOCKS,
    "ChunkedLocalAttentionManager": PrefixRequirement.CHUNK,
    "CircularBufferManager": PrefixRequirement.NONE,
}
"""By vLLM's managers of one group. Source: single_type_kv_cache_manager.py in 0.32 and 0.33."""


class CacheReport(NamedTuple):
    """An engine's answer."""

    events_understood: bool
    """Whether it is known what its events mean."""
    shape: CacheShape | None = None
    """None: plain full attention."""
    block_bytes: int | None = None
    """Of one block, over all layers and ranks; None: not known."""


class UtilityClient(Protocol):
    """What of vLLM's client this needs."""

    async def call_utility_async(self, method: str, *args: object) -> object:
        """Have the engine run one of its methods."""


# ------------------------------------------------------------------ in the engine's process
def apply() -> None:
    """Have this process answer, where it is the one that has the scheduler. May be called again."""
    core = sys.modules.get(_ENGINE_CORE)
    if core is not None:
        setattr(core.EngineCore, CACHE_CALL, read_cache_report)


def read_cache_report(core: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's EngineCore, which is not followed
    """What an engine says, in plain values."""
    answer: dict[str, Any] = {}
    try:
        shape = shape_of(core.scheduler.kv_cache_manager.coordinator)
        if shape is not None:
            groups = [[*group] for group in shape.groups]
            answer["shape"] = {"groups": groups, "alignment_tokens": shape.alignment_tokens}
    except Exception as error:  # noqa: BLE001 - no request fails of it; whoever asks is told
        answer["why"] = f"{type(error).__name__}: {error}"
    try:
        specs = core.model_executor.get_kv_cache_specs()
        tokens = core.vllm_config.cache_config.block_size
        answer["block_bytes"] = block_bytes(specs, tokens)
    except Exception as error:  # noqa: BLE001
        answer["why_no_bytes"] = f"{type(error).__name__}: {error}"
    return answer


def shape_of(coordinator: Any) -> CacheShape | None:  # noqa: ANN401 - vLLM's, likewise
    """How a cache finds what it can reuse; None for one group of full attention.

    Raises:
        ValueError: it has groups of which that is not known.
    """
    groups = coordinator.kv_cache_config.kv_cache_groups
    managers = coordinator.single_type_managers
    cache_groups = [_to_cache_group(manager) for manager in managers]
    if [group.requirement for group in cache_groups] == [PrefixRequirement.ALL]:
        return None
    if getattr(coordinator.block_pool, "num_hash_lookahead_tokens", 0):
        raise ValueError("names of blocks also stand for tokens behind them")
    block_sizes = [
        (group.kv_cache_spec.block_size, other.block_size_tokens)
        for group, other in zip(groups, cache_groups, strict=True)
        if other.requirement is not PrefixRequirement.NONE
    ]
    size = min(own for own, _ in block_sizes)
    mismatched = [whole for _, whole in block_sizes if whole % size]
    if mismatched:
        raise ValueError(f"blocks of {mismatched} tokens beside blocks of {size}")
    alignment = getattr(coordinator, "_cache_hit_alignment_tokens", managers[0].block_size)
    return CacheShape(tuple(cache_groups), alignment_tokens=lcm(alignment, size))


def _to_cache_group(manager: Any) -> CacheGroup:  # noqa: ANN401
    spec, size = manager.kv_cache_spec, manager.block_size
    kind = type(manager).__name__
    needs = _NEEDS.get(kind)
    if not spec.prefix_cacheable:
        needs = PrefixRequirement.NONE
    match needs:
        case None:
            raise ValueError(f"a group of layers is kept by {kind}")
        case PrefixRequirement.TRAILING_BLOCKS if kind == "SlidingWindowManager":
            # Source: SlidingWindowManager._contiguous_blocks_for_hit; at least one is looked for.
            span = max(1, -(-(manager.sliding_window - 1) // size))
        case PrefixRequirement.TRAILING_BLOCKS:
            return CacheGroup(needs, size, span=1)  # drafts have no states, and peek at none
        case PrefixRequirement.CHUNK:
            span = manager.attention_chunk_size
            if span % size:
                raise ValueError(f"chunks of {span} tokens in blocks of {size}")
        case _:
            span = 0
    return CacheGroup(needs, size, span, needs_next_block=bool(manager.use_eagle))


def block_bytes(specs: Iterable[Mapping[str, Any]], block_size_tokens: int) -> int | None:
    """Bytes of so many tokens over all layers and ranks, by each rank's layers; None: no layers.

    States do not count: there is one for a request, however long. Of sliding windows every block
    counts, so that it is an upper bound for models that have them.
    """
    total = 0
    for rank in specs:
        for spec in rank.values():
            if spec.prefix_cacheable and not hasattr(spec, "mamba_type"):
                total += -(-spec.page_size_bytes * block_size_tokens // spec.block_size)
    return total or None


# ------------------------------------------------------------------ in ours
async def request_cache_report(core: UtilityClient) -> CacheReport:
    """Ask a started engine.

    Raises:
        EngineDeadError: it has died.
    """
    try:
        return parse_cache_report(await core.call_utility_async(CACHE_CALL))
    except EngineDeadError:
        raise
    except Exception as error:  # noqa: BLE001 - vLLM's client raises nothing narrower
        log_event(logger, logging.WARNING, "engine_does_not_tell_of_cache", {"why": str(error)})
        return CacheReport(events_understood=False)


def parse_cache_report(answer: Any) -> CacheReport:  # noqa: ANN401 - what comes from another process
    """What an engine said, as a value.

    Raises:
        TypeError: it is of another shape.
        ValueError: likewise.
        KeyError: likewise.
    """
    for name in ("why", "why_no_bytes"):
        if name in answer:
            event = "engine_does_not_tell_of_cache"
            log_event(logger, logging.WARNING, event, {"why": answer[name]})
    shape = answer.get("shape")
    if shape is not None:
        groups = tuple(
            CacheGroup(PrefixRequirement(needs), *fields) for needs, *fields in shape["groups"]
        )
        shape = CacheShape(groups, alignment_tokens=shape["alignment_tokens"])
    size = answer.get("block_bytes")
    return CacheReport(
        events_understood="why" not in answer,
        shape=shape,
        block_bytes=None if size is None else int(size),
    )
