"""How choosers draw among candidates that their formula finds equally good, or nearly so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import TypeVar

_Key = TypeVar("_Key", float, tuple[float, float])


def lowest(costs: Sequence[_Key], rng: Random) -> int:
    """Index of the lowest cost; equal ones are drawn uniformly."""
    best = min(costs)
    ties = [index for index, cost in enumerate(costs) if cost == best]
    return ties[0] if len(ties) == 1 else rng.choice(ties)


def softmin(costs: Sequence[float], temperature: float, rng: Random) -> int:
    """Index drawn with weight exp(-(cost - min) / ((max - min) * temperature)).

    Source: NVIDIA Dynamo 1.6.1, lib/kv-router/src/scheduling/selector/default.rs. At temperature 0
    it is the lowest cost.
    """
    low, spread = min(costs), max(costs) - min(costs)
    if temperature <= 0 or spread <= 0:
        return lowest(costs, rng)
    weights = [math.exp(-(cost - low) / (spread * temperature)) for cost in costs]
    return rng.choices(range(len(costs)), weights)[0]
