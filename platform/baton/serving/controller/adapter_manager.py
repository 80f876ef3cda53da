"""The controller's part when adapters are loaded and unloaded while a deployment runs.

Theory of operation. One change at a time. To load: the rules are asked
(`control.adapter_registry`), then every replica of the model whether it has the files and room for
their rank; one that has not ends it, and nothing has changed. Then the next version is written to
the store (*commit*), replicas are told, and last the ingresses, which offer it from then on. To
unload, ingresses are told that it is draining, and offer it no more. Replicas keep it until no
ingress has had a request that needs it for `_QUIET_S`: a request may still be on its way from an
API server to its coordinator. Then, or when the longest request must have ended, it leaves the
registry.

Whoever is not told of a version finds it in the store, so a process that is away delays nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.config.derive.options import adapter_rules
from baton.config.schema.deployment import DeploymentConfig
from baton.control.fleet.adapter_registry import (
    AdapterRefusal,
    LoadOrder,
    Registry,
    hindrances,
    loaded,
    unloaded,
    without,
)
from baton.runtime.ports import Clock
from baton.serving.ray.serve_control import NONE_READY, Answers
from baton.serving.scaling.ports import Looks
from baton.serving.shared.names import INGRESS
from baton.serving.store.adapter_store import AdapterHolder, AdapterStore, encoded
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_CHECK_S = 60.0
"""For the slowest disk, or a hub from which an adapter is fetched."""
_TELL_S = 5.0
_LOCK_S = 70.0
_QUIET_S = 5.0
_LOOK_EVERY_S = 1.0
_BUSY = AdapterRefusal(status=503, why="another adapter is being loaded or unloaded; try again")
Change = Callable[[Registry], Awaitable[Registry | AdapterRefusal]]


class Calls(Protocol):
    """Calls every replica of a deployment."""

    async def __call__(
        self, deployment: str, method: str, *arguments: object, timeout_s: float
    ) -> Answers:
        """What they said, and why others said nothing."""
        ...


@dataclass(slots=True)
class _Drain:
    """What is known of one adapter that is being unloaded."""

    since_s: float
    quiet_since_s: float | None = None


class AdapterDesk:
    """Changes the registry of a deployment. A `ReportReader`: it looks with each turn at drains."""

    def __init__(
        self,
        config: Callable[[], DeploymentConfig],
        call: Calls,
        *,
        clock: Clock,
        store: AdapterStore | None = None,
    ) -> None:
        """`config` says which holds now."""
        self._config = config
        self._call = call
        self._clock = clock
        self._store = store or AdapterStore()
        self.holder = AdapterHolder(self._say_hindrances, self._store)
        self._changing = asyncio.Lock()
        self._drains: dict[str, _Drain] = {}
        self._looked_at_s = float("-inf")

    async def load(self, order: LoadOrder) -> AdapterRefusal | None:
        """Add an adapter to a model; says why it is not, or None."""

        async def change(registry: Registry) -> Registry | AdapterRefusal:
            after = loaded(registry, order, adapter_rules(self._config()))
            if isinstance(after, AdapterRefusal):
                return after
            added = after.adapters[-1]
            return await self._missing_somewhere(added.model, added.source) or after

        return await self._change("adapter_loaded", order.name, order.tenant, change)

    async def unload(self, name: str, tenant: str) -> AdapterRefusal | None:
        """Have an adapter taken away once no request needs it; says why it is not, or None."""

        async def change(registry: Registry) -> Registry | AdapterRefusal:
            return unloaded(registry, name, adapter_rules(self._config()))

        return await self._change("adapter_unloading", name, tenant, change)

    def rows(self) -> list[dict[str, object]]:
        """Every adapter that was added, for operators."""
        rules = adapter_rules(self._config())
        not_served = {one.key: why for one, why in hindrances(self.holder.registry, rules)}
        rows: list[dict[str, object]] = []
        for one in self.holder.registry.adapters:
            row: dict[str, object] = {
                "name": one.name,
                "model": one.model,
                "source": one.source,
                "tenant": one.tenant,
                "state": "draining" if one.draining else "loaded",
            }
            why = not_served.get(one.key)
            rows.append(row if why is None else row | {"not_served": why})
        return rows

    async def take(self, _looks: Looks) -> None:
        """Take away what has drained."""
        now_s = self._clock.now_s()
        if not self.holder.registry.draining or now_s < self._looked_at_s + _LOOK_EVERY_S:
            return
        self._looked_at_s = now_s
        if drained := await self._drained(now_s):
            await self._forget(drained)

    async def _drained(self, now_s: float) -> list[str]:
        draining = {one.key for one in self.holder.registry.draining}
        self._drains = {key: self._drains.get(key) or _Drain(since_s=now_s) for key in draining}
        needed = await self._in_flight()
        longest_s = self._config().admission.timeouts.total_s
        found = []
        for key, drain in self._drains.items():
            quiet = needed is not None and not needed.get(key)
            drain.quiet_since_s = (drain.quiet_since_s or now_s) if quiet else None
            is_quiet = drain.quiet_since_s is not None and now_s - drain.quiet_since_s >= _QUIET_S
            if is_quiet or now_s - drain.since_s > longest_s + _QUIET_S:
                found.append(key)
        return found

    async def _in_flight(self) -> Mapping[str, int] | None:
        """How many requests need each adapter; None where not all ingresses say it."""
        version = self.holder.registry.version
        answers = await self._call(
            INGRESS, "adapters_in_flight", encoded(self.holder.registry), timeout_s=_TELL_S
        )
        needed: dict[str, int] = {}
        for one in answers.given:
            if not isinstance(one, dict) or one.get("version", 0) < version:
                return None
            for key, count in one["needed"].items():
                needed[key] = needed.get(key, 0) + int(count)
        silent = [why for why in answers.missing if not why.endswith(NONE_READY)]
        return None if silent else needed

    async def _forget(self, keys: Sequence[str]) -> None:
        async def change(registry: Registry) -> Registry | AdapterRefusal:
            return without(registry, keys)

        names = ", ".join(keys)
        refusal = await self._change("adapter_unloaded", names, "-", change)
        if refusal is not None:
            fields = {"adapter": names, "why": refusal.why}
            log_event(_LOGGER, logging.WARNING, "adapter_not_unloaded", fields)

    async def _change(
        self, event: str, name: str, tenant: str, change: Change
    ) -> AdapterRefusal | None:
        try:
            async with asyncio.timeout(_LOCK_S):
                async with self._changing:
                    after = await self._changed(change)
        except TimeoutError:
            return _BUSY
        except (OSError, RuntimeError, ValueError) as error:
            why = f"the registry of adapters cannot be changed now: {error}; try again"
            return AdapterRefusal(status=503, why=why)
        if isinstance(after, AdapterRefusal):
            return after
        fields = {"adapter": name, "tenant": tenant, "version": after.version}
        log_event(_LOGGER, logging.INFO, event, fields)
        await self._tell(after)
        return None

    async def _changed(self, change: Change) -> Registry | AdapterRefusal:
        await self.holder.look()
        before = self.holder.registry
        after = await change(before)
        if isinstance(after, AdapterRefusal) or after is before:
            return after
        if not await asyncio.to_thread(self._store.add, after):
            return _BUSY
        self.holder.take(after)
        return after

    async def _missing_somewhere(self, model: str, source: str) -> AdapterRefusal | None:
        """Why a replica of the model cannot serve what is there."""
        pools = [name for name, pool in self._config().pools.items() if pool.model == model]
        places = list(adapter_rules(self._config())[model].places)
        answers = await asyncio.gather(
            *(
                self._call(pool, "check_adapter", source, places, timeout_s=_CHECK_S)
                for pool in pools
            )
        )
        for one in answers:
            for said in one.given:
                if isinstance(said, dict):
                    return AdapterRefusal(status=int(said["status"]), why=str(said["why"]))
            # A pool without replicas has nobody to ask; they look when a request needs it.
            if silent := [why for why in one.missing if not why.endswith(NONE_READY)]:
                why = f"a replica does not say whether it has the adapter ({silent[0]}); try again"
                return AdapterRefusal(status=503, why=why)
        return None

    async def _tell(self, registry: Registry) -> None:
        """Tell replicas, then ingresses: what is offered must be there."""
        text = encoded(registry)
        pools = (
            self._call(pool, "take_adapters", text, timeout_s=_TELL_S)
            for pool in self._config().pools
        )
        told = list(await asyncio.gather(*pools))
        told.append(await self._call(INGRESS, "take_adapters", text, timeout_s=_TELL_S))
        if silent := [why for one in told for why in one.missing if not why.endswith(NONE_READY)]:
            fields = {"version": registry.version, "why": silent[0], "silent": len(silent)}
            log_event(_LOGGER, logging.WARNING, "adapters_not_told", fields)

    def _say_hindrances(self, registry: Registry) -> None:
        for one, why in hindrances(registry, adapter_rules(self._config())):
            fields = {"adapter": one.name, "model": one.model, "why": why}
            log_event(_LOGGER, logging.WARNING, "adapter_not_served", fields)
