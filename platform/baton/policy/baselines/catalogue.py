"""Every policy of others by its name in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from baton.policy.baselines.dynamo import DynamoKvCost
from baton.policy.baselines.llmd import LlmdScorers
from baton.policy.baselines.mooncake import choose_by_conductor
from baton.policy.baselines.plain import (
    RoundRobin,
    choose_least_loaded,
    choose_power_of_two,
    choose_randomly,
)
from baton.policy.baselines.sglang import SglangCacheAware
from baton.policy.choosing import LEAST_LOADED, Chooser
from baton.policy.prefix_index import IndexMode


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy as it ships."""

    chooser: Callable[[], Chooser]
    """Makes one, with the defaults of its parameters."""
    index: IndexMode | None
    """What its own prefix index is fed by; None where it asks none."""


POLICIES: Mapping[str, PolicySpec] = MappingProxyType(
    {
        "random": PolicySpec(chooser=lambda: choose_randomly, index=None),
        "round-robin": PolicySpec(chooser=RoundRobin, index=None),
        LEAST_LOADED: PolicySpec(chooser=lambda: choose_least_loaded, index=None),
        "power-of-two": PolicySpec(chooser=lambda: choose_power_of_two, index=None),
        "sglang": PolicySpec(chooser=SglangCacheAware, index=IndexMode.PREDICTED),
        "dynamo": PolicySpec(chooser=DynamoKvCost, index=IndexMode.EVENTS),
        "llmd": PolicySpec(chooser=LlmdScorers, index=IndexMode.PREDICTED),
        "mooncake": PolicySpec(chooser=lambda: choose_by_conductor, index=IndexMode.EVENTS),
    }
)
