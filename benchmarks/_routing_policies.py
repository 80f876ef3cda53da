"""The policies that are compared, each with the index that it ships with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from baton.control.coordinator import Coordinator
from baton.control.state.limits import CoordinatorLimits
from baton.policy.placement.chooser import Chooser, ChooserPlacer
from baton.policy.placement.port import Disaggregate, Placer
from baton.policy.placement.predicted import PredictedPlacer
from baton.policy.placement.simple import POLICIES
from baton.policy.prefix_cache.index import IndexMode, IndexOptions
from benchmarks.policies import power_of_two
from benchmarks.policies.dynamo import DynamoKvCost, DynamoParameters
from benchmarks.policies.llmd import LlmdScorers
from benchmarks.policies.mooncake import choose_by_conductor
from benchmarks.policies.sglang import SglangCacheAware

LIMITS = CoordinatorLimits(
    queue_timeout_s=600.0,
    first_token_timeout_s=600.0,
    transfer_deadline_s=60.0,
    stall_timeout_s=600.0,
    total_timeout_s=3600.0,
)
"""Long: the benchmark compares policies, and no request shall end early."""


@dataclass(frozen=True, slots=True)
class PolicyVariant:
    """One policy, ready to be made afresh for each run."""

    make_placer: Callable[[int], Placer]
    """From a seed."""
    index_mode: IndexMode

    def make_coordinator(self, seed: int) -> Coordinator:
        """A coordinator that knows nothing yet."""
        index = IndexOptions(mode=self.index_mode)
        return Coordinator(limits=LIMITS, placer=self.make_placer(seed), index=index)


def _arm(
    name: str, chooser: Callable[[], Chooser], index: IndexMode = IndexMode.EVENTS
) -> PolicyVariant:
    def make(seed: int) -> Placer:
        rng = random.Random(f"{name}/{seed}")  # noqa: S311 - ties, not secrets
        return ChooserPlacer(name, chooser(), disaggregate=Disaggregate.ALWAYS, rng=rng)

    return PolicyVariant(make, index)


def _credit_4() -> Chooser:
    return DynamoKvCost(DynamoParameters(overlap_score_credit=4.0))


VARIANTS: Mapping[str, PolicyVariant] = MappingProxyType(
    {
        "baton": PolicyVariant(lambda seed: PredictedPlacer(seed=seed), IndexMode.HYBRID),
        "dynamo": _arm("dynamo", DynamoKvCost),
        "dynamo_credit4": _arm("dynamo_credit4", _credit_4),
        "sglang": _arm("sglang", SglangCacheAware, IndexMode.PREDICTED),
        "llmd": _arm("llmd", LlmdScorers, IndexMode.PREDICTED),
        "mooncake": _arm("mooncake", lambda: choose_by_conductor),
        "random": _arm("random", POLICIES["random"]),
        "round_robin": _arm("round-robin", POLICIES["round-robin"]),
        "least_loaded": _arm("least-loaded", POLICIES["least-loaded"]),
        "power_of_two": _arm("power-of-two", lambda: power_of_two.choose),
    }
)
