"""From a configuration to the same deployment in virtual time.

Placement, limits and index are built from the same keys, by the same functions, as in a deployment
that serves. Engines are modelled: simulated ones by the times that their configuration states, real
ones by their accelerator's data sheet and their model's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import assert_never

from baton.config.derive.effective_options import batch_limits
from baton.config.derive.options import (
    autoscaler_options,
    coordinator_limits,
    devices_of,
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
from baton.config.simulation.model_shapes import SourceShape, shape_at
from baton.config.simulation.sim_step_timing import SimSteps
from baton.config.simulation.simulated_keys import not_simulated
from baton.control.autoscaling.autoscaler import Autoscaler
from baton.domain.errors import ConfigInvalid, DoesNotFit, UnknownAccelerator, UnknownModel
from baton.perf.hardware.accelerators import Accelerator, Dtype
from baton.perf.hardware.catalogue import accelerator
from baton.perf.model.engine_defaults import BLOCK_TOKENS, MEMORY_SHARE, batch_defaults
from baton.perf.model.memory import MemoryFit, fit
from baton.perf.steps.roofline import Roofline
from baton.policy.placement.port import Placer
from baton.policy.scaling.catalogue import scaling_policy
from baton.policy.scaling.options import AutoscalerOptions
from baton.simulator.faults import Happening
from baton.simulator.scenario import PoolPlan, Scenario
from baton.simulator.v1.settings import V1Settings

_ANY_NUMBER_OF_PULLS = 1_000_000
_PACKED = {
    "int8_per_token_head": Dtype.INT8,
    "fp8_per_token_head": Dtype.INT8,
    "int4_per_token_head": Dtype.INT4,
    "nvfp4": Dtype.FP4,
    "nvfp4_4over6": Dtype.FP4,
    "nvfp4_ds_mla": Dtype.FP4,
}
"""vLLM's types of KV blocks with a scale for each head of a token, or for a few numbers of it. FP8
with a scale for each head takes what INT8 with one takes."""
_QUANTIZED = frozenset({Dtype.FP8, Dtype.INT8, Dtype.FP4, Dtype.INT4})


class CannotModel(ConfigInvalid):
    """A configuration that may well serve, but whose engines cannot be modelled; all reasons."""

    remedy = "correct these keys, as with --set, or give the model's config.json (--model-config)"

    @property
    def why(self) -> str:
        """One reason a line."""
        return str(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A deployment that can be simulated, and what a reader must know of it."""

    scenario: Scenario
    devices: int
    """GPUs of all pools as they start, or engines where they are simulated ones."""
    device: str
    pools: dict[str, str] = field(default_factory=dict)
    """What each pool is, in words."""
    notes: tuple[str, ...] = ()


