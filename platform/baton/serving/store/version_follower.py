"""Polls the store for versions that a process missed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.runtime.process.background_task import BackgroundTask
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
POLL_INTERVAL_S = 5.0
"""A poll is one call of well under a millisecond to the head."""


class VersionFollower:
    """Keeps one process at the newest version; retries after any failure."""

    def __init__(
        self,
        name: str,
        *,
        newest_version: Callable[[], int],
        current_version: Callable[[], int],
        apply_newest: Callable[[], Awaitable[object]],
        interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        """Follow what `name` says. `newest_version` asks the store and blocks."""
        self._name = name
        self._newest_version = newest_version
        self._current_version = current_version
        self._apply_newest = apply_newest
        self._interval_s = interval_s
        self._task = BackgroundTask(f"{name}-follower", self._follow)
        self._last_failure = ""

    def start(self) -> None:
        """Start to poll. Idempotent."""
        self._task.start()

    async def stop(self) -> None:
        """Stop polling. Idempotent."""
        await self._task.stop()

    async def poll(self) -> None:
        """Apply the newest version if it is newer than the current one. Raises any error."""
        if await asyncio.to_thread(self._newest_version) > self._current_version():
            await self._apply_newest()

    async def poll_or_log(self) -> None:
        """Poll; log an error, unless the last poll had the same."""
        try:
            await self.poll()
        except Exception as error:  # noqa: BLE001 - a boundary: retries after any error
            failure = f"{type(error).__name__}: {error}"
            if failure != self._last_failure:
                fields = {"reason": failure, "version": self._current_version()}
                log_event(_LOGGER, logging.WARNING, f"{self._name}_not_followed", fields)
            self._last_failure = failure
        else:
            self._last_failure = ""

    async def _follow(self) -> None:
        while True:
            await self.poll_or_log()
            await asyncio.sleep(self._interval_s)
