"""An engine's knowledge of the engines it pulls from: reachability, and the transport of blocks.

Theory of operation. Side channels are checked on request. On the way the engine's workers are asked
for UCX's choice so far. This is not done each time, for a busy engine answers between two steps:
soon again while a choice is unknown, seldom once all are known. A worker's last answer counts until
its next. A worker that has never answered makes every transport unknown, and no pair has RDMA then.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import weakref
from collections.abc import Awaitable, Callable, Sequence

from baton.domain.errors import RdmaMissing
from baton.domain.names.addresses import parse_address, same_host
from baton.runtime.process.log_events import log_event
from baton.runtime.process.scratch import scratch_folder
from baton.runtime.rank_transports import RankTransports
from baton.transfer.side_channel import SideChannelChecker
from baton.transfer.transport import UCX_SETTINGS, check_rdma, transport_environment, transport_to

_LOG = logging.getLogger(__name__)
_UNKNOWN_INTERVAL_S = 1.0
_KNOWN_INTERVAL_S = 10.0
_QUERY_TIMEOUT_S = 1.0
"""For the workers' answers; it is what a coordinator waits longer than a check may take, or less.
"""
_MAX_INCOMPLETE_QUERIES = 3
"""Asked without an answer from every worker; then it counts that some say nothing."""

QueryRanks = Callable[[], Awaitable[Sequence[RankTransports]]]


async def _no_ranks() -> Sequence[RankTransports]:
    return ()


class Peers:
    """The other engines, as seen from one. Its folder goes away with it."""

    def __init__(
        self, own_id: str, own_address: str, *, workers: int = 1, require_rdma: bool = False
    ) -> None:
        self._checks = SideChannelChecker(own_id, own_address)
        self._own_id = own_id
        self._own_host = _host(own_address)
        self._workers = workers
        self._require_rdma = require_rdma
        self._folder = scratch_folder("baton-ucx-")
        # It is never closed; a TemporaryDirectory would warn of that.
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._hosts: dict[str, str] = {}
        self.query_ranks: QueryRanks = _no_ranks
        """Asks every worker of this engine what carries its pulls; set once there is an engine."""
        self._ranks: dict[int, RankTransports] = {}
        self._queried_at_s = float("-inf")
        self._query_in_flight = False
        self._incomplete_queries = 0

    def environment(self) -> dict[str, str]:
        """Variables for the engine's processes: UCX as it suits pulls, and its transports told."""
        return {**UCX_SETTINGS, **transport_environment(self._folder)}

    def ranks(self) -> tuple[RankTransports, ...]:
        """Each worker's report of its pulls, by rank; workers without a report are missing."""
        return tuple(self._ranks[rank] for rank in sorted(self._ranks))

    async def check(self, source_id: str, address: str, deadline_s: float) -> None:
        """Return when blocks could be pulled from `source_id`.

        Raises:
            TransferFailed: its side channel is not in order.
            RdmaMissing: RDMA is required, and UCX has chosen something else in some worker.
        """
        self._hosts[source_id] = _host(address)
        await self._checks.check(source_id, address, deadline_s)
        if source_id == self._own_id:
            return  # it pulls nothing from itself
        await self._refresh_ranks(source_id)
        if self._require_rdma:
            self._check_rdma(source_id)

    def transport(self, source_id: str) -> str:
        """The transport of blocks from a replica; empty while any worker's is unknown."""
        if source_id not in self._hosts:
            return ""
        return transport_to(
            self.ranks(), workers=self._workers, same_host=self._on_own_host(source_id)
        )

    def _on_own_host(self, source_id: str) -> bool:
        return same_host(self._hosts[source_id], self._own_host)

    def _check_rdma(self, source_id: str) -> None:
        ranks = self.ranks()
        check_rdma(source_id, ranks, same_host=self._on_own_host(source_id))
        if self._incomplete_queries >= _MAX_INCOMPLETE_QUERIES:
            missing_ranks = sorted(set(range(self._workers)) - self._ranks.keys())
            raise RdmaMissing(
                source_id,
                f"ranks {', '.join(map(str, missing_ranks))} of {self._workers} do not say what"
                " carries "
                "their pulls, and transfer.require_rdma wants RDMA; see the engine's log",
            )

    async def _refresh_ranks(self, source_id: str) -> None:
        now_s = asyncio.get_running_loop().time()
        wait_s = _KNOWN_INTERVAL_S if self.transport(source_id) else _UNKNOWN_INTERVAL_S
        if self._query_in_flight or now_s - self._queried_at_s < wait_s:
            return
        self._queried_at_s, self._query_in_flight = now_s, True
        reports: Sequence[RankTransports] = ()
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT_S):
                reports = await self.query_ranks()
        except TimeoutError:
            pass  # it is in a long step; the last answers hold
        finally:
            self._query_in_flight = False
        for rank in reports:
            self._record_rank(rank)
        self._incomplete_queries = (
            self._incomplete_queries + 1 if len(self._ranks) < self._workers else 0
        )

    def _record_rank(self, report: RankTransports) -> None:
        if self._ranks.get(report.rank) == report:
            return
        self._ranks[report.rank] = report
        transports = (
            None
            if report.transports is None
            else {str(reach): sorted(names) for reach, names in report.transports.items()}
        )
        fields = {
            "replica_id": self._own_id,
            "rank": report.rank,
            "node": report.node,
            "pulls_by": transports,
        }
        level = logging.WARNING if transports is None else logging.INFO
        log_event(_LOG, level, "transports_chosen", fields)


def _host(address: str) -> str:
    try:
        return parse_address(address).host
    except ValueError:  # a query there reports it
        return ""
