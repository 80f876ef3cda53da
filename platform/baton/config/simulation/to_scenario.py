"""Creates a simulated deployment from a configuration.

Placement, limits and index come from the same functions as in a live deployment. Engines are
models: simulated engines with their configured times, real engines from data sheet and model shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import assert_never

from baton.config.derive.effective_options import batch_limits
from baton.config.derive.model_files import read_published
from baton.config.derive.options import (
    autoscaler_options,
    coordinator_limits,
    devices_per_replica,
    index_options,
    scaling_policy_name,
    service_rules,
    sim_settings,
)
from baton.config.derive.policies import build_placer, router_rng
from baton.config.schema.deployment import (
    DeploymentConfig,
    EngineConfig,
    EngineKind,
    ModelConfig,
    PoolConfig,
    TransferConfig,
)
from baton.config.schema.deployment import Dtype as ModelDtype
from baton.config.simulation.simulated_keys import unsimulated_notes
from baton.control.autoscaling.autoscaler import Autoscaler
from baton.domain.errors import ConfigInvalid, InsufficientMemory, UnknownAccelerator, UnknownModel
from baton.perf.hardware.accelerators import Accelerator, Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.hardware.efficiency import DEFAULT_EFFICIENCY, Efficiency
from baton.perf.model.engine_defaults import (
    BLOCK_SIZE_TOKENS,
    GPU_MEMORY_UTILIZATION,
    gpu_batch_defaults,
)
from baton.perf.model.known_models import dtype_hint, find_shape
from baton.perf.model.memory import MemoryFit, fit
from baton.perf.model.shape import ModelShape
from baton.perf.step_timing import StepBatch
from baton.perf.steps.roofline import Roofline
from baton.policy.placement.port import Placer
from baton.policy.scaling.catalogue import make_scaling_policy
from baton.policy.scaling.options import AutoscalerOptions
from baton.simulator.engine.settings import SimSettings
from baton.simulator.faults import ScheduledEvent
from baton.simulator.scenario import PoolPlan, Scenario
from baton.simulator.v1.settings import V1Settings

UNMEASURED = (
    "Engines are modelled from kernels, data sheets and the model's shape; check the model"
    " with 'baton calibrate ROWS.csv' or 'baton calibrate LOG' against your own measurements."
)
"""The note of engines without a calibration."""
_UNLIMITED_PULLS = 1_000_000
_SCALED_KV_DTYPES = {
    "int8_per_token_head": Dtype.INT8,
    "fp8_per_token_head": Dtype.INT8,
    "int4_per_token_head": Dtype.INT4,
    "nvfp4": Dtype.FP4,
    "nvfp4_4over6": Dtype.FP4,
    "nvfp4_ds_mla": Dtype.FP4,
}
"""vLLM's KV types with a scale for each head of a token, or for groups of numbers. FP8 with a scale
for each head has the size of INT8 with a scale."""
_QUANTIZED_AS: Mapping[str, Dtype] = {
    "fp8": Dtype.FP8,
    "fp4": Dtype.FP4,
    "awq": Dtype.INT4,
    "gptq": Dtype.INT4,
    "bitsandbytes": Dtype.INT4,
    "int8": Dtype.INT8,
}
"""By parts of vLLM's names of quantizations."""
_QUANTIZED_DTYPES = frozenset({Dtype.FP8, Dtype.INT8, Dtype.FP4, Dtype.INT4})


