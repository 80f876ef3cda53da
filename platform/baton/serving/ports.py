"""Ports that belong to one replica of a node, also while nobody listens on them yet.

An engine opens its side channel seconds after it was told the port, so that two replicas starting
at once would be told the same one. A lock file per port, held by the replica's process, prevents
that; the kernel frees it however the process ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from baton.domain.errors import EngineStartFailed
from baton.runtime.sockets import bound_socket

_SPAN = 2000


class PortReservation:
    """Ports in a row, reserved until `release` or the end of this process."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"baton-ports-{os.getuid()}"
        self._locks: list[int] = []

    def reserve(self, host: str, base: int, count: int) -> int:
        """Reserve `count` ports in a row from `base` on; returns the first.

        Raises:
            EngineStartFailed: there are none.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for first in range(base, min(base + _SPAN, 65_536 - count), count):
            if self._take(host, range(first, first + count)):
                return first
        raise EngineStartFailed(
            f"no {count} free ports in a row from {base} on at {host}",
            "set transfer.side_channel.port_base to where ports are free",
        )

    def release(self) -> None:
        """Give every port back. Idempotent."""
        for lock in self._locks:
            os.close(lock)
        self._locks = []

    def _take(self, host: str, ports: range) -> bool:
        locks: list[int] = []
        for port in ports:
            lock = os.open(self._folder / str(port), os.O_RDWR | os.O_CREAT, 0o600)
            locks.append(lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free = False
            else:
                free = _can_bind(host, port)
            if not free:
                for taken in locks:
                    os.close(taken)
                return False
        self._locks += locks
        return True


def _can_bind(host: str, port: int) -> bool:
    try:
        bound_socket(host, port).close()
    except OSError:
        return False
    return True
