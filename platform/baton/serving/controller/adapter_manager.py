"""The controller's part of loading and unloading adapters in a running deployment.

Theory of operation. One change runs at a time.

- Load: the rules (`control.fleet.adapter_registry`) and every replica of the model check the files
  and the rank. A failed check changes nothing. The store takes the next version (*commit*); then
  replicas, and last the ingresses, receive it.
- Unload: ingresses mark the adapter as draining and reject new requests for it. The adapter leaves
  the registry once no ingress has had a request for it for `_QUIET_S`, because a request may be
  between an API server and its coordinator. The total timeout of requests bounds the drain.

A process that misses a notice finds the version in the store, so it delays no change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.config.derive.options import adapter_rules
from baton.config.schema.deployment import DeploymentConfig
from baton.control.fleet.adapter_registry import (
    AdapterRegistry,
    AdapterRejection,
    LoadRequest,
    load_adapter,
    remove_drained,
    unload_adapter,
    unserved_adapters,
)
from baton.runtime.ports import Clock
from baton.serving.ray.serve_control import NO_REPLICA_READY, CallResults
from baton.serving.scaling.ports import TickInputs
from baton.serving.shared.names import INGRESS
from baton.serving.store.adapter_store import AdapterFollower, AdapterStore, encode_registry
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_CHECK_TIMEOUT_S = 60.0
"""Covers the slowest disk, or a hub from which a replica fetches the adapter."""
_NOTIFY_TIMEOUT_S = 5.0
_LOCK_TIMEOUT_S = 70.0
_QUIET_S = 5.0
_DRAIN_CHECK_INTERVAL_S = 1.0
_BUSY = AdapterRejection(
    status=503, reason="another adapter is being loaded or unloaded; try again"
)
RegistryChange = Callable[[AdapterRegistry], Awaitable[AdapterRegistry | AdapterRejection]]


class CallReplicas(Protocol):
    """Calls every replica of a deployment."""

    async def __call__(
        self, deployment: str, method: str, *arguments: object, timeout_s: float
    ) -> CallResults:
        """Answers, and a reason for each replica without an answer."""
        ...


@dataclass(slots=True)
class _Drain:
    started_at_s: float
    quiet_since_at_s: float | None = None


class AdapterManager:
    """Changes the registry of a deployment. As a `TickListener` it checks drains."""

    def __init__(
        self,
        config: Callable[[], DeploymentConfig],
        call: CallReplicas,
        *,
        clock: Clock,
        store: AdapterStore | None = None,
    ) -> None:
        """`config` returns the configuration in force."""
        self._config = config
        self._call = call
        self._clock = clock
        self._store = store or AdapterStore()
        self.follower = AdapterFollower(self._log_unserved, self._store)
        self._change_lock = asyncio.Lock()
        self._drains: dict[str, _Drain] = {}
        self._checked_at_s = float("-inf")

    async def load(self, request: LoadRequest) -> AdapterRejection | None:
        """Add an adapter to a model; returns the reason if that fails."""

        async def change(registry: AdapterRegistry) -> AdapterRegistry | AdapterRejection:
            after = load_adapter(registry, request, adapter_rules(self._config()))
            if isinstance(after, AdapterRejection):
                return after
            added = after.adapters[-1]
            return await self._check_replicas(added.model, added.source) or after

        return await self._commit_change("adapter_loaded", request.name, request.tenant, change)

    async def unload(self, name: str, tenant: str) -> AdapterRejection | None:
        """Start to drain an adapter; returns the reason if that fails."""

        async def change(registry: AdapterRegistry) -> AdapterRegistry | AdapterRejection:
            return unload_adapter(registry, name, adapter_rules(self._config()))

        return await self._commit_change("adapter_unloading", name, tenant, change)

    def rows(self) -> list[dict[str, object]]:
        """Every loaded or draining adapter, for operators."""
        rules = adapter_rules(self._config())
        not_served = {
            adapter.key: reason
            for adapter, reason in unserved_adapters(self.follower.registry, rules)
        }
        rows: list[dict[str, object]] = []
        for adapter in self.follower.registry.adapters:
            row: dict[str, object] = {
                "name": adapter.name,
                "model": adapter.model,
                "source": adapter.source,
                "tenant": adapter.tenant,
                "state": "draining" if adapter.draining else "loaded",
            }
            reason = not_served.get(adapter.key)
            rows.append(row if reason is None else row | {"not_served": reason})
        return rows

    async def on_tick(self, _inputs: TickInputs) -> None:
        """Remove drained adapters."""
        now_s = self._clock.now_s()
        if (
            not self.follower.registry.draining
            or now_s < self._checked_at_s + _DRAIN_CHECK_INTERVAL_S
        ):
            return
        self._checked_at_s = now_s
        if drained := await self._find_drained(now_s):
            await self._remove_drained(drained)

    async def _find_drained(self, now_s: float) -> list[str]:
        draining = {adapter.key for adapter in self.follower.registry.draining}
        self._drains = {
            key: self._drains.get(key) or _Drain(started_at_s=now_s) for key in draining
        }
        in_flight = await self._in_flight()
        max_request_s = self._config().admission.timeouts.total_s
        drained = []
        for key, drain in self._drains.items():
            quiet = in_flight is not None and not in_flight.get(key)
            drain.quiet_since_at_s = (drain.quiet_since_at_s or now_s) if quiet else None
            is_quiet = (
                drain.quiet_since_at_s is not None and now_s - drain.quiet_since_at_s >= _QUIET_S
            )
            if is_quiet or now_s - drain.started_at_s > max_request_s + _QUIET_S:
                drained.append(key)
        return drained

    async def _in_flight(self) -> Mapping[str, int] | None:
        """How many requests need each adapter; None unless all ingresses answer."""
        version = self.follower.registry.version
        answers = await self._call(
            INGRESS,
            "adapters_in_flight",
            encode_registry(self.follower.registry),
            timeout_s=_NOTIFY_TIMEOUT_S,
        )
        counts: dict[str, int] = {}
        for value in answers.values:
            if not isinstance(value, dict) or value.get("version", 0) < version:
                return None
            for key, count in value["needed"].items():
                counts[key] = counts.get(key, 0) + int(count)
        return None if _unresponsive([answers]) else counts

    async def _remove_drained(self, keys: Sequence[str]) -> None:
        async def change(registry: AdapterRegistry) -> AdapterRegistry | AdapterRejection:
            return remove_drained(registry, keys)

        names = ", ".join(keys)
        refusal = await self._commit_change("adapter_unloaded", names, "-", change)
        if refusal is not None:
            fields = {"adapter": names, "reason": refusal.reason}
            log_event(_LOGGER, logging.WARNING, "adapter_not_unloaded", fields)

    async def _commit_change(
        self, event: str, name: str, tenant: str, change: RegistryChange
    ) -> AdapterRejection | None:
        try:
            async with asyncio.timeout(_LOCK_TIMEOUT_S):
                async with self._change_lock:
                    updated = await self._apply_change(change)
        except TimeoutError:
            return _BUSY
        except (OSError, RuntimeError, ValueError) as error:
            reason = f"the registry of adapters cannot be changed now: {error}; try again"
            return AdapterRejection(status=503, reason=reason)
        if isinstance(updated, AdapterRejection):
            return updated
        fields = {"adapter": name, "tenant": tenant, "version": updated.version}
        log_event(_LOGGER, logging.INFO, event, fields)
        await self._notify(updated)
        return None

    async def _apply_change(self, change: RegistryChange) -> AdapterRegistry | AdapterRejection:
        await self.follower.poll()
        current = self.follower.registry
        updated = await change(current)
        if isinstance(updated, AdapterRejection) or updated is current:
            return updated
        if not await asyncio.to_thread(self._store.add, updated):
            return _BUSY
        self.follower.update(updated)
        return updated

    async def _check_replicas(self, model: str, source: str) -> AdapterRejection | None:
        """Why a replica of the model cannot serve the adapter."""
        pools = [name for name, pool in self._config().pools.items() if pool.model == model]
        places = list(adapter_rules(self._config())[model].paths)
        answers = await asyncio.gather(
            *(
                self._call(pool, "check_adapter", source, places, timeout_s=_CHECK_TIMEOUT_S)
                for pool in pools
            )
        )
        for pool_answers in answers:
            for answer in pool_answers.values:
                if isinstance(answer, dict):
                    return AdapterRejection(
                        status=int(answer["status"]), reason=str(answer["reason"])
                    )
            if unresponsive := _unresponsive([pool_answers]):
                reason = (
                    f"a replica does not say whether it has the adapter ({unresponsive[0]});"
                    " try again"
                )
                return AdapterRejection(status=503, reason=reason)
        return None

    async def _notify(self, registry: AdapterRegistry) -> None:
        """Notify replicas first, so that ingresses offer only adapters that replicas have."""
        text = encode_registry(registry)
        pools = (
            self._call(pool, "apply_adapters", text, timeout_s=_NOTIFY_TIMEOUT_S)
            for pool in self._config().pools
        )
        answers = list(await asyncio.gather(*pools))
        answers.append(
            await self._call(INGRESS, "apply_adapters", text, timeout_s=_NOTIFY_TIMEOUT_S)
        )
        if unresponsive := _unresponsive(answers):
            fields = {
                "version": registry.version,
                "reason": unresponsive[0],
                "unresponsive": len(unresponsive),
            }
            log_event(_LOGGER, logging.WARNING, "adapters_not_told", fields)

    def _log_unserved(self, registry: AdapterRegistry) -> None:
        for adapter, reason in unserved_adapters(registry, adapter_rules(self._config())):
            fields = {"adapter": adapter.name, "model": adapter.model, "reason": reason}
            log_event(_LOGGER, logging.WARNING, "adapter_not_served", fields)


def _unresponsive(answers: Iterable[CallResults]) -> list[str]:
    """Failures, but for pools without replicas: theirs check when a request needs the adapter."""
    return [
        reason
        for calls in answers
        for reason in calls.failures
        if not reason.endswith(NO_REPLICA_READY)
    ]
