"""What every dashboard can be narrowed to, and the matchers that do it."""

from __future__ import annotations

from typing import Final

from baton.telemetry import catalogue as c
from baton.telemetry.dashboards.model import Choice
from baton.telemetry.dashboards.promql import counted, series

BY_CLASS: Final = ("job", "slo_class")
BY_POOL: Final = ("job", "pool")
BY_SERVED: Final = (*BY_CLASS, "model", "pool")
"""What numbers of classes and pools are told apart by: two deployments may call theirs the same.
Latencies of requests also by who has served them: two models have nothing in common."""
SERVED: Final = "{{job}} {{slo_class}} {{model}} {{pool}}"
"""The legend of `BY_SERVED`."""
IN_CLASS: Final = {"slo_class": "=~$class"}
OF_MODEL: Final = {"model": "=~$model"}
OF_TENANT: Final = {"tenant": "=~$tenant"}
IN_POOL: Final = {"pool": "=~$pool"}
OF_SERVED: Final = {**IN_CLASS, **OF_MODEL, **IN_POOL}

JOB: Final = Choice(
    name="job", label="Deployment", of=series(c.BUILD_INFO, job="=~.*"), values="job"
)
CLASS: Final = Choice(name="class", label="Class", of=series(c.SLO_TARGET), values="slo_class")
# Not `baton_build_info`: of several models it tells all names as one.
MODEL: Final = Choice(name="model", label="Model", of=counted(c.REQUESTS), values="model")
POOL: Final = Choice(name="pool", label="Pool", of=series(c.POOL_REPLICAS), values="pool")
TENANT: Final = Choice(name="tenant", label="Tenant", of=counted(c.REQUESTS), values="tenant")
