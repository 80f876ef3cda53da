"""Whether a replica's own side channel answers: a live engine may be one that nobody can pull from.

Theory of operation. Coordinators find a side channel that is dead by their probes of pairs, within
seconds, and send requests over other pairs; but it stays dead, for what is dead in it (in vLLM, a
thread) starts again only with the engine. So each replica asks its own, as another engine would,
and says that it is broken when that fails several times in a row; Ray Serve then replaces it. One
failure says little, for a machine may be too busy to answer in time: hence several, some seconds
apart. Nothing here can break a replica: whatever a check raises is one more failure.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from baton.domain.errors import RdmaMissing
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
CHECK_DEADLINE_S = 5.0
"""For an answer from the same machine, which takes milliseconds where it is not overloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannelTiming:
    """How often, and for how long, a side channel is doubted before it is given up."""

    period_s: float = 5.0
    failure_threshold: int = 4
    """In a row: 20 s where it refuses, 40 s where it is silent."""
    timeout_s: float = CHECK_DEADLINE_S + 1.0
    """For a check that does not keep its own deadline."""


class SideChannelWatch:
    """See the module."""

    def __init__(
        self,
        replica_id: str,
        check: Callable[[], Awaitable[None]],
        *,
        timing: SideChannelTiming | None = None,
    ) -> None:
        """`check` returns when the side channel has answered, and raises when it has not."""
        self._replica_id = replica_id
        self._check = check
        self._timing = timing or SideChannelTiming()
        self._failures = 0
        self._last_failure = ""
        self._latched_failure = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def failure(self) -> str:
        """Why it is to be given up; empty while it is not."""
        return self._last_failure if self._failures >= self._timing.failure_threshold else ""

    def latch_failure(self) -> str:
        """As `failure`, but for good: what was given up once stays so, though it answers again."""
        self._latched_failure = self._latched_failure or self.failure
        return self._latched_failure

    def start(self) -> None:
        """Begin to ask. Idempotent."""
        if self._task is None:
            # A context of its own: Ray would take it for part of the call in which it was started.
            self._task = asyncio.create_task(
                self._probe_loop(), name="own-side-channel", context=contextvars.Context()
            )

    async def close(self) -> None:
        """Ask no more. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def probe(self) -> None:
        """Ask once."""
        try:
            async with asyncio.timeout(self._timing.timeout_s):
                await self._check()
        except RdmaMissing:
            pass  # it has answered; what carries the blocks is for those who pull to judge
        except Exception as error:  # noqa: BLE001 - a boundary: a check that breaks has failed
            self._record_failure(f"{type(error).__name__}: {error}")
            return
        self._failures = 0

    async def _probe_loop(self) -> None:
        while True:
            await asyncio.sleep(self._timing.period_s)
            await self.probe()

    def _record_failure(self, why: str) -> None:
        self._failures += 1
        self._last_failure = (
            f"its side channel has not answered {self._failures} times in a row: {why}"
        )
        if self._failures == self._timing.failure_threshold:
            fields = {"replica_id": self._replica_id, "why": self._last_failure}
            log_event(_LOGGER, logging.ERROR, "side_channel_dead", fields)
