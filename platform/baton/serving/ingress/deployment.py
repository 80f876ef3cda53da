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

from baton.config.schema.deployment import ApiServerKind, DeploymentConfig
from baton.domain.commands import RecordSelection
from baton.domain.demand import ColdStart
from baton.domain.errors import LinkFailed
from baton.engine.vllm.gate.adapters import AdapterRequest, Administer
from baton.engine.vllm.gate.errors import Problem
from baton.engine.vllm.gate.gate import AsgiApp
from baton.serving.controller.adapter_manager import CallReplicas
from baton.serving.controller.quota_allocator import Shares
from baton.serving.ingress.model_ingress import ModelIngress
from baton.serving.ingress.multi_model import MultiModelIngress
from baton.serving.ray.asgi_port import serve_app_at_port, serve_at_port
from baton.serving.ray.grpc_port import bind_grpc_to_node
from baton.serving.ray.packing import pack, pack_reports
from baton.serving.ray.serve_control import call_all
from baton.serving.replica import hub_environment
from baton.serving.replica.model_download import fetch_for_ingress
from baton.serving.replica.start_reports import StartReporter
from baton.serving.shared.metadata import METRICS_ADDRESS
from baton.serving.shared.names import CONTROLLER, INGRESS
from baton.serving.store.adapter_store import AdapterFollower, decode_registry
from baton.serving.store.config_participant import ConfigParticipant
from baton.serving.store.config_store import Generations, LiveConfig
from baton.serving.store.link_keys import link_options
from baton.telemetry.logs import configure_logs, log_event

_LOGGER = logging.getLogger(__name__)
_MAX_RUST_CORES = 4
"""What one ingress in Rust keeps busy: its program and its gate have several threads each."""
_CALL_TIMEOUT_S = 80.0
"""The controller itself gives up sooner."""


