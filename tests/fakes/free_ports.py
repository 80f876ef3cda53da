"""Ports for what tests start, which nobody takes before it listens."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from itertools import chain

HOST = "127.0.0.1"
FIRST_PORT, LAST_PORT = 29_000, 32_767
"""Above those of side channels and of Ray Serve's front, below those of outgoing connections."""
_PORTS_PER_PROCESS = 32


def ports_of(pid: int) -> Iterator[int]:
    """All of them once, from where those of the processes started before and after it do not."""
    slots = (LAST_PORT + 1 - FIRST_PORT) // _PORTS_PER_PROCESS
    start = FIRST_PORT + pid % slots * _PORTS_PER_PROCESS
    return chain(range(start, LAST_PORT + 1), range(FIRST_PORT, start))


_PORTS = ports_of(os.getpid())
"""Each is given out once."""


def free_port() -> int:
    """A port that nobody has, and that no outgoing connection will have before somebody binds it.

    A front that finds its port taken does not start; a side channel waits for it for ever.
    """
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise RuntimeError(f"no port from {FIRST_PORT} to {LAST_PORT} is free")
