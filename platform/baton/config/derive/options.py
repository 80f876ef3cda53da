"""Options of coordinators, autoscaler, engines and API servers, from a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from baton.config.derive.api_arguments import MODEL_LOADING_ARGUMENTS
from baton.config.language.conditions import parse_condition
from baton.config.language.fields import SecretRef
from baton.config.schema.deployment import (
    DeploymentConfig,
    Dtype,
    EngineConfig,
    ModelConfig,
    PoolConfig,
    SimTimings,
    TransferConfig,
)
from baton.config.schema.recovery import RecoveryConfig
from baton.config.schema.service import SloObjectives, TenantConfig
from baton.control.fleet.adapter_registry import AdapterRules
from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits, RecoveryOptions
from baton.control.state.service_rules import ServiceRules
from baton.domain.errors import ConfigInvalid, UnknownAccelerator
from baton.domain.slo import Slo
from baton.domain.tenant import DEFAULT_TENANT, RateLimit, Tenant
from baton.perf.hardware.catalogue import find_accelerator
from baton.policy.admission.decision import AdmissionOptions
from baton.policy.admission.slo_classes import DEFAULT_CLASS, SloClasses, SloRule
from baton.policy.placement.predicted import PredictedOptions
from baton.policy.prefix_cache.index import IndexMode, IndexOptions
from baton.policy.resilience.circuit_breakers import BreakerOptions
from baton.policy.resilience.hedging import HedgeOptions
from baton.policy.resilience.retry_budget import RetryOptions
from baton.policy.scaling.ingresses import IngressBounds
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds, ScalingRule, StepLimits
from baton.simulator.engine.settings import OnTransferFailure, SimSettings

_USABLE_FRACTION = 0.9
"""Of a replica's part of a GPU. vLLM does not count contexts, graphs and fragmentation."""


def coordinator_limits(config: DeploymentConfig) -> CoordinatorLimits:
    """Limits of every coordinator."""
    admission, timeouts = config.admission, config.admission.timeouts
    cold_start_wait_s = admission.cold_start_timeout_s
    return CoordinatorLimits(
        max_queued_requests=admission.max_queued_requests,
        max_prompt_tokens=admission.max_prompt_tokens,
        queue_timeout_s=admission.queue_timeout_s,
        cold_start_timeout_s=cold_start_wait_s if scales_from_zero(config) else None,
        resume_timeout_s=timeouts.resume_s,
        first_token_timeout_s=timeouts.first_token_s,
        transfer_deadline_s=config.transfer.deadline_s,
        max_pulls=config.transfer.max_concurrent_pulls,
        early_first_token=config.transfer.early_first_token,
        stall_timeout_s=timeouts.stall_s,
        total_timeout_s=timeouts.total_s,
        drain_timeout_s=timeouts.drain_s,
        lease_s=config.transfer.lease_s,
        recovery=recovery_options(config.recovery),
    )


def scales_from_zero(config: DeploymentConfig) -> bool:
    """Whether a model may have no replicas and gets one when a request waits for it.

    A dry run starts none. With several models, pass each model's own part.
    """
    autoscaler = config.autoscaler
    if autoscaler is None or not autoscaler.scale_to_zero or autoscaler.dry_run:
        return False
    is_scaled = autoscaler.policy != str(ScalingRule.STATIC)
    return is_scaled and all(pool.replicas.min == 0 for pool in config.pools.values())


def recovery_options(recovery: RecoveryConfig) -> RecoveryOptions:
    """Recovery of every coordinator from replica failures."""
    return RecoveryOptions(
        heartbeat_timeout_s=recovery.heartbeat_timeout_s,
        circuit_breaker=BreakerOptions(
            failure_threshold=recovery.circuit_breaker.failure_threshold,
            open_duration_s=recovery.circuit_breaker.open_duration_s,
        ),
        retry_budget=RetryOptions(ratio=recovery.retry_budget.ratio),
        hedging=HedgeOptions(latency_multiple=recovery.hedging.latency_multiple),
    )


