"""The class that a request is served in: as requested, by rule, or its tenant's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from baton.domain.slo import NO_SLO, Slo
from baton.domain.tenant import Tenant

DEFAULT_CLASS = "default"


class Comparison(StrEnum):
    """How a rule compares."""

    ABOVE = ">"
    AT_LEAST = ">="
    BELOW = "<"
    AT_MOST = "<="


@dataclass(frozen=True, slots=True, kw_only=True)
class SloRule:
    """Requests whose prompt is so long are served in this class."""

    slo_class: str
    comparison: Comparison
    prompt_tokens: int

    def matches(self, prompt_tokens: int) -> bool:
        """Whether a prompt is that long."""
        match self.comparison:
            case Comparison.ABOVE:
                return prompt_tokens > self.prompt_tokens
            case Comparison.AT_LEAST:
                return prompt_tokens >= self.prompt_tokens
            case Comparison.BELOW:
                return prompt_tokens < self.prompt_tokens
            case Comparison.AT_MOST:
                return prompt_tokens <= self.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassNotAllowed:
    """The request asks for a class that it cannot have."""

    reason: str


def _default_classes() -> Mapping[str, Slo]:
    return {DEFAULT_CLASS: NO_SLO}


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClasses:
    """Every class, and the rules by which requests fall into them."""

    classes: Mapping[str, Slo] = field(default_factory=_default_classes)
    """By name; `default` is always there."""
    rules: tuple[SloRule, ...] = ()
    """The first that holds counts."""

    def __post_init__(self) -> None:
        if DEFAULT_CLASS not in self.classes:
            raise ValueError(f"slo: there is no class {DEFAULT_CLASS!r}")
        for rule in self.rules:
            if rule.slo_class not in self.classes:
                raise ValueError(f"slo: a rule names {rule.slo_class!r}, which is no class")

    def resolve(
        self, requested: str | None, tenant: Tenant, prompt_tokens: int
    ) -> Slo | ClassNotAllowed:
        """The class of a request: the requested one, else its tenant's, else by rule, else default.

        A tenant may ask for classes that its configuration lists; where it lists none, for those
        whose priority is not above that of the class it would get.
        """
        assigned = self._assigned_slo(tenant, prompt_tokens)
        if requested is None or requested == assigned.name:
            return assigned
        requested_slo = self.classes.get(requested)
        if requested_slo is None:
            known_names = ", ".join(sorted(self.classes))
            return ClassNotAllowed(
                reason=f"there is no SLO class {requested!r}, expected one of {known_names}"
            )
        if tenant.classes is None:
            is_allowed = requested_slo.priority <= assigned.priority
        else:
            is_allowed = requested in tenant.classes
        if not is_allowed:
            return ClassNotAllowed(
                reason=f"tenant {tenant.name!r} may not ask for SLO class {requested!r}"
                f" (priority {requested_slo.priority}, its own class {assigned.name!r} has"
                f" {assigned.priority})"
            )
        return requested_slo

    def _assigned_slo(self, tenant: Tenant, prompt_tokens: int) -> Slo:
        if tenant.slo is not None:
            return self.classes.get(tenant.slo, self.classes[DEFAULT_CLASS])
        for rule in self.rules:
            if rule.matches(prompt_tokens):
                return self.classes[rule.slo_class]
        return self.classes[DEFAULT_CLASS]
