"""Checks whether blocks could be pulled from other replicas: seldom, bounded, answered to all.

Theory of operation: a check that is asked for while one of the same source is under way waits for
that one's result, and one asked for right after gets the last result again. A few run at a time,
the others wait in a bounded queue; what finds it full is refused, for it will be asked for again.
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
"""Checks that run at a time: as many silent sources do not hold up the others."""
_MAX_WAITING: Final = 1024
_REUSE_S: Final = 0.5
GRACE_S: Final = 1.0
"""How much longer than its deadline an engine may take before it is not waited for any more."""


class _Result(NamedTuple):
    at_s: float
    took_s: float
    why: str


class Tell(Protocol):
    """Whoever hears how checks ended."""

    def __call__(self, source_id: str, address: str, *, took_s: float, why: str) -> None:
        """One check ended; `why` is empty when all was well."""
        ...


class SideChannelChecks:
    """One replica's checks of others; `work` is to run as `WORKERS` tasks."""

    def __init__(self, engine: Engine, tell: Tell, *, deadline_s: float) -> None:
        self._engine = engine
        self._tell = tell
        self._deadline_s = deadline_s
        self._now_s: Callable[[], float] = asyncio.get_running_loop().time
        self._queue: asyncio.Queue[tuple[str, str]] = asyncio.Queue(_MAX_WAITING)
        self._under_way: set[tuple[str, str]] = set()
        self._recent: dict[tuple[str, str], _Result] = {}

    def ask(self, source_id: str, address: str) -> bool:
        """Have a source checked, and `tell` called; False when too many wait already."""
        asked = (source_id, address)
        if asked in self._under_way:
            return True
        self._forget_old()
        if (recent := self._recent.get(asked)) is not None:
            self._tell(source_id, address, took_s=recent.took_s, why=recent.why)
            return True
        try:
            self._queue.put_nowait(asked)
        except asyncio.QueueFull:
            return False
        self._under_way.add(asked)
        return True

    async def work(self) -> None:
        """Carry out what is asked for, one check after the other."""
        while True:
            asked = source_id, address = await self._queue.get()
            began_at_s = self._now_s()
            why = await self._check(source_id, address)
            now_s = self._now_s()
            self._recent.pop(asked, None)  # so that the oldest stay in front
            self._recent[asked] = _Result(now_s, now_s - began_at_s, why)
            self._under_way.discard(asked)
            self._tell(source_id, address, took_s=now_s - began_at_s, why=why)

    async def _check(self, source_id: str, address: str) -> str:
        try:
            async with asyncio.timeout(self._deadline_s + GRACE_S):
                await self._engine.check_side_channel(source_id, address, self._deadline_s)
        except TransferFailed as error:
            return error.why or type(error).__name__
        except TimeoutError:
            return f"the check did not end within {self._deadline_s:g} s"
        except Exception as error:  # noqa: BLE001 - a check that breaks fails no request
            told = {"source": source_id, "address": address}
            log_event(_LOG, logging.WARNING, "side_channel_check_broke", told, error=error)
            return f"{type(error).__name__}: {error}"
        return ""

    def _forget_old(self) -> None:
        since_s = self._now_s() - _REUSE_S
        for asked, result in tuple(self._recent.items()):
            if result.at_s > since_s:
                break
            del self._recent[asked]
