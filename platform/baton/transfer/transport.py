"""Which transport UCX really uses between two engines: read from UCX itself, never assumed.

Theory of operation: what UCX would rather use is no secret, but what it did choose for a pair of
processes depends on devices, namespaces, permissions and the peer, and NIXL has no call that tells.
UCX can print how it carries out an operation, each time it makes that choice for an operation that
was asked for. `transport_environment` has it print that for remote reads, which is what a pull is,
into a file per process (`ucx_log` sees to it that it gets there); `read_transports` reads those
files from beside the engine. A choice takes some 800 bytes and is printed once for all peers that
are reached alike:

    | 0f0c puller inter-node cfg#1                                     |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | Range  |    Description     |               Config               |
    | 0..inf | software emulation | 52% on tcp/lo and 48% on tcp/eth0  |

UCX does not name the peer there, only whether it is on the same node. So what is known is known per
node: peers on this one, and peers on others.

Source: UCX 1.23 (nixl 1.5.1), UCX_PROTO_INFO; a test with two agents holds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import islice
from pathlib import Path

from baton.domain.errors import RdmaMissing
from baton.transfer.ucx_log import FLUSH_VARIABLE

_PREFIX = "ucx."
_MAX_LOG = "4M"
_FLUSH_S = 1.0
_MAX_LINES = 20_000
"""Looked at in one file, some 2 MB: choices are printed early, and warnings may be many."""

_CHOICE = re.compile(r"(self|intra-node|inter-node) cfg#\d+ *\|$")
_ROW = re.compile(r"\| *[0-9][^|]*\.\.inf *\|[^|]*\| *([^|]*?) *\|$")
"""The row of a choice that is about large operations."""
_CARRIER = re.compile(r"(?:^| )([a-z][a-z0-9_]*)/")
_READ = "remote memory read by ucp_get"

_WITHIN_NODE = frozenset(
    {"cma", "cuda_copy", "cuda_ipc", "gdr_copy", "knem", "posix", "rocm_copy", "rocm_ipc", "sysv"}
    | {"xpmem", "ze_copy", "ze_ipc"}
)
_RDMA = frozenset(
    {"dc_mlx5", "gga_mlx5", "rc_gda", "rc_mlx5", "rc_verbs", "srd", "ud_mlx5", "ud_verbs"}
)
"""srd is EFA's. Source: the transports of UCX 1.23, src/uct."""


class Reach(StrEnum):
    """Where a peer is, as UCX sees it."""

    SAME_NODE = "intra-node"
    OTHER_NODE = "inter-node"


def transport_environment(folder: Path) -> dict[str, str]:
    """Variables for an engine whose transports `read_transports` shall find in `folder`.

    The folder must exist and be this engine's alone. UCX's warnings go there, too.
    """
    return {
        "UCX_LOG_FILE": str(folder / f"{_PREFIX}%h.%p"),
        "UCX_LOG_FILE_SIZE": _MAX_LOG,
        "UCX_LOG_FILE_ROTATE": "1",
        "UCX_PROTO_INFO": "*ucp_get*",
        FLUSH_VARIABLE: str(_FLUSH_S),
    }


def read_transports(folder: Path) -> Mapping[Reach, frozenset[str]]:
    """What carried pulls of an engine's processes so far; a reach that was not used is missing.

    Several transports that share one pull are one entry, joined by "+". Two entries under one reach
    mean that peers are reached in different ways. Reads files: not for an event loop.
    """
    found: dict[Reach, set[str]] = {}
    for file in sorted(folder.glob(f"{_PREFIX}*")):
        with file.open(encoding="utf-8", errors="replace") as lines:
            for reach, transport in _choices(islice(lines, _MAX_LINES)):
                found.setdefault(reach, set()).add(transport)
    return {reach: frozenset(transports) for reach, transports in found.items()}


def transport_towards(found: Mapping[Reach, frozenset[str]], *, same_host: bool) -> str:
    """The transport of pulls from a peer; empty when it was not read, or cannot be told.

    A peer under another address may still be on the same node, in a container of its own; where no
    other node was ever reached, it is.
    """
    reach = Reach.SAME_NODE if same_host or Reach.OTHER_NODE not in found else Reach.OTHER_NODE
    transports = found.get(reach, frozenset())
    return next(iter(transports)) if len(transports) == 1 else ""


def is_rdma(transport: str) -> bool:
    """Whether network cards move all the data without the kernel's help."""
    return _RDMA.issuperset(transport.split("+"))


def check_rdma(source_id: str, transport: str) -> None:
    """Refuse a link that a deployment with `require_rdma` must not use.

    Transports inside a node (NVLink, shared memory) pass, and so does one that is not known yet:
    nothing was pulled over it so far.

    Raises:
        RdmaMissing: pulls go through the kernel's network stack.
    """
    if not transport or (_RDMA | _WITHIN_NODE).issuperset(transport.split("+")):
        return
    raise RdmaMissing(
        source_id,
        f"pulls are carried by {transport}, and transfer.require_rdma wants RDMA; check that the "
        "engines see the network cards (/dev/infiniband, UCX_NET_DEVICES, UCX_TLS)",
    )


def _choices(lines: Iterable[str]) -> Iterator[tuple[Reach, str]]:
    reach: Reach | None = None
    reading = False
    for line in lines:
        text = line.rstrip()
        if choice := _CHOICE.search(text):
            reach = None if choice[1] == "self" else Reach(choice[1])
            reading = False
        elif _READ in text:
            reading = True
        elif reach is not None and reading and (row := _ROW.search(text)):
            carriers = set(_CARRIER.findall(row[1]))
            if carriers:
                yield reach, "+".join(sorted(carriers))
