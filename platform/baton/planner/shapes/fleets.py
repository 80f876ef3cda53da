"""Fleets of pools: their accelerators, and rates estimated from single replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

from baton.domain.fleet import Role
from baton.planner.problem import AcceleratorOffer
from baton.planner.shapes.space import Duty, EngineShape, ShapeKey

RateKey = tuple[Duty, ShapeKey]
RatesByKey = Mapping[RateKey, float]
"""Requests per second of one replica, by duty and shape."""
_MAX_REPLICAS = 4096
_GOOD_PROPORTION = 0.95
"""Of the parts of a fleet with proportions at least this good, the largest is simulated."""
_MAX_FRUITLESS_STEPS = 16
"""Additional prefill replicas to try that save no decode replica."""
_MIN_PROPORTION = 0.8
"""Parts of a fleet with worse proportions are not representative."""


class FleetKind(StrEnum):
    """Which replicas prefill and decode."""

    COLOCATED = "colocated"
    """Every replica does both, prompts in chunks."""
    DISAGGREGATED = "disaggregated"
    """Every prompt is prefilled in one pool and decoded in the other."""
    HYBRID = "hybrid"
    """Two pools; the decode pool prefills some prompts itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPool:
    """Replicas of one shape and role."""

    role: Role
    engine_shape: EngineShape
    replicas: int

    @property
    def gpus(self) -> int:
        """Number of accelerators."""
        return self.replicas * self.engine_shape.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFleet:
    """One pool of mixed replicas, or a prefill pool and a decode pool."""

    kind: FleetKind
    pools: tuple[PlannedPool, ...]

    @property
    def gpus(self) -> int:
        """Number of accelerators."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def replicas(self) -> int:
        """Of all pools."""
        return sum(pool.replicas for pool in self.pools)

    @property
    def price_per_hour(self) -> float | None:
        """Of all its accelerators; None if a price is missing."""
        prices = [(pool.engine_shape.price_per_hour, pool.replicas) for pool in self.pools]
        known = [price * count for price, count in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    @property
    def label(self) -> str:
        """For people: `2 x prefill h100 tp1 + 1 x decode h100 tp2`."""
        return " + ".join(
            f"{pool.replicas} x {pool.role} {pool.engine_shape.label}" for pool in self.pools
        )

    def with_replicas(self, counts: Iterable[int]) -> PlannedFleet:
        """The same with other numbers of replicas."""
        pools = zip(self.pools, counts, strict=True)
        return replace(self, pools=tuple(replace(pool, replicas=n) for pool, n in pools))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBudget:
    """Available accelerators."""

    gpus: int | None
    limit_by_accelerator: Mapping[str, int]
    """For offers with a limit of their own."""

    @staticmethod
    def from_offers(gpus: int | None, offers: Iterable[AcceleratorOffer]) -> GpuBudget:
        """The budget of a question."""
        limits = {
            offer.accelerator.name: offer.available
            for offer in offers
            if offer.available is not None
        }
        return GpuBudget(gpus=gpus, limit_by_accelerator=limits)

    def fits(self, fleet: PlannedFleet) -> bool:
        """Whether this fleet is within the budget."""
        if self.gpus is not None and fleet.gpus > self.gpus:
            return False
        used: dict[str, int] = {}
        for pool in fleet.pools:
            name = pool.engine_shape.accelerator.name
            used[name] = used.get(name, 0) + pool.gpus
        return all(used.get(name, 0) <= limit for name, limit in self.limit_by_accelerator.items())

    def max_replicas(self, engine_shape: EngineShape, fleet: PlannedFleet | None = None) -> int:
        """Replicas of a shape within the budget, next to `fleet`."""
        limits = [_MAX_REPLICAS * engine_shape.gpus]
        used = 0 if fleet is None else fleet.gpus
        if self.gpus is not None:
            limits.append(self.gpus - used)
        name = engine_shape.accelerator.name
        if name in self.limit_by_accelerator:
            pools = () if fleet is None else fleet.pools
            used_of_type = sum(
                pool.gpus for pool in pools if pool.engine_shape.accelerator.name == name
            )
            limits.append(self.limit_by_accelerator[name] - used_of_type)
        return max(0, min(limits) // engine_shape.gpus)


def rate_key(duty: Duty, engine_shape: EngineShape) -> RateKey:
    """The key of a shape's rate."""
    return duty, engine_shape.key


def estimate_rate(fleet: PlannedFleet, rates: RatesByKey) -> float:
    """Requests per second of a fleet, estimated from the rates of single replicas.

    In a hybrid fleet, decode replicas serve whole requests with the time that decoding the prefill
    pool's requests leaves.
    """
    if fleet.kind is FleetKind.COLOCATED:
        (pool,) = fleet.pools
        return pool.replicas * rates.get(rate_key(Duty.BOTH, pool.engine_shape), 0.0)
    prefill, decode = fleet.pools
    prefill_rate = prefill.replicas * rates.get(rate_key(Duty.PREFILL, prefill.engine_shape), 0.0)
    decode_rate_per_replica = rates.get(rate_key(Duty.DECODE, decode.engine_shape), 0.0)
    handoff_rate = min(prefill_rate, decode.replicas * decode_rate_per_replica)
    if fleet.kind is FleetKind.DISAGGREGATED or not decode_rate_per_replica:
        return handoff_rate
    free_replicas = max(0.0, decode.replicas - handoff_rate / decode_rate_per_replica)
    return handoff_rate + free_replicas * rates.get(rate_key(Duty.BOTH, decode.engine_shape), 0.0)


