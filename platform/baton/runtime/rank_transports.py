"""Which transports UCX chose in one worker process: read there, from UCX's own log.

Theory of operation: UCX prints how it carries out remote reads, which is what a pull is, into a
file per process, each time it makes that choice. A choice takes some 800 bytes and is printed once
for all peers that are reached alike:

    | 0f0c puller inter-node cfg#1                                     |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | Range  |    Description     |               Config               |
    | 0..inf | software emulation | 52% on tcp/lo and 48% on tcp/eth0  |

UCX does not name the peer there, only whether it is on the same node. So transports are known per
node: peers on the same node, and peers on others. Each worker of an engine has an agent of its own,
and may be on a node of its own, so each reads and reports its own file.

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
"""UCX's: where its log goes."""
LOG_PREFIX = "ucx."
_MAX_LINES = 20_000
"""Looked at in one file, some 2 MB: choices are printed early, and warnings may be many."""

_CHOICE_HEADER = re.compile(r"(self|intra-node|inter-node) cfg#\d+ *\|$")
_ROW = re.compile(r"\| *[0-9][^|]*\.\.inf *\|[^|]*\| *([^|]*?) *\|$")
"""The row of a choice that is about large operations."""
_TRANSPORT = re.compile(r"(?:^| )([a-z][a-z0-9_]*)/")
_REMOTE_READ = "remote memory read by ucp_get"


class Locality(StrEnum):
    """Where a peer is, as UCX sees it."""

    SAME_NODE = "intra-node"
    OTHER_NODE = "inter-node"


Transports = Mapping[Locality, frozenset[str]]
"""The transports of pulls so far; an unused reach is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTransports:
    """One engine worker's report of its own pulls."""

    rank: int
    node: str
    """The host that it runs on."""
    transports: Transports | None
    """None: its log cannot be read, so nothing is known."""


def read_own_transports(environment: Mapping[str, str], pid: int) -> Transports | None:
    """The transports of this process's pulls; None where its log was sent elsewhere.

    Reads a file: not for an event loop.
    """
    log = Path(environment.get(LOG_VARIABLE, ""))
    if log.name != log_name() or "UCX_PROTO_INFO" not in environment or not log.parent.is_dir():
        return None
    return read_transports(log.parent, pid=pid)


def log_name() -> str:
    """The name of a process' log as UCX is told it."""
    return f"{LOG_PREFIX}%h.%p"


def read_transports(folder: Path, *, pid: int | None = None) -> Transports:
    """The transports of the pulls of all processes that log there, or of one.

    Several transports that share one pull are one entry, joined by "+". Two entries under one reach
    mean that peers are reached in different ways. Reads files: not for an event loop.
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
