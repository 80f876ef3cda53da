"""Settings of a vLLM engine, and vLLM's arguments for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from baton.domain.fleet import Role
from baton.domain.names.addresses import format_address
from baton.domain.names.process_names import OWNER_ENV_VAR, process_name
from baton.domain.names.proxies import PROXY_VARIABLES
from baton.engine.vllm.patches.step_budget import DECODE_BUDGET_VARIABLE
from baton.engine.vllm.wire.keys import (
    CONNECTOR,
    CONNECTOR_MODULE,
    MAX_PULLS_KEY,
    PULL_DEADLINE_KEY,
)

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

NIXL_DELAY_VARIABLE = "BATON_NIXL_PROGRESS_DELAY_US"
"""Read by `baton.transfer.nixl_progress` in the engine process; a test compares the two."""


class OnLoadFailure(StrEnum):
    """An engine's reaction to a failed fetch of a prompt's KV blocks."""

    RECOMPUTE = "recompute"
    """The engine computes them itself; the request is only late."""
    FAIL = "fail"
    """The leg ends with ERROR; the coordinator decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlSettings:
    """An engine's part in KV transfers; without it an engine serves LOCAL legs only."""

    host: str
    """The address for other engines; the side channel listens there."""
    port: int
    """The side channel's port; each engine on a host needs its own."""
    lease_s: int = 30
    """How long blocks of a finished prefill are kept without a heartbeat of a puller."""
    max_pulls: int | None = None
    """Requests that fetch blocks at a time; others wait. None: no limit."""
    pull_deadline_s: float = 2.0
    """A longer pull stops delaying others; also the deadline of its source's lease confirmation."""
    on_load_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE
    progress_delay_us: int | None = 1000
    """Pause of the agent's progress thread; None leaves NIXL's busy polling, right for RDMA.

    Source: benchmarks/results/idle_cpu.json.
    """

    @property
    def address(self) -> str:
        """The side channel as `host:port`; an IPv6 host in brackets."""
        return format_address(self.host, self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlots:
    """An engine's room for LoRA adapters."""

    max_per_batch: int = 4
    """Different adapters in a step; requests with others wait."""
    max_loaded: int = 16
    """In host memory; a new adapter replaces the least recently used."""
    max_rank: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngineSettings:
    """Settings of an engine. None means vLLM's default."""

    replica_id: str
    pool: str
    model_source: str
    """A folder, or a hub id."""
    model_name: str
    """The model's name for clients."""
    role: Role
    revision: str | None = None
    max_len_tokens: int | None = None
    block_size_tokens: int | None = None
    dtype: str = "auto"
    kv_cache_bytes: int | None = None
    """Per worker. On a CPU, None lets vLLM take a large share of the machine's memory."""
    enforce_eager: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False
    """Whole experts on each worker."""
    prefix_caching: bool = True
    max_running_requests: int | None = None
    max_batched_tokens: int | None = None
    max_batched_tokens_while_decoding: int | None = None
    """Per step while a stream decodes; see `patches.step_budget`."""
    gpu_memory_utilization: float | None = None
    shares_gpu: bool = False
    """Whether other engines use its GPU: such engines start one after the other."""
    nixl: NixlSettings | None = None
    host_memory_bytes: int | None = None
    """For KV blocks in host memory, over all workers. GPUs only."""
    adapters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """LoRA adapters by the names that legs give: a folder or a hub id each."""
    runtime_adapters: bool = False
    """Whether adapters may be added while the engine runs."""
    adapter_slots: AdapterSlots = field(default_factory=AdapterSlots)
    kv_events: bool = True
    """Whether the engine reports changes of its prefix cache, if it has one."""
    start_deadline_s: float = 600.0
    reply_deadline_s: float = 60.0
    """For the answer to a control call, which may wait for a step."""
    extra: Mapping[str, Json] = field(default_factory=lambda: MappingProxyType({}))
    """Raw vLLM engine arguments, under vLLM's names; they override all others."""
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Environment of the engine's processes; overrides this process'."""


KvRole: TypeAlias = Literal["kv_producer", "kv_consumer", "kv_both"]


def kv_role(role: Role) -> KvRole:
    """The KV role in an engine's arguments.

    vLLM 0.32's NixlConnector does not enforce it: engines of either role prefill for, and pull
    from, one another. So a replica may change its role without a restart; a test with real engines
    checks that. vLLM has deprecated `kv_both`, so only mixed pools get it.
    """
    match role:
        case Role.PREFILL:
            return "kv_producer"
        case Role.DECODE:
            return "kv_consumer"
        case Role.MIXED:
            return "kv_both"


def engine_arguments(
    settings: VllmEngineSettings, kv_events_endpoint: str | None
) -> dict[str, Any]:
    """The keyword arguments for vLLM's `AsyncEngineArgs`."""
    arguments: dict[str, Any] = {
        "model": settings.model_source,
        "served_model_name": settings.model_name,
        "revision": settings.revision,
        "max_model_len": settings.max_len_tokens,
        "block_size": settings.block_size_tokens,
        "dtype": settings.dtype,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "enforce_eager": settings.enforce_eager,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "enable_expert_parallel": settings.expert_parallel,
        "enable_prefix_caching": settings.prefix_caching,
        "max_num_seqs": settings.max_running_requests,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        # Adds each step's time to the statistics; this process logs nothing.
        "enable_logging_iteration_details": True,
        "kv_transfer_config": _kv_transfer(settings),
        "kv_events_config": None,
    }
    if kv_events_endpoint is not None:
        arguments["kv_events_config"] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": kv_events_endpoint,
            "replay_endpoint": replay_endpoint(kv_events_endpoint),
        }
    if settings.adapters or settings.runtime_adapters:
        slots = settings.adapter_slots
        arguments |= {
            "enable_lora": True,
            "max_loras": slots.max_per_batch,
            "max_cpu_loras": slots.max_loaded,
            "max_lora_rank": slots.max_rank,
        }
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return arguments | dict(settings.extra)


