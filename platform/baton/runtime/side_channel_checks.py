"""Checks whether blocks could be pulled from other replicas: seldom, bounded, answered to all.

Theory of operation: a request during or right after a check of the same source gets that check's
result. `WORKERS` run at a time, the others wait in a bounded queue; a full queue refuses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from baton.domain.errors import TransferFailed
from baton.runtime.ports import Engine
from baton.runtime.process.log_events import log_event

_LOG = logging.getLogger(__name__)

WORKERS: Final = 16
"""Checks that run at a time; with fewer unresponsive sources no other check waits."""
_MAX_QUEUED: Final = 1024
_RESULT_TTL_S: Final = 0.5
GRACE_S: Final = 1.0
"""Added to an engine's deadline before its check is given up."""


class _Result(NamedTuple):
    ended_at_s: float
    elapsed_s: float
    reason: str


class OnCheckResult(Protocol):
    """Gets the results of checks."""

    def __call__(self, source_id: str, address: str, *, elapsed_s: float, reason: str) -> None:
        """One check ended; `why` is empty when it succeeded."""
        ...


class SideChannelCheckQueue:
    """One replica's checks of others; run `run_worker` as `WORKERS` tasks."""

    def __init__(self, engine: Engine, on_result: OnCheckResult, *, deadline_s: float) -> None:
        self._engine = engine
        self._on_result = on_result
        self._deadline_s = deadline_s
        self._now_s: Callable[[], float] = asyncio.get_running_loop().time
        self._queue: asyncio.Queue[tuple[str, str]] = asyncio.Queue(_MAX_QUEUED)
        self._in_flight: set[tuple[str, str]] = set()
        self._recent: dict[tuple[str, str], _Result] = {}

    def request(self, source_id: str, address: str) -> bool:
        """Queue a check that ends in `on_result`; False when the queue is full."""
        key = (source_id, address)
        if key in self._in_flight:
            return True
        self._drop_expired()
        if (recent := self._recent.get(key)) is not None:
            self._on_result(source_id, address, elapsed_s=recent.elapsed_s, reason=recent.reason)
            return True
        try:
            self._queue.put_nowait(key)
        except asyncio.QueueFull:
            return False
        self._in_flight.add(key)
        return True

    async def run_worker(self) -> None:
        """Carry out queued checks, one after the other."""
        while True:
            key = source_id, address = await self._queue.get()
            began_at_s = self._now_s()
            reason = await self._check(source_id, address)
            now_s = self._now_s()
            self._recent.pop(key, None)  # so that the oldest stay in front
            self._recent[key] = _Result(now_s, now_s - began_at_s, reason)
            self._in_flight.discard(key)
            self._on_result(source_id, address, elapsed_s=now_s - began_at_s, reason=reason)

    async def _check(self, source_id: str, address: str) -> str:
        try:
            async with asyncio.timeout(self._deadline_s + GRACE_S):
                await self._engine.check_side_channel(source_id, address, self._deadline_s)
        except TransferFailed as error:
            return error.reason or type(error).__name__
        except TimeoutError:
            return f"the check did not end within {self._deadline_s:g} s"
        except Exception as error:  # noqa: BLE001 - a check that breaks fails no request
            fields = {"source": source_id, "address": address}
            log_event(_LOG, logging.WARNING, "side_channel_check_broke", fields, error=error)
            return f"{type(error).__name__}: {error}"
        return ""

    def _drop_expired(self) -> None:
        since_s = self._now_s() - _RESULT_TTL_S
        for key, result in tuple(self._recent.items()):
            if result.ended_at_s > since_s:
                break
            del self._recent[key]
