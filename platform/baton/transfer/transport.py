"""Which transport UCX really uses between two engines: read from UCX itself, never assumed.

Theory of operation: UCX's preference is no secret. Its choice for a pair of processes depends on
devices, namespaces, permissions and the peer, and NIXL has no call for it.
`transport_environment` has UCX print it (`ucx_log` sees to it that it gets out). Each worker reads
its own (`runtime.rank_transports`), and here all workers of an engine are put together. An engine
pulls by all of its workers at once. A worker without a report makes the answer unknown, and a
forbidden transport of one worker makes the whole pair forbidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from baton.domain.errors import RdmaMissing
from baton.runtime.rank_transports import LOG_VARIABLE, Locality, RankTransports, log_name
from baton.transfer.ucx_log import FLUSH_VARIABLE

_MAX_LOG_SIZE = "4M"
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
"""Environment variables for an engine's processes; a deployment's own win over them.

Over TCP a remote read is answered in segments, of 8 kB if UCX is left alone: 8,192 of them for 64
MiB. With 256 kB pulls were 1.06 to 2.2 times as fast (M, three runs of two sizes). It costs buffers
of that size, a few for each interface of each of NIXL's workers. RDMA and shared memory do not use
them.

Source: `python -m benchmarks.transfer --sweep tcp`, benchmarks/README.md.
"""


def transport_environment(folder: Path) -> dict[str, str]:
    """Variables for an engine whose workers shall log what UCX chooses, in `folder`.

    The folder must exist and be this engine's alone; a worker on another node makes one of its own.
    UCX's warnings go there, too.
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

    Empty when it was not read, or cannot be told, for any of them. A peer under another address may
    still be on the same node, in a container of its own; where no other node was ever reached, it
    is.
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

    Transports inside a node (NVLink, shared memory) pass, and so does an unknown transport: nothing
    was pulled over it so far.

    Raises:
        RdmaMissing: pulls of a worker go through the kernel's network stack, or it is not known.
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
    """A rank's only transport for a reach; empty where it has none, or several."""
    transports = (rank.transports or {}).get(locality, frozenset())
    return next(iter(transports)) if len(transports) == 1 else ""