def process_tree_cpu_s() -> float:
    """Processor time of this process and of those below it, so far."""
    this_process = psutil.Process()
    total_s = 0.0
    for process in (this_process, *this_process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


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
        self._models: MultiModelIngress | None = None
        self._config_participant: ConfigParticipant | None = None
        self._adapters: AdapterFollower | None = None

    async def __serve_build_asgi_app__(self) -> AsgiApp:
        """Called once by Serve when the replica starts."""
        from baton.serving.ray.context import app_name, node_address, replica_name

        bind_grpc_to_node(node_address())
        await asyncio.to_thread(hub_environment.apply_stored, self._models_folder)
        config_store = Generations()
        live = await asyncio.to_thread(config_store.newest, self._config)
        link = await asyncio.to_thread(link_options)

        def build(model: str, part: DeploymentConfig) -> ModelIngress:
            alone = len(live.config.models) == 1
            name = replica_name() if alone else f"{replica_name()}/{model}"
            return ModelIngress(part, app=app_name(), coordinator_id=name, link=link)

        for model in live.config.models.values():
            await fetch_for_ingress(model, StartReporter(INGRESS, node_address()))
        self._models = MultiModelIngress(live.config, build)
        app = await self._models.start(node_address())
        rust_ingresses = [
            ingress.rust_ingress
            for ingress in self._models.model_ingresses
            if ingress.rust_ingress is not None
        ]
        for rust_ingress in rust_ingresses:
            serve_at_port(rust_ingress, os.environ)
        if not rust_ingresses:
            serve_app_at_port(app)
        participant = self._config_participant = ConfigParticipant(
            live, self._models.prepare_switch
        )
        self._models.generation = lambda: participant.live.generation
        self._adapters = AdapterFollower(self._models.set_adapters)
        await self._adapters.start()
        if not rust_ingresses:
            self._models.set_administer(make_administer(partial(call_all, app_name())))
        participant.follow(config_store)
        log_event(_LOGGER, logging.INFO, "ingress_started", {"ingress": replica_name()})
        return app

    def record_replica_metadata(self) -> dict[str, object]:
        """Where its metrics are; Serve hands it to whoever follows the ingresses."""
        return {METRICS_ADDRESS: self._require_models().metrics_address}

    async def status(self) -> bytes:
        """See `ModelIngress.status`; also by which generation it goes, once it serves; packed."""
        generation = (
            None if self._config_participant is None else self._config_participant.live.generation
        )
        return pack({**self._require_models().status(), "generation": generation})

    async def explain(self, request_id: str) -> bytes:
        """See `ModelIngress.explain`; packed."""
        return pack(self._require_models().explain(request_id))

    async def requests(self, count: int, order: str) -> bytes:
        """See `ModelIngress.requests`; packed."""
        return pack(self._require_models().requests(count, RecordSelection(order)))

    async def links(self) -> bytes:
        """See `ModelIngress.links`; packed."""
        return pack(self._require_models().links())

    async def outcomes(self) -> bytes:
        """What each replica has done for requests that came through here; packed."""
        return pack(self._require_models().tallies())

    async def report(self) -> bytes:
        """See `ModelIngress.report`; packed."""
        return pack_reports(self._require_models().reports())

    async def apply_quotas(self, shares: Shares, at_most: bool) -> str | tuple[str, ...]:  # noqa: FBT001 - Serve's calls to all replicas take no keywords
        """See `ModelIngress.apply_quotas`; a single id as itself, as other versions send it."""
        coordinator_ids = self._require_models().apply_quotas(shares, at_most=at_most)
        return coordinator_ids[0] if len(coordinator_ids) == 1 else coordinator_ids

    async def apply_adapters(self, registry: str) -> int:
        """Offer the adapters of this registry; the version that holds then."""
        if self._adapters is None:
            raise LinkFailed("ingress", "the ingress is starting")
        return self._adapters.update(decode_registry(registry))

    async def adapters_in_flight(self, registry: str) -> dict[str, object]:
        """How many requests here need each adapter, once this registry holds; and which does."""
        version = await self.apply_adapters(registry)
        return {"version": version, "needed": dict(self._require_models().adapters_in_flight())}

    async def record_cold_starts(self, starts: Mapping[str, tuple[Any, ...]]) -> None:
        """See `ModelIngress.record_cold_start`; each as plain values, for versions may differ."""
        self._require_models().record_cold_starts(
            {model: ColdStart(*value) for model, value in starts.items()}
        )

    def check_health(self) -> None:
        """See `ModelIngress.check`; Serve replaces an ingress for which it raises."""
        if self._models is not None:
            self._models.check()

    async def resource_usage(self) -> tuple[str, float, float, float]:
        """As `ingress_scaler.Used`: what this process has used, with those that it has started."""
        from baton.serving.ray.context import replica_name

        self._require_models()
        needed_s = await asyncio.to_thread(process_tree_cpu_s)
        if self._config.server.api_server is ApiServerKind.RUST:
            cores = min(_MAX_RUST_CORES, os.cpu_count() or 1)
        else:
            # One loop does the work: beside others that want its core it uses little and is full.
            cores, needed_s = 1, needed_s + waited_s(threading.get_native_id())
        return replica_name(), needed_s, time.monotonic(), float(cores)

    async def healthy(self) -> bool:
        """See `ModelIngress.healthy`."""
        return self._require_models().healthy()

    async def prepare_config(self, base_generation: int, config: DeploymentConfig) -> str:
        """See `ConfigParticipant.prepare`."""
        return await self._require_participant().prepare(base_generation, config)

    async def commit_config(self, live: LiveConfig) -> int:
        """See `ConfigParticipant.commit`."""
        return await self._require_participant().commit(live)

    async def __del__(self) -> None:
        """Serve's shutdown hook."""
        if self._config_participant is not None:
            await self._config_participant.close()
        if self._adapters is not None:
            await self._adapters.close()
        models, self._models = self._models, None
        if models is not None:
            await models.close()

    def _require_models(self) -> MultiModelIngress:
        if self._models is None:
            raise LinkFailed("ingress", "the ingress is starting or stopping")
        return self._models

    def _require_participant(self) -> ConfigParticipant:
        if self._config_participant is None:
            raise LinkFailed("ingress", "the ingress is starting")
        return self._config_participant


def make_administer(call: CallReplicas) -> Administer:
    """What carries a client's orders out."""

    async def administer(order: AdapterRequest) -> Problem | None:
        if order.path is None:
            call_arguments: tuple[object, ...] = ("unload_adapter", order.name, order.tenant)
        else:
            load_order = {
                "name": order.name,
                "source": order.path,
                "tenant": order.tenant,
                "model": order.model,
                "in_place": order.in_place,
            }
            call_arguments = ("load_adapter", load_order)
        method, *arguments = call_arguments
        answers = await call(CONTROLLER, str(method), *arguments, timeout_s=_CALL_TIMEOUT_S)
        if not answers.values:
            why = answers.failures[0] if answers.failures else "there is none"
            return Problem(status=503, message=f"the controller does not answer: {why}; try again")
        refusal = answers.values[0]
        if isinstance(refusal, dict):
            return Problem(status=int(refusal["status"]), message=str(refusal["why"]))
        return None

    return administer