def predicted_options(config: DeploymentConfig) -> PredictedOptions:
    """Options of the `predicted` placement policy."""
    objectives = config.slo.default
    return PredictedOptions(
        disaggregate=config.router.disaggregate,
        ttft_slo_s=objectives.ttft_s,
        tpot_slo_s=objectives.tpot_s,
        decode_on_prefill_fraction=config.router.overflow.decode_on_prefill,
        prefill_on_decode_fraction=config.router.overflow.prefill_on_decode,
    )


def service_rules(config: DeploymentConfig) -> ServiceRules:
    """Classes, tenants and admission of every coordinator."""
    return ServiceRules(
        slos=slo_classes(config), tenants=tenants(config), admission=admission_options(config)
    )


def slo_classes(config: DeploymentConfig) -> SloClasses:
    """Every class, and the rules that assign requests."""
    rules = []
    for name, class_ in config.slo.classes.items():
        condition = None if class_.match is None else parse_condition(class_.match)
        if condition is not None:
            comparison, tokens = condition
            rules.append(SloRule(slo_class=name, comparison=comparison, prompt_tokens=tokens))
    classes = {DEFAULT_CLASS: config.slo.default, **config.slo.classes}
    return SloClasses(
        classes={name: _slo(name, slo) for name, slo in classes.items()}, rules=tuple(rules)
    )


def _slo(name: str, objectives: SloObjectives) -> Slo:
    return Slo(
        name=name,
        ttft_s=objectives.ttft_s,
        tpot_s=objectives.tpot_s,
        itl_p99_s=objectives.itl_p99_s,
        attainment_target=objectives.attainment,
        window_s=objectives.window_s,
        priority=objectives.priority,
    )


def tenants(config: DeploymentConfig) -> dict[str, Tenant]:
    """By name."""
    return {name: _tenant(name, tenant) for name, tenant in config.tenants.items()}


def _tenant(name: str, tenant_config: TenantConfig) -> Tenant:
    rate = tenant_config.rate
    return Tenant(
        name=name,
        priority=tenant_config.priority,
        weight=tenant_config.weight,
        slo=tenant_config.slo,
        classes=tenant_config.classes,
        rate=RateLimit(
            requests_per_s=rate.requests_per_s,
            tokens_per_s=rate.tokens_per_s,
            burst_s=rate.burst_s,
        ),
        max_in_flight=tenant_config.max_in_flight,
        cache=tenant_config.cache,
    )


def key_files(config: DeploymentConfig) -> dict[str, Path]:
    """Files with API keys, by tenant that has one."""
    return {
        name: Path(tenant.keys_file)
        for name, tenant in config.tenants.items()
        if tenant.keys_file is not None
    }


def allows_anonymous(config: DeploymentConfig) -> bool:
    """Whether callers without a key are served, as tenant `default`.

    The default is yes while no tenant has keys.
    """
    default_tenant = config.tenants.get(DEFAULT_TENANT)
    configured = None if default_tenant is None else default_tenant.anonymous
    return not key_files(config) if configured is None else configured


def admission_options(config: DeploymentConfig) -> AdmissionOptions:
    """Options of admission."""
    admission = config.admission
    return AdmissionOptions(
        policy=admission.policy,
        max_engine_queue_delay_s=admission.max_engine_queue_delay_s,
        slo_safety_margin_fraction=admission.slo_safety_margin,
    )


def autoscaler_options(config: DeploymentConfig) -> AutoscalerOptions | None:
    """Options of the autoscaler for any policy; None without autoscaling."""
    autoscaler = config.autoscaler
    if autoscaler is None:
        return None
    return AutoscalerOptions(
        interval_s=autoscaler.interval_s,
        gpu_budget=autoscaler.gpu_budget,
        scale_up=StepLimits(
            cooldown_s=autoscaler.scale_up.cooldown_s, max_step=autoscaler.scale_up.max_step
        ),
        scale_down=StepLimits(
            cooldown_s=autoscaler.scale_down.cooldown_s,
            max_step=autoscaler.scale_down.max_step,
            headroom_fraction=autoscaler.scale_down.headroom,
        ),
        scale_to_zero=autoscaler.scale_to_zero,
        dry_run=autoscaler.dry_run,
        bounds=pool_bounds(config),
    )


