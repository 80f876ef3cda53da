"""Keys of placement."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar, Final

from baton.config.language.bounds import Fraction
from baton.config.language.scalars import Pluggable
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions
from baton.policy.prefix_cache.index import IndexMode

_OPTIONS = PredictedOptions()


class Policy(StrEnum):
    """Placement policies: baton's `predicted`, and plain policies for comparison."""

    PREDICTED = "predicted"
    RANDOM = "random"
    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"


MOVED_POLICIES: Final = {
    "power-of-two": "benchmarks.policies.power_of_two:choose",
    "sglang": "benchmarks.policies.sglang:SglangCacheAware",
    "dynamo": "benchmarks.policies.dynamo:DynamoKvCost",
    "llmd": "benchmarks.policies.llmd:LlmdScorers",
    "mooncake": "benchmarks.policies.mooncake:choose_by_conductor",
}
"""Former names of policies, and their present places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowConfig:
    """Work of the other role that a pool may do, with policy `predicted`; fractions from 0 to 1."""

    decode_on_prefill: Annotated[float, Fraction] = _OPTIONS.decode_on_prefill_fraction
    """Fraction of a prefill replica's batch for streams that stay where they were prefilled."""
    prefill_on_decode: Annotated[float, Fraction] = _OPTIONS.prefill_on_decode_fraction
    """Fraction of a decode replica's time for prompts, when its streams have a TPOT objective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Placement of requests."""

    MAIN_KEY: ClassVar[str] = "policy"

    policy: Annotated[str, Pluggable(Policy, MOVED_POLICIES)] = Policy.PREDICTED
    """A policy's name, or your own function that chooses among candidates."""
    index: IndexMode = IndexMode.HYBRID
    """Sources of the prefix index."""
    disaggregate: Disaggregate = Disaggregate.AUTO
    """`always` by default with `random`, `round-robin` and `least-loaded`, which do not support
    `auto`."""
    overflow: OverflowConfig = field(default_factory=OverflowConfig)
    seed: int = 0
    """Seed of random choices; each coordinator derives its own numbers from it."""
