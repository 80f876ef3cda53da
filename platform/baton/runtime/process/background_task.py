"""A task beside the requests of a process."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any


class BackgroundTask:
    """Runs a coroutine until its owner stops it."""

    def __init__(self, name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._run = run
        self._task: asyncio.Task[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it has ended without `stop`."""
        return self._task is not None and self._task.done()

    def start(self) -> None:
        """Start to run. Idempotent."""
        if self._task is None:
            # A context of its own: Ray would take its calls for part of the request that happens to
            # be served now, and cancel them with it.
            self._task = asyncio.create_task(
                self._run(), name=self._name, context=contextvars.Context()
            )

    async def stop(self) -> None:
        """Cancel it and wait for its end. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
