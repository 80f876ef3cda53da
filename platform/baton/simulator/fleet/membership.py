"""Who belongs to a simulated fleet: starts, stops, flips and deaths, and what replicas cost.

Theory of operation: a replica is paid for from being asked for to being gone. One that was asked
for serves after its pool's cold start; until then it can be called off. One that is stopped takes
no new work and leaves when it has ended what it has.
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
        self._made = dict.fromkeys(self._plans, 0)
        self._starting: dict[str, list[str]] = {name: [] for name in self._plans}
        self._counts = dict.fromkeys(self._plans, 0)
        self._held_since_s: dict[str, float] = {}
        self._held_s = dict.fromkeys(self._plans, 0.0)

    @property
    def plans(self) -> Mapping[str, PoolPlan]:
        """Every pool."""
        return self._plans

    @property
    def starting(self) -> Mapping[str, int]:
        """By pool: replicas that were asked for and do not serve yet; stays up to date."""
        return self._counts

    def states(self) -> dict[str, PoolState]:
        """What whoever starts and stops replicas knows of each pool."""
        running, draining = dict.fromkeys(self._plans, 0), dict.fromkeys(self._plans, 0)
        for replica in self._fleet.replicas.values():
            counts = draining if replica.draining else running
            counts[replica.facts.pool] += 1
        return {
            name: PoolState(
                role=plan.role,
                starting=self._counts[name],
                draining=draining[name],
                running=running[name],
                gpus_per_replica=plan.gpus_per_replica,
                cold_start_s=plan.starts_in_s,
            )
            for name, plan in self._plans.items()
        }

    def replica_seconds(self) -> dict[str, float]:
        """By pool: from being asked for to being gone, until now."""
        now_s = self._fleet.timeline.now_s
        held_s = dict(self._held_s)
        for replica_id, since_s in self._held_since_s.items():
            held_s[_pool_of(replica_id)] += max(0.0, now_s - since_s)
        return held_s

    # ------------------------------------------------------------------ changes
    def found(self, since_s: float) -> None:
        """Let everybody join who is there from the beginning; they are paid for since then."""
        for plan in self._plans.values():
            for _ in range(plan.replicas):
                self._join(plan, self._name(plan.name), since_s)

    def start(self, pool: str, replicas: int) -> None:
        """Ask for more."""
        plan, timeline = self._plans[pool], self._fleet.timeline
        for _ in range(replicas):
            replica_id = self._name(pool)
            self._starting[pool].append(replica_id)
            self._held_since_s[replica_id] = timeline.now_s
            timeline.after(plan.starts_in_s, partial(self._ready, plan, replica_id))
        self._counts[pool] = len(self._starting[pool])

    def stop(self, pool: str, replicas: int) -> None:
        """Stop so many, or all if there are fewer.

        First those that still start, who have no work to lose; then those that play another role
        than the pool's; then the newest.
        """
        starting = self._starting[pool]
        while starting and replicas:
            self._let_go(starting.pop())
            replicas -= 1
        self._counts[pool] = len(starting)
        own = self._plans[pool].role
        newest = list(reversed(self._serving(pool)))
        newest.sort(key=lambda replica_id: self._fleet.replicas[replica_id].facts.role is own)
        for replica_id in newest[:replicas]:
            self.stop_one(replica_id)

    def stop_one(self, replica_id: str) -> None:
        """Stop one that serves."""
        if not self._fleet.replicas[replica_id].draining:
            self._fleet.retire(replica_id, lambda: self._let_go(replica_id))

    def flip(self, pool: str, replicas: int, to: Role) -> None:
        """Have so many play another role, those with the least to do first."""
        others = [
            replica_id
            for replica_id in self._serving(pool)
            if self._fleet.replicas[replica_id].facts.role is not to
        ]
        others.sort(key=self._work)
        for replica_id in others[:replicas]:
            self._fleet.replicas[replica_id].change_role(to)

    def kill(self, replica_id: str) -> None:
        """One dies."""
        self._fleet.kill(replica_id)
        self._let_go(replica_id)

    # ------------------------------------------------------------------ the works
    def _serving(self, pool: str) -> list[str]:
        """The oldest first."""
        return [
            replica_id
            for replica_id, replica in self._fleet.replicas.items()
            if replica.facts.pool == pool and not replica.draining
        ]

    def _work(self, replica_id: str) -> tuple[int, int]:
        load = self._fleet.replicas[replica_id].load()
        return load.running_requests + load.queued_requests, load.queued_tokens

    def _ready(self, plan: PoolPlan, replica_id: str) -> None:
        starting = self._starting[plan.name]
        if replica_id in starting:  # or else it was called off
            starting.remove(replica_id)
            self._counts[plan.name] = len(starting)
            self._join(plan, replica_id, self._held_since_s[replica_id])

    def _join(self, plan: PoolPlan, replica_id: str, since_s: float) -> None:
        self._held_since_s[replica_id] = since_s
        self._fleet.add_replica(
            replica_id, plan.settings, role=plan.role, pool=plan.name, model=self._model
        )

    def _name(self, pool: str) -> str:
        self._made[pool] += 1
        return f"{pool}-{self._made[pool] - 1}"

    def _let_go(self, replica_id: str) -> None:
        """Nobody pays for a replica any more."""
        since_s = self._held_since_s.pop(replica_id)
        self._held_s[_pool_of(replica_id)] += self._fleet.timeline.now_s - since_s


def _pool_of(replica_id: str) -> str:
    return replica_id.rpartition("-")[0]
