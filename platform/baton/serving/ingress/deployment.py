"""One ingress replica, as Ray Serve starts and asks it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from baton.config.schema.deployment import DeploymentConfig, FrontendKind
from baton.domain.commands import RecordOrder
from baton.domain.demand import ColdStart
from baton.domain.errors import LinkFailed
from baton.engine.vllm.gate.gate import AsgiApp
from baton.serving.controller.quota_allocator import Shares
from baton.serving.ingress.adapter_admin import administered_by
from baton.serving.ingress.model_ingress import IngressBody
from baton.serving.ingress.multi_model import SeveralBodies
from baton.serving.ray.asgi_port import serve_app_at_port, serve_at_port
from baton.serving.ray.grpc_port import keep_port_private
from baton.serving.ray.packing import packed, packed_reports
from baton.serving.ray.serve_control import call_all
from baton.serving.replica import hub_environment
from baton.serving.replica.model_download import fetch_for_ingress
from baton.serving.replica.start_reports import StartReporter
from baton.serving.shared.metadata import METRICS_ADDRESS
from baton.serving.shared.names import INGRESS
from baton.serving.store.adapter_store import AdapterHolder, decoded
from baton.serving.store.config_participant import ConfigHolder
from baton.serving.store.config_store import Generations, LiveConfig
from baton.serving.store.link_keys import link_options
from baton.telemetry.logs import configure_logs, log_event

_LOGGER = logging.getLogger(__name__)
_RUST_CORES = 4
"""What one ingress in Rust keeps busy: its program and its gate have several threads each."""


def own_cpu_s() -> float:
    """Processor time of this process and of those below it, so far."""
    own = psutil.Process()
    whole = 0.0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            times = process.cpu_times()
            whole += times.user + times.system
    return whole


def waited_s(thread_id: int) -> float:
    """For how long a thread of this process had work and no core to do it on, so far.

    0 where the kernel does not say. Source: Documentation/scheduler/sched-stats.rst of Linux.
    """
    try:
        told = Path(f"/proc/self/task/{thread_id}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(told[1]) / 1e9


class Ingress:
    """The class behind the ingress deployment; `app` decorates it."""

    def __init__(self, config: DeploymentConfig, *_handles: object) -> None:
        logs = config.observability.logs
        configure_logs(logs.format, logs.level)
        self._config = config
        self._models_folder = config.cluster.model_cache.path
        self._bodies: SeveralBodies | None = None
        self._holder: ConfigHolder | None = None
        self._adapters: AdapterHolder | None = None

    async def __serve_build_asgi_app__(self) -> AsgiApp:
        """Called once by Serve when the replica starts."""
        from baton.serving.ray.context import app_name, node_address, replica_name

        keep_port_private(node_address())
        await asyncio.to_thread(hub_environment.take, self._models_folder)
        generations = Generations()
        live = await asyncio.to_thread(generations.newest, self._config)
        link = await asyncio.to_thread(link_options)

        def make(model: str, part: DeploymentConfig) -> IngressBody:
            alone = len(live.config.models) == 1
            name = replica_name() if alone else f"{replica_name()}/{model}"
            return IngressBody(part, app=app_name(), coordinator_id=name, link=link)

        for model in live.config.models.values():
            await fetch_for_ingress(model, StartReporter(INGRESS, node_address()))
        self._bodies = SeveralBodies(live.config, make)
        app = await self._bodies.start(node_address())
        gates = [body.rust for body in self._bodies.bodies if body.rust is not None]
        for gate in gates:
            serve_at_port(gate, os.environ)
        if not gates:
            serve_app_at_port(app)
        holder = self._holder = ConfigHolder(live, self._bodies.switch_to)
        self._bodies.generation = lambda: holder.live.generation
        self._adapters = AdapterHolder(self._bodies.take_adapters)
        await self._adapters.start()
        if not gates:
            self._bodies.administer_by(administered_by(partial(call_all, app_name())))
        holder.follow(generations)
        log_event(_LOGGER, logging.INFO, "ingress_started", {"ingress": replica_name()})
        return app

    def record_replica_metadata(self) -> dict[str, object]:
        """Where its metrics are; Serve hands it to whoever follows the ingresses."""
        return {METRICS_ADDRESS: self._started().metrics_address}

    async def status(self) -> bytes:
        """See `IngressBody.status`; also by which generation it goes, once it serves; packed."""
        generation = None if self._holder is None else self._holder.live.generation
        return packed({**self._started().status(), "generation": generation})

    async def explain(self, request_id: str) -> bytes:
        """See `IngressBody.explain`; packed."""
        return packed(self._started().explain(request_id))

    async def requests(self, count: int, order: str) -> bytes:
        """See `IngressBody.requests`; packed."""
        return packed(self._started().requests(count, RecordOrder(order)))

    async def links(self) -> bytes:
        """See `IngressBody.links`; packed."""
        return packed(self._started().links())

    async def outcomes(self) -> bytes:
        """What each replica has done for requests that came through here; packed."""
        return packed(self._started().tallies())

    async def report(self) -> bytes:
        """See `IngressBody.report`; packed."""
        return packed_reports(self._started().reports())

    async def take_quotas(self, shares: Shares, at_most: bool) -> str | tuple[str, ...]:  # noqa: FBT001 - Serve's calls to all replicas take no keywords
        """See `IngressBody.take_quotas`; a single id as itself, as other versions send it."""
        taken = self._started().take_quotas(shares, at_most=at_most)
        return taken[0] if len(taken) == 1 else taken

    async def take_adapters(self, registry: str) -> int:
        """Offer the adapters of this registry; the version that holds then."""
        if self._adapters is None:
            raise LinkFailed("ingress", "the ingress is starting")
        return self._adapters.take(decoded(registry))

    async def adapters_in_flight(self, registry: str) -> dict[str, object]:
        """How many requests here need each adapter, once this registry holds; and which does."""
        version = await self.take_adapters(registry)
        return {"version": version, "needed": dict(self._started().adapters_in_flight())}

    async def take_starts(self, starts: Mapping[str, tuple[Any, ...]]) -> None:
        """See `IngressBody.take_start`; each as plain values, for versions may differ."""
        self._started().take_starts({model: ColdStart(*one) for model, one in starts.items()})

    def check_health(self) -> None:
        """See `IngressBody.check`; Serve replaces an ingress for which it raises."""
        if self._bodies is not None:
            self._bodies.check()

    async def used(self) -> tuple[str, float, float, float]:
        """As `ingress_desk.Used`: what this process has used, with those that it has started."""
        from baton.serving.ray.context import replica_name

        self._started()
        needed_s = await asyncio.to_thread(own_cpu_s)
        if self._config.server.frontend is FrontendKind.RUST:
            cores = min(_RUST_CORES, os.cpu_count() or 1)
        else:
            # One loop does the work: beside others that want its core it uses little and is full.
            cores, needed_s = 1, needed_s + waited_s(threading.get_native_id())
        return replica_name(), needed_s, time.monotonic(), float(cores)

    async def healthy(self) -> bool:
        """See `IngressBody.healthy`."""
        return self._started().healthy()

    async def prepare_config(self, on_top_of: int, config: DeploymentConfig) -> str:
        """See `ConfigHolder.prepare`."""
        return await self._holding().prepare(on_top_of, config)

    async def take_config(self, live: LiveConfig) -> int:
        """See `ConfigHolder.take`."""
        return await self._holding().take(live)

    async def __del__(self) -> None:
        """Serve's shutdown hook."""
        if self._holder is not None:
            await self._holder.close()
        if self._adapters is not None:
            await self._adapters.close()
        bodies, self._bodies = self._bodies, None
        if bodies is not None:
            await bodies.close()

    def _started(self) -> SeveralBodies:
        if self._bodies is None:
            raise LinkFailed("ingress", "the ingress is starting or stopping")
        return self._bodies

    def _holding(self) -> ConfigHolder:
        if self._holder is None:
            raise LinkFailed("ingress", "the ingress is starting")
        return self._holder