def scaling_policy_name(config: DeploymentConfig) -> str:
    """The policy's name or `module:function`; `static` without autoscaling."""
    autoscaler = config.autoscaler
    return str(ScalingRule.STATIC if autoscaler is None else autoscaler.policy)


def pool_bounds(config: DeploymentConfig) -> dict[str, PoolBounds]:
    """Bounds of each pool's replicas."""
    return {
        name: PoolBounds(
            min=pool.replicas.min,
            initial=pool.replicas.initial,
            max=pool.replicas.max,
            gpus_per_replica=devices_per_replica(pool),
        )
        for name, pool in config.pools.items()
    }


def ingress_bounds(config: DeploymentConfig) -> IngressBounds:
    """Bounds of the ingress replicas."""
    counts = config.server.replicas
    return IngressBounds(min=counts.min, max=counts.max)


def devices_per_replica(pool: PoolConfig) -> float:
    """Units of a replica in budgets and costs: its GPUs, or its workers without GPUs."""
    return float(pool.resources.gpus or pool.parallel.workers)


def price_per_hour(pool: PoolConfig) -> float | None:
    """$ for one device of a pool: configured, else of the catalogue; None: unknown."""
    resources = pool.resources
    if resources.price_per_hour is not None or resources.accelerator is None:
        return resources.price_per_hour
    try:
        return find_accelerator(resources.accelerator).price_per_hour
    except UnknownAccelerator:
        return None


def api_arguments(model: ModelConfig) -> dict[str, object]:
    """Arguments of a model's API server that have no key of their own."""
    revision = {"revision": model.revision} if model.revision else {}
    return {**model_loading_arguments(model), **model.api, **revision}


def model_loading_arguments(model: ModelConfig) -> dict[str, object]:
    """Arguments about reading a model, from `api` or `engine.extra`; `api` has precedence."""
    sources = (model.api, model.engine.extra)
    return {
        name: source[name]
        for name in MODEL_LOADING_ARGUMENTS
        for source in reversed(sources)
        if name in source
    }


def serves_adapters(model: ModelConfig) -> bool:
    """Whether its engines need room for LoRA adapters."""
    return bool(model.adapters) or model.runtime_adapters.max > 0


def adapter_rules(config: DeploymentConfig) -> dict[str, AdapterRules]:
    """Adapters that may be added to each model at run time."""
    return {
        name: AdapterRules(
            max=model.runtime_adapters.max,
            max_per_tenant=model.runtime_adapters.max_per_tenant,
            paths=model.runtime_adapters.paths or (),
            reserved_names=frozenset((name, *model.adapters)),
        )
        for name, model in config.models.items()
    }


def adapter_sources(model: ModelConfig) -> dict[str, str]:
    """Sources of a model's LoRA adapters, by name."""
    return {name: adapter.source for name, adapter in model.adapters.items()}


def index_options(config: DeploymentConfig) -> IndexOptions:
    """Options of every coordinator's prefix index."""
    return IndexOptions(mode=config.router.index)


def probe_options(config: DeploymentConfig) -> ProbeOptions:
    """Options of every coordinator's pair prober.

    Replicas that check a pair have the same deadline.
    """
    probe, defaults = config.transfer.probe, ProbeOptions()
    return ProbeOptions(
        interval_s=probe.interval_s,
        deadline_s=probe.deadline_s,
        first_transfer_s=max(defaults.first_transfer_s, probe.deadline_s),
    )


def emits_cache_events(config: DeploymentConfig, pool: str) -> bool:
    """Whether the engines of a pool must report their cache updates."""
    has_prefix_cache = config.pools[pool].engine.prefix_caching
    return has_prefix_cache and config.router.index is not IndexMode.PREDICTED


