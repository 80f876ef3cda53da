"""The policies that are compared, each with the index that it ships with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from baton.control.coordinator import Coordinator
from baton.control.limits import CoordinatorLimits
from baton.policy.baselines.catalogue import POLICIES
from baton.policy.baselines.dynamo import DynamoKvCost, DynamoParameters
from baton.policy.choosing import Chooser, ChooserPlacer
from baton.policy.placement import Disaggregate, Placer
from baton.policy.predicted import PredictedPlacer
from baton.policy.prefix_index import IndexMode, IndexOptions

LIMITS = CoordinatorLimits(
    queue_wait_s=600.0, first_token_s=600.0, transfer_s=60.0, stall_s=600.0, total_s=3600.0
)
"""Long: the benchmark compares policies, and no request shall end early."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One policy, ready to be made afresh for each run."""

    placer: Callable[[int], Placer]
    """From a seed."""
    index: IndexMode

    def coordinator(self, seed: int) -> Coordinator:
        """A coordinator that knows nothing yet."""
        index = IndexOptions(mode=self.index)
        return Coordinator(limits=LIMITS, placer=self.placer(seed), index=index)


def _baseline(name: str, chooser: Callable[[], Chooser], index: IndexMode | None) -> Arm:
    def make(seed: int) -> Placer:
        rng = random.Random(f"{name}/{seed}")  # noqa: S311 - ties, not secrets
        return ChooserPlacer(name, chooser(), disaggregate=Disaggregate.ALWAYS, rng=rng)

    return Arm(make, index or IndexMode.EVENTS)


def _credit_4() -> Chooser:
    return DynamoKvCost(DynamoParameters(overlap_score_credit=4.0))


ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        "baton": Arm(lambda seed: PredictedPlacer(seed=seed), IndexMode.HYBRID),
        "dynamo": _baseline("dynamo", POLICIES["dynamo"].chooser, POLICIES["dynamo"].index),
        "dynamo_credit4": _baseline("dynamo_credit4", _credit_4, POLICIES["dynamo"].index),
    }
    | {
        name.replace("-", "_"): _baseline(name, POLICIES[name].chooser, POLICIES[name].index)
        for name in (
            "sglang",
            "llmd",
            "mooncake",
            "random",
            "round-robin",
            "least-loaded",
            "power-of-two",
        )
    }
)