def largest_fleets(
    kind: FleetKind, shape_tuples: Iterable[tuple[EngineShape, ...]], budget: GpuBudget
) -> Iterator[PlannedFleet]:
    """All fleets of one kind to which the budget can add no replica."""
    for shapes in shape_tuples:
        if kind is FleetKind.COLOCATED:
            fleet = _build_fleet(kind, shapes, (budget.max_replicas(shapes[0]),))
            if fleet.replicas:
                yield fleet
            continue
        for count in range(1, budget.max_replicas(shapes[0]) + 1):
            prefill_fleet = _build_fleet(kind, shapes, (count, 0))
            decode_count = budget.max_replicas(shapes[1], prefill_fleet)
            if not decode_count:
                break
            yield _build_fleet(kind, shapes, (count, decode_count))


def smallest_fleets(
    kind: FleetKind,
    shape_tuples: Iterable[tuple[EngineShape, ...]],
    budget: GpuBudget,
    is_sufficient: Callable[[PlannedFleet], bool],
) -> Iterator[PlannedFleet]:
    """All sufficient fleets of one kind that need each of their replicas."""
    for shapes in shape_tuples:
        if kind is FleetKind.COLOCATED:
            colocated = _with_min_last_pool(kind, shapes, (), is_sufficient)
            fleets = [] if colocated is None else [colocated]
        else:
            fleets = list(_sufficient_splits(kind, shapes, budget, is_sufficient))
        yield from (fleet for fleet in fleets if budget.fits(fleet))


def _sufficient_splits(
    kind: FleetKind,
    shapes: tuple[EngineShape, ...],
    budget: GpuBudget,
    is_sufficient: Callable[[PlannedFleet], bool],
) -> Iterator[PlannedFleet]:
    """With one prefill replica, with two, and so on, while that saves decode replicas."""
    min_decode_replicas, fruitless_steps = _MAX_REPLICAS + 1, 0
    for count in range(1, budget.max_replicas(shapes[0]) + 1):
        fleet = _with_min_last_pool(kind, shapes, (count,), is_sufficient)
        if fleet is not None and fleet.pools[1].replicas < min_decode_replicas:
            min_decode_replicas, fruitless_steps = fleet.pools[1].replicas, 0
            yield fleet
        elif min_decode_replicas <= _MAX_REPLICAS:
            fruitless_steps += 1
            if fruitless_steps == _MAX_FRUITLESS_STEPS:
                return


def _with_min_last_pool(
    kind: FleetKind,
    shapes: tuple[EngineShape, ...],
    counts: tuple[int, ...],
    is_sufficient: Callable[[PlannedFleet], bool],
) -> PlannedFleet | None:
    """With the fewest sufficient replicas of the last shape; None if no number suffices."""

    def with_last(count: int) -> PlannedFleet:
        return _build_fleet(kind, shapes, (*counts, count))

    last_count = _min_count(lambda count: is_sufficient(with_last(count)))
    return None if last_count is None else with_last(last_count)


def _min_count(is_sufficient: Callable[[int], bool]) -> int | None:
    """The smallest sufficient count, if sufficiency is monotonic; None if none suffices."""
    high = 1
    while not is_sufficient(high):
        high *= 2
        if high > _MAX_REPLICAS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_sufficient(middle) else (middle, high)
    return high


def _build_fleet(
    kind: FleetKind, shapes: tuple[EngineShape, ...], counts: tuple[int, ...]
) -> PlannedFleet:
    roles = (Role.MIXED,) if kind is FleetKind.COLOCATED else (Role.PREFILL, Role.DECODE)
    pools = zip(roles, shapes, counts, strict=True)
    return PlannedFleet(
        kind=kind,
        pools=tuple(
            PlannedPool(role=role, engine_shape=shape, replicas=n) for role, shape, n in pools
        ),
    )


def representative_part(fleet: PlannedFleet, max_replicas: int) -> PlannedFleet:
    """A part of a fleet with about its proportions and at most `max_replicas` replicas.

    If there is none, the smallest larger part, or the whole fleet. Among parts with good
    proportions, the largest: more replicas have shorter queues, so a part sustains a little less
    than its share.
    """
    if fleet.replicas <= max_replicas:
        return fleet
    counts = [pool.replicas for pool in fleet.pools]
    count_ranges = [range(1, min(count, max_replicas) + 1) for count in counts]
    parts: list[tuple[int, ...]] = [
        part for part in product(*count_ranges) if sum(part) <= max_replicas
    ]
    proportions = {other: _proportionality(other, counts) for other in parts}
    best = max(proportions.values(), default=0.0)
    if best < _MIN_PROPORTION:
        return _smallest_proportional(fleet, max_replicas + 1)
    good_parts = [
        part
        for part, proportion in proportions.items()
        if proportion >= min(best, _GOOD_PROPORTION)
    ]
    chosen = max(good_parts, key=lambda part: (sum(part), proportions[part]))
    return fleet.with_replicas(chosen)


def _smallest_proportional(fleet: PlannedFleet, min_replicas: int) -> PlannedFleet:
    """The smallest part, of at least `min_replicas` replicas, that has about the proportions."""
    counts = [pool.replicas for pool in fleet.pools]
    for replicas in range(min_replicas, fleet.replicas):
        parts = [
            (first, replicas - first)
            for first in range(1, replicas)
            if first <= counts[0] and replicas - first <= counts[1]
        ]
        best = max(parts, key=lambda part: _proportionality(part, counts))
        if _proportionality(best, counts) >= _MIN_PROPORTION:
            return fleet.with_replicas(best)
    return fleet


def _proportionality(part: tuple[int, ...], whole: list[int]) -> float:
    """1 if a part has exactly the proportions of the whole."""
    shares = [some / all_ for some, all_ in zip(part, whole, strict=True)]
    return min(shares) / max(shares)
