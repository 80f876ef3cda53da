"""Facts of a started vLLM engine, and errors of an engine that did not start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

from baton.domain.errors import EngineStartFailed
from baton.domain.fleet import ReplicaFacts
from baton.engine.vllm.core.settings import VllmEngineSettings
from baton.engine.vllm.patches.engine_reports import CacheReport
from baton.engine.vllm.wire.keys import CONNECTOR, CONNECTOR_MODULE


def typed_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments with nested mappings as vLLM's config objects."""
    typed = dict(arguments)
    for name, kind in (
        ("kv_transfer_config", KVTransferConfig),
        ("kv_events_config", KVEventsConfig),
    ):
        if isinstance(typed.get(name), Mapping):
            typed[name] = kind(**typed[name])
    return typed


def engine_config(arguments: Mapping[str, Any]) -> VllmConfig:
    """Make vLLM's config from engine arguments, with the defaults of `vllm serve` on this device.

    Without a usage context vLLM takes 128 requests and 2,048 tokens on any GPU.
    """
    typed = AsyncEngineArgs(**typed_arguments(arguments))
    return typed.create_engine_config(UsageContext.OPENAI_API_SERVER)


def replica_facts(
    settings: VllmEngineSettings,
    config: VllmConfig,
    kv_events_endpoint: str | None = None,
    *,
    cache_report: CacheReport,
    supports_resume: bool = False,
) -> ReplicaFacts:
    """An engine's facts, from vLLM's config of the ready engine and its `cache_report`.

    Raw arguments may override `settings`, so the config decides.
    """
    scheduler, options = config.scheduler_config, config.cache_config
    events, transfer = config.kv_events_config, config.kv_transfer_config
    block_bytes = cache_report.block_bytes or kv_block_bytes(config)
    has_side_channel = transfer is not None and settings.nixl is not None
    return ReplicaFacts(
        replica_id=settings.replica_id,
        pool=settings.pool,
        role=settings.role,
        model=settings.model_name,
        engine="vllm",
        engine_version=vllm.__version__,
        block_size_tokens=options.block_size,
        kv_blocks=options.num_gpu_blocks,
        kv_block_bytes=block_bytes,
        max_len_tokens=config.model_config.max_model_len,
        max_running_requests=scheduler.max_num_seqs,
        max_batched_tokens=scheduler.max_num_batched_tokens,
        max_batched_tokens_while_decoding=settings.max_batched_tokens_while_decoding,
        layout=kv_layout(settings, config),
        side_channel=side_channel_address(settings) if has_side_channel else "",
        cache_events=bool(
            options.enable_prefix_caching
            and cache_report.events_understood
            and kv_events_endpoint is not None
            and events is not None
            and events.endpoint == kv_events_endpoint
        ),
        supports_prefix_fetch=has_side_channel and _uses_baton_connector(transfer),
        supports_resume=supports_resume,
        host_blocks=(settings.host_memory_bytes or 0) // block_bytes,
        adapter_slots=_adapter_slots(config),
        adapters_per_batch=0 if config.lora_config is None else int(config.lora_config.max_loras),
        cache_shape=cache_report.shape,
    )


def _adapter_slots(config: VllmConfig) -> int:
    """Adapters that every worker keeps in host memory."""
    return 0 if config.lora_config is None else int(config.lora_config.max_cpu_loras)


def side_channel_address(settings: VllmEngineSettings) -> str:
    """The address for other engines' pulls; empty without NIXL."""
    return "" if settings.nixl is None else settings.nixl.address


def _uses_baton_connector(transfer: KVTransferConfig) -> bool:
    """Whether baton's connector fetches blocks, alone or beside others."""
    nested_connectors = transfer.kv_connector_extra_config.get("connectors", ())
    modules = [
        nested_connector.get("kv_connector_module_path") for nested_connector in nested_connectors
    ]
    return CONNECTOR_MODULE in (transfer.kv_connector_module_path, *modules)


def kv_block_bytes(config: VllmConfig) -> int:
    """Bytes of a block over all layers and ranks, which a pull of it moves.

    From the model's shape with full attention in every layer, for engines that do not report
    `CacheReport.block_bytes`.
    """
    model, cache = config.model_config, config.cache_config
    heads = 1 if model.use_mla else 2 * model.get_total_num_kv_heads()
    values_per_token = heads * model.get_head_size() * model.get_total_num_hidden_layers()
    return int(cache.block_size * values_per_token * _kv_value_bytes(config))


def _kv_value_bytes(config: VllmConfig) -> int:
    name = config.cache_config.cache_dtype
    dtype = config.model_config.dtype if name == "auto" else STR_DTYPE_TO_TORCH_DTYPE[name]
    return int(dtype.itemsize)


def kv_layout(settings: VllmEngineSettings, config: VllmConfig) -> str:
    """All properties that two engines must share to hand KV blocks to each other.

    Not tensor and pipeline parallelism: the connector bridges differences there. An engine without
    NIXL shares with no other, so its layout is unique.
    """
    model, cache = config.model_config, config.cache_config
    transfer = config.kv_transfer_config
    if transfer is None or settings.nixl is None:
        return f"unshared:{settings.replica_id}"
    shape = (
        model.get_total_num_hidden_layers(),
        1 if model.use_mla else model.get_total_num_kv_heads(),
        model.get_head_size(),
    )
    return "|".join(
        (
            settings.model_name,
            settings.revision or "",
            "x".join(str(size) for size in shape),
            str(model.dtype).removeprefix("torch."),
            f"kv={cache.cache_dtype}",
            f"block={cache.block_size}",
            f"vllm={vllm.__version__}",
            # NIXL beside other connectors hands off as it does alone.
            CONNECTOR if transfer.has_connector(CONNECTOR) else str(transfer.kv_connector),
        )
    )


def start_failure(settings: VllmEngineSettings, error: Exception) -> EngineStartFailed:
    """A line and a remedy for any exception from the construction of an engine."""
    if isinstance(error, EngineStartFailed):
        return error
    subject = f"replica {settings.replica_id}: engine did not start"
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if isinstance(error, TypeError) and "unexpected keyword argument" in text:
        return EngineStartFailed(f"{subject}: {text}", "correct the name under `engine.extra`")
    if text.startswith("Engine core initialization failed"):
        return EngineStartFailed(
            f"{subject}: its process ended while starting", "the cause is in the engine's log above"
        )
    return EngineStartFailed(
        f"{subject}: {type(error).__name__}: {text}", "correct the model or the engine's options"
    )
