"""Builds a replica's engine from the configuration."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil
from prometheus_client import CollectorRegistry

from baton.config.derive.options import (
    adapter_sources,
    emits_cache_events,
    engine_env,
    gpu_memory_fraction,
    model_loading_arguments,
    shares_gpu,
    sim_settings,
)
from baton.config.derive.start_deadlines import start_deadline_s
from baton.config.language.addresses import ip_network
from baton.config.schema.deployment import (
    DeploymentConfig,
    EngineKind,
    ModelConfig,
    OnFailure,
    PoolConfig,
    TransferConfig,
)
from baton.domain.errors import EngineStartFailed
from baton.domain.names.model_sources import TINY, hub_id
from baton.engine.log_handlers import preserve_log_handlers
from baton.runtime.known_adapters import KnownAdapters
from baton.runtime.ports import Engine

if TYPE_CHECKING:
    from baton.engine.vllm.core.settings import Json, NixlSettings, VllmEngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSite:
    """The name and the node of a replica."""

    replica_id: str
    pool: str
    host: str
    """Other nodes reach this node at it."""
    reserve_ports: Callable[[str, int, int], int]
    """`(host, base, count)` → the first of `count` consecutive ports, reserved for this replica."""
    gcs_address: str = ""
    """`host:port` of the Ray cluster's GCS; empty without a cluster."""
    phase_file: Path | None = None
    """The file for the phase of the engine's start; None: the phase is not recorded."""


def model_path(model: ModelConfig) -> str:
    """A hub id or a path; writes the tiny model if it is missing."""
    if model.source != TINY:
        return hub_id(model.source)
    from baton.engine.tiny_model import write_tiny_model

    return str(write_tiny_model(tiny_model_folder()))


def tiny_model_folder() -> Path:
    """The folder of the tiny model on this machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "baton" / "tiny-model"


def build_engine(
    config: DeploymentConfig,
    site: ReplicaSite,
    *,
    series: CollectorRegistry | None = None,
    adapters: KnownAdapters | None = None,
) -> Engine:
    """Make the engine of one replica, without starting it.

    `series` gets the engine's own Prometheus series. Without `adapters` it serves those of the
    configuration.
    """
    if adapters is None:
        adapters = KnownAdapters(adapter_sources(config.models[config.pools[site.pool].model]))
    kind = config.pools[site.pool].engine.kind
    match kind:
        case EngineKind.SIM:
            return _sim_engine(config, site, adapters)
        case EngineKind.VLLM:
            return _vllm_engine(config, site, series, adapters)


def side_channel_host(bind: str, node: str) -> str:
    """The address of this node at which other engines reach its side channels.

    Args:
        bind: as in `transfer.side_channel.bind`.
        node: the address under which the cluster knows this node.

    Raises:
        EngineStartFailed: this node has no address, or several, in the configured network.
    """
    network = ip_network(bind)
    if network is None:
        return node if bind == "private" else bind
    matches = sorted(
        local_address
        for local_address in local_addresses()
        if ipaddress.ip_address(local_address) in network
    )
    if len(matches) != 1:
        raise EngineStartFailed(
            f"node {node} has {', '.join(matches) or 'no address'} in {bind}, expected exactly one",
            "set transfer.side_channel.bind to a network in which every node has one address",
        )
    return matches[0]


def local_addresses() -> frozenset[str]:
    """Every IP address of this machine."""
    kinds = {socket.AF_INET, socket.AF_INET6}
    rows = [row for rows in psutil.net_if_addrs().values() for row in rows if row.family in kinds]
    return frozenset(row.address.partition("%")[0] for row in rows)


def device_count(config: DeploymentConfig, pool: str) -> float:
    """GPUs of one replica of a pool; a replica on CPUs counts as 1."""
    return float(config.pools[pool].resources.gpus or 1)


def _sim_engine(config: DeploymentConfig, site: ReplicaSite, adapters: KnownAdapters) -> Engine:
    from baton.engine.sim import SimEngine

    pool = config.pools[site.pool]
    settings = sim_settings(pool.engine, config.models[pool.model], config.transfer)
    host = side_channel_host(config.transfer.side_channel.bind, site.host)
    return SimEngine(
        replace(settings, side_channel_host=host),
        replica_id=site.replica_id,
        pool=site.pool,
        role=pool.role,
        model=pool.model,
        adapters=adapters,
    )


def _vllm_engine(
    config: DeploymentConfig,
    site: ReplicaSite,
    series: CollectorRegistry | None,
    adapters: KnownAdapters,
) -> Engine:
    with preserve_log_handlers():
        from baton.engine.vllm.core.engine import VllmEngine
        from baton.engine.vllm.core.series import VllmSeries
    from baton.transfer.peers import Peers

    settings = vllm_settings(config, site)
    assert settings.nixl is not None, "every engine of a deployment may hand blocks over"
    peers = Peers(
        site.replica_id,
        settings.nixl.address,
        workers=config.pools[site.pool].parallel.workers,
        require_rdma=config.transfer.require_rdma,
    )
    settings = replace(settings, env={**peers.environment(), **settings.env})
    vllm_series = None
    if series is not None:
        vllm_series = VllmSeries()
        series.register(vllm_series)
    engine = VllmEngine(
        settings,
        side_channel_check=peers.check,
        transport=peers.transport,
        series=vllm_series,
        adapters=adapters,
    )
    peers.query_ranks = engine.rank_transports
    return engine


def vllm_settings(config: DeploymentConfig, site: ReplicaSite) -> VllmEngineSettings:
    """The settings of a vLLM engine, with its side channel's ports reserved."""
    from baton.engine.vllm.core.settings import AdapterSlots, VllmEngineSettings

    pool = config.pools[site.pool]
    model, engine = config.models[pool.model], pool.engine
    return VllmEngineSettings(
        replica_id=site.replica_id,
        pool=site.pool,
        model_source=model_path(model),
        model_name=pool.model,
        role=pool.role,
        revision=model.revision,
        max_len_tokens=model.max_len_tokens,
        block_size_tokens=engine.block_size_tokens,
        dtype=str(engine.dtype),
        kv_cache_bytes=engine.kv_cache_bytes,
        tensor_parallel=pool.parallel.tp,
        pipeline_parallel=pool.parallel.pp,
        expert_parallel=pool.parallel.ep,
        prefix_caching=engine.prefix_caching,
        max_running_requests=engine.max_num_seqs,
        max_batched_tokens=engine.max_num_batched_tokens,
        max_batched_tokens_while_decoding=engine.max_num_batched_tokens_while_decoding,
        gpu_memory_utilization=gpu_memory_fraction(pool),
        shares_gpu=shares_gpu(pool),
        nixl=_nixl_settings(pool, config.transfer, site),
        host_memory_bytes=engine.offload.host_memory_bytes,
        adapters=adapter_sources(model),
        runtime_adapters=model.runtime_adapters.max > 0,
        adapter_slots=AdapterSlots(
            max_per_batch=engine.adapters.max_batched,
            max_loaded=engine.adapters.max_loaded,
            max_rank=engine.adapters.max_rank,
        ),
        kv_events=emits_cache_events(config, site.pool),
        start_deadline_s=start_deadline_s(pool, model),
        extra=cast("dict[str, Json]", model_loading_arguments(model) | _vllm_extra(pool)),
        env=_site_environment(site) | engine_environment(config, site.pool),
    )


