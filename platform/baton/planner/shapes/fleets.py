"""Fleets of pools: what they take, and what they should carry by what replicas carry alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

from baton.domain.fleet import Role
from baton.planner.problem import Offer
from baton.planner.shapes.space import Duty, Instance

Key = tuple[Duty, tuple[str, int, int, int]]
Rates = Mapping[Key, float]
"""Requests per second of one replica of a shape, by its duty."""
_MOST_REPLICAS = 4096
_EVEN = 0.95
"""Of two parts of a fleet whose proportions are both as near as this, the larger is simulated."""
_IN_VAIN = 16
"""Prefill replicas that spare no decode replica, before no more are tried."""
_UNEVEN = 0.8
"""A part of a fleet with proportions further off than this stands for nothing."""


class Kind(StrEnum):
    """Whether, and how, prefill and decode are on replicas of their own."""

    COLOCATED = "colocated"
    """Every replica does both, prompts in chunks."""
    DISAGGREGATED = "disaggregated"
    """Every prompt is prefilled in one pool and decoded in the other."""
    HYBRID = "hybrid"
    """Two pools, but the decode pool prefills what is served better so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Replicas of one shape and role."""

    role: Role
    instance: Instance
    replicas: int

    @property
    def gpus(self) -> int:
        """How many accelerators it takes."""
        return self.replicas * self.instance.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """One pool of mixed replicas, or a prefill pool and a decode pool."""

    kind: Kind
    pools: tuple[Pool, ...]

    @property
    def gpus(self) -> int:
        """How many accelerators it takes."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def replicas(self) -> int:
        """Of all pools."""
        return sum(pool.replicas for pool in self.pools)

    @property
    def price_per_hour(self) -> float | None:
        """Of all its accelerators; None when one has no price."""
        prices = [(pool.instance.price_per_hour, pool.replicas) for pool in self.pools]
        known = [price * count for price, count in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    @property
    def label(self) -> str:
        """The fleet in words: `2 x prefill h100 tp1 + 1 x decode h100 tp2`."""
        return " + ".join(
            f"{pool.replicas} x {pool.role} {pool.instance.label}" for pool in self.pools
        )

    def with_replicas(self, counts: Iterable[int]) -> Fleet:
        """The same with other numbers of replicas."""
        pools = zip(self.pools, counts, strict=True)
        return replace(self, pools=tuple(replace(pool, replicas=n) for pool, n in pools))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """How many accelerators there are."""

    gpus: int | None
    by_name: Mapping[str, int]
    """Where an offer has a limit of its own."""

    @staticmethod
    def of(gpus: int | None, offers: Iterable[Offer]) -> Stock:
        """What a question says of it."""
        limits = {
            one.accelerator.name: one.available for one in offers if one.available is not None
        }
        return Stock(gpus=gpus, by_name=limits)

    def has(self, fleet: Fleet) -> bool:
        """Whether there are enough for this fleet."""
        if self.gpus is not None and fleet.gpus > self.gpus:
            return False
        taken: dict[str, int] = {}
        for pool in fleet.pools:
            name = pool.instance.accelerator.name
            taken[name] = taken.get(name, 0) + pool.gpus
        return all(taken.get(name, 0) <= limit for name, limit in self.by_name.items())

    def room(self, instance: Instance, beside: Fleet | None = None) -> int:
        """How many replicas of a shape there are accelerators for, beside a fleet."""
        limits = [_MOST_REPLICAS * instance.gpus]
        used = 0 if beside is None else beside.gpus
        if self.gpus is not None:
            limits.append(self.gpus - used)
        name = instance.accelerator.name
        if name in self.by_name:
            mine = () if beside is None else beside.pools
            alike = sum(pool.gpus for pool in mine if pool.instance.accelerator.name == name)
            limits.append(self.by_name[name] - alike)
        return max(0, min(limits) // instance.gpus)


def key(duty: Duty, instance: Instance) -> Key:
    """Under which the rate of a shape is found."""
    return duty, instance.key


def estimate(fleet: Fleet, rates: Rates) -> float:
    """Requests per second that a fleet should carry, by what each of its replicas carries alone.

    A hybrid's decode replicas take over the prompts that its prefill pool has no time for; what is
    left of them for that is what decoding the prefill pool's prompts does not take.
    """
    if fleet.kind is Kind.COLOCATED:
        (pool,) = fleet.pools
        return pool.replicas * rates.get(key(Duty.BOTH, pool.instance), 0.0)
    prefill, decode = fleet.pools
    handed = prefill.replicas * rates.get(key(Duty.PREFILL, prefill.instance), 0.0)
    decoded = rates.get(key(Duty.DECODE, decode.instance), 0.0)
    carried = min(handed, decode.replicas * decoded)
    if fleet.kind is Kind.DISAGGREGATED or not decoded:
        return carried
    free = max(0.0, decode.replicas - carried / decoded)
    return carried + free * rates.get(key(Duty.BOTH, decode.instance), 0.0)


def largest(kind: Kind, pairs: Iterable[tuple[Instance, ...]], stock: Stock) -> Iterator[Fleet]:
    """All ways to spend the stock on one kind of fleet: what no replica can be added to."""
    for shapes in pairs:
        if kind is Kind.COLOCATED:
            fleet = _fleet(kind, shapes, (stock.room(shapes[0]),))
            if fleet.replicas:
                yield fleet
            continue
        for count in range(1, stock.room(shapes[0]) + 1):
            beside = _fleet(kind, shapes, (count, 0))
            rest = stock.room(shapes[1], beside)
            if not rest:
                break
            yield _fleet(kind, shapes, (count, rest))


def smallest(
    kind: Kind,
    pairs: Iterable[tuple[Instance, ...]],
    stock: Stock,
    enough: Callable[[Fleet], bool],
) -> Iterator[Fleet]:
    """All fleets of one kind that are enough, and that no replica can be taken from."""
    for shapes in pairs:
        if kind is Kind.COLOCATED:
            alone = _completed(kind, shapes, (), enough)
            found = [] if alone is None else [alone]
        else:
            found = list(_splits(kind, shapes, stock, enough))
        yield from (fleet for fleet in found if stock.has(fleet))


def _splits(
    kind: Kind, shapes: tuple[Instance, ...], stock: Stock, enough: Callable[[Fleet], bool]
) -> Iterator[Fleet]:
    """With one prefill replica, with two, and so on, while that spares decode replicas."""
    least, in_vain = _MOST_REPLICAS + 1, 0
    for count in range(1, stock.room(shapes[0]) + 1):
        fleet = _completed(kind, shapes, (count,), enough)
        if fleet is not None and fleet.pools[1].replicas < least:
            least, in_vain = fleet.pools[1].replicas, 0
            yield fleet
        elif least <= _MOST_REPLICAS:
            in_vain += 1
            if in_vain == _IN_VAIN:
                return


def _completed(
    kind: Kind,
    shapes: tuple[Instance, ...],
    counts: tuple[int, ...],
    enough: Callable[[Fleet], bool],
) -> Fleet | None:
    """With as many replicas of the last shape as are enough; None when no number is."""

    def with_last(count: int) -> Fleet:
        return _fleet(kind, shapes, (*counts, count))

    last = _least(lambda count: enough(with_last(count)))
    return None if last is None else with_last(last)


def _least(enough: Callable[[int], bool]) -> int | None:
    """The smallest count that is enough, where more always is; None when none is."""
    high = 1
    while not enough(high):
        high *= 2
        if high > _MOST_REPLICAS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _fleet(kind: Kind, shapes: tuple[Instance, ...], counts: tuple[int, ...]) -> Fleet:
    roles = (Role.MIXED,) if kind is Kind.COLOCATED else (Role.PREFILL, Role.DECODE)
    pools = zip(roles, shapes, counts, strict=True)
    return Fleet(
        kind=kind,
        pools=tuple(Pool(role=role, instance=one, replicas=n) for role, one, n in pools),
    )


def cell(fleet: Fleet, most: int) -> Fleet:
    """A part of a fleet with about its proportions and at most so many replicas.

    Where none of those comes near, the smallest that does; in the end, all of the fleet.

    Of parts that are about even, the largest: a queue that more replicas serve is shorter, so a
    part carries a little less than its share of the whole.
    """
    if fleet.replicas <= most:
        return fleet
    counts = [pool.replicas for pool in fleet.pools]
    each = [range(1, min(count, most) + 1) for count in counts]
    parts: list[tuple[int, ...]] = [part for part in product(*each) if sum(part) <= most]
    evenness = {one: _evenness(one, counts) for one in parts}
    best = max(evenness.values(), default=0.0)
    if best < _UNEVEN:
        return _smallest_even(fleet, most + 1)
    near = [part for part, even in evenness.items() if even >= min(best, _EVEN)]
    chosen = max(near, key=lambda part: (sum(part), evenness[part]))
    return fleet.with_replicas(chosen)


def _smallest_even(fleet: Fleet, least: int) -> Fleet:
    """The part with the fewest replicas, from so many on, that has about the proportions."""
    counts = [pool.replicas for pool in fleet.pools]
    for replicas in range(least, fleet.replicas):
        parts = [
            (first, replicas - first)
            for first in range(1, replicas)
            if first <= counts[0] and replicas - first <= counts[1]
        ]
        best = max(parts, key=lambda part: _evenness(part, counts))
        if _evenness(best, counts) >= _UNEVEN:
            return fleet.with_replicas(best)
    return fleet


def _evenness(part: tuple[int, ...], whole: list[int]) -> float:
    """1 when a part has exactly the proportions of the whole."""
    shares = [some / all_ for some, all_ in zip(part, whole, strict=True)]
    return min(shares) / max(shares)
