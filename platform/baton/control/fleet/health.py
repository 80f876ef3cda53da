"""Which replicas are counted on: their circuits, and whether they are heard of.

*Theory of operation.* Told of whatever replicas say and of what becomes of legs, it keeps the
`Standing` of every replica in the fleet table up to date, by which placement goes:

- SILENT: it is suspect (`policy.silences`);
- QUARANTINED: its circuit lets nobody in now (`policy.breakers`);
- SOUND: neither.

`time_passed` says whom to leave now. Nobody is left while nobody else is heard of either: then it
is likelier this end that is cut off, and where would streams go? The link decides then.

A replica that talks and does no *step* is *still*: its engine hangs. Engines may take seconds for
one step, so this alone is no reason to leave; it is one for all of its requests once the deadline
of any has passed.
"""

from __future__ import annotations

from baton.control.fleet.fleet_table import FleetTable
from baton.control.state.limits import RecoveryOptions
from baton.domain.fleet import Load, LossReason, Standing
from baton.policy.resilience.circuit_breakers import Breakers, Circuit
from baton.policy.resilience.liveness import Silences


class Health:
    """The standing of one coordinator's replicas."""

    def __init__(self, options: RecoveryOptions, fleet: FleetTable) -> None:
        self._fleet = fleet
        self._breakers = Breakers(options.breaker)
        self._silences = Silences(options.silence_s)
        self._left_alone: set[str] = set()
        """Silent ones that were tripped for it, and have not been heard of since."""
        self._moved_at_s: dict[str, float] = {}
        """By replica: when its engine was last known to move, or to have nothing to do."""
        self._steps: dict[str, int] = {}
        self._paused_until_s: float | None = None
        """When the first of the open circuits is half-open."""

    def reconfigure(self, options: RecoveryOptions) -> None:
        """Go on by others."""
        self._breakers.reconfigure(options.breaker)
        self._silences.reconfigure(options.silence_s)

    # ---------------------------------------------------------------- replicas

    def joined(self, replica_id: str, now_s: float) -> None:
        """A replica is a member, for the first time or again."""
        self._breakers.joined(replica_id)
        self._silences.joined(replica_id, now_s)
        self._left_alone.discard(replica_id)
        self._moved_at_s[replica_id] = now_s
        self._plan(now_s)
        self._judge(replica_id, now_s)

    def lost(self, replica_id: str, reason: LossReason, now_s: float) -> None:
        """A replica is no member any more; whoever has just been left for its silence knew that."""
        known = replica_id in self._left_alone
        self._silences.left(replica_id)
        self._left_alone.discard(replica_id)
        self._moved_at_s.pop(replica_id, None)
        self._steps.pop(replica_id, None)
        if reason is LossReason.LEFT:
            self._breakers.forget(replica_id)
            return
        if not known:
            self._breakers.trip(replica_id, now_s, f"it was lost ({reason})")
        self._breakers.left(replica_id, now_s)

    def heard(self, replica_id: str, now_s: float) -> None:
        """A replica has said something."""
        self._silences.heard(replica_id, now_s)
        view = self._fleet.get(replica_id)
        if view is not None and view.standing is Standing.SILENT:
            self._left_alone.discard(replica_id)
            self._judge(replica_id, now_s)

    def stepped(self, replica_id: str, now_s: float) -> None:
        """A replica's engine has done a step."""
        if replica_id in self._moved_at_s:
            self._moved_at_s[replica_id] = now_s

    def reported(self, replica_id: str, load: Load, now_s: float) -> None:
        """A replica has said how loaded it is."""
        if replica_id not in self._moved_at_s:
            return
        idle, steps = not load.requests, load.steps.steps
        if idle and not self._runs_something(replica_id):
            self._silences.rests(replica_id, now_s)
        if idle or self._steps.get(replica_id) != steps:
            self._steps[replica_id] = steps
            self._moved_at_s[replica_id] = now_s

    def is_still(self, replica_id: str, now_s: float, *, for_s: float) -> bool:
        """Whether a replica has not done a step for so long, though it has work."""
        return now_s - self._moved_at_s.get(replica_id, now_s) >= for_s

    # ---------------------------------------------------------------- legs

    def began(self, replica_id: str, leg_id: str, now_s: float) -> None:
        """A leg of a request was sent to a replica."""
        self._silences.works(replica_id, now_s)
        self._silences.wake(now_s)
        self._breakers.began(replica_id, leg_id)
        self._judge(replica_id, now_s)

    def spoke(self, replica_id: str, leg_id: str, now_s: float) -> None:
        """A leg gave its first output."""
        if self._breakers.spoke(replica_id, leg_id, now_s):
            self._closed(replica_id, now_s)

    def failed(self, replica_id: str, leg_id: str, now_s: float, why: str) -> None:
        """A leg has failed, and its replica is to blame."""
        if replica_id in self._fleet and self._breakers.failed(replica_id, leg_id, now_s, why):
            self._plan(now_s)
            self._judge(replica_id, now_s)

    def over(self, replica_id: str, leg_id: str, now_s: float, *, done: bool) -> None:
        """A leg has ended; `done` when it did what it was for."""
        if done and self._breakers.done(replica_id, leg_id, now_s):
            self._closed(replica_id, now_s)
        self._breakers.over(replica_id, leg_id)
        self._judge(replica_id, now_s)

    def doubted(self, replica_id: str, leg_id: str, now_s: float, why: str) -> None:
        """A leg was taken away for being late; that counts where it was on trial, not else."""
        if self._breakers.circuit(replica_id, now_s) is not Circuit.CLOSED:
            self.failed(replica_id, leg_id, now_s, why)

    def trip(self, replica_id: str, now_s: float, why: str, *, pauses: bool = False) -> None:
        """Whatever runs on a replica is being taken from it; `pauses`: it gets a rest first."""
        self._breakers.trip(replica_id, now_s, why, pauses=pauses)
        self._plan(now_s)
        self._judge(replica_id, now_s)

    # ---------------------------------------------------------------- time

    def next_at_s(self) -> float | None:
        """When time should pass at the latest."""
        look_at_s, until_s = self._silences.next_at_s(), self._paused_until_s
        if look_at_s is None or until_s is None:
            return until_s if look_at_s is None else look_at_s
        return min(look_at_s, until_s)

    def time_passed(self, now_s: float) -> tuple[str, ...]:
        """Look around; returns the replicas that are to be left now, for they are silent."""
        if self._paused_until_s is not None and now_s >= self._paused_until_s:
            self._plan(now_s)
            self._judge_all(now_s)
        if self._fleet.has_work:
            self._silences.wake(now_s)  # other options have ended the looks that were arranged
        if not self._silences.look(now_s, runs=self._fleet.has_work):
            return ()
        self._judge_all(now_s)
        if not self._somebody_is_heard_of():
            return ()
        found = tuple(one for one in self._silences.silent(now_s) if self._runs_something(one))
        for replica_id in found:
            if replica_id not in self._left_alone:
                self._left_alone.add(replica_id)
                silent_s = self._silences.silent_s(replica_id, now_s)
                self.trip(replica_id, now_s, f"nothing was heard of it for {silent_s:.1f} s")
        return found

    # ---------------------------------------------------------------- asked

    @property
    def openings(self) -> int:
        """How often a circuit was opened."""
        return self._breakers.openings

    def silent_s(self, replica_id: str, now_s: float) -> float:
        """For how long nothing was heard of a replica."""
        return self._silences.silent_s(replica_id, now_s)

    def circuit(self, replica_id: str, now_s: float) -> Circuit:
        """How far a replica is trusted."""
        return self._breakers.circuit(replica_id, now_s)

    def why(self, replica_id: str) -> str:
        """Why its circuit was last opened; empty where it never was."""
        return self._breakers.why(replica_id)

    def is_known_to_ail(self, replica_id: str, now_s: float) -> bool:
        """Whether its circuit is open while another replica's, that takes work, is closed."""
        closed = self._breakers.circuit(replica_id, now_s) is Circuit.CLOSED
        return not closed and self._others_are_well(replica_id, now_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when something is kept of replicas that are not there."""
        self._breakers.check_integrity()
        ids = self._fleet.ids
        assert self._moved_at_s.keys() == ids, "engines of replicas that are not there"
        assert self._steps.keys() <= ids, "steps of replicas that are not there"
        assert self._left_alone <= ids, "silent replicas that are not there"

    # ---------------------------------------------------------------- inside

    def _closed(self, replica_id: str, now_s: float) -> None:
        """A replica has proven well; where it is the first, what ailed all of them may be over.

        Else it would have to carry the whole fleet's load until their pauses end.
        """
        self._judge(replica_id, now_s)
        if not self._others_are_well(replica_id, now_s):
            self._breakers.end_pauses(now_s)
            self._plan(now_s)
            self._judge_all(now_s)

    def _others_are_well(self, replica_id: str, now_s: float) -> bool:
        circuit = self._breakers.circuit
        return any(
            view.is_counted_on and circuit(one, now_s) is Circuit.CLOSED
            for one, view in self._fleet.view(now_s).replicas.items()
            if one != replica_id
        )

    def _judge(self, replica_id: str, now_s: float) -> None:
        standing = Standing.SOUND
        if self._silences.is_suspect(replica_id):
            standing = Standing.SILENT
        elif not self._breakers.lets_in(replica_id, now_s):
            standing = Standing.QUARANTINED
        self._fleet.stand(replica_id, standing)

    def _judge_all(self, now_s: float) -> None:
        for replica_id in tuple(self._fleet.ids):
            self._judge(replica_id, now_s)

    def _runs_something(self, replica_id: str) -> bool:
        view = self._fleet.get(replica_id)
        return view is not None and view.inflight_legs > 0

    def _plan(self, now_s: float) -> None:
        """Find out when the next circuit is half-open."""
        ends = (until_s for _, until_s in self._breakers.pausing(now_s))
        self._paused_until_s = min(ends, default=None)

    def _somebody_is_heard_of(self) -> bool:
        views = self._fleet.view(0.0).replicas.values()
        return any(not v.draining and v.standing is not Standing.SILENT for v in views)
