"""What outlives the processes of a deployment: its configuration as it is now, and small notes.

Theory of operation. Deployments carry the configuration that they were started with. What was
applied since is kept in the store of Ray's head (its GCS), under a number that goes up by one with
each change: a *generation*; the configuration of the start is generation 0. A number can be taken
once only, which is how two who apply at the same time find out. Whoever starts later, or restarts,
begins with the newest generation; whoever was not told of one finds it by looking every few seconds
(`ConfigFollower`). Every call to the store has a deadline. Without the head's own persistence its
store ends with the cluster, as the deployment does.

Generations are kept as text, as `baton config show` has it, so that another version of baton can
read them, and beside each what became of it: an operator can look back, and go back.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol, cast

from baton.config.load import load_text
from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.render import render

_LOGGER = logging.getLogger(__name__)
_NAMESPACE = b"baton"
_CONFIG_PREFIX = "config/"
_STATUS_PREFIX = "fate/"
BUILD_RECORD_KEY = "built"
"""The note that says what the deployments that run were built from."""
ENDPOINT_KEY = "where"
"""The note that says where clients come to a deployment on a cluster of somebody else's."""
ROLLOUT_KEY = "rollout"
"""The note that says how far the last rollout is."""
_MAX_GENERATIONS = 20
"""Generations that are kept, for operators to look back at."""
_STORE_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 5.0
"""Between two looks at the store; each is one call of well under a millisecond to the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConfig:
    """A configuration and its number."""

    generation: int
    config: DeploymentConfig


class Store(Protocol):
    """Bytes by name. Blocks for milliseconds; every call has a deadline."""

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        """Whether it was written: without `overwrite` only if there was nothing."""
        ...

    def get(self, key: str) -> bytes | None:
        """What is kept under a name; None for nothing."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """The names that begin so."""
        ...

    def delete(self, key: str, *, by_prefix: bool = False) -> None:
        """Forget one name, or all that begin so."""
        ...


class HeadStore:
    """The store of the Ray cluster that this process is connected to (private API of Ray 2.60)."""

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        """See `Store`."""
        added = _client().internal_kv_put(
            key.encode(), value, overwrite=overwrite, namespace=_NAMESPACE, timeout=_STORE_TIMEOUT_S
        )
        return overwrite or added == 1

    def get(self, key: str) -> bytes | None:
        """See `Store`."""
        return _client().internal_kv_get(key.encode(), _NAMESPACE, _STORE_TIMEOUT_S)

    def keys(self, prefix: str) -> list[str]:
        """See `Store`."""
        raw_keys = _client().internal_kv_keys(prefix.encode(), _NAMESPACE, _STORE_TIMEOUT_S)
        return [key.decode() for key in raw_keys]

    def delete(self, key: str, *, by_prefix: bool = False) -> None:
        """See `Store`."""
        _client().internal_kv_del(
            key.encode(), del_by_prefix=by_prefix, namespace=_NAMESPACE, timeout=_STORE_TIMEOUT_S
        )


class _Client(Protocol):
    def internal_kv_put(
        self, key: bytes, value: bytes, *, overwrite: bool, namespace: bytes, timeout: float
    ) -> int: ...
    def internal_kv_get(self, key: bytes, namespace: bytes, timeout: float) -> bytes | None: ...
    def internal_kv_keys(self, prefix: bytes, namespace: bytes, timeout: float) -> list[bytes]: ...
    def internal_kv_del(
        self, key: bytes, *, del_by_prefix: bool, namespace: bytes, timeout: float
    ) -> int: ...


def _client() -> _Client:
    from ray.experimental.internal_kv import internal_kv_get_gcs_client

    client = internal_kv_get_gcs_client()
    if client is None:
        raise ConnectionError("not connected to a Ray cluster, so that nothing can be kept")
    return cast(_Client, client)


def unix_time_s() -> float:
    """Seconds since 1970: the one clock that means the same to two processes."""
    return datetime.now(UTC).timestamp()


def save(name: str, data: bytes) -> None:
    """Keep a small note; blocks for milliseconds."""
    HeadStore().put(f"note/{name}", data, overwrite=True)


def load(name: str) -> bytes | None:
    """A note as it was kept last; None when there is none. Blocks for milliseconds."""
    return HeadStore().get(f"note/{name}")


def clear_store() -> None:
    """Begin anew: what an earlier deployment on this cluster has kept does not count."""
    HeadStore().delete("", by_prefix=True)


class GenerationStatus(StrEnum):
    """What became of a generation."""

    STARTED = "started"
    """The deployment was started with it."""
    IN_PROGRESS = "in progress"
    """Somebody is carrying it out, or was and is gone."""
    APPLIED = "applied"
    REVERTED = "reverted"
    """It did not work out; the next generation is as the one before it."""
    NOT_REVERTED = "not reverted"
    """It did not work out, and its operator wanted no way back."""


ROLLBACK_STATUSES = frozenset({GenerationStatus.STARTED, GenerationStatus.APPLIED})
"""Generations that somebody may want to go back to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One generation, as operators look back at it."""

    generation: int
    at_s: float | None
    """When it was written, in seconds since 1970; None for that of the start."""
    operation: str
    """What brought it: `apply`, `rollback`, ..."""
    status: GenerationStatus
    why: str = ""
    """What went wrong, or what it was judged by."""


class Generations:
    """The configurations that were applied, and what became of each."""

    def __init__(
        self, store: Store | None = None, *, now_s: Callable[[], float] = unix_time_s
    ) -> None:
        self._store = store or HeadStore()
        self._now_s = now_s
        self._cached: LiveConfig | None = None
        """The last that was read: a generation never changes, and reading one takes 30 ms."""

    def newest(self, initial_config: DeploymentConfig) -> LiveConfig:
        """The configuration that holds now.

        Raises:
            ConfigInvalid: another version of baton has written what this one cannot use.
        """
        for number in sorted(self._numbers(), reverse=True):
            if (config := self.find(number)) is not None:
                return LiveConfig(generation=number, config=config)
        return LiveConfig(generation=0, config=initial_config)

    def newest_number(self) -> int:
        """The newest generation's."""
        return max(self._numbers(), default=0)

    def find(self, generation: int) -> DeploymentConfig | None:
        """The configuration of a generation; None when it is not kept (any more).

        Raises:
            ConfigInvalid: another version of baton has written what this one cannot use.
        """
        if self._cached is not None and self._cached.generation == generation:
            return self._cached.config
        data = self._store.get(_key(generation))
        if data is None:
            return None
        config = load_text(json.loads(data)["config"])
        self._cached = LiveConfig(generation=generation, config=config)
        return config

    def add(self, live: LiveConfig, *, operation: str = "apply") -> bool:
        """Keep the next configuration; False when somebody else took its number first."""
        if not self._put(live, operation):
            return False
        self._cached = live
        if live.generation > _MAX_GENERATIONS:
            for key in (
                _key(live.generation - _MAX_GENERATIONS),
                _status_key(live.generation - _MAX_GENERATIONS),
            ):
                self._store.delete(key)
        return True

    def add_first(self, config: DeploymentConfig) -> None:
        """Keep what the deployment was started with, so that one can go back to it. Idempotent."""
        if self._put(LiveConfig(generation=0, config=config), "up"):
            self.set_status(0, GenerationStatus.STARTED)

    def set_status(self, generation: int, status: GenerationStatus, why: str = "") -> None:
        """Write down what became of a generation; the last word counts."""
        entry = {"fate": str(status), "why": why}
        self._store.put(_status_key(generation), json.dumps(entry).encode(), overwrite=True)

    def history(self) -> list[GenerationRecord]:
        """Every generation that is kept, oldest first."""
        return [self._record_of(number) for number in sorted(self._numbers())]

    def _record_of(self, generation: int) -> GenerationRecord:
        entry = json.loads(self._store.get(_key(generation)) or b"{}")
        status_entry = json.loads(self._store.get(_status_key(generation)) or b"{}")
        return GenerationRecord(
            generation=generation,
            at_s=entry.get("at_s") if generation else None,
            operation=str(entry.get("by", "?")),
            status=GenerationStatus(status_entry.get("fate", GenerationStatus.IN_PROGRESS)),
            why=str(status_entry.get("why", "")),
        )

    def _put(self, live: LiveConfig, operation: str) -> bool:
        entry = {"config": render(live.config), "by": operation, "at_s": self._now_s()}
        return self._store.put(_key(live.generation), json.dumps(entry).encode(), overwrite=False)

    def _numbers(self) -> list[int]:
        return [int(key.removeprefix(_CONFIG_PREFIX)) for key in self._store.keys(_CONFIG_PREFIX)]


