"""The scaling rules of a deployment, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.config.derive.options import autoscaler_options, pool_bounds, scaling_policy_name
from baton.config.schema.deployment import DeploymentConfig
from baton.control.autoscaling.observer import ObserverOptions
from baton.control.fleet.pool_views import PoolState
from baton.domain.fleet import Role
from baton.policy.scaling.catalogue import make_scaling_policy
from baton.policy.scaling.desired import ScalingPolicy
from baton.policy.scaling.fixed import Static
from baton.policy.scaling.options import AutoscalerOptions, ScalingRule
from baton.policy.scaling.pools.groups import PerModelPolicy
from baton.serving.ray.serve_control import DeploymentState

_ANY_SIZE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPlan:
    """The rules of the scaling loop; replaced as a whole, while it runs."""

    rule: str
    """A built-in policy, or a custom one as `module:function`."""
    options: AutoscalerOptions
    roles: Mapping[str, Role]
    """The initial role of each pool's replicas."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Each pool's model; empty with one model."""
    is_configured: bool = True

    @property
    def is_automatic(self) -> bool:
        """Whether the number of replicas changes without an override.

        Under `static`, the default, no pool even returns to its initial size: an operator may have
        scaled it with Ray's own tools.
        """
        return self.rule != ScalingRule.STATIC

    @property
    def limits(self) -> AutoscalerOptions:
        """The options that ticks go by; under `static` a pool of any size stays as it is."""
        if self.is_automatic:
            return self.options
        bounds = {
            name: replace(pool, min=0, max=_ANY_SIZE) for name, pool in self.options.bounds.items()
        }
        return replace(self.options, bounds=bounds, scale_to_zero=True)

    @property
    def description(self) -> str:
        """For operators."""
        if not self.is_configured:
            return "none is configured, pools follow overrides only"
        if not self.is_automatic:
            return f"{self.rule}, pools follow overrides only"
        return f"{self.rule}, dry run" if self.options.dry_run else self.rule

    def pool_state(self, deployment: DeploymentState) -> PoolState:
        """A pool for the observer, from Serve's state."""
        bounds = self.options.bounds[deployment.name]
        return PoolState(
            role=self.roles[deployment.name],
            starting=deployment.starting,
            draining=deployment.stopping,
            running=deployment.running,
            gpus_per_replica=bounds.gpus_per_replica,
            model=self.models.get(deployment.name, ""),
        )

    def policy(self) -> ScalingPolicy:
        """A new policy.

        Raises:
            ConfigInvalid: the custom policy cannot be loaded.
        """
        if self.is_automatic and self.models:
            return PerModelPolicy(lambda: make_scaling_policy(self.rule, self.options))
        if self.is_automatic:
            return make_scaling_policy(self.rule, self.options)
        return Static(replace(self.options, bounds={}))  # without bounds: every pool as it is


def scaling_plan(config: DeploymentConfig) -> ScalingPlan:
    """The scaling plan of a configuration."""
    options, has_several_models = autoscaler_options(config), len(config.models) > 1
    return ScalingPlan(
        rule=scaling_policy_name(config),
        roles={name: pool.role for name, pool in config.pools.items()},
        models={name: pool.model for name, pool in config.pools.items()}
        if has_several_models
        else {},
        options=options or AutoscalerOptions(bounds=pool_bounds(config)),
        is_configured=options is not None,
    )


def observer_options(plan: ScalingPlan) -> ObserverOptions:
    """The observer's options: rates are taken over some ticks."""
    return ObserverOptions.for_interval(plan.options.interval_s)