@dataclass(frozen=True, slots=True)
class SimStepTiming:
    """A `StepTiming` with configured times, linear except for squares of prompt tokens."""

    settings: SimSettings

    def step_s(self, batch: StepBatch) -> float:
        """Seconds of one step."""
        settings = self.settings
        capacity_tokens = settings.kv_blocks * settings.block_size_tokens
        return settings.step_s(
            prefill_tokens=batch.prefill_tokens,
            decode_requests=batch.decode_requests,
            kv_used_fraction=min(1.0, batch.decode_context_tokens / capacity_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourceShape:
    """A model's shape, and types of weights and KV cache; None where the source does not tell."""

    shape: ModelShape
    weights: Dtype | None = None
    kv: Dtype | None = None


class CannotModel(ConfigInvalid):
    """A configuration that may be valid, but whose engines cannot be modelled; with all reasons."""

    remedy = "correct these keys, as with --set, or give the model's config.json (--model-config)"

    @property
    def reason(self) -> str:
        """The reasons, one per line."""
        return str(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledEngine:
    """Facts by which the error of an engine's predicted times is looked up."""

    accelerator: str
    devices: int
    has_experts: bool
    has_ranks: bool = False
    """Whether it is a data-parallel group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDeployment:
    """A simulated deployment, and facts that its reports state."""

    scenario: Scenario
    devices: int
    """Initial GPUs of all pools, or engines when they are simulated."""
    device: str
    pools: dict[str, str] = field(default_factory=dict)
    """Description of each pool."""
    modelled: tuple[ModelledEngine, ...] = ()
    """Engines whose times are predicted."""
    notes: tuple[str, ...] = ()


def to_scenario(
    config: DeploymentConfig,
    *,
    model_config: Path | None = None,
    seed: int = 0,
    scheduled_events: tuple[ScheduledEvent, ...] = (),
    cold_start_s: float | None = None,
    efficiency: Efficiency = DEFAULT_EFFICIENCY,
) -> SimulatedDeployment:
    """The deployment in its state after `baton up`, with scheduled events.

    `model_config` is the model's `config.json`, for a source that is neither a folder nor a known
    name. `cold_start_s` is the start time of a replica that the autoscaler adds; the default is a
    minute. `efficiency` is that of modelled engines.

    Raises:
        CannotModel: no accelerator is given, the model's shape is unknown, or it does not fit.
        ConfigInvalid: the user's policy cannot be loaded.
    """
    if len(config.models) > 1:
        names = ", ".join(config.models)
        raise CannotModel((f"models: got {names}, expected one: simulate one after the other",))
    engine_models = _engine_models(config, model_config, efficiency)
    options = autoscaler_options(config)
    build_placer(config, router_rng(config, "simulated"))  # raises now if it cannot be loaded
    kinds = {pool.engine.kind for pool in config.pools.values()}
    workers = [pool.replicas.initial * pool.parallel.workers for pool in config.pools.values()]
    return SimulatedDeployment(
        scenario=Scenario(
            pools=tuple(
                PoolPlan(
                    name=name,
                    role=pool.role,
                    replicas=pool.replicas.initial,
                    settings=engine_models[name].settings,
                    cold_start_s=cold_start_s,
                    gpus_per_replica=devices_per_replica(pool),
                )
                for name, pool in config.pools.items()
            ),
            placer=_placer_factory(config),
            coordinators=config.server.replicas.min,
            index=index_options(config),
            limits=coordinator_limits(config),
            rules=service_rules(config),
            priors={},  # as in a live deployment, which learns from reports
            seed=seed,
            scheduled_events=scheduled_events,
            model=config.model_name,
            autoscaler=None if options is None else _autoscaler_factory(config, options),
            scaling_interval_s=2.0 if options is None else options.interval_s,
        ),
        devices=sum(workers),
        device="engine" if EngineKind.SIM in kinds else "GPU",
        pools={
            name: _describe_pool(config.pools[name], model) for name, model in engine_models.items()
        },
        modelled=tuple(
            model.modelled for model in engine_models.values() if model.modelled is not None
        ),
        notes=(*_notes(config), *_left_out_notes(config, model_config)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineModel:
    settings: V1Settings
    description: str
    modelled: ModelledEngine | None = None
    """None where the configuration says how fast it is."""


def _placer_factory(config: DeploymentConfig) -> Callable[[], Placer]:
    """A new policy for each coordinator, in order, with random numbers as in a live deployment."""
    coordinator_numbers = count()
    return lambda: build_placer(
        config, router_rng(config, f"simulated-{next(coordinator_numbers)}")
    )


def _autoscaler_factory(
    config: DeploymentConfig, options: AutoscalerOptions
) -> Callable[[], Autoscaler]:
    """A new autoscaler for each run; a policy that cannot be loaded raises now."""
    rule = scaling_policy_name(config)
    make_scaling_policy(rule, options)
    return lambda: Autoscaler(make_scaling_policy(rule, options), options)


def _engine_models(
    config: DeploymentConfig, model_config: Path | None, efficiency: Efficiency
) -> dict[str, _EngineModel]:
    """The engine of each pool; raises all errors together."""
    findings: list[str] = []
    models: dict[str, _EngineModel] = {}
    shape = _model_shape(config, model_config, findings)
    for name, pool in config.pools.items():
        engine, model = pool.engine, config.models[pool.model]
        match engine.kind:
            case EngineKind.SIM:
                models[name] = _sim_engine(engine, model, config.transfer)
            case EngineKind.VLLM:
                engine_model = _vllm_engine(config, name, shape, efficiency, findings)
                if engine_model is not None:
                    models[name] = engine_model
            case _:
                assert_never(engine.kind)
    if findings:
        raise CannotModel(tuple(findings))
    return models


def _model_shape(
    config: DeploymentConfig, model_config: Path | None, findings: list[str]
) -> _SourceShape | None:
    if all(pool.engine.kind is EngineKind.SIM for pool in config.pools.values()):
        return None
    try:
        return load_shape(config.models[config.model_name].source, model_config)
    except UnknownModel as error:
        findings.append(f"models.{config.model_name}.source: {error}")
        return None


# ---------------------------------------------------------------------- simulated engines
def _sim_engine(engine: EngineConfig, model: ModelConfig, transfer: TransferConfig) -> _EngineModel:
    settings = sim_settings(engine, model, transfer)
    v1_settings = V1Settings(
        timing=SimStepTiming(settings),
        kv_blocks=settings.kv_blocks,
        kv_block_bytes=settings.kv_block_bytes,
        block_size_tokens=settings.block_size_tokens,
        max_len_tokens=settings.max_len_tokens,
        max_running_requests=settings.max_running_requests,
        max_batched_tokens=settings.max_batched_tokens,
        max_batched_tokens_while_decoding=settings.max_batched_tokens_while_decoding,
        prefix_caching=engine.prefix_caching,
        lease_s=settings.lease_s,
        transfer_bytes_per_s=settings.wire_bytes_per_s,
        transfer_setup_s=settings.transfer_setup_s / settings.speed,
        max_waiting_requests=settings.max_waiting_requests,
        max_pulls=transfer.max_concurrent_pulls or _UNLIMITED_PULLS,
        layout=settings.layout(model.source),
    )
    return _EngineModel(settings=v1_settings, description="simulated engine as configured")


# ---------------------------------------------------------------------- vLLM's engines
def _vllm_engine(
    config: DeploymentConfig,
    name: str,
    source_shape: _SourceShape | None,
    efficiency: Efficiency,
    findings: list[str],
) -> _EngineModel | None:
    """The engine of a pool; None after an error, which is added to the findings."""
    pool = config.pools[name]
    device = _device(pool, f"pools.{name}.resources.accelerator", findings)
    budget_error = None if device is None else _step_budget_error(pool.engine, device)
    if budget_error is not None:
        findings.append(
            f"pools.{name}.engine.max_num_batched_tokens_while_decoding: {budget_error}"
        )
    if source_shape is None:
        return None
    weights = _weights_dtype(pool.engine, source_shape.weights)
    if weights is None:
        findings.append(
            f"pools.{name}.engine.extra.quantization: got"
            f" {pool.engine.extra.get('quantization')!r}, expected one that tells the bits of"
            f" weights ({', '.join(_QUANTIZED_AS)}), or weights that are stored quantized"
        )
    if device is None or weights is None or budget_error is not None:
        return None
    source_shape = replace(source_shape, weights=weights)
    try:
        return _model_engine(
            device,
            source_shape,
            config.models[pool.model],
            pool,
            config.transfer,
            efficiency=efficiency,
        )
    except InsufficientMemory as error:
        findings.append(f"pools.{name}: {error}")
        return None


def _device(pool: PoolConfig, key: str, findings: list[str]) -> Accelerator | None:
    accelerator_name = pool.resources.accelerator
    if accelerator_name is None:
        findings.append(
            f"{key}: missing, expected the name of an accelerator such as H100 (and gpus:"
            f" {pool.parallel.workers}): without it the speed of the engine is unknown"
        )
        return None
    try:
        return find_accelerator(accelerator_name)
    except UnknownAccelerator as error:
        findings.append(f"{key}: {error}")
        return None


def _step_budget_error(engine: EngineConfig, device: Accelerator) -> str | None:
    """The error of the budget beside streams, where vLLM's defaults bound it."""
    tokens, (max_seqs, max_tokens) = (
        engine.max_num_batched_tokens_while_decoding,
        batch_limits(engine, gpu_batch_defaults(device)),
    )
    if tokens is None or max_seqs <= tokens <= max_tokens:
        return None
    if tokens > max_tokens:
        expected, action = f"at most {max_tokens}, vLLM's own max_num_batched_tokens", "lower"
    else:
        expected, action = f"at least {max_seqs}, vLLM's own max_num_seqs, one a stream", "raise"
    return f"got {tokens}, expected {expected}: {action} it, or set that, too"


def _model_engine(
    device: Accelerator,
    source_shape: _SourceShape,
    model_config: ModelConfig,
    pool: PoolConfig,
    transfer: TransferConfig,
    *,
    efficiency: Efficiency,
) -> _EngineModel:
    engine, parallel, shape = pool.engine, pool.parallel, source_shape.shape
    weights, kv = source_shape.weights or Dtype.BF16, _kv_dtype(engine, source_shape.kv)
    least_tokens = engine.block_size_tokens or BLOCK_SIZE_TOKENS
    block_tokens = shape.block_tokens(least_tokens, kv, parallel.tp)
    max_running_requests, max_batched_tokens = batch_limits(engine, gpu_batch_defaults(device))
    memory_fit = fit(
        shape,
        device,
        tp=parallel.tp,
        pp=parallel.pp,
        dp=parallel.dp,
        ep=parallel.ep,
        weights=weights,
        kv=kv,
        utilization=engine.gpu_memory_utilization or GPU_MEMORY_UTILIZATION,
        max_batched_tokens=max_batched_tokens,
        max_running_requests=max_running_requests,
    )
    rank = V1Settings(
        timing=Roofline(
            shape,
            device,
            tp=parallel.tp,
            pp=parallel.pp,
            dp=parallel.dp,
            ep=parallel.tp * parallel.dp if parallel.ep else 1,
            weights=weights,
            kv=kv,
            efficiency=efficiency,
        ),
        kv_blocks=_kv_blocks(memory_fit, engine, block_tokens),
        kv_block_bytes=round(shape.kv_bytes(block_tokens, kv)),
        block_size_tokens=block_tokens,
        request_blocks=shape.request_blocks(block_tokens, kv),
        max_len_tokens=model_config.max_len_tokens or shape.max_len_tokens,
        max_running_requests=max_running_requests,
        max_batched_tokens=max_batched_tokens,
        max_batched_tokens_while_decoding=engine.max_num_batched_tokens_while_decoding,
        prefix_caching=engine.prefix_caching,
        pipeline_stages=parallel.pp,
        first_token_s=efficiency.first_token_s,
        lease_s=transfer.lease_s,
        transfer_bytes_per_s=device.network_bytes_per_s * parallel.tp * parallel.pp,
        max_pulls=transfer.max_concurrent_pulls or _UNLIMITED_PULLS,
        layout=f"{shape.name}/{kv}/{block_tokens}",
    )
    parallelism = f", TP {parallel.tp}, PP {parallel.pp}" if parallel.workers > 1 else ""
    parallelism += f", DP {parallel.dp}" if parallel.dp > 1 else ""
    parallelism += ", whole experts on each GPU" if parallel.ep else ""
    return _EngineModel(
        settings=rank.for_ranks(parallel.dp),
        description=f"{device.name}{parallelism}, {weights} weights, {kv} KV cache",
        modelled=ModelledEngine(
            accelerator=device.name,
            devices=parallel.workers,
            has_experts=shape.experts is not None,
            has_ranks=parallel.dp > 1,
        ),
    )


def _weights_dtype(engine: EngineConfig, stored_dtype: Dtype | None) -> Dtype | None:
    """Type of weights: as quantized when stored, else by the quantization, else as configured.

    None where a quantization does not tell.
    """
    if stored_dtype in _QUANTIZED_DTYPES:
        return stored_dtype
    quantization = engine.extra.get("quantization")
    if quantization is not None:
        name = str(quantization).lower()
        return next((dtype for part, dtype in _QUANTIZED_AS.items() if part in name), None)
    return _to_perf_dtype(engine.dtype) or stored_dtype or Dtype.BF16


def _kv_dtype(engine: EngineConfig, published: Dtype | None) -> Dtype:
    """With `auto`, that of the quantization, else of activations: 16 bits for narrower weights."""
    kv_cache_dtype = str(engine.extra.get("kv_cache_dtype", "auto"))
    if kv_cache_dtype == "auto" and published is not None:
        return published
    if (scaled_dtype := _SCALED_KV_DTYPES.get(kv_cache_dtype)) is not None:
        return scaled_dtype
    if kv_cache_dtype.startswith("fp8"):
        return Dtype.FP8
    model_dtype = (
        ModelDtype(kv_cache_dtype) if kv_cache_dtype in set(ModelDtype) else ModelDtype.AUTO
    )
    return _to_perf_dtype(model_dtype) or _to_perf_dtype(engine.dtype) or Dtype.BF16


def _to_perf_dtype(dtype: ModelDtype) -> Dtype | None:
    match dtype:
        case ModelDtype.AUTO:
            return None
        case ModelDtype.BFLOAT16:
            return Dtype.BF16
        case ModelDtype.FLOAT16:
            return Dtype.FP16
        case ModelDtype.FLOAT32:
            return Dtype.FP32
        case _:
            assert_never(dtype)


def _kv_blocks(memory_fit: MemoryFit, engine: EngineConfig, block_tokens: int) -> int:
    """KV blocks of a rank: all memory that remains, or the configured part of it."""
    blocks = memory_fit.rank_kv_tokens // block_tokens
    if engine.kv_cache_bytes is None:
        return blocks
    return max(1, int(blocks * engine.kv_cache_bytes / memory_fit.kv_bytes))


# ---------------------------------------------------------------------- in words
def _describe_pool(pool: PoolConfig, engine_model: _EngineModel) -> str:
    tokens = engine_model.settings.kv_blocks * engine_model.settings.block_size_tokens
    return (
        f"{pool.replicas.initial} x {engine_model.description}, KV cache of {tokens:,} tokens each"
    )


def _notes(config: DeploymentConfig) -> Iterable[str]:
    kinds = {pool.engine.kind for pool in config.pools.values()}
    if EngineKind.VLLM in kinds:
        yield UNMEASURED
    if EngineKind.SIM in kinds:
        yield "Engines are as fast as the configuration says, which is no statement about hardware."
    yield from unsimulated_notes(config)
    groups = [f"pools.{name}" for name, pool in config.pools.items() if pool.parallel.dp > 1]
    if groups:
        yield (
            "No deployment starts data-parallel groups; requests are taken to be spread evenly over"
            f" their ranks ({', '.join(groups)})."
        )


def _left_out_notes(config: DeploymentConfig, model_config: Path | None) -> Iterable[str]:
    """Parts of the model whose weights are not counted."""
    shape = _model_shape(config, model_config, [])
    if shape is not None and shape.shape.left_out:
        yield (
            f"The memory of {' and '.join(shape.shape.left_out)} is not counted: engines have less"
            " room for keys and values than here."
        )


def load_shape(source: str, config_file: Path | None = None) -> _SourceShape:
    """The shape of a model by its source (a hub id or a folder) or by a `config.json`.

    Raises:
        UnknownModel: the name is unknown, or the file is not readable or incomplete.
    """
    if config_file is None and (file := Path(source) / "config.json").is_file():
        config_file = file
    if config_file is None:
        return _SourceShape(shape=find_shape(source), weights=dtype_hint(source))
    shape, weights, kv = read_published(config_file, name=source)
    return _SourceShape(shape=shape, weights=weights, kv=kv)
