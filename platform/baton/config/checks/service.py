"""What must agree among classes, tenants and scaling."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.checks.check_context import Seen
from baton.config.derive.options import devices_of
from baton.config.language.scalars import did_you_mean
from baton.config.language.tree import Finding, Path
from baton.config.schema.scaling import AutoscalerConfig
from baton.config.schema.service import SloConfig, TenantConfig
from baton.domain.tenant import DEFAULT_TENANT
from baton.policy.admission.slo_classes import DEFAULT_CLASS


def check_service(seen: Seen) -> Iterator[Finding]:
    """Classes and tenants."""
    slo = seen.get(SloConfig, "slo")
    if slo is not None and DEFAULT_CLASS in slo.classes:
        what = f"there is one already, put what it says under slo.{DEFAULT_CLASS}"
        yield seen.wrong(("slo", "classes", DEFAULT_CLASS), what)
    for name in seen.tenant_names:
        tenant = seen.get(TenantConfig, "tenants", name)
        if tenant is not None:
            yield from _tenant(seen, name, tenant, slo)


def _tenant(
    seen: Seen, name: str, tenant: TenantConfig, slo: SloConfig | None
) -> Iterator[Finding]:
    path = ("tenants", name)
    if slo is not None:
        known = (DEFAULT_CLASS, *slo.classes)
        if tenant.slo is not None:
            yield from _known(seen, (*path, "slo"), tenant.slo, known)
        for index, asked in enumerate(tenant.classes or ()):
            yield from _known(seen, (*path, "classes", str(index)), asked, known)
    if tenant.anonymous is not None and name != DEFAULT_TENANT:
        what = (
            f"has no effect here: callers without a key are tenant '{DEFAULT_TENANT}',"
            f" set tenants.{DEFAULT_TENANT}.anonymous"
        )
        yield seen.wrong((*path, "anonymous"), what)


def _known(seen: Seen, path: Path, asked: str, known: tuple[str, ...]) -> Iterator[Finding]:
    if asked not in known:
        wanted = did_you_mean(asked, known) or f", wanted one of {', '.join(known)}"
        yield seen.wrong(path, f"no class {asked!r}{wanted}")


def check_scaling(seen: Seen) -> Iterator[Finding]:
    """The autoscaler's bounds against those of the pools."""
    scaler, pools = seen.get(AutoscalerConfig, "autoscaler"), seen.pools()
    if scaler is None or len(pools) < len(seen.pool_names):
        return
    if scaler.scale_to_zero and all(pool.replicas.min for pool in pools.values()):
        what = "no pool may have 0 replicas, wanted replicas.min: 0 in one, or false"
        yield seen.wrong(("autoscaler", "scale_to_zero"), what)
    if scaler.gpu_budget is not None:
        least = sum(pool.replicas.start * devices_of(pool) for pool in pools.values())
        if scaler.gpu_budget < least:
            what = f"got {scaler.gpu_budget:g}, wanted at least {least:g}: so many GPUs"
            yield seen.wrong(("autoscaler", "gpu_budget"), f"{what} do the pools start with")
