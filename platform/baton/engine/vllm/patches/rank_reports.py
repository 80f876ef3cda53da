"""What each worker of an engine says of its pulls: asked through vLLM, answered where it runs.

Theory of operation: `apply`, run by the plugin in every engine process, gives workers and the
process that holds the scheduler a method of one name. The adapter calls the latter's, as it calls
any utility; that one calls the former's in all workers, on whatever nodes they are, and gathers the
answers. What cannot be read, or is not understood, is no answer.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from baton.runtime.process.log_events import log_event
from baton.runtime.rank_transports import Locality, RankTransports, read_own_transports

if TYPE_CHECKING:  # workers and whoever reads the plugin's names need not load vLLM for it
    from baton.engine.vllm.patches.resume_checks import UtilityClient

logger = logging.getLogger(__name__)

TRANSPORTS_CALL = "baton_rank_transports"
_ENGINE_CORE = "vllm.v1.engine.core"

EncodedRankReport = tuple[int, str, dict[str, list[str]] | None]
"""Rank, node, and transports by reach, in what vLLM carries between processes."""


def apply() -> None:
    """Have this process' workers and scheduler answer. It may be called again."""
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, TRANSPORTS_CALL, lambda worker: read_rank_report(worker.rank))
    core = sys.modules.get(_ENGINE_CORE)
    if core is not None:  # the process that holds the scheduler
        setattr(core.EngineCore, TRANSPORTS_CALL, lambda core: core.collective_rpc(TRANSPORTS_CALL))


def read_rank_report(rank: int) -> EncodedRankReport:
    """What this worker process says of itself."""
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
        log_event(logger, logging.WARNING, "ranks_say_nothing", {"why": str(error)})
        return ()


def parse_rank_reports(reports: Sequence[Any]) -> tuple[RankTransports, ...]:
    """The answers of workers as they come from vLLM.

    Raises:
        ValueError: one of them is no answer.
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
