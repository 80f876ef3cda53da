"""The keys that say how requests are placed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final

from baton.config.language.bounds import Fraction
from baton.config.language.scalars import Pluggable
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions
from baton.policy.prefix_cache.index import IndexMode

_OPTIONS = PredictedOptions()


class Policy(StrEnum):
    """How replicas are chosen: baton's own way, and plain ones for comparison."""

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
"""Names that a configuration may still have, and where those policies are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowConfig:
    """How far pools may do each other's work, where `predicted` decides; fractions from 0 to 1."""

    decode_on_prefill: Annotated[float, Fraction] = _OPTIONS.decode_on_prefill_fraction
    """Of a prefill replica's places in the batch, for streams that stay where they were
    prefilled."""
    prefill_on_decode: Annotated[float, Fraction] = _OPTIONS.prefill_on_decode_fraction
    """Of a decode replica's time, for prompts, where a pace is promised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How requests are placed."""

    policy: Annotated[str, Pluggable(Policy, MOVED_POLICIES)] = Policy.PREDICTED
    """A policy's name, or a function of your own that chooses among candidates."""
    index: IndexMode = IndexMode.HYBRID
    """What tells which replica holds which prefix."""
    disaggregate: Disaggregate = Disaggregate.AUTO
    """With `random`, `round-robin` and `least-loaded`, `always` unless said: they do not decide
    about it."""
    overflow: OverflowConfig = field(default_factory=OverflowConfig)
    seed: int = 0
    """Of what placement draws at random; every coordinator draws its own numbers from it."""
