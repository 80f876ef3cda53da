"""One process' part when a configuration is applied: look whether it can be taken, then take it.

Theory of operation. `prepare` builds everything from the new configuration that building can fail
at, beside what runs, and says what is wrong; nothing changes, and what was built is dropped when
something else is prepared. `commit` switches over, in one go between two steps of the event loop as
far as requests can see. It may come without `prepare`, for who was not told in time finds the
configuration in the store; and twice, for the second time does nothing. Generations only go up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.config.diff import diff
from baton.config.schema.deployment import DeploymentConfig
from baton.serving.store.config_store import ConfigFollower, Generations, LiveConfig
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
Switch = Callable[[], Awaitable[None]]
"""Goes over to what was built."""


class ConfigParticipant:
    """The configuration by which one process works, and the way to another."""

    def __init__(self, live: LiveConfig, build: Callable[[DeploymentConfig], Switch]) -> None:
        self._live = live
        self._build = build
        self._staged: tuple[DeploymentConfig, Switch] | None = None
        self._commit_lock = asyncio.Lock()
        self._follower: ConfigFollower | None = None
        self.rejected = 0
        """Configurations that could not be taken, each time that one was tried."""

    @property
    def live(self) -> LiveConfig:
        """What holds here now."""
        return self._live

    def follow(self, generations: Generations) -> None:
        """Begin to look for configurations of which nobody tells. Idempotent."""
        if self._follower is None:
            self._follower = ConfigFollower(
                generations, current=lambda: self._live, commit=self.commit
            )
        self._follower.start()

    async def close(self) -> None:
        """Look no more. Idempotent."""
        if self._follower is not None:
            await self._follower.stop()

    async def prepare(self, base_generation: int, config: DeploymentConfig) -> str:
        """Why a configuration cannot be taken after that generation; empty when it can."""
        if base_generation != self._live.generation:
            return (
                f"generation {self._live.generation} holds here, not {base_generation}:"
                " somebody else has applied something, look again"
            )
        try:
            self._staged = (config, await asyncio.to_thread(self._build, config))
        except Exception as error:  # noqa: BLE001 - a boundary: whatever is wrong is said
            self._staged = None
            self.rejected += 1
            return f"{type(error).__name__}: {error}"
        return ""

    async def commit(self, live: LiveConfig) -> int:
        """Go over to a configuration; the generation that holds then."""
        async with self._commit_lock:
            if live.generation <= self._live.generation:
                return self._live.generation
            staged, self._staged = self._staged, None
            try:
                if staged is None or diff(staged[0], live.config):
                    staged = (live.config, await asyncio.to_thread(self._build, live.config))
                await staged[1]()
            except Exception:
                self.rejected += 1
                raise
            self._live = live
        log_event(_LOGGER, logging.INFO, "config_taken", {"generation": live.generation})
        return live.generation
