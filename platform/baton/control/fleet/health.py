"""The health of each replica: its circuit breaker and its heartbeats.

*Theory of operation.* From messages of replicas and results of legs, it keeps `Health` in the fleet
table up to date, which placement reads:

- UNRESPONSIVE: it is suspect (`policy.resilience.liveness`);
- EJECTED: its circuit admits no request now (`policy.resilience.circuit_breakers`);
- HEALTHY: neither.

`on_time` returns the replicas whose requests go elsewhere now. There are none while no replica
responds: then it is likelier this process that is cut off.

A replica that sends messages and does no step is *stalled*. Engines may take seconds for one step,
so only a request's deadline takes its requests away, and then all of them.
"""

from __future__ import annotations

from baton.control.fleet.fleet_table import FleetTable
from baton.control.state.limits import RecoveryOptions
from baton.domain.fleet import Health, Load, LossReason
from baton.policy.resilience.circuit_breakers import CircuitBreakers, CircuitState
from baton.policy.resilience.liveness import LivenessTracker


class ReplicaHealth:
    """The health of one coordinator's replicas."""

    def __init__(self, options: RecoveryOptions, fleet: FleetTable) -> None:
        self._fleet = fleet
        self._breakers = CircuitBreakers(options.circuit_breaker)
        self._liveness = LivenessTracker(options.heartbeat_timeout_s)
        self._tripped_unresponsive: set[str] = set()
        """Unresponsive replicas that were tripped for it, and have not been heard of since."""
        self._last_step_at_s: dict[str, float] = {}
        """By replica: when its engine was last known to move, or to have nothing to do."""
        self._step_counts: dict[str, int] = {}
        self._next_half_open_at_s: float | None = None
        """When the first of the open circuits is half-open."""

    def reconfigure(self, options: RecoveryOptions) -> None:
        """Go on by others."""
        self._breakers.reconfigure(options.circuit_breaker)
        self._liveness.reconfigure(options.heartbeat_timeout_s)

    # ---------------------------------------------------------------- replicas

    def on_replica_joined(self, replica_id: str, now_s: float) -> None:
        """A replica is a member, for the first time or again."""
        self._breakers.on_replica_joined(replica_id)
        self._liveness.on_replica_joined(replica_id, now_s)
        self._tripped_unresponsive.discard(replica_id)
        self._last_step_at_s[replica_id] = now_s
        self._schedule_half_open(now_s)
        self._update_health(replica_id, now_s)

    def on_replica_lost(self, replica_id: str, reason: LossReason, now_s: float) -> None:
        """A replica is no member any more; an unresponsive replica is tripped already."""
        already_tripped = replica_id in self._tripped_unresponsive
        self._liveness.on_replica_left(replica_id)
        self._tripped_unresponsive.discard(replica_id)
        self._last_step_at_s.pop(replica_id, None)
        self._step_counts.pop(replica_id, None)
        if reason is LossReason.LEFT:
            self._breakers.forget(replica_id)
            return
        if not already_tripped:
            self._breakers.trip(replica_id, now_s, f"it was lost ({reason})")
        self._breakers.on_replica_left(replica_id, now_s)

    def on_heartbeat(self, replica_id: str, now_s: float) -> None:
        """A message of a replica came."""
        self._liveness.heartbeat(replica_id, now_s)
        view = self._fleet.get(replica_id)
        if view is not None and view.health is Health.UNRESPONSIVE:
            self._tripped_unresponsive.discard(replica_id)
            self._update_health(replica_id, now_s)

    def on_step(self, replica_id: str, now_s: float) -> None:
        """A replica's engine has done a step."""
        if replica_id in self._last_step_at_s:
            self._last_step_at_s[replica_id] = now_s

    def on_load_report(self, replica_id: str, load: Load, now_s: float) -> None:
        """A load report of a replica came."""
        if replica_id not in self._last_step_at_s:
            return
        idle, steps = not load.total_requests, load.steps.steps
        if idle and not self._is_busy(replica_id):
            self._liveness.set_idle(replica_id, now_s)
        if idle or self._step_counts.get(replica_id) != steps:
            self._step_counts[replica_id] = steps
            self._last_step_at_s[replica_id] = now_s

    def is_stalled(self, replica_id: str, now_s: float, *, for_s: float) -> bool:
        """Whether a replica has not done a step for so long, though it has work."""
        return now_s - self._last_step_at_s.get(replica_id, now_s) >= for_s

    # ---------------------------------------------------------------- legs

    def on_leg_started(self, replica_id: str, leg_id: str, now_s: float) -> None:
        """A leg of a request was sent to a replica."""
        self._liveness.set_busy(replica_id, now_s)
        self._liveness.start_checks(now_s)
        self._breakers.on_leg_started(replica_id, leg_id)
        self._update_health(replica_id, now_s)

    def on_first_output(self, replica_id: str, leg_id: str, now_s: float) -> None:
        """A leg gave its first output."""
        if self._breakers.on_first_output(replica_id, leg_id, now_s):
            self._on_circuit_closed(replica_id, now_s)

    def on_leg_failed(self, replica_id: str, leg_id: str, now_s: float, reason: str) -> None:
        """A leg has failed, and its replica is to blame."""
        if replica_id in self._fleet and self._breakers.on_leg_failed(
            replica_id, leg_id, now_s, reason
        ):
            self._schedule_half_open(now_s)
            self._update_health(replica_id, now_s)

    def on_leg_ended(self, replica_id: str, leg_id: str, now_s: float, *, done: bool) -> None:
        """A leg has ended; `done` when it did what it was for."""
        if done and self._breakers.on_leg_succeeded(replica_id, leg_id, now_s):
            self._on_circuit_closed(replica_id, now_s)
        self._breakers.on_leg_ended(replica_id, leg_id)
        self._update_health(replica_id, now_s)

    def on_slow_leg(self, replica_id: str, leg_id: str, now_s: float, reason: str) -> None:
        """A leg was taken away for being late; that counts where it was on trial, not else."""
        if self._breakers.circuit_state(replica_id, now_s) is not CircuitState.CLOSED:
            self.on_leg_failed(replica_id, leg_id, now_s, reason)

    def trip(self, replica_id: str, now_s: float, reason: str, *, with_pause: bool = False) -> None:
        """All work of a replica is being taken from it; `with_pause`: it gets a rest first."""
        self._breakers.trip(replica_id, now_s, reason, with_pause=with_pause)
        self._schedule_half_open(now_s)
        self._update_health(replica_id, now_s)

    # ---------------------------------------------------------------- time

    def next_at_s(self) -> float | None:
        """When time should pass at the latest."""
        check_at_s, half_open_at_s = self._liveness.next_check_at_s(), self._next_half_open_at_s
        if check_at_s is None or half_open_at_s is None:
            return half_open_at_s if check_at_s is None else check_at_s
        return min(check_at_s, half_open_at_s)

    def on_time(self, now_s: float) -> tuple[str, ...]:
        """Check heartbeats; returns the replicas that are to be left now."""
        if self._next_half_open_at_s is not None and now_s >= self._next_half_open_at_s:
            self._schedule_half_open(now_s)
            self._update_all(now_s)
        if self._fleet.has_work:
            self._liveness.start_checks(
                now_s
            )  # other options have ended the looks that were arranged
        if not self._liveness.check(now_s, has_work=self._fleet.has_work):
            return ()
        self._update_all(now_s)
        if not self._has_responsive_replica():
            return ()
        unresponsive = tuple(
            replica_id
            for replica_id in self._liveness.unresponsive(now_s)
            if self._is_busy(replica_id)
        )
        for replica_id in unresponsive:
            if replica_id not in self._tripped_unresponsive:
                self._tripped_unresponsive.add(replica_id)
                unresponsive_s = self._liveness.unresponsive_s(replica_id, now_s)
                self.trip(replica_id, now_s, f"nothing was heard of it for {unresponsive_s:.1f} s")
        return unresponsive

    # ---------------------------------------------------------------- asked

    @property
    def openings(self) -> int:
        """How often a circuit was opened."""
        return self._breakers.openings

    def unresponsive_s(self, replica_id: str, now_s: float) -> float:
        """For how long nothing was heard of a replica."""
        return self._liveness.unresponsive_s(replica_id, now_s)

    def circuit(self, replica_id: str, now_s: float) -> CircuitState:
        """How far a replica is trusted."""
        return self._breakers.circuit_state(replica_id, now_s)

    def reason(self, replica_id: str) -> str:
        """Why its circuit was last opened; empty where it never was."""
        return self._breakers.reason(replica_id)

    def is_outlier(self, replica_id: str, now_s: float) -> bool:
        """Whether its circuit is open while another replica's, that takes work, is closed."""
        closed = self._breakers.circuit_state(replica_id, now_s) is CircuitState.CLOSED
        return not closed and self._has_healthy_peer(replica_id, now_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when something is kept of replicas that are not there."""
        self._breakers.check_integrity()
        ids = self._fleet.ids
        assert self._last_step_at_s.keys() == ids, "engines of replicas that are not there"
        assert self._step_counts.keys() <= ids, "steps of replicas that are not there"
        assert self._tripped_unresponsive <= ids, "unresponsive replicas that are not there"

    # ---------------------------------------------------------------- inside

    def _on_circuit_closed(self, replica_id: str, now_s: float) -> None:
        """A replica has proven well; where it is the first, what ailed all of them may be over.

        Else it would have to carry the whole fleet's load until their pauses end.
        """
        self._update_health(replica_id, now_s)
        if not self._has_healthy_peer(replica_id, now_s):
            self._breakers.half_open_all(now_s)
            self._schedule_half_open(now_s)
            self._update_all(now_s)

    def _has_healthy_peer(self, replica_id: str, now_s: float) -> bool:
        circuit = self._breakers.circuit_state
        return any(
            view.is_eligible and circuit(other, now_s) is CircuitState.CLOSED
            for other, view in self._fleet.view(now_s).replicas.items()
            if other != replica_id
        )

    def _update_health(self, replica_id: str, now_s: float) -> None:
        health = Health.HEALTHY
        if self._liveness.is_suspect(replica_id):
            health = Health.UNRESPONSIVE
        elif not self._breakers.allows_request(replica_id, now_s):
            health = Health.EJECTED
        self._fleet.set_health(replica_id, health)

    def _update_all(self, now_s: float) -> None:
        for replica_id in tuple(self._fleet.ids):
            self._update_health(replica_id, now_s)

    def _is_busy(self, replica_id: str) -> bool:
        view = self._fleet.get(replica_id)
        return view is not None and view.inflight_legs > 0

    def _schedule_half_open(self, now_s: float) -> None:
        """Find out when the next circuit is half-open."""
        ends = (until_s for _, until_s in self._breakers.open_circuits(now_s))
        self._next_half_open_at_s = min(ends, default=None)

    def _has_responsive_replica(self) -> bool:
        views = self._fleet.view(0.0).replicas.values()
        return any(not v.draining and v.health is not Health.UNRESPONSIVE for v in views)
