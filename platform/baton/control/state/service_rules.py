"""A coordinator's rules: classes, tenants, admission. Replaced as a whole, while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.domain.tenant import DEFAULT_TENANT, Tenant
from baton.policy.admission.decision import AdmissionOptions
from baton.policy.admission.slo_classes import SloClasses

_DEFAULT_TENANT = Tenant()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRules:
    """Immutable, so that a request is served by one set of rules from its arrival on."""

    slos: SloClasses = field(default_factory=SloClasses)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    """By name; an unknown tenant is served like `default`, or with no limits without one."""
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)

    def tenant(self, name: str) -> Tenant:
        """The tenant of that name, or the stand-in for unknown tenants."""
        return self.tenants.get(name) or self.tenants.get(DEFAULT_TENANT, _DEFAULT_TENANT)

    def highest_priority(self, name: str | None) -> int:
        """The highest priority that a request of a tenant may have; None: of any tenant."""
        tenants = self.tenants.values() if name is None else (self.tenant(name),)
        tenant_priority = max((tenant.priority for tenant in tenants), default=0)
        return tenant_priority + max(slo.priority for slo in self.slos.classes.values())
