"""What outlives the processes of a deployment: its configuration as it is now, and small notes.

Theory of operation. Deployments carry the configuration that they were started with. What was
applied since is kept in the store of Ray's head (its GCS), under a number that goes up by one with
each change: a *generation*; the configuration of the start is generation 0. A number can be taken
once only, which is how two who apply at the same time find out. Whoever starts later, or restarts,
begins with the newest generation; whoever was not told of one finds it by looking every few seconds
(`ConfigFollower`). Every call to the store has a deadline. Without the head's own persistence its
store ends with the cluster, as the deployment does.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, cast

from baton.config.schema import DeploymentConfig

_LOGGER = logging.getLogger(__name__)
_NAMESPACE = b"baton"
_PREFIX = "config/"
_KEPT = 20
"""Generations that are kept, for operators to look back at."""
_STORE_S = 5.0
_FOLLOW_S = 5.0
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
            key.encode(), value, overwrite=overwrite, namespace=_NAMESPACE, timeout=_STORE_S
        )
        return overwrite or added == 1

    def get(self, key: str) -> bytes | None:
        """See `Store`."""
        return _client().internal_kv_get(key.encode(), _NAMESPACE, _STORE_S)

    def keys(self, prefix: str) -> list[str]:
        """See `Store`."""
        found = _client().internal_kv_keys(prefix.encode(), _NAMESPACE, _STORE_S)
        return [key.decode() for key in found]

    def delete(self, key: str, *, by_prefix: bool = False) -> None:
        """See `Store`."""
        _client().internal_kv_del(
            key.encode(), del_by_prefix=by_prefix, namespace=_NAMESPACE, timeout=_STORE_S
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


def save(name: str, data: bytes) -> None:
    """Keep a small note; blocks for milliseconds."""
    HeadStore().put(f"note/{name}", data, overwrite=True)


def load(name: str) -> bytes | None:
    """A note as it was kept last; None when there is none. Blocks for milliseconds."""
    return HeadStore().get(f"note/{name}")


def forget_all() -> None:
    """Begin anew: what an earlier deployment on this cluster has kept does not count."""
    HeadStore().delete("", by_prefix=True)


class Generations:
    """The configurations that were applied."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store or HeadStore()

    def newest(self, started_with: DeploymentConfig) -> LiveConfig:
        """The configuration that holds now."""
        for key in sorted(self._store.keys(_PREFIX), reverse=True):
            data = self._store.get(key)
            if data is not None:
                config = cast(DeploymentConfig, pickle.loads(data))  # noqa: S301 - our own bytes
                return LiveConfig(generation=_number(key), config=config)
        return LiveConfig(generation=0, config=started_with)

    def number(self) -> int:
        """The newest generation's."""
        return max(map(_number, self._store.keys(_PREFIX)), default=0)

    def add(self, live: LiveConfig) -> bool:
        """Keep the next configuration; False when somebody else took its number first."""
        data = pickle.dumps(live.config)
        if not self._store.put(_key(live.generation), data, overwrite=False):
            return False
        if live.generation > _KEPT:
            self._store.delete(_key(live.generation - _KEPT))
        return True


def _key(generation: int) -> str:
    return f"{_PREFIX}{generation:010d}"


def _number(key: str) -> int:
    return int(key.removeprefix(_PREFIX))


class ConfigFollower:
    """Finds configurations of which this process was not told."""

    def __init__(
        self,
        generations: Generations,
        *,
        current: Callable[[], LiveConfig],
        take: Callable[[LiveConfig], Awaitable[object]],
        interval_s: float = _FOLLOW_S,
    ) -> None:
        self._generations = generations
        self._current = current
        self._take = take
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

    async def look(self) -> None:
        """Take the newest configuration if it is newer than the present one."""
        current = self._current()
        if await asyncio.to_thread(self._generations.number) > current.generation:
            newest = await asyncio.to_thread(self._generations.newest, current.config)
            await self._take(newest)

    async def _follow(self) -> None:
        while True:
            try:
                await self.look()
            except Exception as error:  # noqa: BLE001 - a boundary: whatever it is, look again
                _LOGGER.warning(
                    "the newest configuration cannot be taken (%s: %s); going on with generation"
                    " %d and looking again",
                    type(error).__name__,
                    str(error).partition("\n")[0],
                    self._current().generation,
                )
            await asyncio.sleep(self._interval_s)
