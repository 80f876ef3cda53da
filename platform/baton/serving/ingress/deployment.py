"""The ingress deployment: one replica's start, and the methods that Ray Serve calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil

from baton.config.derive.options import adapter_rules, adapter_sources, split_by_model
from baton.config.schema.deployment import ApiServerKind, DeploymentConfig
from baton.control.fleet.adapter_registry import AdapterRegistry, requestable_adapters
from baton.domain.commands import RecordSelection
from baton.domain.demand import ColdStart, CoordinatorReport
from baton.domain.errors import LinkFailed
from baton.engine.vllm.gate.adapters import AdapterRequest, Administer
from baton.engine.vllm.gate.errors import Problem
from baton.engine.vllm.gate.gate import AsgiApp
from baton.engine.vllm.gate.model_router import ModelRouter
from baton.serving.controller.adapter_manager import CallReplicas
from baton.serving.controller.quota_allocator import Shares
from baton.serving.ingress.model_ingress import ModelIngress
from baton.serving.ray.asgi_port import serve_app_at_port, serve_at_port
from baton.serving.ray.grpc_port import bind_grpc_to_node
from baton.serving.ray.packing import pack, pack_reports
from baton.serving.ray.serve_control import call_all
from baton.serving.replica import hub_environment
from baton.serving.replica.model_download import fetch_for_ingress
from baton.serving.replica.start_reports import StartReporter
from baton.serving.shared.names import CONTROLLER, INGRESS, METRICS_ADDRESS
from baton.serving.shared.reports import Row
from baton.serving.store.adapter_store import AdapterFollower, decode_registry
from baton.serving.store.config_participant import ConfigParticipant, Switch
from baton.serving.store.config_store import Generations, LiveConfig
from baton.serving.store.link_keys import link_options
from baton.telemetry.logs import configure_logs, log_event
from baton.telemetry.requests.request_log import RequestReport

_LOGGER = logging.getLogger(__name__)
_MAX_RUST_CORES = 4
"""Its frontend and its gate have several threads each."""
_CALL_TIMEOUT_S = 80.0
"""The controller times out earlier."""
_SHARED = ("keys", "tls_expires_s")
_Status = dict[str, object]


def process_tree_cpu_s() -> float:
    """Processor time of this process and its descendants since their start."""
    this_process = psutil.Process()
    total_s = 0.0
    for process in (this_process, *this_process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # a process that has just ended
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


def waited_s(thread_id: int) -> float:
    """How long a thread of this process has waited for a core since its start.

    0 if the kernel does not report it. Source: Documentation/scheduler/sched-stats.rst of Linux.
    """
    try:
        schedstat = Path(f"/proc/self/task/{thread_id}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(schedstat[1]) / 1e9


class Ingress:
    """The class of the ingress deployment; `application.app` decorates it."""

    def __init__(self, config: DeploymentConfig, *_handles: object) -> None:
        logs = config.observability.logs
        configure_logs(logs.format, logs.level)
        self._config = config
        self._models_folder = config.cluster.model_cache.path
        self._models: MultiModelIngress | None = None
        self._config_participant: ConfigParticipant | None = None
        self._adapters: AdapterFollower | None = None

    async def __serve_build_asgi_app__(self) -> AsgiApp:
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

        reporter = StartReporter(INGRESS, node_address(), replica=replica_name())
        for model in live.config.models.values():
            await fetch_for_ingress(model, reporter)
        self._models = MultiModelIngress(live.config, build)
        with reporter.reporting("starting the API server"):
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
        for ingress in self._models.model_ingresses:
            ingress.telemetry.generation = lambda: participant.live.generation
        self._adapters = AdapterFollower(self._models.set_adapters)
        await self._adapters.start()
        if not rust_ingresses:
            self._models.set_administer(make_administer(partial(call_all, app_name())))
        participant.follow(config_store)
        log_event(_LOGGER, logging.INFO, "ingress_started", {"ingress": replica_name()})
        return app

    def record_replica_metadata(self) -> dict[str, object]:
        """The metrics address and the process; Serve gives them to followers of the ingresses."""
        return {METRICS_ADDRESS: self._require_models().metrics_address, "pid": os.getpid()}

    async def status(self) -> bytes:
        """See `ModelIngress.status`, with the process and the generation; packed."""
        from baton.serving.ray.context import node_address, replica_name

        generation = (
            None if self._config_participant is None else self._config_participant.live.generation
        )
        process = {"ingress": replica_name(), "node": node_address(), "pid": os.getpid()}
        return pack({**process, **self._require_models().status(), "generation": generation})

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
        """Outcomes by replica for requests of this ingress; packed."""
        return pack(self._require_models().tallies())

    async def report(self) -> bytes:
        """See `ModelIngress.report`; packed."""
        return pack_reports(self._require_models().reports())

    async def apply_quotas(self, shares: Shares, at_most: bool) -> str | tuple[str, ...]:  # noqa: FBT001 - Serve's calls to all replicas take no keywords
        """See `ModelIngress.apply_quotas`. A single id is a string, as other versions send it."""
        coordinator_ids = self._require_models().apply_quotas(shares, at_most=at_most)
        return coordinator_ids[0] if len(coordinator_ids) == 1 else coordinator_ids

    async def apply_adapters(self, registry: str) -> int:
        """Offer the adapters of this registry; returns the version in force."""
        if self._adapters is None:
            raise LinkFailed("ingress", "the ingress is starting")
        return self._adapters.update(decode_registry(registry))

    async def adapters_in_flight(self, registry: str) -> dict[str, object]:
        """Requests in flight by adapter, and the version of the registry in force."""
        version = await self.apply_adapters(registry)
        return {"version": version, "needed": dict(self._require_models().adapters_in_flight())}

    async def record_cold_starts(self, starts: Mapping[str, tuple[Any, ...]]) -> None:
        """See `ModelIngress.record_cold_start`; values are plain, because versions may differ."""
        self._require_models().record_cold_starts(
            {model: ColdStart(*value) for model, value in starts.items()}
        )

    def check_health(self) -> None:
        """See `ModelIngress.check`; Serve replaces an ingress for which it raises."""
        if self._models is not None:
            self._models.check()

    async def resource_usage(self) -> tuple[str, float, float, float]:
        """The fields of `IngressUsage`, for this process and its descendants."""
        from baton.serving.ray.context import replica_name

        self._require_models()
        needed_s = await asyncio.to_thread(process_tree_cpu_s)
        if self._config.server.api_server is ApiServerKind.RUST:
            cores = min(_MAX_RUST_CORES, os.cpu_count() or 1)
        else:
            # One event loop does the work: while others use its core, it is full at little use.
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
    """The function that passes clients' adapter requests to the controller."""

    async def administer(order: AdapterRequest) -> Problem | None:
        if order.path is None:
            answers = await call(
                CONTROLLER, "unload_adapter", order.name, order.tenant, timeout_s=_CALL_TIMEOUT_S
            )
        else:
            fields = {
                "name": order.name,
                "source": order.path,
                "tenant": order.tenant,
                "model": order.model,
                "in_place": order.in_place,
            }
            answers = await call(CONTROLLER, "load_adapter", fields, timeout_s=_CALL_TIMEOUT_S)
        if not answers.values:
            reason = answers.failures[0] if answers.failures else "there is none"
            return Problem(
                status=503, message=f"the controller does not answer: {reason}; try again"
            )
        refusal = answers.values[0]
        if isinstance(refusal, dict):
            return Problem(status=int(refusal["status"]), message=str(refusal["reason"]))
        return None

    return administer


