"""Ports of a node's side channels: never two replicas' at once, never one life's after another's.

Theory of operation. An engine opens its side channel seconds after it was told the port, so that
two replicas starting at once would be told the same one. A lock file per port, held by the
replica's process, prevents that; the kernel frees it however the process ends.

A port that was freed rests. Engines that pulled from its last holder remember that one's agent by
the address, and such an engine may crash when another agent answers there. The file says since when
a port rests. A killed process cannot write that, so its port rests from when the next one finds it
free. Files may be gone, with a container or after a restart of the machine, while the address
stays: so the search begins at a place that the clock gives, another one each second.

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
"""How long peers may remember an engine, and five minutes for requests that still wait for it."""
_LAST_PORT = 65_535
_IN_USE = b"held"


def wall_clock_s() -> float:
    """The time of day, which, unlike the monotonic clock, goes on when the machine restarts."""
    return datetime.now(UTC).timestamp()


class PortReservation:
    """Ports in a row, reserved until `release` or the end of this process."""

    def __init__(
        self, folder: Path | None = None, *, clock: Callable[[], float] = wall_clock_s
    ) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"baton-ports-{os.getuid()}"
        self._clock = clock
        self._locks: list[int] = []

    def reserve(self, host: str, base: int, count: int) -> int:
        """Reserve `count` ports in a row from `base` on; returns the first.

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
        """Give every port back, to rest. Idempotent."""
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
                free = False
            else:
                free = _is_quarantine_over(lock, now_s) and port_is_free(host, port)
            if not free:
                for acquired in locks:
                    os.close(acquired)
                return False
        for lock in locks:
            _write(lock, _IN_USE)
        self._locks += locks
        return True


def _is_quarantine_over(lock: int, now_s: float) -> bool:
    """Whether nobody remembers the port's last holder. The lock is ours."""
    recorded = os.pread(lock, 64, 0)
    if not recorded:
        return True
    try:
        elapsed_s = now_s - float(recorded)
    except ValueError:  # its holder was killed, as it seems
        elapsed_s = -1.0
    if elapsed_s < 0.0:  # or the clock was set back
        _begin_quarantine(lock, now_s)
    return elapsed_s >= QUARANTINE_S


def _begin_quarantine(lock: int, now_s: float) -> None:
    _write(lock, f"{now_s:.0f}".encode())


def _write(lock: int, text: bytes) -> None:
    os.pwrite(lock, text, 0)
    os.ftruncate(lock, len(text))
