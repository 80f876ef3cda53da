"""What must agree among classes, tenants and scaling."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.checks.check_context import CheckContext
from baton.config.derive.options import devices_per_replica
from baton.config.language.scalars import did_you_mean
from baton.config.language.tree import Finding, Path
from baton.config.schema.scaling import AutoscalerConfig
from baton.config.schema.service import SloConfig, TenantConfig
from baton.domain.tenant import DEFAULT_TENANT
from baton.policy.admission.slo_classes import DEFAULT_CLASS


def check_service(context: CheckContext) -> Iterator[Finding]:
    """Classes and tenants."""
    slo = context.get(SloConfig, "slo")
    if slo is not None and DEFAULT_CLASS in slo.classes:
        message = f"there is one already, put what it says under slo.{DEFAULT_CLASS}"
        yield context.finding(("slo", "classes", DEFAULT_CLASS), message)
    for name in context.tenant_names:
        tenant = context.get(TenantConfig, "tenants", name)
        if tenant is not None:
            yield from _check_tenant(context, name, tenant, slo)


def _check_tenant(
    context: CheckContext, name: str, tenant: TenantConfig, slo: SloConfig | None
) -> Iterator[Finding]:
    path = ("tenants", name)
    if slo is not None:
        known_classes = (DEFAULT_CLASS, *slo.classes)
        if tenant.slo is not None:
            yield from _check_class(context, (*path, "slo"), tenant.slo, known_classes)
        for index, class_name in enumerate(tenant.classes or ()):
            yield from _check_class(
                context, (*path, "classes", str(index)), class_name, known_classes
            )
    if tenant.anonymous is not None and name != DEFAULT_TENANT:
        message = (
            f"has no effect here: callers without a key are tenant '{DEFAULT_TENANT}',"
            f" set tenants.{DEFAULT_TENANT}.anonymous"
        )
        yield context.finding((*path, "anonymous"), message)


def _check_class(
    context: CheckContext, path: Path, class_name: str, known_classes: tuple[str, ...]
) -> Iterator[Finding]:
    if class_name not in known_classes:
        suggestion = (
            did_you_mean(class_name, known_classes) or f", wanted one of {', '.join(known_classes)}"
        )
        yield context.finding(path, f"no class {class_name!r}{suggestion}")


def check_scaling(context: CheckContext) -> Iterator[Finding]:
    """The autoscaler's bounds against those of the pools."""
    autoscaler, pools = context.get(AutoscalerConfig, "autoscaler"), context.pools()
    if autoscaler is None or len(pools) < len(context.pool_names):
        return
    if autoscaler.scale_to_zero and all(pool.replicas.min for pool in pools.values()):
        message = "no pool may have 0 replicas, wanted replicas.min: 0 in one, or false"
        yield context.finding(("autoscaler", "scale_to_zero"), message)
    if autoscaler.gpu_budget is not None:
        initial_gpus = sum(
            pool.replicas.start * devices_per_replica(pool) for pool in pools.values()
        )
        if autoscaler.gpu_budget < initial_gpus:
            message = (
                f"got {autoscaler.gpu_budget:g}, wanted at least {initial_gpus:g}: so many GPUs"
            )
            yield context.finding(
                ("autoscaler", "gpu_budget"), f"{message} do the pools start with"
            )
