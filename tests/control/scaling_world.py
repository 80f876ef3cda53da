"""Observations and policies for tests of the autoscaler."""

from __future__ import annotations

from collections.abc import Mapping

from baton.domain.fleet import Role
from baton.policy.scaling.desired import DesiredReplicas, ScalingReason
from baton.policy.scaling.observation import Demand, Observation, PoolObservation, ServiceLevel
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds, StepLimits


def pool(
    name: str, role: Role, ready: int, *, starting: int = 0, draining: int = 0, other: int = 0
) -> PoolObservation:
    """A pool of `ready` replicas; `other` of them play the role opposite to its own."""
    prefill = other if role is Role.DECODE else ready - other
    decode = other if role is Role.PREFILL else ready - other
    return PoolObservation(
        name=name,
        role=role,
        prefill=prefill if role is not Role.MIXED else 0,
        decode=decode if role is not Role.MIXED else 0,
        mixed=ready if role is Role.MIXED else 0,
        starting=starting,
        draining=draining,
        cold_start_s=60.0,
        prefill_tokens_per_s=10_000.0,
        decode_tokens_per_s=2_000.0,
    )


def observe(
    at_s: float,
    *pools: PoolObservation,
    demand: Demand | None = None,
    service: ServiceLevel | None = None,
    missing: tuple[str, ...] = (),
) -> Observation:
    """An observation of these pools."""
    return Observation(
        at_s=at_s,
        window_s=30.0,
        demand=demand or Demand(),
        service=service or ServiceLevel(),
        pools={each.name: each for each in pools},
        ttft_s=2.0,
        tpot_s=0.05,
        missing_inputs=missing,
    )


class FixedPolicy:
    """A policy that wants what the test says."""

    name = "asks"

    def __init__(self, **replicas: int) -> None:
        self.replicas: dict[str, int] = dict(replicas)
        self.flips: dict[str, Mapping[Role, int]] = {}

    def desired(self, observation: Observation) -> Mapping[str, DesiredReplicas]:
        return {
            name: DesiredReplicas(
                replicas=count,
                reason=ScalingReason.DEMAND,
                detail=f"the test wants {count}",
                role_flips=self.flips.get(name, {}),
            )
            for name, count in self.replicas.items()
            if name in observation.pools
        }


def options(
    *,
    bounds: Mapping[str, PoolBounds] | None = None,
    gpu_budget: float | None = None,
    up: StepLimits | None = None,
    down: StepLimits | None = None,
    scale_to_zero: bool = False,
    dry_run: bool = False,
) -> AutoscalerOptions:
    """Bounds of 1 to 10 for `prefill` and `decode`, and nothing that holds a change up."""
    pool_bounds = PoolBounds(min=1, initial=1, max=10)
    return AutoscalerOptions(
        bounds={"prefill": pool_bounds, "decode": pool_bounds} if bounds is None else bounds,
        gpu_budget=gpu_budget,
        scale_up=up or StepLimits(cooldown_s=0.0, max_step=100),
        scale_down=down or StepLimits(cooldown_s=0.0, max_step=100),
        scale_to_zero=scale_to_zero,
        dry_run=dry_run,
    )
