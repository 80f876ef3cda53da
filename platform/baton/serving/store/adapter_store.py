"""The registry of adapters in the store, and how processes follow it.

Theory of operation. The store of Ray's head has the registry under its version. A version can be
written only once, so of two concurrent changes one has to retry. Every process starts with the
newest version, receives later versions from the controller, and polls for missed versions
(`AdapterFollower`). Versions only increase.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, replace

from baton.control.fleet.adapter_registry import AdapterRegistry, RuntimeAdapter
from baton.serving.store.config_store import HeadStore, Store
from baton.serving.store.version_follower import POLL_INTERVAL_S, VersionFollower

_PREFIX = "adapters/"
_MAX_VERSIONS = 3
"""Kept versions, so that a reader finds the newest during a write."""


def encode_registry(registry: AdapterRegistry) -> str:
    """The JSON that is stored and sent to other processes."""
    adapters = [asdict(adapter) for adapter in registry.adapters]
    return json.dumps({"version": registry.version, "adapters": adapters})


def decode_registry(text: str | bytes) -> AdapterRegistry:
    """Inverse of `encode_registry`.

    Raises:
        ValueError: the text is no registry.
    """
    try:
        entry = json.loads(text)
        adapters = tuple(RuntimeAdapter(**item) for item in entry["adapters"])
        return AdapterRegistry(version=int(entry["version"]), adapters=adapters)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"cannot be read: {type(error).__name__}: {error}") from error


class AdapterStore:
    """The registry in the cluster's store; calls block for milliseconds."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store or HeadStore()

    def newest(self) -> AdapterRegistry:
        """The current registry; empty without any. Raises `ValueError` like `decode_registry`."""
        for key in sorted(self._store.keys(_PREFIX), reverse=True):
            if (data := self._store.get(key)) is not None:
                return decode_registry(data)
        return AdapterRegistry()

    def version(self) -> int:
        """The newest version; 0 without any."""
        keys = self._store.keys(_PREFIX)
        return max((int(key.removeprefix(_PREFIX)) for key in keys), default=0)

    def add(self, registry: AdapterRegistry) -> bool:
        """Store the next version; False if another process stored it first."""
        data = encode_registry(registry).encode()
        if not self._store.put(_key(registry.version), data, overwrite=False):
            return False
        if registry.version > _MAX_VERSIONS:
            self._store.delete(_key(registry.version - _MAX_VERSIONS))
        return True


def _key(version: int) -> str:
    return f"{_PREFIX}{version:010d}"


def active_adapters(store: AdapterStore | None = None) -> AdapterRegistry:
    """The registry for a restarted deployment, without draining adapters."""
    registry = (store or AdapterStore()).newest()
    return replace(
        registry, adapters=tuple(adapter for adapter in registry.adapters if not adapter.draining)
    )


class AdapterFollower:
    """The registry that one process applies."""

    def __init__(
        self,
        apply: Callable[[AdapterRegistry], None],
        store: AdapterStore | None = None,
        *,
        interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        self.registry = AdapterRegistry()
        self._apply = apply
        self._store = store or AdapterStore()
        self._follower = VersionFollower(
            "adapters",
            newest_version=self._store.version,
            current_version=lambda: self.registry.version,
            apply_newest=self._update_to_newest,
            interval_s=interval_s,
        )

    async def start(self) -> None:
        """Apply the newest registry and follow it. Idempotent."""
        await self._follower.poll_or_log()
        self._follower.start()

    async def close(self) -> None:
        """Stop following. Idempotent."""
        await self._follower.stop()

    def update(self, registry: AdapterRegistry) -> int:
        """Apply a registry unless it is older; returns the version in force."""
        if registry.version > self.registry.version:
            self.registry = registry
            self._apply(registry)
        return self.registry.version

    def reapply(self) -> None:
        """Apply the current registry again, after a change of the configuration."""
        self._apply(self.registry)

    async def poll(self) -> None:
        """Apply the newest registry of the store.

        Raises:
            ValueError: it cannot be read.
            OSError, RuntimeError: the store cannot be reached.
        """
        await self._follower.poll()

    async def _update_to_newest(self) -> None:
        self.update(await asyncio.to_thread(self._store.newest))
