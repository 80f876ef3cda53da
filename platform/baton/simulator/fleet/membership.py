"""Membership of a simulated fleet: starts, stops, role changes, crashes, replica seconds.

Theory of operation: a replica is billed from the request for it until it leaves. It serves after
its pool's cold start; before, it can be cancelled. A stopped replica drains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from baton.control.fleet.pool_views import PoolState
from baton.domain.fleet import Role
from baton.simulator.fleet.fleet import VirtualFleet
from baton.simulator.fleet.plans import PoolPlan


class Membership:
    """The replicas of a fleet, by pool."""

    def __init__(self, fleet: VirtualFleet, pools: Iterable[PoolPlan], *, model: str) -> None:
        self._fleet = fleet
        self._model = model
        self._plans = {pool.name: pool for pool in pools}
        self._created_counts = dict.fromkeys(self._plans, 0)
        self._starting: dict[str, list[str]] = {name: [] for name in self._plans}
        self._starting_counts = dict.fromkeys(self._plans, 0)
        self._billed_since_s: dict[str, float] = {}
        self._billed_s = dict.fromkeys(self._plans, 0.0)

    @property
    def plans(self) -> Mapping[str, PoolPlan]:
        """All pools, by name."""
        return self._plans

    @property
    def starting(self) -> Mapping[str, int]:
        """Requested replicas that do not serve yet, by pool; a live view."""
        return self._starting_counts

    def pool_states(self) -> dict[str, PoolState]:
        """The state of each pool, for an autoscaler."""
        running, draining = dict.fromkeys(self._plans, 0), dict.fromkeys(self._plans, 0)
        for replica in self._fleet.replicas.values():
            counts = draining if replica.is_draining else running
            counts[replica.facts.pool] += 1
        return {
            name: PoolState(
                role=plan.role,
                starting=self._starting_counts[name],
                draining=draining[name],
                running=running[name],
                gpus_per_replica=plan.gpus_per_replica,
                cold_start_s=plan.effective_cold_start_s,
            )
            for name, plan in self._plans.items()
        }

    def replica_seconds(self) -> dict[str, float]:
        """Billed seconds until now, by pool."""
        now_s = self._fleet.timeline.now_s
        billed_s = dict(self._billed_s)
        for replica_id, since_s in self._billed_since_s.items():
            billed_s[_pool_of(replica_id)] += max(0.0, now_s - since_s)
        return billed_s

    # ------------------------------------------------------------------ changes
    def join_initial(self, since_s: float) -> None:
        """Add the initial replicas, billed from `since_s`."""
        for plan in self._plans.values():
            for _ in range(plan.replicas):
                self._join(plan, self._new_replica_id(plan.name), since_s)

    def start(self, pool: str, replicas: int) -> None:
        """Request replicas."""
        plan, timeline = self._plans[pool], self._fleet.timeline
        for _ in range(replicas):
            replica_id = self._new_replica_id(pool)
            self._starting[pool].append(replica_id)
            self._billed_since_s[replica_id] = timeline.now_s
            timeline.call_later(
                plan.effective_cold_start_s, partial(self._on_ready, plan, replica_id)
            )
        self._starting_counts[pool] = len(self._starting[pool])

    def stop(self, pool: str, replicas: int) -> None:
        """Stop this number of replicas, or all if there are fewer.

        The order: starting replicas, then replicas with another role than the pool's, then the
        newest.
        """
        starting = self._starting[pool]
        while starting and replicas:
            self._stop_billing(starting.pop())
            replicas -= 1
        self._starting_counts[pool] = len(starting)
        pool_role = self._plans[pool].role
        newest = list(reversed(self._serving(pool)))
        newest.sort(key=lambda replica_id: self._fleet.replicas[replica_id].facts.role is pool_role)
        for replica_id in newest[:replicas]:
            self.stop_replica(replica_id)

    def stop_replica(self, replica_id: str) -> None:
        """Drain a serving replica."""
        if not self._fleet.replicas[replica_id].is_draining:
            self._fleet.retire(replica_id, lambda: self._stop_billing(replica_id))

    def flip(self, pool: str, replicas: int, to: Role) -> None:
        """Change the role of this number of replicas, those with the least load first."""
        candidates = [
            replica_id
            for replica_id in self._serving(pool)
            if self._fleet.replicas[replica_id].facts.role is not to
        ]
        candidates.sort(key=self._load_key)
        for replica_id in candidates[:replicas]:
            self._fleet.replicas[replica_id].change_role(to)

    def kill(self, replica_id: str) -> None:
        """Crash a replica."""
        self._fleet.kill(replica_id)
        self._stop_billing(replica_id)

    # ------------------------------------------------------------------ internals
    def _serving(self, pool: str) -> list[str]:
        return [
            replica_id
            for replica_id, replica in self._fleet.replicas.items()
            if replica.facts.pool == pool and not replica.is_draining
        ]

    def _load_key(self, replica_id: str) -> tuple[int, int]:
        load = self._fleet.replicas[replica_id].load()
        return load.running_requests + load.queued_requests, load.queued_tokens

    def _on_ready(self, plan: PoolPlan, replica_id: str) -> None:
        starting = self._starting[plan.name]
        if replica_id in starting:  # else the start was cancelled
            starting.remove(replica_id)
            self._starting_counts[plan.name] = len(starting)
            self._join(plan, replica_id, self._billed_since_s[replica_id])

    def _join(self, plan: PoolPlan, replica_id: str, since_s: float) -> None:
        self._billed_since_s[replica_id] = since_s
        self._fleet.add_replica(
            replica_id, plan.settings, role=plan.role, pool=plan.name, model=self._model
        )

    def _new_replica_id(self, pool: str) -> str:
        self._created_counts[pool] += 1
        return f"{pool}-{self._created_counts[pool] - 1}"

    def _stop_billing(self, replica_id: str) -> None:
        since_s = self._billed_since_s.pop(replica_id)
        self._billed_s[_pool_of(replica_id)] += self._fleet.timeline.now_s - since_s


def _pool_of(replica_id: str) -> str:
    return replica_id.rpartition("-")[0]
