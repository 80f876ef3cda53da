"""The configuration in force and small records, in the store of Ray's head.

Theory of operation. A deployment carries the configuration of its start, generation 0. The store of
Ray's head (its GCS) has each later configuration under the next number, its *generation*. A number
can be written only once, so concurrent commands notice each other. A process that starts takes the
newest generation. A process that misses a notice finds it by polling (`VersionFollower`). Every
call has a deadline. Without persistence of Ray's head the store ends with the cluster, as the
deployment does.

Generations are text, as of `baton config show`, so that another version of baton can read them.
Each has a status, for `baton history` and `baton rollback`.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol, cast

from baton.config.load import load_text
from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.render import render

_NAMESPACE = b"baton"
_CONFIG_PREFIX = "config/"
_STATUS_PREFIX = "fate/"
BUILD_RECORD_KEY = "built"
"""Builds of the running deployments."""
ENDPOINT_KEY = "where"
"""Address for clients of a deployment on an existing cluster."""
STARTED_BY_KEY = "started_by"
"""`user@host` of the command that started the deployment."""
ROLLOUT_KEY = "rollout"
"""Progress of the last rollout."""
_MAX_GENERATIONS = 20
"""Kept for the history."""
_STORE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConfig:
    """A configuration and its generation."""

    generation: int
    config: DeploymentConfig


class Store(Protocol):
    """Bytes by name. Calls block for milliseconds and have a deadline."""

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        """Write; returns False if the key exists and `overwrite` is off."""
        ...

    def get(self, key: str) -> bytes | None:
        """The bytes of a key; None without."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """The keys with a prefix."""
        ...

    def delete(self, key: str, *, by_prefix: bool = False) -> None:
        """Delete one key, or all with the prefix."""
        ...


class HeadStore:
    """The store of the connected Ray cluster (private API of Ray 2.60)."""

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
    """Seconds since 1970; comparable between processes, unlike the monotonic clock."""
    return datetime.now(UTC).timestamp()


def save(name: str, data: bytes) -> None:
    """Save a small record; blocks for milliseconds."""
    HeadStore().put(f"note/{name}", data, overwrite=True)


def load(name: str) -> bytes | None:
    """A record; None without. Blocks for milliseconds."""
    return HeadStore().get(f"note/{name}")


def clear_store() -> None:
    """Delete what an earlier deployment on this cluster has stored."""
    HeadStore().delete("", by_prefix=True)


class GenerationStatus(StrEnum):
    """The status of a generation."""

    STARTED = "started"
    """The deployment was started with it."""
    IN_PROGRESS = "in progress"
    """A command applies it, or was killed while it did."""
    APPLIED = "applied"
    REVERTED = "reverted"
    """It failed; the next generation has the earlier configuration."""
    NOT_REVERTED = "not reverted"
    """It failed, and the operator disabled the rollback."""


ROLLBACK_STATUSES = frozenset({GenerationStatus.STARTED, GenerationStatus.APPLIED})


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One generation in the history."""

    generation: int
    at_s: float | None
    """When it was written, in seconds since 1970; None for generation 0."""
    operation: str
    status: GenerationStatus
    reason: str = ""
    """The failure, or why it was good."""
    author: str = ""
    """`user@host` of the command; empty if it is not known."""


def user_at_host() -> str:
    """The user and the machine of this process: `ada@node-1`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in a container
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class Generations:
    """The applied configurations and their statuses."""

    def __init__(
        self,
        store: Store | None = None,
        *,
        now_s: Callable[[], float] = unix_time_s,
        author: Callable[[], str] = user_at_host,
    ) -> None:
        self._store = store or HeadStore()
        self._now_s = now_s
        self._author = author
        self._cached: LiveConfig | None = None
        """The last generation read: it never changes, and a read takes 30 ms."""

    def newest(self, initial_config: DeploymentConfig) -> LiveConfig:
        """The configuration in force.

        Raises:
            ConfigInvalid: another version of baton wrote a configuration that this version cannot
                use.
        """
        for number in sorted(self._numbers(), reverse=True):
            if (config := self.find(number)) is not None:
                return LiveConfig(generation=number, config=config)
        return LiveConfig(generation=0, config=initial_config)

    def newest_number(self) -> int:
        """The newest generation's number."""
        return max(self._numbers(), default=0)

    def find(self, generation: int) -> DeploymentConfig | None:
        """The configuration of a generation; None if it is not kept. Raises like `newest`."""
        if self._cached is not None and self._cached.generation == generation:
            return self._cached.config
        data = self._store.get(_key(generation))
        if data is None:
            return None
        config = load_text(json.loads(data)["config"])
        self._cached = LiveConfig(generation=generation, config=config)
        return config

    def add(self, live: LiveConfig, *, operation: str = "apply") -> bool:
        """Store the next configuration; False if another command took its number first."""
        if not self._put(live, operation, self._author()):
            return False
        self._cached = live
        if live.generation > _MAX_GENERATIONS:
            dropped = live.generation - _MAX_GENERATIONS
            self._store.delete(_key(dropped))
            self._store.delete(_status_key(dropped))
        return True

    def add_first(self, config: DeploymentConfig) -> None:
        """Store generation 0, for rollbacks. Idempotent."""
        author = (self._store.get(f"note/{STARTED_BY_KEY}") or b"").decode()
        if self._put(LiveConfig(generation=0, config=config), "up", author):
            self.set_status(0, GenerationStatus.STARTED)

    def set_status(self, generation: int, status: GenerationStatus, reason: str = "") -> None:
        """Store a generation's status; the last write wins."""
        entry = {"fate": str(status), "why": reason}
        self._store.put(_status_key(generation), json.dumps(entry).encode(), overwrite=True)

    def history(self) -> list[GenerationRecord]:
        """Every kept generation, oldest first."""
        return [self._record_of(number) for number in sorted(self._numbers())]

    def _record_of(self, generation: int) -> GenerationRecord:
        entry = json.loads(self._store.get(_key(generation)) or b"{}")
        status_entry = json.loads(self._store.get(_status_key(generation)) or b"{}")
        return GenerationRecord(
            generation=generation,
            at_s=entry.get("at_s") if generation else None,
            operation=str(entry.get("by", "?")),
            status=GenerationStatus(status_entry.get("fate", GenerationStatus.IN_PROGRESS)),
            reason=str(status_entry.get("why", "")),
            author=str(entry.get("author", "")),
        )

    def _put(self, live: LiveConfig, operation: str, author: str) -> bool:
        entry = {
            "config": render(live.config),
            "by": operation,
            "at_s": self._now_s(),
            "author": author,
        }
        return self._store.put(_key(live.generation), json.dumps(entry).encode(), overwrite=False)

    def _numbers(self) -> list[int]:
        return [int(key.removeprefix(_CONFIG_PREFIX)) for key in self._store.keys(_CONFIG_PREFIX)]


def _key(generation: int) -> str:
    return f"{_CONFIG_PREFIX}{generation:010d}"


def _status_key(generation: int) -> str:
    return f"{_STATUS_PREFIX}{generation:010d}"
