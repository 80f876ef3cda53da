"""What every dashboard can be narrowed to, and the matchers that do it."""

from __future__ import annotations

from typing import Final

from baton.telemetry import catalogue as c
from baton.telemetry.dashboards.model import Choice
from baton.telemetry.dashboards.promql import counted, series

IN_CLASS: Final = {"slo_class": "=~$class"}
OF_MODEL: Final = {"model": "=~$model"}
OF_TENANT: Final = {"tenant": "=~$tenant"}
IN_POOL: Final = {"pool": "=~$pool"}

JOB: Final = Choice(
    name="job", label="Deployment", of=series(c.BUILD_INFO, job="=~.*"), values="job"
)
CLASS: Final = Choice(name="class", label="Class", of=series(c.SLO_TARGET), values="slo_class")
MODEL: Final = Choice(name="model", label="Model", of=series(c.BUILD_INFO), values="model")
POOL: Final = Choice(name="pool", label="Pool", of=series(c.POOL_REPLICAS), values="pool")
TENANT: Final = Choice(name="tenant", label="Tenant", of=counted(c.REQUESTS), values="tenant")
