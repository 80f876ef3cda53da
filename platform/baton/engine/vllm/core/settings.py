"""What a vLLM engine is started with, and how that becomes vLLM's own arguments."""

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
from baton.engine.vllm.wire.transfer_keys import (
    CONNECTOR,
    CONNECTOR_MODULE,
    MAX_PULLS_KEY,
    PULL_DEADLINE_KEY,
)

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

NIXL_DELAY_VARIABLE = "BATON_NIXL_PROGRESS_DELAY_US"
"""Read by `baton.transfer.nixl_progress` in the engine process; a test holds the two together."""


class OnLoadFailure(StrEnum):
    """What an engine does when a prompt's KV blocks cannot be fetched."""

    RECOMPUTE = "recompute"
    """Compute them itself; the request is only late."""
    FAIL = "fail"
    """End the leg with ERROR; the coordinator decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlSettings:
    """An engine's part in KV transfers; without it an engine serves LOCAL legs only."""

    host: str
    """The address other engines reach this one at; the side channel listens there."""
    port: int
    """The side channel's port; each engine on a host needs its own."""
    lease_s: int = 30
    """How long blocks of a finished prefill are kept for a puller that gives no sign of life."""
    max_pulls: int | None = None
    """Requests that fetch blocks at a time; more wait for their turn. None: no limit."""
    pull_deadline_s: float = 2.0
    """A pull that takes longer holds up no other, and its source has so long to say that it still
    kept the blocks."""
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
    """How much room an engine has for LoRA adapters."""

    max_per_batch: int = 4
    """Different ones in one step; requests with others wait."""
    max_loaded: int = 16
    """In the host's memory; the longest unused goes for a new one."""
    max_rank: int = 16
    """The highest rank of any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEngineSettings:
    """One engine. None means: vLLM's own default."""

    replica_id: str
    pool: str
    model_source: str
    """A folder, or a hub id."""
    model_name: str
    """What clients call it."""
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
    """Of a step that any stream waits for; see `step_budget`."""
    gpu_memory_utilization: float | None = None
    shares_gpu: bool = False
    """Whether other engines are on its GPU: then it starts while none of them does."""
    nixl: NixlSettings | None = None
    host_memory_bytes: int | None = None
    """Of the host, for KV blocks that the GPU has no room for; all workers together. GPUs only."""
    adapters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """LoRA adapters by the names that legs give: a folder or a hub id each."""
    runtime_adapters: bool = False
    """Whether others may come while it runs."""
    adapter_slots: AdapterSlots = field(default_factory=AdapterSlots)
    kv_events: bool = True
    """Whether the engine says what its prefix cache holds; without a prefix cache it never does."""
    start_deadline_s: float = 600.0
    reply_deadline_s: float = 60.0
    """How long the engine may take to answer a control call: a step may be in its way."""
    extra: Mapping[str, Json] = field(default_factory=lambda: MappingProxyType({}))
    """Raw vLLM engine arguments, under vLLM's names; they win over everything above."""
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Environment of the engine's processes, over that of this one."""


KvRole: TypeAlias = Literal["kv_producer", "kv_consumer", "kv_both"]


def kv_role(role: Role) -> KvRole:
    """The role an engine is told. The one place where that is decided.

    vLLM 0.32's NixlConnector does not enforce it: an engine of either role prefills for, and pulls
    from, one of the other, which is why a replica may change its role without a restart. A test
    with real engines fails when that is no longer so. `kv_both` would say it more openly, but vLLM
    warns that it will go; only pools without a role of their own get it.
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
        # Brings the time of each step with the statistics; nothing is logged in this process.
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
    """Where an engine that publishes its KV events answers questions about earlier ones."""
    return f"{kv_events_endpoint}-replay"


def engine_environment(settings: VllmEngineSettings, folder: Path) -> dict[str, str]:
    """The variables that make an engine's processes ours and tell them what has no argument.

    Its sockets are in `folder`: vLLM leaves them behind when it is killed.
    """
    environment = {
        OWNER_ENV_VAR: process_name(),
        # Forking a process with threads (Ray, gRPC) is unsafe; also, a forked child would believe
        # that its plugins are loaded and outlive its parent.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Workers of a split engine may be Ray's processes, which inherit nothing by themselves.
        "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY": "BATON_,UCX_",
        # By which they reach a hub; variables of the hub itself vLLM passes on.
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
            # vLLM sets it on loading NIXL, which our plugin may do first.
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
        # The scheduler looks at the policy here, not at those of the connectors below.
        "kv_load_failure_policy": nixl["kv_load_failure_policy"],
        # Loads come from the first that has something: a ticket is before what lies in the host's
        # memory. Saves go to all.
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
            # Without it, events about the host's memory name blocks but not their tokens.
            "self_describing_kv_events": True,
        },
    }
