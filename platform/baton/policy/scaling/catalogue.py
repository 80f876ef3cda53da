"""Every scaling policy by its name in a configuration, and the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import cast

from baton.domain.errors import ConfigInvalid
from baton.policy.scaling.desired import ScalingPolicy
from baton.policy.scaling.fixed import Static
from baton.policy.scaling.options import AutoscalerOptions, ScalingRule
from baton.policy.scaling.slo import SloPolicy

RULES: Mapping[ScalingRule, Callable[[AutoscalerOptions], ScalingPolicy]] = MappingProxyType(
    {
        ScalingRule.SLO: SloPolicy,
        ScalingRule.STATIC: Static,
    }
)


def make_scaling_policy(rule: str, options: AutoscalerOptions) -> ScalingPolicy:
    """A new policy: a built-in policy, by name, or the user's own, by `module:function`.

    The user's is called with the options, and answers with something that has a `name` and
    `desired`; a class will do.

    Raises:
        ConfigInvalid: it cannot be loaded, or is no scaling policy.
    """
    if rule in RULES:
        return RULES[ScalingRule(rule)](options)
    if ":" not in rule:
        names = ", ".join(RULES)
        raise _unusable_policy(
            rule, f"no policy of that name, expected one of {names} or 'module:function'"
        )
    module_name, _, attribute = rule.partition(":")
    try:
        factory: object = getattr(import_module(module_name), attribute)
        policy: object = factory(options) if callable(factory) else factory
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise _unusable_policy(rule, f"{reason}, expected a function of (options)") from error
    if not callable(getattr(policy, "desired", None)) or not hasattr(policy, "name"):
        type_name = type(policy).__name__
        raise _unusable_policy(
            rule, f"it made a {type_name}, expected something with a name and desired(observation)"
        )
    return cast(ScalingPolicy, policy)


def _unusable_policy(rule: str, reason: str) -> ConfigInvalid:
    return ConfigInvalid((f"autoscaler.policy: cannot use {rule!r}: {reason}",))
