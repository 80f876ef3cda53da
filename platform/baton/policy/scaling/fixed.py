"""No scaling: as many replicas as the configuration starts with."""

from __future__ import annotations

from collections.abc import Mapping

from baton.policy.scaling.desired import DesiredReplicas, ScalingReason
from baton.policy.scaling.observation import Observation
from baton.policy.scaling.options import AutoscalerOptions


class Static:
    """Every pool as it was configured; an unconfigured pool, as it is."""

    name = "static"

    def __init__(self, options: AutoscalerOptions) -> None:
        self._bounds = options.bounds

    def desired(self, observation: Observation) -> Mapping[str, DesiredReplicas]:
        """The configured counts."""
        desired = {}
        for name, pool in observation.pools.items():
            bounds = self._bounds.get(name)
            if bounds is None:
                replicas, detail = pool.ready_replicas + pool.starting, "stays as it is"
            else:
                replicas, detail = bounds.initial, f"configured to start {bounds.initial}"
            desired[name] = DesiredReplicas(
                replicas=replicas, reason=ScalingReason.FIXED, detail=detail
            )
        return desired
