"""Which transports UCX chose in one worker process, read from UCX's own log.

Theory of operation: UCX prints how it carries out remote reads (a pull is one) into a file per
process, each time it makes that choice. A choice takes some 800 bytes and is printed once for all
peers that are reached alike:

    | 0f0c puller inter-node cfg#1                                     |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | Range  |    Description     |               Config               |
    | 0..inf | software emulation | 52% on tcp/lo and 48% on tcp/eth0  |

UCX names the locality of a peer (same node or another), not the peer. Each worker of an engine has
an agent of its own, maybe on another node, so each reads and reports its own file.

Source: UCX 1.23 (nixl 1.5.1), UCX_PROTO_INFO; a test with two agents holds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path

LOG_VARIABLE = "UCX_LOG_FILE"
LOG_PREFIX = "ucx."
_MAX_LINES = 20_000
"""Read of one file, some 2 MB: choices are printed early, and warnings may be many."""

_CHOICE_HEADER = re.compile(r"(self|intra-node|inter-node) cfg#\d+ *\|$")
_ROW = re.compile(r"\| *[0-9][^|]*\.\.inf *\|[^|]*\| *([^|]*?) *\|$")
"""The row of a choice for large operations."""
_TRANSPORT = re.compile(r"(?:^| )([a-z][a-z0-9_]*)/")
_REMOTE_READ = "remote memory read by ucp_get"


class Locality(StrEnum):
    """Where a peer is, as UCX sees it."""

    SAME_NODE = "intra-node"
    OTHER_NODE = "inter-node"


Transports = Mapping[Locality, frozenset[str]]
"""Transports of pulls so far; a locality without pulls is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTransports:
    """One engine worker's report of its own pulls."""

    rank: int
    node: str
    transports: Transports | None
    """None: its log cannot be read."""


def read_own_transports(environment: Mapping[str, str], pid: int) -> Transports | None:
    """The transports of this process's pulls; None if its log goes elsewhere. Reads a file."""
    log = Path(environment.get(LOG_VARIABLE, ""))
    if log.name != log_name() or "UCX_PROTO_INFO" not in environment or not log.parent.is_dir():
        return None
    return read_transports(log.parent, pid=pid)


def log_name() -> str:
    """The name of a process' log, as UCX expects it."""
    return f"{LOG_PREFIX}%h.%p"


def read_transports(folder: Path, *, pid: int | None = None) -> Transports:
    """The transports of the pulls of all processes that log there, or of one. Blocks on the disk.

    Transports that share one pull are joined by "+". Two entries of one locality mean that peers
    are reached in different ways.
    """
    by_locality: dict[Locality, set[str]] = {}
    for file in sorted(folder.glob(f"{LOG_PREFIX}*" if pid is None else f"{LOG_PREFIX}*.{pid}")):
        with file.open(encoding="utf-8", errors="replace") as lines:
            for locality, transport in _parse_choices(islice(lines, _MAX_LINES)):
                by_locality.setdefault(locality, set()).add(transport)
    return {locality: frozenset(transports) for locality, transports in by_locality.items()}


def _parse_choices(lines: Iterable[str]) -> Iterator[tuple[Locality, str]]:
    locality: Locality | None = None
    is_remote_read = False
    for line in lines:
        text = line.rstrip()
        if choice := _CHOICE_HEADER.search(text):
            locality = None if choice[1] == "self" else Locality(choice[1])
            is_remote_read = False
        elif _REMOTE_READ in text:
            is_remote_read = True
        elif locality is not None and is_remote_read and (row := _ROW.search(text)):
            transports = set(_TRANSPORT.findall(row[1]))
            if transports:
                yield locality, "+".join(sorted(transports))