def sim_settings(engine: EngineConfig, model: ModelConfig, transfer: TransferConfig) -> SimSettings:
    """Settings of a simulated engine; its replica sets the address of the side channel.

    Options that real engines also have come from `engine`, `model` and `transfer`.

    Raises:
        SettingInvalid: a setting is impossible for an engine.
    """
    timings = engine.sim or SimTimings()
    defaults = SimSettings()
    host_bytes = engine.offload.host_memory_bytes or 0
    return SimSettings(
        prefill_tokens_per_s=timings.prefill_tokens_per_s,
        prefill_step_s=timings.prefill_step_s,
        prefill_quadratic_s=timings.prefill_quadratic_s,
        decode_step_s=timings.decode_step_s,
        decode_request_s=timings.decode_request_s,
        decode_kv_s=timings.decode_kv_s,
        decode_kv_quadratic_s=timings.decode_kv_quadratic_s,
        step_overhead_s=timings.step_overhead_s,
        transfer_bytes_per_s=timings.transfer_bytes_per_s,
        transfer_setup_s=timings.transfer_setup_s,
        share_bandwidth=timings.share_bandwidth,
        host_blocks=host_bytes // timings.kv_block_bytes,
        host_bytes_per_s=timings.host_bytes_per_s,
        adapter_slots=engine.adapters.max_loaded if serves_adapters(model) else 0,
        adapters_per_batch=engine.adapters.max_batched if serves_adapters(model) else 0,
        adapter_load_s=timings.adapter_load_s,
        speed=timings.speed,
        max_len_tokens=model.max_len_tokens or defaults.max_len_tokens,
        block_size_tokens=engine.block_size_tokens or defaults.block_size_tokens,
        kv_blocks=timings.kv_blocks,
        kv_block_bytes=timings.kv_block_bytes,
        kv_dtype=defaults.kv_dtype if engine.dtype is Dtype.AUTO else str(engine.dtype),
        max_running_requests=engine.max_num_seqs or defaults.max_running_requests,
        max_waiting_requests=timings.max_waiting_requests,
        max_batched_tokens=engine.max_num_batched_tokens or defaults.max_batched_tokens,
        max_batched_tokens_while_decoding=engine.max_num_batched_tokens_while_decoding,
        lease_s=transfer.lease_s,
        max_pulls=transfer.max_concurrent_pulls,
        on_transfer_failure=OnTransferFailure(transfer.on_failure),
        side_channel_deadline_s=transfer.deadline_s,
        vocab_size=timings.vocab_size,
        eos_probability=timings.eos_probability,
        eos_token_id=timings.eos_token_id,
    )


def engine_env(config: DeploymentConfig, pool: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a pool's engine processes, with secrets read on this machine.

    Raises:
        ConfigInvalid: the variable or file of a secret is missing.
    """
    findings: list[str] = []
    variables: dict[str, str] = {}
    for section, env in (
        ("transfer", config.transfer.env),
        (f"pools.{pool}", config.pools[pool].env),
    ):
        for name, value in env.items():
            try:
                variables[name] = (
                    value if isinstance(value, str) else _resolve_secret(value, environ)
                )
            except (OSError, LookupError, ValueError) as error:
                message = (
                    f"{type(error).__name__}: {error}, expected it on the machine of the engine"
                )
                findings.append(f"{section}.env.{name}: {message}")
    if findings:
        raise ConfigInvalid(tuple(findings))
    return variables


def _resolve_secret(secret: SecretRef, environ: Mapping[str, str]) -> str:
    if secret.file is not None:
        return Path(secret.file).read_text(encoding="utf-8").strip()
    name = secret.env or ""
    if name not in environ:
        raise LookupError(f"no environment variable {name}")
    return environ[name]


def shares_gpu(pool: PoolConfig) -> bool:
    """Whether a replica shares its GPU with others."""
    return 0 < pool.resources.gpus < 1


def gpu_memory_fraction(pool: PoolConfig) -> float | None:
    """Fraction of a GPU's memory that an engine uses; None leaves it to vLLM.

    Configured, else derived from the replica's part of a GPU, so that replicas on one GPU fit.
    """
    configured = pool.engine.gpu_memory_utilization
    if configured is not None or not shares_gpu(pool):
        return configured
    return round(pool.resources.gpus * _USABLE_FRACTION, 4)


def split_by_model(config: DeploymentConfig) -> dict[str, DeploymentConfig]:
    """The part of each model, by its name: its pools, and all shared sections."""
    return {
        name: replace(
            config,
            models={name: model},
            pools={key: pool for key, pool in config.pools.items() if pool.model == name},
        )
        for name, model in config.models.items()
    }
