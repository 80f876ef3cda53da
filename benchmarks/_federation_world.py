"""Clusters, fronts and requests in virtual time, coarse enough for ten thousand replicas.

A replica prefills one prompt after another; decoding, transfers and batches are left out, for what
is compared is which cluster, and which cache, a request meets. Inside a cluster everything is known
exactly: a request goes where it ends soonest, which is to a replica that holds its prefix unless
the wait there exceeds what the prefix is worth. Between clusters fronts know what they were told.
Since nobody overtakes, a request's whole way is known when it arrives: there are no events.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

_HOLDERS = 8
"""Replicas looked at that hold a prefix; the others are found by their load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked, and of whom."""

    replicas: int
    cluster_replicas: int = 500
    regions: int = 4
    requests_per_replica_s: float = 10.0
    from_first_region: float = 0.0
    """The share of requests that come from there besides its own part of the rest."""
    families_per_replica: float = 12.0
    """Prefixes that are shared: all clusters together have room for them, no single one has."""
    zipf: float = 0.9
    """How unequally they are asked for."""
    prefix_tokens: int = 3000
    own_tokens: float = 500.0
    """Of a prompt besides, on average."""
    tokens_per_s: float = 20_000.0
    held_families: int = 16
    """Prefixes that one replica's cache has room for."""
    away_s: float = 0.08
    """Between regions, there and back."""
    report_s: float = 1.0
    """How often clusters tell fronts of their load."""
    silent_s: float = 3.0
    """A cluster that has not told for so long is not counted on."""

    @property
    def prefix_s(self) -> float:
        """What computing a prefix takes."""
        return self.prefix_tokens / self.tokens_per_s

    @property
    def clusters(self) -> int:
        """As few as there may be, and one in each region at least."""
        return max(self.regions, -(-self.replicas // self.cluster_replicas))


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt."""

    at_s: float
    region: int
    family: int
    own_s: float
    """What computing the rest of it takes."""


@dataclass(slots=True)
class Served:
    """What became of it."""

    first_token_s: float
    """After it arrived at a replica's cluster; the way there is not in it."""
    hit: bool


@dataclass(slots=True)
class Cluster:
    """Replicas under one exact scheduler."""

    name: str
    region: int
    load: Load
    free_at_s: list[float]
    told_wait_s: float = 0.0
    told_at_s: float = 0.0
    down: bool = False
    caches: list[OrderedDict[int, None]] = field(default_factory=list)
    holders: dict[int, list[int]] = field(default_factory=dict)
    by_load: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.caches = [OrderedDict() for _ in self.free_at_s]
        self.by_load = [(free_s, replica) for replica, free_s in enumerate(self.free_at_s)]
        heapify(self.by_load)

    def serve(self, request: Request, now_s: float) -> Served:
        """Have the best replica compute it."""
        least = self._least_loaded()
        best, hit = least, least in self.holders.get(request.family, ())
        soonest_s = self._ends_s(best, request, now_s, hit=hit)
        for replica in self.holders.get(request.family, ())[:_HOLDERS]:
            ends_s = self._ends_s(replica, request, now_s, hit=True)
            if ends_s < soonest_s:
                best, hit, soonest_s = replica, True, ends_s
        self.free_at_s[best] = soonest_s
        heappush(self.by_load, (soonest_s, best))
        self._hold(best, request.family)
        return Served(soonest_s - now_s, hit)

    def tell(self, now_s: float) -> None:
        """How long work waits here, on average."""
        waits = sum(free_s - now_s for free_s in self.free_at_s if free_s > now_s)
        self.told_wait_s, self.told_at_s = waits / len(self.free_at_s), now_s

    def _ends_s(self, replica: int, request: Request, now_s: float, *, hit: bool) -> float:
        begins_s = max(now_s, self.free_at_s[replica])
        return begins_s + request.own_s + (0.0 if hit else self.load.prefix_s)

    def _least_loaded(self) -> int:
        while self.by_load[0][0] != self.free_at_s[self.by_load[0][1]]:
            heappop(self.by_load)  # it has got work since
        return self.by_load[0][1]

    def _hold(self, replica: int, family: int) -> None:
        cache = self.caches[replica]
        if family in cache:
            cache.move_to_end(family)
            return
        cache[family] = None
        self.holders.setdefault(family, []).append(replica)
        if len(cache) > self.load.held_families:
            gone, _ = cache.popitem(last=False)
            self.holders[gone].remove(replica)


def clusters_of(load: Load, *, count: int | None = None) -> list[Cluster]:
    """The replicas in so many clusters, regions in turn."""
    count = load.clusters if count is None else count
    return [
        Cluster(
            name=f"cluster-{number}",
            region=number % load.regions,
            load=load,
            free_at_s=[0.0] * (load.replicas // count),
        )
        for number in range(count)
    ]


def requests_of(load: Load, seconds: float, rng: random.Random) -> Iterator[Request]:
    """Arrivals by chance, each of a family by Zipf's law; own parts have exponential lengths."""
    families = max(1, int(load.families_per_replica * load.replicas))
    rate = load.requests_per_replica_s * load.replicas
    at_s, power = 0.0, 1.0 - load.zipf
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        # The inverse of Zipf's distribution, its sum taken for an integral.
        family = int(((families + 1) ** power * rng.random() + 1 - rng.random()) ** (1 / power)) - 1
        own_s = rng.expovariate(1.0) * load.own_tokens / load.tokens_per_s
        surges = rng.random() < load.from_first_region
        region = 0 if surges else rng.randrange(load.regions)
        yield Request(at_s, region, max(0, min(families - 1, family)), own_s)
