"""One process' part in applying a configuration: prepare, then commit.

Theory of operation. `prepare` builds everything that can fail from the new configuration, beside
the running parts, and returns what is wrong. Nothing changes; the next `prepare` drops the result.
`commit` switches between two steps of the event loop, as far as requests can see. It works without
`prepare`, because a process may find the configuration in the store, and is idempotent. Generations
only increase.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.config.diff import diff
from baton.config.schema.deployment import DeploymentConfig
from baton.serving.store.config_store import Generations, LiveConfig
from baton.serving.store.version_follower import POLL_INTERVAL_S, VersionFollower
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
Switch = Callable[[], Awaitable[None]]


class ConfigParticipant:
    """The configuration that one process applies."""

    def __init__(
        self,
        live: LiveConfig,
        build: Callable[[DeploymentConfig], Switch],
        *,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        self._live = live
        self._build = build
        self._poll_interval_s = poll_interval_s
        self._staged: tuple[DeploymentConfig, Switch] | None = None
        self._commit_lock = asyncio.Lock()
        self._follower: VersionFollower | None = None
        self.rejected = 0

    @property
    def live(self) -> LiveConfig:
        """The configuration in force."""
        return self._live

    def follow(self, generations: Generations) -> None:
        """Start to poll for missed configurations. Idempotent."""

        async def commit_newest() -> None:
            newest = await asyncio.to_thread(generations.newest, self._live.config)
            await self.commit(newest)

        if self._follower is None:
            self._follower = VersionFollower(
                "config",
                newest_version=generations.newest_number,
                current_version=lambda: self._live.generation,
                apply_newest=commit_newest,
                interval_s=self._poll_interval_s,
            )
        self._follower.start()

    async def close(self) -> None:
        """Stop polling. Idempotent."""
        if self._follower is not None:
            await self._follower.stop()

    async def prepare(self, base_generation: int, config: DeploymentConfig) -> str:
        """Why a configuration cannot follow that generation; empty if it can."""
        if base_generation != self._live.generation:
            return (
                f"generation {self._live.generation} holds here, not {base_generation}:"
                " another command has applied a configuration, look again"
            )
        try:
            self._staged = (config, await asyncio.to_thread(self._build, config))
        except Exception as error:  # noqa: BLE001 - a boundary: the caller gets the text
            self._staged = None
            reason = f"{type(error).__name__}: {error}"
            self._note_rejection(base_generation + 1, reason)
            return reason
        return ""

    def _note_rejection(self, generation: int, reason: str) -> None:
        self.rejected += 1
        fields = {"generation": generation, "reason": reason}
        log_event(_LOGGER, logging.WARNING, "config_rejected", fields)

    async def commit(self, live: LiveConfig) -> int:
        """Apply a configuration; returns the generation in force."""
        async with self._commit_lock:
            if live.generation <= self._live.generation:
                return self._live.generation
            staged, self._staged = self._staged, None
            try:
                if staged is None or diff(staged[0], live.config):
                    staged = (live.config, await asyncio.to_thread(self._build, live.config))
                await staged[1]()
            except Exception as error:
                self._note_rejection(live.generation, f"{type(error).__name__}: {error}")
                raise
            self._live = live
        log_event(_LOGGER, logging.INFO, "config_taken", {"generation": live.generation})
        return live.generation