def _key(generation: int) -> str:
    return f"{_CONFIG_PREFIX}{generation:010d}"


def _status_key(generation: int) -> str:
    return f"{_STATUS_PREFIX}{generation:010d}"


class ConfigFollower:
    """Finds configurations of which this process was not told."""

    def __init__(
        self,
        generations: Generations,
        *,
        current: Callable[[], LiveConfig],
        commit: Callable[[LiveConfig], Awaitable[object]],
        interval_s: float = _POLL_INTERVAL_S,
    ) -> None:
        self._generations = generations
        self._current = current
        self._commit = commit
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look. Idempotent."""
        if self._task is None:
            # A context of its own: Ray would take it for part of the request that is served now.
            self._task = asyncio.create_task(
                self._follow(), name="config-follower", context=contextvars.Context()
            )

    async def stop(self) -> None:
        """Stop looking. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def poll(self) -> None:
        """Take the newest configuration if it is newer than the present one."""
        current = self._current()
        if await asyncio.to_thread(self._generations.newest_number) > current.generation:
            newest = await asyncio.to_thread(self._generations.newest, current.config)
            await self._commit(newest)

    async def _follow(self) -> None:
        while True:
            try:
                await self.poll()
            except Exception as error:  # noqa: BLE001 - a boundary: whatever it is, look again
                _LOGGER.warning(
                    "the newest configuration cannot be taken (%s: %s); going on with generation"
                    " %d and looking again",
                    type(error).__name__,
                    str(error).partition("\n")[0],
                    self._current().generation,
                )
            await asyncio.sleep(self._interval_s)