def replay_endpoint(kv_events_endpoint: str) -> str:
    """Where an engine that publishes its KV events answers requests for a replay."""
    return f"{kv_events_endpoint}-replay"


def engine_environment(settings: VllmEngineSettings, folder: Path) -> dict[str, str]:
    """The variables of an engine's processes for settings without an argument.

    Its sockets are in `folder`, because vLLM leaves them behind when it is killed.
    """
    environment = {
        OWNER_ENV_VAR: process_name(),
        # Forking a process with threads (Ray, gRPC) is unsafe. A forked child would also take its
        # plugins for loaded and outlive its parent.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Workers of a split engine may be Ray's processes, which inherit no variables.
        "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY": "BATON_,UCX_",
        # For access to a hub; vLLM passes on the hub's own variables.
        "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": ",".join(PROXY_VARIABLES),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(folder),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(settings.start_deadline_s)),
    }
    if settings.max_batched_tokens_while_decoding is not None:
        environment[DECODE_BUDGET_VARIABLE] = str(settings.max_batched_tokens_while_decoding)
    nixl = settings.nixl
    if nixl is not None:
        environment |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": nixl.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(nixl.port),
            # vLLM sets it on loading NIXL, which baton's plugin may do first.
            "UCX_RCACHE_MAX_UNRELEASED": "1024",
        }
        if nixl.progress_delay_us is not None:
            environment[NIXL_DELAY_VARIABLE] = str(nixl.progress_delay_us)
    return environment | dict(settings.env)


def _kv_transfer(settings: VllmEngineSettings) -> dict[str, Any] | None:
    nixl = None if settings.nixl is None else _nixl_transfer(settings.nixl, settings.role)
    if settings.host_memory_bytes is None:
        return nixl
    offload = _offload_transfer(settings.host_memory_bytes)
    if nixl is None:
        return offload
    return {
        "kv_connector": "MultiConnector",
        "kv_role": nixl["kv_role"],
        # The scheduler reads the policy here, not in the connectors below.
        "kv_load_failure_policy": nixl["kv_load_failure_policy"],
        # Loads come from the first that has blocks: a KV handle precedes host memory. Saves go to
        # all.
        "kv_connector_extra_config": {"connectors": [nixl, offload]},
    }


def _nixl_transfer(nixl: NixlSettings, role: Role) -> dict[str, Any]:
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": kv_role(role),
        "kv_load_failure_policy": nixl.on_load_failure.value,
        "kv_connector_extra_config": {
            "kv_lease_duration": nixl.lease_s,
            MAX_PULLS_KEY: nixl.max_pulls,
            PULL_DEADLINE_KEY: nixl.pull_deadline_s,
        },
    }


def _offload_transfer(host_memory_bytes: int) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": host_memory_bytes,
            # Without it, events about host memory name blocks without their tokens.
            "self_describing_kv_events": True,
        },
    }
