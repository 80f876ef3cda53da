"""Samples of a fleet over time: replicas, queues and memory of each pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from baton.domain.fleet import Role
from baton.simulator.engine.port import NO_OCCUPANCY
from baton.simulator.fleet.fleet import VirtualFleet

_MAX_SAMPLES = 500
_MAX_REPLICA_READS = 100_000
"""Replica reads over all samples of the span: 1,000 replicas get 100 samples."""
_MIN_INTERVAL_S = 0.01


class PoolSample(NamedTuple):
    """One pool at one moment: sums over its replicas, including draining replicas."""

    pool: str
    replicas: int
    starting: int
    """Requested, and not yet serving."""
    queued: int
    running: int
    pulling: int
    kv_used_fraction: float
    """Mean over the replicas."""
    flipped_roles: tuple[tuple[Role, int], ...] = ()
    """Number of replicas with another role than their first, by role."""


class Sample(NamedTuple):
    """A fleet at one moment."""

    at_s: float
    arrived: int
    """Requests so far."""
    ended: int
    pools: tuple[PoolSample, ...]


class Sampler:
    """Samples a fleet at even intervals."""

    def __init__(
        self,
        fleet: VirtualFleet,
        *,
        span_s: float,
        replicas: int,
        starting: Mapping[str, int],
        counts: Callable[[], tuple[int, int]],
    ) -> None:
        """Configure the sampling of `fleet`.

        Args:
            fleet: the fleet.
            span_s: expected duration.
            replicas: expected number of replicas.
            starting: starting replicas by pool, in the order of pools; a live view.
            counts: returns the numbers of arrived and of ended requests.
        """
        self._fleet = fleet
        samples = max(1, min(_MAX_SAMPLES, _MAX_REPLICA_READS // max(1, replicas)))
        self._interval_s = max(_MIN_INTERVAL_S, span_s / samples)
        self._max_samples = 2 * samples
        self._starting = starting
        self._request_counts = counts
        self._samples: list[Sample] = []

    def sample_periodically(self) -> None:
        """Take a sample now and at every interval.

        After twice the expected span, it drops every other sample and doubles the interval.
        """
        self.take_sample()
        if len(self._samples) > self._max_samples:
            del self._samples[1::2]
            self._interval_s *= 2
        self._fleet.timeline.call_later(self._interval_s, self.sample_periodically)

    def take_sample(self) -> None:
        """Take one sample."""
        by_pool: dict[str, list[float]] = {pool: [0, 0, 0, 0, 0.0] for pool in self._starting}
        flipped_roles: dict[str, Counter[Role]] = {pool: Counter() for pool in self._starting}
        for replica in self._fleet.replicas.values():
            facts, occupancy = replica.facts, replica.occupancy()
            sums = by_pool[facts.pool]
            sums[0] += 1
            if occupancy is not NO_OCCUPANCY:
                queued, running, pulling, kv_used_fraction = occupancy
                sums[1] += queued
                sums[2] += running
                sums[3] += pulling
                sums[4] += kv_used_fraction
            if facts.role is not replica.initial_role:
                flipped_roles[facts.pool][facts.role] += 1
        pools = tuple(
            PoolSample(
                pool,
                replicas=int(replicas),
                starting=self._starting[pool],
                queued=int(queued),
                running=int(running),
                pulling=int(pulling),
                kv_used_fraction=kv_used / replicas if replicas else 0.0,
                flipped_roles=tuple(sorted(flipped_roles[pool].items())),
            )
            for pool, (replicas, queued, running, pulling, kv_used) in by_pool.items()
        )
        arrived, ended = self._request_counts()
        self._samples.append(
            Sample(at_s=self._fleet.timeline.now_s, arrived=arrived, ended=ended, pools=pools)
        )

    def samples(self) -> tuple[Sample, ...]:
        """The samples that were kept."""
        return tuple(self._samples)
