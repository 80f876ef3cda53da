"""Ports for what tests start, which nobody takes before it listens."""

from __future__ import annotations

import contextlib
import os
import socket

HOST = "127.0.0.1"
_PORTS = iter(range(15_000 + os.getpid() % 500 * 32, 32_000))
"""Below those that Linux gives to outgoing connections; each is given out once."""


def free_port() -> int:
    """A port that nobody has, and that no outgoing connection will have before somebody binds it.

    A front that finds its port taken does not start; a side channel waits for it for ever.
    """
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise RuntimeError("no port below the ephemeral ones is free")
