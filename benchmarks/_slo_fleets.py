"""The fleets of the scaling benchmark: engines, the capacity of a replica, and autoscalers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil

from baton.control.autoscaling.autoscaler import Autoscaler
from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.perf.capacity.capacity import (
    Pulls,
    max_decode_streams,
    prefill_tokens_per_s,
    required_decode_replicas,
    required_prefill_replicas,
)
from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.model.known_models import find_shape
from baton.perf.model.memory import fit
from baton.perf.steps.modelled import ModelledTiming
from baton.perf.steps.roofline import Roofline
from baton.policy.scaling.catalogue import make_scaling_policy
from baton.policy.scaling.observation import Demand
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds, ScalingRule, StepLimits
from baton.simulator.v1.settings import V1Settings
from benchmarks._fluid_pools import FluidCapacity, FluidPool
from benchmarks._oracle import Oracle

GPUS = 4
"""Of one replica: tensor parallel."""
COLD_STARTS_S = (30.0, 60.0, 120.0, 300.0)
PREFILL, DECODE = "prefill", "decode"

SERVER_SLO = Slo(ttft_s=2.0, tpot_s=0.2, attainment_target=0.97)
"""Llama-70B in a conversation server. Source: MLPerf Inference's server scenario, P99 2,000/200 ms.
The target is what is planned for; 95 % is what is wanted."""
BURST_SLO = replace(SERVER_SLO, attainment_target=0.92)
"""Where demand comes in bursts shorter than any cold start; 90 % is what is wanted."""
ORACLE_BURST_SLO = replace(BURST_SLO, attainment_target=0.99)
"""The oracle knows each burst, and can serve it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCapacity:
    """What one replica can do, for requests of such a mean size."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    streams: float
    min_step_s: float
    mean_prompt_tokens: float

    @property
    def fluid(self) -> FluidCapacity:
        """The same of a replica of a fluid."""
        return FluidCapacity(
            self.prefill_tokens_per_s, self.decode_tokens_per_s, self.streams, self.min_step_s
        )


def engine_settings(
    device_name: str,
    weights: Dtype,
    *,
    max_batched_tokens: int,
    cold_start_s: float,
    max_batched_tokens_while_decoding: int | None = None,
) -> V1Settings:
    """A replica: Llama-3.1-70B on four of a device."""
    shape, device = find_shape("meta-llama/Llama-3.1-70B-Instruct"), find_accelerator(device_name)
    memory = fit(shape, device, tp=GPUS, pp=1, weights=weights, kv=Dtype.BF16)
    return V1Settings(
        timing=Roofline(shape, device, tp=GPUS, weights=weights),
        kv_blocks=memory.kv_blocks(16),
        kv_block_bytes=round(shape.kv_token_bytes(Dtype.BF16)) * 16,
        max_running_requests=512,
        max_batched_tokens=max_batched_tokens,
        max_batched_tokens_while_decoding=max_batched_tokens_while_decoding,
        transfer_bytes_per_s=GPUS * device.network_bytes_per_s,
        weights_load_s=cold_start_s,
    )


def replica_capacity(
    settings: V1Settings, slo: Slo, *, prompt_tokens: float, output_tokens: float
) -> ReplicaCapacity:
    """By the calibrated model, as coordinators report it."""
    timing = ModelledTiming(
        steps=settings.timing, max_batched_tokens=settings.max_batched_tokens, host_block_s=0.0
    )
    context_tokens = prompt_tokens + output_tokens / 2
    streams = max_decode_streams(
        timing,
        tpot_s=slo.tpot_s,
        context_tokens=context_tokens,
        max_running=settings.max_running_requests,
        kv_tokens=settings.kv_blocks * settings.block_size_tokens,
        pulls=Pulls(at_once=settings.max_pulls, output_tokens=output_tokens),
    )
    step_s = timing.step_s(running=streams, context_tokens=round(streams * context_tokens))
    return ReplicaCapacity(
        prefill_tokens_per_s=prefill_tokens_per_s(
            timing,
            mean_uncached_tokens=prompt_tokens,
            max_batched_tokens=settings.max_batched_tokens,
            max_running=settings.max_running_requests,
            ttft_s=slo.ttft_s,
        ),
        decode_tokens_per_s=streams / step_s,
        streams=streams,
        min_step_s=timing.step_s(running=1, context_tokens=round(context_tokens)),
        mean_prompt_tokens=prompt_tokens,
    )


def needed_replicas(demand: Demand, capacity: ReplicaCapacity, slo: Slo) -> Mapping[str, int]:
    """Replicas of each pool for a demand, as baton's own policy works it out."""
    late_allowed = (1 - slo.attainment_target) / 2
    prefill = required_prefill_replicas(
        demand.prompt_tokens_per_s / capacity.prefill_tokens_per_s,
        service_s=capacity.mean_prompt_tokens / capacity.prefill_tokens_per_s,
        ttft_s=slo.ttft_s,
        max_late_fraction=late_allowed,
    )
    decode = required_decode_replicas(
        demand.output_tokens_per_s / capacity.decode_tokens_per_s,
        streams_per_replica=capacity.streams,
        max_overload_fraction=late_allowed,
    )
    return {PREFILL: max(1, ceil(prefill)), DECODE: max(1, ceil(decode))}


