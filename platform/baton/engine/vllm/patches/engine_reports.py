"""Reports that an engine gives on baton's control calls: KV cache, transports, resume support.

Theory of operation: only a started engine knows its groups of layers, their rules for blocks, and a
block's size, which depend on model, options, attention backends and memory. Neither events nor the
ready message have them. So `apply_cache_report` gives EngineCore a control call (`CACHE_CALL`) that
reads them from the engine's cache manager and workers, and `request_cache_report` calls it. After a
failure the answer says why. Then baton ignores the engine's events, whose meaning is unknown, and
computes the size of a block from the model's shape.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import lcm
from typing import Any, NamedTuple, Protocol

from baton.domain.cache import CacheGroup, CacheShape, PrefixRequirement
from baton.engine.vllm.wire.keys import RESUME_SUPPORT_CALL
from baton.runtime.process.log_events import log_event
from baton.runtime.rank_transports import Locality, RankTransports, read_own_transports

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
"""By vLLM's managers of a group. Source: single_type_kv_cache_manager.py in 0.32 and 0.33."""
TRANSPORTS_CALL = "baton_rank_transports"
_EncodedRankReport = tuple[int, str, dict[str, list[str]] | None]
"""Rank, node, and transports by reach, in types that vLLM serializes."""


class CacheReport(NamedTuple):
    """An engine's answer."""

    events_understood: bool
    """Whether the meaning of its events is known."""
    shape: CacheShape | None = None
    """None: plain full attention."""
    block_bytes: int | None = None
    """Of a block, over all layers and ranks; None: unknown."""


class UtilityClient(Protocol):
    """The part of vLLM's client that control calls need."""

    async def call_utility_async(self, method: str, *args: object) -> object:
        """Have the engine run one of its methods."""


# ------------------------------------------------------------------ in the engine's process
def apply_cache_report() -> None:
    """Have this process answer, if it has the scheduler. Idempotent."""
    core = sys.modules.get(_ENGINE_CORE)
    if core is not None:
        setattr(core.EngineCore, CACHE_CALL, read_cache_report)


def read_cache_report(core: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's EngineCore, which is not followed
    """An engine's answer, in plain values."""
    answer: dict[str, Any] = {}
    try:
        shape = shape_of(core.scheduler.kv_cache_manager.coordinator)
        if shape is not None:
            groups = [[*group] for group in shape.groups]
            answer["shape"] = {"groups": groups, "alignment_tokens": shape.alignment_tokens}
    except Exception as error:  # noqa: BLE001 - the caller gets the reason
        answer["reason"] = f"{type(error).__name__}: {error}"
    try:
        specs = core.model_executor.get_kv_cache_specs()
        tokens = core.vllm_config.cache_config.block_size
        answer["block_bytes"] = block_bytes(specs, tokens)
    except Exception as error:  # noqa: BLE001
        answer["why_no_bytes"] = f"{type(error).__name__}: {error}"
    return answer


def shape_of(coordinator: Any) -> CacheShape | None:  # noqa: ANN401 - vLLM's, likewise
    """How a cache finds reusable blocks; None for a single group of full attention.

    Raises:
        ValueError: it has groups for which that is unknown.
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
            # Source: SlidingWindowManager._contiguous_blocks_for_hit; it looks for at least one.
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
    """Bytes of this many tokens over all layers and ranks; None without layers.

    Each mapping of `specs` has a rank's layers. States do not count: a request has one, at any
    length. Every block of a sliding window counts, so the result is an upper bound for such models.
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
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        return parse_cache_report(await core.call_utility_async(CACHE_CALL))
    except EngineDeadError:
        raise
    except Exception as error:  # noqa: BLE001 - vLLM's client raises nothing narrower
        log_event(logger, logging.WARNING, "engine_does_not_tell_of_cache", {"reason": str(error)})
        return CacheReport(events_understood=False)


def parse_cache_report(answer: Any) -> CacheReport:  # noqa: ANN401 - what comes from another process
    """An engine's answer as a value.

    Raises:
        TypeError: it is of another shape.
        ValueError: likewise.
        KeyError: likewise.
    """
    for name in ("reason", "why_no_bytes"):
        if name in answer:
            event = "engine_does_not_tell_of_cache"
            log_event(logger, logging.WARNING, event, {"reason": answer[name]})
    shape = answer.get("shape")
    if shape is not None:
        groups = tuple(
            CacheGroup(PrefixRequirement(needs), *fields) for needs, *fields in shape["groups"]
        )
        shape = CacheShape(groups, alignment_tokens=shape["alignment_tokens"])
    size = answer.get("block_bytes")
    return CacheReport(
        events_understood="reason" not in answer,
        shape=shape,
        block_bytes=None if size is None else int(size),
    )


async def query_resume_support(core: UtilityClient) -> bool:
    """Whether a started engine supports resume in each of its processes; False without an answer.

    Raises:
        EngineDeadError: it has died.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        return await core.call_utility_async(RESUME_SUPPORT_CALL) is True
    except EngineDeadError:
        raise
    except Exception as error:  # noqa: BLE001 - vLLM's client raises nothing narrower
        log_event(logger, logging.WARNING, "engine_does_not_take_up", {"reason": str(error)})
        return False


def apply_rank_reports() -> None:
    """Have this process' workers and scheduler answer. Idempotent.

    Theory of operation: `apply_rank_reports`, which the plugin runs in every engine process, gives
    workers and the process with the scheduler a method of one name. The adapter calls the
    scheduler's, like any utility; that method calls the workers' on all nodes and gathers the
    answers. An answer that cannot be decoded is missing.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, TRANSPORTS_CALL, lambda worker: read_rank_report(worker.rank))
    core = sys.modules.get(_ENGINE_CORE)
    if core is not None:  # the process with the scheduler
        setattr(core.EngineCore, TRANSPORTS_CALL, lambda core: core.collective_rpc(TRANSPORTS_CALL))


def read_rank_report(rank: int) -> _EncodedRankReport:
    """This worker process' report."""
    by_locality = read_own_transports(os.environ, os.getpid())
    if by_locality is None:
        return rank, socket.gethostname(), None
    encoded = {str(reach): sorted(transports) for reach, transports in by_locality.items()}
    return rank, socket.gethostname(), encoded


async def query_ranks(core: UtilityClient) -> tuple[RankTransports, ...]:
    """Ask every worker of a started engine; empty where it does not answer, or is dying."""
    try:
        reports: Any = await core.call_utility_async(TRANSPORTS_CALL)
        return parse_rank_reports(reports)
    except Exception as error:  # noqa: BLE001 - vLLM's client raises nothing narrower
        log_event(logger, logging.WARNING, "ranks_say_nothing", {"reason": str(error)})
        return ()


def parse_rank_reports(reports: Sequence[Any]) -> tuple[RankTransports, ...]:
    """The answers of workers as they come from vLLM.

    Raises:
        ValueError: one of them is invalid.
        TypeError: likewise.
    """
    return tuple(
        RankTransports(
            rank=int(rank),
            node=str(node),
            transports=None
            if by_locality is None
            else {
                Locality(reach): frozenset(transports) for reach, transports in by_locality.items()
            },
        )
        for rank, node, by_locality in reports
    )
