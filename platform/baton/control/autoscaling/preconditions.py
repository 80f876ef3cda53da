"""What is wrong with an observation, in words: an autoscaler in doubt changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from baton.policy.scaling.observation import Demand, Observation, PoolObservation, Service

_MOST = 1e12
"""Beyond any rate, count or time that a fleet could have."""
_MOST_REPLICAS = 100_000
_SIGNED = frozenset({"slack_s"})
_SHARES = frozenset({"attainment", "kv_used_fraction"})
_ABOVE_ZERO = frozenset({"gpus_per_replica", "prefill_tokens_per_s", "decode_tokens_per_s"})
_COUNTS = frozenset({"prefill", "decode", "mixed", "starting", "draining"})
_SLIGHTLY = 1.01
"""Shares are worked out in floating point, some from two clocks."""


def doubts(seen: Observation) -> Iterator[str]:
    """Everything that is missing, not a number, or out of all bounds."""
    yield from seen.missing
    if not math.isfinite(seen.window_s) or seen.window_s <= 0:
        yield f"the window is {seen.window_s} s, wanted more than 0"
    for name, objective in (("ttft_s", seen.ttft_s), ("tpot_s", seen.tpot_s)):
        if objective is not None and not 0 < objective < _MOST:
            yield f"the objective {name} is {objective}, wanted more than 0"
    yield from _figures("demand", seen.demand)
    yield from _figures("service", seen.service)
    for name in sorted(seen.pools):
        if seen.pools[name].name != name:
            yield f"pool {name!r} calls itself {seen.pools[name].name!r}"
        yield from _figures(f"pool {name!r}", seen.pools[name])


def pool_doubts(pool: PoolObservation) -> Iterator[str]:
    """Likewise of one pool's counts alone."""
    for name in sorted(_COUNTS):
        count = getattr(pool, name)
        if _is_absurd(name, count):
            yield f"{name} is {count}"


def _figures(where: str, of: Demand | Service | PoolObservation) -> Iterator[str]:
    for field in fields(of):
        value: object = getattr(of, field.name)
        if isinstance(value, int | float) and _is_absurd(field.name, value):
            yield f"{where}: {field.name} is {value}"


def _is_absurd(name: str, value: float) -> bool:
    if not math.isfinite(value) or abs(value) > _MOST:
        return True
    if name in _SIGNED:
        return False
    if name in _COUNTS:
        return not 0 <= value <= _MOST_REPLICAS
    if name in _ABOVE_ZERO:
        return value <= 0
    return value < 0 or (name in _SHARES and value > _SLIGHTLY)