# -------------------------------------------------------------------- who scales

_UNLIMITED_STEPS = StepLimits(cooldown_s=0.0, max_step=1000)
"""Others pace themselves, as published: the bounds of baton's configuration are not theirs."""

Foresight = Callable[[float], Demand]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingVariant:
    """A way to scale."""

    name: str
    rule: str | None
    """As in a configuration; None: the oracle."""

    def make_autoscaler(
        self,
        bounds: Mapping[str, PoolBounds],
        foresight: Foresight,
        *,
        interval_s: float,
        every_s: float,
        capacity_at: Callable[[float], FluidCapacity] | None = None,
    ) -> Autoscaler:
        """A new one; the oracle looks at the future, and its capacities, at this interval."""
        options = AutoscalerOptions(interval_s=interval_s, bounds=bounds)
        if self.rule != ScalingRule.SLO:
            options = replace(options, scale_up=_UNLIMITED_STEPS, scale_down=_UNLIMITED_STEPS)
        if self.rule is None:
            oracle = Oracle(options, foresight, capacity=capacity_at, every_s=every_s)
            return Autoscaler(oracle, options)
        return Autoscaler(make_scaling_policy(self.rule, options), options)


VARIANTS = {
    arm.name: arm
    for arm in (
        ScalingVariant(name="oracle", rule=None),
        ScalingVariant(name="static_peak", rule=ScalingRule.STATIC),
        ScalingVariant(name="baton", rule=ScalingRule.SLO),
        ScalingVariant(name="hpa", rule="benchmarks.policies.hpa:Hpa"),
        ScalingVariant(name="kpa", rule="benchmarks.policies.kpa:Kpa"),
        ScalingVariant(name="dynamo", rule="benchmarks.policies.dynamo_planner:DynamoPlanner"),
        ScalingVariant(name="wva", rule="benchmarks.policies.wva:Wva"),
    )
}


def pool_bounds(
    initial_replicas: Mapping[str, int], max_replicas: Mapping[str, int]
) -> dict[str, PoolBounds]:
    """Of both pools."""
    return {
        pool: PoolBounds(
            min=1, initial=initial_replicas[pool], max=max_replicas[pool], gpus_per_replica=GPUS
        )
        for pool in (PREFILL, DECODE)
    }


ROLES = {PREFILL: Role.PREFILL, DECODE: Role.DECODE}


def fluid_pools(
    initial_replicas: Mapping[str, int],
    capacity: ReplicaCapacity,
    *,
    cold_start_s: float,
    drain_s: Mapping[str, float],
) -> list[FluidPool]:
    """Both pools as a fluid has them, with these numbers of replicas of that strength."""
    return [
        FluidPool(
            name=pool,
            role=role,
            replicas=initial_replicas[pool],
            **capacity.fluid._asdict(),
            cold_start_s=cold_start_s,
            drain_s=drain_s[pool],
            gpus_per_replica=GPUS,
        )
        for pool, role in ROLES.items()
    ]


def print_progress(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)
