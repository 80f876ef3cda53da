"""What one engine knows of the engines it pulls from: do they answer, and what carries the blocks.

Theory of operation. Side channels are checked when somebody asks. On the way the engine's workers
are asked what UCX has chosen in them by then, but not each time, for a busy engine answers between
two steps: soon again while something is not known yet, seldom once it is. What a worker said last
counts until it says something else; one that has never answered makes every transport unknown, and
no pair one that has RDMA.
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
from baton.transfer.side_channel import SideChannelChecks
from baton.transfer.transport import check_rdma, transport_environment, transport_towards
from baton.transfer.ucx_settings import UCX_SETTINGS

_LOG = logging.getLogger(__name__)
_SOON_S = 1.0
_LATER_S = 10.0
_ANSWER_S = 1.0
"""For the workers' answers; it is what a coordinator waits longer than a check may take, or less.
"""
_TRIES = 3
"""Asked without an answer from every worker; then it counts that some say nothing."""

AskRanks = Callable[[], Awaitable[Sequence[RankTransports]]]


async def _nobody() -> Sequence[RankTransports]:
    return ()


class Peers:
    """The other engines, as seen from one. Its folder goes away with it."""

    def __init__(
        self, own_id: str, own_address: str, *, workers: int = 1, require_rdma: bool = False
    ) -> None:
        self._checks = SideChannelChecks(own_id, own_address)
        self._own_id = own_id
        self._own_host = _host(own_address)
        self._workers = workers
        self._require_rdma = require_rdma
        self._folder = scratch_folder("baton-ucx-")
        # Nobody closes this; a TemporaryDirectory would warn of that.
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._hosts: dict[str, str] = {}
        self.ask_ranks: AskRanks = _nobody
        """Asks every worker of this engine what carries its pulls; set once there is an engine."""
        self._ranks: dict[int, RankTransports] = {}
        self._asked_at_s = float("-inf")
        self._asking = False
        self._unanswered = 0

    def environment(self) -> dict[str, str]:
        """Variables for the engine's processes: UCX as it suits pulls, and its transports told."""
        return {**UCX_SETTINGS, **transport_environment(self._folder)}

    def ranks(self) -> tuple[RankTransports, ...]:
        """What each worker has said of its pulls, by rank; those that never did are missing."""
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
        await self._look(source_id)
        if self._require_rdma:
            self._check_rdma(source_id)

    def transport(self, source_id: str) -> str:
        """What carries blocks from a replica; empty while it is not known of every worker."""
        if source_id not in self._hosts:
            return ""
        return transport_towards(
            self.ranks(), workers=self._workers, same_host=self._on_own_host(source_id)
        )

    def _on_own_host(self, source_id: str) -> bool:
        return same_host(self._hosts[source_id], self._own_host)

    def _check_rdma(self, source_id: str) -> None:
        ranks = self.ranks()
        check_rdma(source_id, ranks, same_host=self._on_own_host(source_id))
        if self._unanswered >= _TRIES:
            silent = sorted(set(range(self._workers)) - self._ranks.keys())
            raise RdmaMissing(
                source_id,
                f"ranks {', '.join(map(str, silent))} of {self._workers} do not say what carries "
                "their pulls, and transfer.require_rdma wants RDMA; see the engine's log",
            )

    async def _look(self, source_id: str) -> None:
        now_s = asyncio.get_running_loop().time()
        wait_s = _LATER_S if self.transport(source_id) else _SOON_S
        if self._asking or now_s - self._asked_at_s < wait_s:
            return
        self._asked_at_s, self._asking = now_s, True
        said: Sequence[RankTransports] = ()
        try:
            async with asyncio.timeout(_ANSWER_S):
                said = await self.ask_ranks()
        except TimeoutError:
            pass  # it is in a long step; what was known holds
        finally:
            self._asking = False
        for rank in said:
            self._hear(rank)
        self._unanswered = self._unanswered + 1 if len(self._ranks) < self._workers else 0

    def _hear(self, said: RankTransports) -> None:
        if self._ranks.get(said.rank) == said:
            return
        self._ranks[said.rank] = said
        found = (
            None
            if said.found is None
            else {str(reach): sorted(names) for reach, names in said.found.items()}
        )
        told = {"replica_id": self._own_id, "rank": said.rank, "node": said.node, "pulls_by": found}
        level = logging.WARNING if found is None else logging.INFO
        log_event(_LOG, level, "transports_chosen", told)


def _host(address: str) -> str:
    try:
        return parse_address(address).host
    except ValueError:  # whoever asks there is told
        return ""
