"""What is wrong with an observation, in words: an autoscaler in doubt changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from baton.policy.scaling.observation import Demand, Observation, PoolObservation, ServiceLevel

_MAX_VALUE = 1e12
"""Beyond any rate, count or time that a fleet could have."""
_MAX_REPLICAS = 100_000
_SIGNED = frozenset({"min_ttft_slack_s"})
_FRACTIONS = frozenset({"attainment", "kv_used_fraction"})
_POSITIVE = frozenset({"gpus_per_replica", "prefill_tokens_per_s", "decode_tokens_per_s"})
_COUNTS = frozenset({"prefill", "decode", "mixed", "starting", "draining"})
_MAX_FRACTION = 1.01
"""Shares are worked out in floating point, some from two clocks."""


def unmet_preconditions(observation: Observation) -> Iterator[str]:
    """Everything that is missing, not a number, or out of all bounds."""
    yield from observation.missing_inputs
    if not math.isfinite(observation.window_s) or observation.window_s <= 0:
        yield f"the window is {observation.window_s} s, wanted more than 0"
    for name, objective in (("ttft_s", observation.ttft_s), ("tpot_s", observation.tpot_s)):
        if objective is not None and not 0 < objective < _MAX_VALUE:
            yield f"the objective {name} is {objective}, wanted more than 0"
    yield from _out_of_range_fields("demand", observation.demand)
    yield from _out_of_range_fields("service", observation.service)
    for name in sorted(observation.pools):
        if observation.pools[name].name != name:
            yield f"pool {name!r} calls itself {observation.pools[name].name!r}"
        yield from _out_of_range_fields(f"pool {name!r}", observation.pools[name])


def unmet_pool_preconditions(pool: PoolObservation) -> Iterator[str]:
    """Likewise of one pool's counts alone."""
    for name in sorted(_COUNTS):
        count = getattr(pool, name)
        if _is_out_of_range(name, count):
            yield f"{name} is {count}"


def _out_of_range_fields(
    label: str, figures: Demand | ServiceLevel | PoolObservation
) -> Iterator[str]:
    for field in fields(figures):
        value: object = getattr(figures, field.name)
        if isinstance(value, int | float) and _is_out_of_range(field.name, value):
            yield f"{label}: {field.name} is {value}"


def _is_out_of_range(name: str, value: float) -> bool:
    if not math.isfinite(value) or abs(value) > _MAX_VALUE:
        return True
    if name in _SIGNED:
        return False
    if name in _COUNTS:
        return not 0 <= value <= _MAX_REPLICAS
    if name in _POSITIVE:
        return value <= 0
    return value < 0 or (name in _FRACTIONS and value > _MAX_FRACTION)
