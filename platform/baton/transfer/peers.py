"""An engine's knowledge of the engines it pulls from: reachability, and the transport of blocks.

Theory of operation: a check of a side channel also queries the engine's workers for UCX's choice.
A busy engine answers between two steps, so queries are rare once all choices are known. A worker's
last answer counts until its next. While a worker has never answered, every transport is unknown.

UCX's choice for a pair of processes depends on devices, namespaces, permissions and the peer, and
NIXL has no call for it. So UCX logs it (`transport_environment`), and each worker reads its own log
(`runtime.rank_transports`). An engine pulls by all of its workers at once: one worker's forbidden
transport makes the pair forbidden.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from baton.domain.errors import RdmaMissing
from baton.domain.names.addresses import is_loopback, parse_address, same_host
from baton.runtime.process.log_events import log_event
from baton.runtime.process.scratch import scratch_folder
from baton.runtime.rank_transports import LOG_VARIABLE, Locality, RankTransports, log_name
from baton.transfer.side_channel import SideChannelChecker
from baton.transfer.ucx_log import FLUSH_VARIABLE

_LOG = logging.getLogger(__name__)
_UNKNOWN_INTERVAL_S = 1.0
_KNOWN_INTERVAL_S = 10.0
_QUERY_TIMEOUT_S = 1.0
"""Limit of the workers' answers; at most the time that a coordinator adds to a check's deadline."""
_MAX_INCOMPLETE_QUERIES = 3
"""After this many queries a worker without an answer breaks `require_rdma`."""
QueryRanks = Callable[[], Awaitable[Sequence[RankTransports]]]
_MAX_LOG_SIZE = "4M"
_RDMA_DEVICES = Path("/sys/class/infiniband")
_FLUSH_S = 1.0
_INTRA_NODE = frozenset(
    {"cma", "cuda_copy", "cuda_ipc", "gdr_copy", "knem", "posix", "rocm_copy", "rocm_ipc", "sysv"}
    | {"xpmem", "ze_copy", "ze_ipc"}
)
_RDMA = frozenset(
    {"dc_mlx5", "gga_mlx5", "rc_gda", "rc_mlx5", "rc_verbs", "srd", "ud_mlx5", "ud_verbs"}
)
"""srd is EFA's. Source: the transports of UCX 1.23, src/uct."""
UCX_SETTINGS: Mapping[str, str] = MappingProxyType(
    {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
)
"""Environment variables for an engine's processes; a deployment's own override them.

Over TCP a remote read is answered in segments, by default of 8 kB: 8,192 of them for 64 MiB. With
256 kB pulls were 1.06 to 2.2 times as fast (M, three runs of two sizes). It costs buffers of that
size, a few for each interface of each of NIXL's workers. RDMA and shared memory do not use them.

Source: `python -m benchmarks.transfer --sweep tcp`, benchmarks/README.md.
"""


async def _no_ranks() -> Sequence[RankTransports]:
    return ()


class Peers:
    """The other engines, as seen from one; its log folder is removed with it."""

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
        """Queries the transports of every worker; set once there is an engine."""
        self._ranks: dict[int, RankTransports] = {}
        self._queried_at_s = float("-inf")
        self._query_in_flight = False
        self._incomplete_queries = 0

    def environment(self) -> dict[str, str]:
        """Variables for the engine's processes: UCX tuned for pulls and logging its transports."""
        network = loopback_devices(_RDMA_DEVICES) if is_loopback(self._own_host) else {}
        return {**UCX_SETTINGS, **network, **transport_environment(self._folder)}

    def ranks(self) -> tuple[RankTransports, ...]:
        """Each worker's last report, by rank; workers without a report are missing."""
        return tuple(self._ranks[rank] for rank in sorted(self._ranks))

    async def check(self, source_id: str, address: str, deadline_s: float) -> None:
        """Return when blocks could be pulled from `source_id`.

        Raises:
            TransferFailed: its side channel does not work.
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


def loopback_devices(rdma_devices: Path) -> dict[str, str]:
    """Network devices for an engine whose peers are all on this machine.

    By default UCX listens on the address of every interface, where other machines reach it. RDMA
    devices have no such listener.
    """
    ports = sorted(":".join(port.parts[-3::2]) for port in rdma_devices.glob("*/ports/*"))
    return {"UCX_NET_DEVICES": ",".join(["lo", *ports])}


def transport_environment(folder: Path) -> dict[str, str]:
    """Variables for an engine whose workers log UCX's choices, and its warnings, in `folder`.

    The folder exists and is this engine's alone; a worker on another node makes one of its own.
    """
    return {
        LOG_VARIABLE: str(folder / log_name()),
        "UCX_LOG_FILE_SIZE": _MAX_LOG_SIZE,
        "UCX_LOG_FILE_ROTATE": "1",
        "UCX_PROTO_INFO": "*ucp_get*",
        FLUSH_VARIABLE: str(_FLUSH_S),
    }


def transport_to(ranks: Sequence[RankTransports], *, workers: int, same_host: bool) -> str:
    """The transport of pulls from a peer by all of an engine's workers, joined by "+".

    Empty when any worker's is unknown. A peer under another address may still be on the same node,
    in another container; it is while no other node was ever reached.
    """
    if len(ranks) < workers:
        return ""
    locality = _locality(ranks, same_host=same_host)
    names: set[str] = set()
    for rank in ranks:
        transport = _only_transport(rank, locality)
        if not transport:
            return ""
        names |= set(transport.split("+"))
    return "+".join(sorted(names))


def check_rdma(source_id: str, ranks: Sequence[RankTransports], *, same_host: bool) -> None:
    """Refuse a link that a deployment with `require_rdma` must not use.

    Transports inside a node (NVLink, shared memory) pass, and so does a choice not yet made.

    Raises:
        RdmaMissing: a worker pulls through the kernel's network stack, or its log cannot be read.
    """
    locality = _locality(ranks, same_host=same_host)
    for rank in ranks:
        location = f"rank {rank.rank} on {rank.node}"
        if rank.transports is None:
            raise RdmaMissing(
                source_id,
                f"the transport of pulls of {location} cannot be read, and transfer.require_rdma"
                " wants RDMA; leave UCX_LOG_FILE and UCX_PROTO_INFO out of transfer.env and of "
                "the pools' env",
            )
        transport = _only_transport(rank, locality)
        if transport and not (_RDMA | _INTRA_NODE).issuperset(transport.split("+")):
            raise RdmaMissing(
                source_id,
                f"pulls are carried by {transport}, and transfer.require_rdma wants RDMA: "
                f"{location}; check that it sees the network cards (/dev/infiniband, "
                "UCX_NET_DEVICES, UCX_TLS)",
            )


def _locality(ranks: Sequence[RankTransports], *, same_host: bool) -> Locality:
    if same_host or not any(Locality.OTHER_NODE in (rank.transports or {}) for rank in ranks):
        return Locality.SAME_NODE
    return Locality.OTHER_NODE


def _only_transport(rank: RankTransports, locality: Locality) -> str:
    """A rank's only transport for a locality; empty where it has none, or several."""
    transports = (rank.transports or {}).get(locality, frozenset())
    return next(iter(transports)) if len(transports) == 1 else ""
