"""Reserves ports of side channels: no two replicas share a port, and freed ports are quarantined.

Theory of operation. An engine opens its side channel seconds after it gets the port, so two
replicas that start together could get the same port. The replica's process therefore holds a lock
on a file per port; the kernel frees it however the process ends.

A freed port is quarantined. Peers remember the agent of its last holder by the address, and may
crash when another agent answers there. The file has the time of the release. A killed process
cannot write it, so its quarantine begins when the next process finds the port free. The files may
be lost with a container or a restart while the address stays. So the search starts at a position
that changes each second.

Source: vLLM's issue 49238; `engine_ttl`, 3,600 s, after which vLLM forgets an engine that it did
not pull from.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from baton.config.schema.deployment import SIDE_CHANNEL_PORTS
from baton.domain.errors import EngineStartFailed
from baton.serving.front.data_path import port_is_free

QUARANTINE_S = 3_900.0
"""vLLM's `engine_ttl`, and 5 minutes for requests that still wait."""
_LAST_PORT = 65_535
_IN_USE = b"held"


def wall_clock_s() -> float:
    """Unix time, which continues across restarts of the machine, unlike the monotonic clock."""
    return datetime.now(UTC).timestamp()


class PortReservation:
    """Consecutive ports, reserved until `release` or the end of this process."""

    def __init__(
        self, folder: Path | None = None, *, clock: Callable[[], float] = wall_clock_s
    ) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"baton-ports-{os.getuid()}"
        self._clock = clock
        self._locks: list[int] = []

    def reserve(self, host: str, base: int, count: int) -> int:
        """Reserve `count` consecutive ports from `base` on; returns the first.

        Raises:
            EngineStartFailed: there are none.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        now_s = self._clock()
        end = min(base + SIDE_CHANNEL_PORTS, _LAST_PORT + 1)
        first_ports: list[int] = list(range(base, end - count + 1, count))
        offset = int(now_s) % len(first_ports) if first_ports else 0
        for first in first_ports[offset:] + first_ports[:offset]:
            if self._try_reserve(host, range(first, first + count), now_s):
                return first
        raise EngineStartFailed(
            f"no {count} free ports in a row among the {SIDE_CHANNEL_PORTS} from {base} on at "
            f"{host}; a port that an engine had rests for {QUARANTINE_S / 60:.0f} min",
            "set transfer.side_channel.port_base to where ports are free, or see why many "
            "engines start",
        )

    def release(self) -> None:
        """Free all ports and start their quarantine. Idempotent."""
        now_s = self._clock()
        for lock in self._locks:
            _begin_quarantine(lock, now_s)
            os.close(lock)
        self._locks = []

    def _try_reserve(self, host: str, ports: Sequence[int], now_s: float) -> bool:
        locks: list[int] = []
        for port in ports:
            lock = os.open(self._folder / str(port), os.O_RDWR | os.O_CREAT, 0o600)
            locks.append(lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_free = False
            else:
                is_free = _is_quarantine_over(lock, now_s) and port_is_free(host, port)
            if not is_free:
                for acquired in locks:
                    os.close(acquired)
                return False
        for lock in locks:
            _write(lock, _IN_USE)
        self._locks += locks
        return True


def _is_quarantine_over(lock: int, now_s: float) -> bool:
    """Whether no peer remembers the port's last holder. The caller has the lock."""
    recorded = os.pread(lock, 64, 0)
    if not recorded:
        return True
    try:
        elapsed_s = now_s - float(recorded)
    except ValueError:  # its holder was probably killed
        elapsed_s = -1.0
    if elapsed_s < 0.0:  # or the clock was set back
        _begin_quarantine(lock, now_s)
    return elapsed_s >= QUARANTINE_S


def _begin_quarantine(lock: int, now_s: float) -> None:
    _write(lock, f"{now_s:.0f}".encode())


def _write(lock: int, text: bytes) -> None:
    os.pwrite(lock, text, 0)
    os.ftruncate(lock, len(text))