def simulated(
    config: DeploymentConfig,
    *,
    model_config: Path | None = None,
    seed: int = 0,
    happenings: tuple[Happening, ...] = (),
    cold_start_s: float | None = None,
) -> Simulated:
    """The deployment as it is when `baton up` has started it, and what happens to it.

    `model_config` is the model's `config.json`, where its source is no folder and its name unknown;
    `cold_start_s` is how long a replica takes that an autoscaler starts, a minute unless given.

    Raises:
        CannotModel: no accelerator is named, the model's shape is not known, or it does not fit.
        ConfigInvalid: the user's own policy cannot be loaded.
    """
    if len(config.models) > 1:
        names = ", ".join(config.models)
        raise CannotModel((f"models: got {names}, wanted one: simulate one after the other",))
    modelled = _modelled(config, model_config)
    options = autoscaler_options(config)
    build_placer(config, router_rng(config, "simulated"))  # a policy that cannot be loaded, now
    kinds = {pool.engine.kind for pool in config.pools.values()}
    workers = [pool.replicas.start * pool.parallel.workers for pool in config.pools.values()]
    return Simulated(
        scenario=Scenario(
            pools=tuple(
                PoolPlan(
                    name=name,
                    role=pool.role,
                    replicas=pool.replicas.start,
                    settings=modelled[name].settings,
                    cold_start_s=cold_start_s,
                    gpus_per_replica=devices_of(pool),
                )
                for name, pool in config.pools.items()
            ),
            placer=_placers(config),
            coordinators=config.server.replicas.min,
            index=index_options(config),
            limits=coordinator_limits(config),
            rules=service_rules(config),
            priors={},  # a deployment has none: how long its engines take it learns from reports
            seed=seed,
            happenings=happenings,
            model=config.model_name,
            autoscaler=None if options is None else _autoscalers(config, options),
            scaling_interval_s=2.0 if options is None else options.interval_s,
        ),
        devices=sum(workers),
        device="engine" if EngineKind.SIM in kinds else "GPU",
        pools={name: _described(config.pools[name], one) for name, one in modelled.items()},
        notes=tuple(_notes(config)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Modelled:
    settings: V1Settings
    what: str


def _placers(config: DeploymentConfig) -> Callable[[], Placer]:
    """Each coordinator's own, in order; they draw as those of a deployment would."""
    numbers = count()
    return lambda: build_placer(config, router_rng(config, f"simulated-{next(numbers)}"))


def _autoscalers(config: DeploymentConfig, options: AutoscalerOptions) -> Callable[[], Autoscaler]:
    """One for each run. A policy of the user's own that cannot be loaded says so now."""
    rule = scaling_policy_name(config)
    scaling_policy(rule, options)
    return lambda: Autoscaler(scaling_policy(rule, options), options)


def _modelled(config: DeploymentConfig, model_config: Path | None) -> dict[str, _Modelled]:
    """Each pool's engine; everything that is wrong is said at once."""
    findings: list[str] = []
    found: dict[str, _Modelled] = {}
    shape = _shape(config, model_config, findings)
    for name, pool in config.pools.items():
        engine, model = pool.engine, config.models[pool.model]
        match engine.kind:
            case EngineKind.SIM:
                found[name] = _sim_engine(engine, model, config.transfer)
            case EngineKind.VLLM:
                made = _vllm_engine(config, name, shape, findings)
                if made is not None:
                    found[name] = made
            case _:
                assert_never(engine.kind)
    if findings:
        raise CannotModel(tuple(findings))
    return found


def _shape(
    config: DeploymentConfig, model_config: Path | None, findings: list[str]
) -> SourceShape | None:
    if all(pool.engine.kind is EngineKind.SIM for pool in config.pools.values()):
        return None
    try:
        return shape_at(config.models[config.model_name].source, model_config)
    except UnknownModel as error:
        findings.append(f"models.{config.model_name}.source: {error}")
        return None


# ---------------------------------------------------------------------- simulated engines
def _sim_engine(engine: EngineConfig, model: ModelConfig, transfer: TransferConfig) -> _Modelled:
    settings = sim_settings(engine, model, transfer)
    made = V1Settings(
        timing=SimSteps(settings),
        kv_blocks=settings.kv_blocks,
        kv_block_bytes=settings.kv_block_bytes,
        block_size_tokens=settings.block_size_tokens,
        max_len_tokens=settings.max_len_tokens,
        max_running_requests=settings.max_running_requests,
        max_batched_tokens=settings.max_batched_tokens,
        decode_step_tokens=settings.decode_step_tokens,
        prefix_caching=engine.prefix_caching,
        lease_s=settings.lease_s,
        transfer_bytes_per_s=settings.wire_bytes_per_s,
        transfer_setup_s=settings.transfer_setup_s / settings.speed,
        max_waiting_requests=settings.max_waiting_requests,
        max_pulls=transfer.max_concurrent_pulls or _ANY_NUMBER_OF_PULLS,
        layout=settings.layout(model.source),
    )
    return _Modelled(settings=made, what="simulated engine as configured")


# ---------------------------------------------------------------------- vLLM's engines
def _vllm_engine(
    config: DeploymentConfig, name: str, model: SourceShape | None, findings: list[str]
) -> _Modelled | None:
    """The engine of a pool; None when something is missing, which is then among the findings."""
    pool = config.pools[name]
    device = _device(pool, f"pools.{name}.resources.accelerator", findings)
    misfit = None if device is None else _budget_misfit(pool.engine, device)
    if misfit is not None:
        findings.append(f"pools.{name}.engine.decode_step_tokens: {misfit}")
    if device is None or model is None or misfit is not None:
        return None
    try:
        return _on(device, model, config.models[pool.model], pool, config.transfer)
    except DoesNotFit as error:
        findings.append(f"pools.{name}: {error}")
        return None


def _device(pool: PoolConfig, key: str, findings: list[str]) -> Accelerator | None:
    named = pool.resources.accelerator
    if named is None:
        findings.append(
            f"{key}: missing, wanted the name of an accelerator such as H100 (and gpus:"
            f" {pool.parallel.workers}): without it nobody knows how fast the engine is"
        )
        return None
    try:
        return accelerator(named)
    except UnknownAccelerator as error:
        findings.append(f"{key}: {error}")
        return None


def _budget_misfit(engine: EngineConfig, device: Accelerator) -> str | None:
    """Why the budget beside streams cannot be; of bounds that are set, the configuration knows."""
    tokens, (seats, most) = engine.decode_step_tokens, batch_limits(engine, batch_defaults(device))
    if tokens is None or seats <= tokens <= most:
        return None
    if tokens > most:
        own, change = f"at most {most}, vLLM's own max_num_batched_tokens", "lower"
    else:
        own, change = f"at least {seats}, vLLM's own max_num_seqs, one a stream", "raise"
    return f"got {tokens}, wanted {own}: {change} it, or set that, too"


def _on(
    device: Accelerator,
    model: SourceShape,
    served: ModelConfig,
    pool: PoolConfig,
    transfer: TransferConfig,
) -> _Modelled:
    engine, parallel, shape = pool.engine, pool.parallel, model.shape
    weights, kv = _weights(engine, model.weights), _kv_cache(engine)
    block_tokens = engine.block_size_tokens or BLOCK_TOKENS
    max_running_requests, max_batched_tokens = batch_limits(engine, batch_defaults(device))
    room = fit(
        shape,
        device,
        tp=parallel.tp,
        pp=parallel.pp,
        weights=weights,
        kv=kv,
        utilization=engine.gpu_memory_utilization or MEMORY_SHARE,
        max_batched_tokens=max_batched_tokens,
        max_running_requests=max_running_requests,
    )
    made = V1Settings(
        timing=Roofline(shape, device, tp=parallel.tp, pp=parallel.pp, weights=weights, kv=kv),
        kv_blocks=_kv_blocks(room, engine, block_tokens),
        kv_block_bytes=round(shape.kv_bytes(block_tokens, kv)),
        block_size_tokens=block_tokens,
        max_len_tokens=served.max_len_tokens or shape.max_len_tokens,
        max_running_requests=max_running_requests,
        max_batched_tokens=max_batched_tokens,
        decode_step_tokens=engine.decode_step_tokens,
        prefix_caching=engine.prefix_caching,
        pipeline_stages=parallel.pp,
        lease_s=transfer.lease_s,
        transfer_bytes_per_s=device.network_bytes_per_s * parallel.workers,
        max_pulls=transfer.max_concurrent_pulls or _ANY_NUMBER_OF_PULLS,
        layout=f"{shape.name}/{kv}/{block_tokens}",
    )
    split = f", TP {parallel.tp}, PP {parallel.pp}" if parallel.workers > 1 else ""
    return _Modelled(settings=made, what=f"{device.name}{split}, {weights} weights, {kv} KV cache")


def _weights(engine: EngineConfig, stored: Dtype | None) -> Dtype:
    """How weights are held: as quantized, else as the configuration says, else as they are."""
    quantization = str(engine.extra.get("quantization", "")).lower()
    if "fp8" in quantization:
        return Dtype.FP8
    if any(scheme in quantization for scheme in ("awq", "gptq")):
        return Dtype.INT4
    if stored in _QUANTIZED:
        return stored
    return _plain(engine.dtype) or stored or Dtype.BF16


def _kv_cache(engine: EngineConfig) -> Dtype:
    """With `auto`, vLLM takes the type of activations: 16 bits, also where weights are narrower."""
    said = str(engine.extra.get("kv_cache_dtype", "auto"))
    if (packed := _PACKED.get(said)) is not None:
        return packed
    if said.startswith("fp8"):
        return Dtype.FP8
    own = ModelDtype(said) if said in set(ModelDtype) else ModelDtype.AUTO
    return _plain(own) or _plain(engine.dtype) or Dtype.BF16


def _plain(dtype: ModelDtype) -> Dtype | None:
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


def _kv_blocks(room: MemoryFit, engine: EngineConfig, block_tokens: int) -> int:
    """Of the whole replica: what memory leaves, or the share of it that was asked for."""
    blocks = room.kv_blocks(block_tokens)
    if engine.kv_cache_bytes is None:
        return blocks
    return max(1, int(blocks * engine.kv_cache_bytes / room.kv_bytes))


# ---------------------------------------------------------------------- in words
def _described(pool: PoolConfig, one: _Modelled) -> str:
    tokens = one.settings.kv_blocks * one.settings.block_size_tokens
    return f"{pool.replicas.start} x {one.what}, KV cache of {tokens:,} tokens each"


def _notes(config: DeploymentConfig) -> Iterable[str]:
    kinds = {pool.engine.kind for pool in config.pools.values()}
    if EngineKind.VLLM in kinds:
        yield (
            "Engines are modelled from data sheets and the model's shape, not measured; check the"
            " model with 'baton fit ROWS.csv' or 'baton fit LOG' against your own measurements."
        )
    if EngineKind.SIM in kinds:
        yield "Engines are as fast as the configuration says, which is no statement about hardware."
    yield from not_simulated(config)
