"""What a fleet looks like from time to time: replicas, queues, memory, for each pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from baton.domain.fleet import Role
from baton.simulator.fleet.fleet import VirtualFleet

_MAX_SAMPLES = 500
_MAX_REPLICA_READS = 100_000
"""Replicas that are looked at, over all samples of the span: of 1,000 there are 100 samples."""
_MIN_INTERVAL_S = 0.01


class PoolSample(NamedTuple):
    """One pool at one moment; sums over its replicas, those that drain among them."""

    pool: str
    replicas: int
    starting: int
    """Asked for, and not yet serving."""
    queued: int
    """Requests that wait for a place in a batch."""
    running: int
    pulling: int
    kv_used_fraction: float
    """Mean over the replicas."""
    flipped_roles: tuple[tuple[Role, int], ...] = ()
    """How many of the replicas play another role than they started in."""


class Sample(NamedTuple):
    """A fleet at one moment."""

    at_s: float
    arrived: int
    """Requests so far, in all; the rate is what this grows by."""
    ended: int
    pools: tuple[PoolSample, ...]


class Sampler:
    """Looks at a fleet at even distances, from `sample_periodically` on."""

    def __init__(
        self,
        fleet: VirtualFleet,
        *,
        span_s: float,
        replicas: int,
        starting: Mapping[str, int],
        counts: Callable[[], tuple[int, int]],
    ) -> None:
        """Look at `fleet`.

        Args:
            fleet: whom.
            span_s: how long something is expected to happen.
            replicas: how many there will be, about.
            starting: by pool, in the order of pools: replicas that are on their way.
            counts: requests that have arrived, and that have ended.
        """
        self._fleet = fleet
        samples = max(1, min(_MAX_SAMPLES, _MAX_REPLICA_READS // max(1, replicas)))
        self._interval_s = max(_MIN_INTERVAL_S, span_s / samples)
        self._max_samples = 2 * samples
        self._starting = starting
        self._request_counts = counts
        self._samples: list[Sample] = []

    def sample_periodically(self) -> None:
        """Take a sample now, and from now on.

        When it takes twice as long as expected, every other sample is let go and they get rarer.
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
            load = replica.load()
            sums = by_pool[replica.facts.pool]
            sums[0] += 1
            sums[1] += load.queued_requests
            sums[2] += load.running_requests
            sums[3] += load.pulling_requests
            sums[4] += load.kv_used_fraction
            if replica.facts.role is not replica.initial_role:
                flipped_roles[replica.facts.pool][replica.facts.role] += 1
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
        self._samples.append(Sample(self._fleet.timeline.now_s, arrived, ended, pools))

    def samples(self) -> tuple[Sample, ...]:
        """All that were taken and kept."""
        return tuple(self._samples)