class MultiModelIngress:
    """The model ingresses; with one model, nothing is added to it.

    Theory of operation. Models share only the router and access. Each has its own coordinator,
    links to replicas of its pools, and API server. So an overload of one model rejects no request
    for another. The controller sees one coordinator per model and divides tenants' limits among
    them as among ingresses.
    """

    def __init__(
        self, config: DeploymentConfig, build: Callable[[str, DeploymentConfig], ModelIngress]
    ) -> None:
        self._config = config
        self._by_model = {name: build(name, part) for name, part in split_by_model(config).items()}
        self._router: ModelRouter | None = None
        """None with one model."""

    @property
    def model_ingresses(self) -> tuple[ModelIngress, ...]:
        """In the order of the configuration."""
        return tuple(self._by_model.values())

    @property
    def metrics_address(self) -> str | None:
        """Addresses of the metrics, separated by commas; None without metrics."""
        addresses = (ingress.telemetry.address for ingress in self.model_ingresses)
        return ",".join(address for address in addresses if address is not None) or None

    async def start(self, host: str) -> AsgiApp:
        """See `ModelIngress.start`; one after the other, as each imports and builds a server."""
        apps = [await ingress.start(host) for ingress in self.model_ingresses]
        if len(apps) == 1:
            return apps[0]
        apis: dict[str, AsgiApp] = {}
        for name, ingress in self._by_model.items():
            names = (name, *adapter_sources(self._config.models[name]))
            apis |= dict.fromkeys(names, ingress.frontend.api)
        first_frontend = self.model_ingresses[0].frontend
        self._router = ModelRouter(apis)
        return first_frontend.gate_app(self._router, healthy=self.healthy)

    async def close(self) -> None:
        """Close all. Idempotent."""
        for ingress in self.model_ingresses:
            await ingress.close()

    def prepare_switch(self, config: DeploymentConfig) -> Switch:
        """See `ModelIngress.prepare_switch`."""
        parts = split_by_model(config)
        switches = [ingress.prepare_switch(parts[name]) for name, ingress in self._by_model.items()]

        async def switch() -> None:
            for switch in switches:
                await switch()
            self._config = config

        return switch

    def healthy(self) -> bool:
        """Whether a request for at least one model could be served."""
        return any(ingress.healthy() for ingress in self.model_ingresses)

    def check(self) -> None:
        """See `ModelIngress.check`."""
        for ingress in self.model_ingresses:
            ingress.check()

    def status(self) -> _Status:
        """One status for all models."""
        statuses = {name: ingress.status() for name, ingress in self._by_model.items()}
        return merge_statuses(statuses)

    def explain(self, request_id: str) -> list[RequestReport]:
        """See `ModelIngress.explain`."""
        return [row for ingress in self.model_ingresses for row in ingress.explain(request_id)]

    def requests(self, count: int, order: RecordSelection) -> list[RequestReport]:
        """See `ModelIngress.requests`; `count` applies to each model."""
        return [row for ingress in self.model_ingresses for row in ingress.requests(count, order)]

    def links(self) -> list[Row]:
        """See `ModelIngress.links`."""
        return [row for ingress in self.model_ingresses for row in ingress.links()]

    def set_administer(self, administer: Administer) -> None:
        """Set the function that loads and unloads adapters."""
        self.model_ingresses[0].frontend.set_administer(administer)

    def set_adapters(self, registry: AdapterRegistry) -> None:
        """Offer each model's added adapters in addition to those of the configuration."""
        rules, models = adapter_rules(self._config), dict[str, str]()
        for model, ingress in self._by_model.items():
            added = requestable_adapters(registry, model, rules)
            ingress.set_adapters(tuple(added.values()))
            models |= dict.fromkeys(added, model)
        if self._router is not None:
            self._router.set_adapters(models)

    def adapters_in_flight(self) -> Counter[str]:
        """How many requests in flight need each adapter."""
        counts: Counter[str] = Counter()
        for ingress in self.model_ingresses:
            counts.update(ingress.adapters_in_flight())
        return counts

    def tallies(self) -> Mapping[str, object]:
        """Outcomes by replica for requests of this ingress."""
        outcomes: dict[str, object] = {}
        for ingress in self.model_ingresses:
            outcomes |= ingress.telemetry.outcomes.tallies()
        return outcomes

    def reports(self) -> tuple[CoordinatorReport, ...]:
        """One report per coordinator."""
        return tuple(ingress.report() for ingress in self.model_ingresses)

    def apply_quotas(self, shares: Shares, *, at_most: bool) -> tuple[str, ...]:
        """Apply the shares of coordinators here; returns the ids of those that had a share."""
        coordinator_ids = (
            ingress.apply_quotas(shares, at_most=at_most) for ingress in self.model_ingresses
        )
        return tuple(
            coordinator_id for coordinator_id in coordinator_ids if coordinator_id is not None
        )

    def record_cold_starts(self, starts: Mapping[str, ColdStart]) -> None:
        """Tell each model's ingress how long its first replica takes."""
        for name, ingress in self._by_model.items():
            start = starts.get(name if len(self._by_model) > 1 else "")
            if start is not None:
                ingress.record_cold_start(start)


def merge_statuses(statuses: Mapping[str, _Status]) -> _Status:
    """Merge the statuses of several models; a single status stays as it is.

    Counts are added and rows concatenated; other values are those of the first model, as are keys
    and expiries, which all models share.
    """
    first, *others = statuses.values()
    if not others:
        return first
    merged = dict(first)
    for other in others:
        merged |= {key: _merge_values(merged[key], value) for key, value in other.items()}
    by_model = {name: {"healthy": entry["healthy"]} for name, entry in statuses.items()}
    return merged | {name: first[name] for name in _SHARED if name in first} | {"models": by_model}


def _merge_values(left: object, right: object) -> object:
    match left, right:
        case bool(), bool():
            return left or right
        case ((int() | float()), (int() | float())):
            return left + right
        case list(), list():
            return [*left, *right]
        case dict(), dict():
            merged = cast("dict[str, object]", left) | cast("dict[str, object]", right)
            shared = left.keys() & right.keys()
            return merged | {key: _merge_values(left[key], right[key]) for key in shared}
        case _:
            return left