def _nixl_settings(pool: PoolConfig, transfer: TransferConfig, site: ReplicaSite) -> NixlSettings:
    """The settings of NIXL's connector; reserves the ports of its side channel."""
    from baton.engine.vllm.core.settings import NixlSettings, OnLoadFailure

    side = transfer.side_channel
    host = side_channel_host(side.bind, site.host)
    nixl = NixlSettings(
        host=host,
        port=site.reserve_ports(host, side.port_base, pool.parallel.workers),
        lease_s=max(1, round(transfer.lease_s)),
        max_pulls=transfer.max_concurrent_pulls,
        pull_deadline_s=transfer.deadline_s,
        on_load_failure=(
            OnLoadFailure.RECOMPUTE
            if transfer.on_failure is OnFailure.RECOMPUTE
            else OnLoadFailure.FAIL
        ),
    )
    if pool.resources.gpus:
        # For NVLink and RDMA, fast progress matters more than an idle core.
        nixl = replace(nixl, progress_delay_us=None)
    return nixl


def _site_environment(site: ReplicaSite) -> dict[str, str]:
    """The node's address, the Ray cluster that starts the engine's workers, and the phase file.

    Without the first two, vLLM uses the interface to the internet between nodes, and starts a Ray
    of its own for spawned processes (0.32, 0.33).
    """
    from baton.engine.vllm.patches.start_phases import START_PHASE_VARIABLE

    environment = {"RAY_ADDRESS": site.gcs_address} if site.gcs_address else {}
    if site.phase_file is not None:
        environment[START_PHASE_VARIABLE] = str(site.phase_file)
    return environment | {"VLLM_HOST_IP": site.host}


def _vllm_extra(pool: PoolConfig) -> dict[str, object]:
    """Raw arguments, and how workers start.

    On GPUs they run in the replica's placement group, on several nodes if needed. On CPUs they are
    processes of the engine, because Ray has no resource name for vLLM's CPUs.
    """
    executor: dict[str, object] = {}
    if pool.parallel.workers > 1:
        executor["distributed_executor_backend"] = "ray" if pool.resources.gpus else "mp"
    return executor | dict(pool.engine.extra)


def engine_environment(config: DeploymentConfig, pool_name: str) -> dict[str, str]:
    """Environment of a pool's engine processes."""
    pool = config.pools[pool_name]
    on_cpu = {
        # By default vLLM binds each engine to all cores, so engines on one machine compete.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, int(pool.resources.cpus / pool.parallel.workers))),
    }
    offline = {"HF_HUB_OFFLINE": "1"} if config.models[pool.model].source == TINY else {}
    configured = engine_env(config, pool_name, os.environ)
    return (on_cpu if pool.resources.gpus == 0 else {}) | offline | configured
