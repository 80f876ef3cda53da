"""Which class a request is served in: what it asks for, what rules say, what its tenant has."""

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

    def holds(self, prompt_tokens: int) -> bool:
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
class NoSuchClass:
    """The request asks for a class that it cannot have."""

    why: str


def _only_default() -> Mapping[str, Slo]:
    return {DEFAULT_CLASS: NO_SLO}


@dataclass(frozen=True, slots=True, kw_only=True)
class SloBook:
    """Every class, and the rules by which requests fall into them."""

    classes: Mapping[str, Slo] = field(default_factory=_only_default)
    """By name; `default` is always there."""
    rules: tuple[SloRule, ...] = ()
    """The first that holds counts."""

    def __post_init__(self) -> None:
        if DEFAULT_CLASS not in self.classes:
            raise ValueError(f"slo: there is no class {DEFAULT_CLASS!r}")
        for rule in self.rules:
            if rule.slo_class not in self.classes:
                raise ValueError(f"slo: a rule names {rule.slo_class!r}, which is no class")

    def resolve(self, asked: str | None, tenant: Tenant, prompt_tokens: int) -> Slo | NoSuchClass:
        """The class of a request: what it asks for, else its tenant's, else by rule, else default.

        A tenant may ask for classes that its configuration lists; where it lists none, for those
        whose priority is not above that of the class it would get.
        """
        own = self._own(tenant, prompt_tokens)
        if asked is None or asked == own.name:
            return own
        wanted = self.classes.get(asked)
        if wanted is None:
            known = ", ".join(sorted(self.classes))
            return NoSuchClass(why=f"there is no SLO class {asked!r}, wanted one of {known}")
        if tenant.classes is None:
            allowed = wanted.priority <= own.priority
        else:
            allowed = asked in tenant.classes
        if not allowed:
            return NoSuchClass(
                why=f"tenant {tenant.name!r} may not ask for SLO class {asked!r}"
                f" (priority {wanted.priority}, its own class {own.name!r} has {own.priority})"
            )
        return wanted

    def _own(self, tenant: Tenant, prompt_tokens: int) -> Slo:
        if tenant.slo is not None:
            return self.classes.get(tenant.slo, self.classes[DEFAULT_CLASS])
        for rule in self.rules:
            if rule.holds(prompt_tokens):
                return self.classes[rule.slo_class]
        return self.classes[DEFAULT_CLASS]
