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
_PREFIX = "config/"
_FATES = "fate/"
BUILT = "built"
"""The note that says what the deployments that run were built from."""
WHERE = "where"
"""The note that says where clients come to a deployment on a cluster of somebody else's."""
ROLLOUT = "rollout"
"""The note that says how far the last rollout is."""
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


def wall_s() -> float:
    """Seconds since 1970: the one clock that means the same to two processes."""
    return datetime.now(UTC).timestamp()


def save(name: str, data: bytes) -> None:
    """Keep a small note; blocks for milliseconds."""
    HeadStore().put(f"note/{name}", data, overwrite=True)


def load(name: str) -> bytes | None:
    """A note as it was kept last; None when there is none. Blocks for milliseconds."""
    return HeadStore().get(f"note/{name}")


def forget_all() -> None:
    """Begin anew: what an earlier deployment on this cluster has kept does not count."""
    HeadStore().delete("", by_prefix=True)


class Fate(StrEnum):
    """What became of a generation."""

    STARTED = "started"
    """The deployment was started with it."""
    UNDER_WAY = "under way"
    """Somebody is carrying it out, or was and is gone."""
    APPLIED = "applied"
    TAKEN_BACK = "taken back"
    """It did not work out; the next generation is as the one before it."""
    LEFT = "left as it is"
    """It did not work out, and its operator wanted no way back."""


GOOD = frozenset({Fate.STARTED, Fate.APPLIED})
"""Generations that somebody may want to go back to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One generation, as operators look back at it."""

    generation: int
    at_s: float | None
    """When it was written, in seconds since 1970; None for that of the start."""
    by: str
    """What brought it: `apply`, `rollback`, ..."""
    fate: Fate
    why: str = ""
    """What went wrong, or what it was judged by."""


class Generations:
    """The configurations that were applied, and what became of each."""

    def __init__(self, store: Store | None = None, *, now_s: Callable[[], float] = wall_s) -> None:
        self._store = store or HeadStore()
        self._now_s = now_s
        self._read: LiveConfig | None = None
        """The last that was read: a generation never changes, and reading one takes 30 ms."""

    def newest(self, started_with: DeploymentConfig) -> LiveConfig:
        """The configuration that holds now.

        Raises:
            ConfigInvalid: another version of baton has written what this one cannot use.
        """
        for number in sorted(self._numbers(), reverse=True):
            if (config := self.find(number)) is not None:
                return LiveConfig(generation=number, config=config)
        return LiveConfig(generation=0, config=started_with)

    def number(self) -> int:
        """The newest generation's."""
        return max(self._numbers(), default=0)

    def find(self, generation: int) -> DeploymentConfig | None:
        """The configuration of a generation; None when it is not kept (any more).

        Raises:
            ConfigInvalid: another version of baton has written what this one cannot use.
        """
        if self._read is not None and self._read.generation == generation:
            return self._read.config
        data = self._store.get(_key(generation))
        if data is None:
            return None
        config = load_text(json.loads(data)["config"])
        self._read = LiveConfig(generation=generation, config=config)
        return config

    def add(self, live: LiveConfig, *, by: str = "apply") -> bool:
        """Keep the next configuration; False when somebody else took its number first."""
        if not self._put(live, by):
            return False
        self._read = live
        if live.generation > _KEPT:
            for key in (_key(live.generation - _KEPT), _fate_key(live.generation - _KEPT)):
                self._store.delete(key)
        return True

    def add_first(self, config: DeploymentConfig) -> None:
        """Keep what the deployment was started with, so that one can go back to it. Idempotent."""
        if self._put(LiveConfig(generation=0, config=config), "up"):
            self.settle(0, Fate.STARTED)

    def settle(self, generation: int, fate: Fate, why: str = "") -> None:
        """Write down what became of a generation; the last word counts."""
        told = {"fate": str(fate), "why": why}
        self._store.put(_fate_key(generation), json.dumps(told).encode(), overwrite=True)

    def history(self) -> list[Kept]:
        """Every generation that is kept, oldest first."""
        return [self._kept(number) for number in sorted(self._numbers())]

    def _kept(self, generation: int) -> Kept:
        head = json.loads(self._store.get(_key(generation)) or b"{}")
        fate = json.loads(self._store.get(_fate_key(generation)) or b"{}")
        return Kept(
            generation=generation,
            at_s=head.get("at_s") if generation else None,
            by=str(head.get("by", "?")),
            fate=Fate(fate.get("fate", Fate.UNDER_WAY)),
            why=str(fate.get("why", "")),
        )

    def _put(self, live: LiveConfig, by: str) -> bool:
        told = {"config": render(live.config), "by": by, "at_s": self._now_s()}
        return self._store.put(_key(live.generation), json.dumps(told).encode(), overwrite=False)

    def _numbers(self) -> list[int]:
        return [int(key.removeprefix(_PREFIX)) for key in self._store.keys(_PREFIX)]


def _key(generation: int) -> str:
    return f"{_PREFIX}{generation:010d}"


def _fate_key(generation: int) -> str:
    return f"{_FATES}{generation:010d}"


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
