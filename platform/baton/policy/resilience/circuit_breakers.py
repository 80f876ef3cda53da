"""Circuit breakers: which replicas get no requests for a while because of failed requests.

Theory of operation. Each replica has a *circuit*:

    CLOSED ──failures in a row, or a trip──▶ OPEN ──its pause is over──▶ HALF_OPEN
       ▲                                      ▲                             │
       │                                      └────────a trial failed───────┤
       └─────────────────────────a trial spoke or was done──────────────────┘

A leg that begins while its replica's circuit is not closed is a *trial*. Half-open, one trial is
admitted at a time. An open circuit admits none. In a fleet without another replica, placement uses
it all the same, and a trial that goes well closes it at once. Results of legs that began before the
circuit opened say nothing new, and are ignored.

A pause is twice as long as the one before, up to a most, until the circuit was closed for as long
as the longest pause. A replica that is *gone*, or was not heard of, is tripped at once, and may be
tried as soon as it is back: its absence was the first pause. So a replica that comes and goes is
left alone for longer each time.

Every call passes the time in seconds, which never goes back. Circuits are remembered for a while
after their replica has gone, a bounded number of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from baton.domain.names.words import count_text

_MAX_DOUBLINGS = 64


class CircuitState(StrEnum):
    """How far a replica is trusted."""

    CLOSED = "closed"
    """It gets work like any other."""
    OPEN = "open"
    """It gets none, while there is another."""
    HALF_OPEN = "half_open"
    """It gets one request, which decides about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerOptions:
    """When a circuit opens, and for how long."""

    failure_threshold: int = 3
    """Legs that fail in a row, with none done between them."""
    open_duration_s: float = 1.0
    """The first pause ..."""
    max_open_duration_s: float = 30.0
    """... and the longest."""

    def __post_init__(self) -> None:
        if self.failure_threshold < 1:
            raise ValueError(
                f"breaker: failure_threshold is {self.failure_threshold}, expected at least 1"
            )
        if not 0 < self.open_duration_s <= self.max_open_duration_s:
            raise ValueError(
                f"breaker: open_duration_s is {self.open_duration_s} and max_open_duration_s"
                f" {self.max_open_duration_s}, expected"
                " 0 < open_duration_s <= max_open_duration_s"
            )


@dataclass(slots=True)
class _BreakerState:
    """The state of one replica."""

    consecutive_failures: int = 0
    """In a row, while closed."""
    trips: int = 0
    """Without a long time of being closed between them."""
    open_until_s: float | None = None
    """None: closed."""
    closed_at_s: float = float("-inf")
    trials: set[str] = field(default_factory=set)
    """Legs that began since it opened and have not ended."""
    reason: str = ""
    left_at_s: float | None = None
    """When its replica left; None while it is there."""


class CircuitBreakers:
    """The circuits of one coordinator's replicas; ids that are unknown are of closed circuits."""

    def __init__(self, options: BreakerOptions | None = None, *, max_replicas: int = 4096) -> None:
        self.openings = 0
        """How often a circuit was opened, so far."""
        self._options = options or BreakerOptions()
        self._max_replicas = max_replicas
        self._states: dict[str, _BreakerState] = {}
        """Of those replicas of which there is anything to remember."""

    def reconfigure(self, options: BreakerOptions) -> None:
        """Go on by others; a pause that has begun stays as long as it is.

        A replica with more failures than the new limit is borne until its next failure.
        """
        self._options = options
        for state in self._states.values():
            state.consecutive_failures = min(
                state.consecutive_failures, options.failure_threshold - 1
            )

    # ---------------------------------------------------------------- asked

    def circuit_state(self, replica_id: str, now_s: float) -> CircuitState:
        """How far a replica is trusted now."""
        state = self._states.get(replica_id)
        if state is None or state.open_until_s is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if now_s < state.open_until_s else CircuitState.HALF_OPEN

    def allows_request(self, replica_id: str, now_s: float) -> bool:
        """Whether a replica may be given a request now."""
        state = self._states.get(replica_id)
        if state is None or state.open_until_s is None:
            return True
        return now_s >= state.open_until_s and not state.trials

    def reason(self, replica_id: str) -> str:
        """Why a circuit was last opened; empty where it never was."""
        state = self._states.get(replica_id)
        return "" if state is None else state.reason

    def open_circuits(self, now_s: float) -> Iterator[tuple[str, float]]:
        """The replicas with an open circuit, and until when each is."""
        for replica_id, state in self._states.items():
            if state.open_until_s is not None and now_s < state.open_until_s:
                yield replica_id, state.open_until_s

    # ---------------------------------------------------------------- events of legs

    def on_leg_started(self, replica_id: str, leg_id: str) -> None:
        """A leg was sent to a replica."""
        state = self._states.get(replica_id)
        if state is not None and state.open_until_s is not None:
            state.trials.add(leg_id)

    def on_first_output(self, replica_id: str, leg_id: str, now_s: float) -> bool:
        """A leg gave its first output; whether that closed the circuit.

        It is enough of a trial, and not enough to forgive failures.
        """
        state = self._states.get(replica_id)
        if state is None or leg_id not in state.trials:
            return False
        self._close(state, now_s)
        return True

    def on_leg_succeeded(self, replica_id: str, leg_id: str, now_s: float) -> bool:
        """A leg has ended well; whether that closed the circuit."""
        state = self._states.get(replica_id)
        if state is not None and state.open_until_s is None:
            state.consecutive_failures = 0
        return self.on_first_output(replica_id, leg_id, now_s)

    def on_leg_failed(self, replica_id: str, leg_id: str, now_s: float, reason: str) -> bool:
        """A leg has failed and its replica is to blame; whether that opened the circuit."""
        state = self._states.get(replica_id)
        if state is None:
            state = self._add(replica_id)
        if state.open_until_s is None:
            state.consecutive_failures += 1
            if state.consecutive_failures < self._options.failure_threshold:
                return False
            legs = count_text(state.consecutive_failures, "leg")
            reason = f"{legs} failed in a row, the last: {reason}"
        elif leg_id not in state.trials or now_s < state.open_until_s:
            return False
        self._open(state, now_s, reason, with_pause=True)
        return True

    def on_leg_ended(self, replica_id: str, leg_id: str) -> None:
        """A leg has ended, in any way; to be called after its other events."""
        state = self._states.get(replica_id)
        if state is not None:
            state.trials.discard(leg_id)

    # ---------------------------------------------------------------- events of replicas

    def half_open_all(self, now_s: float) -> None:
        """Let every replica be tried now: the reason of the open circuits was not theirs."""
        for state in self._states.values():
            if state.open_until_s is not None:
                state.open_until_s = min(state.open_until_s, now_s)

    def trip(self, replica_id: str, now_s: float, reason: str, *, with_pause: bool = False) -> None:
        """Open the circuit of a replica that is gone, frozen or cut off, even if it was sound.

        With `with_pause` it is there, and gets the pause that failures would have earned it.
        """
        state = self._states.get(replica_id)
        if state is None:
            state = self._add(replica_id)
        if state.open_until_s is None or now_s >= state.open_until_s:
            self._open(state, now_s, reason, with_pause=with_pause)

    def on_replica_left(self, replica_id: str, now_s: float) -> None:
        """A replica is no member any more; it may come back."""
        state = self._states.get(replica_id)
        if state is not None:
            state.trials.clear()
            state.left_at_s = now_s

    def on_replica_joined(self, replica_id: str) -> None:
        """A replica is a member, for the first time or again."""
        state = self._states.get(replica_id)
        if state is not None:
            state.left_at_s = None

    def forget(self, replica_id: str) -> None:
        """A replica will not come back."""
        self._states.pop(replica_id, None)

    def check_integrity(self) -> None:
        """Raise AssertionError when a circuit contradicts itself."""
        assert len(self._states) <= self._max_replicas, "more circuits are remembered than may be"
        for replica_id, state in self._states.items():
            closed = state.open_until_s is None
            assert not (closed and state.trials), f"{replica_id}: trials of a closed circuit"
            assert closed or state.trips, f"{replica_id}: open, and never opened"
            is_below_threshold = state.consecutive_failures < self._options.failure_threshold
            assert is_below_threshold or not closed, (
                f"{replica_id}: closed after {state.consecutive_failures} failures"
            )

    # ---------------------------------------------------------------- inside

    def _open(self, state: _BreakerState, now_s: float, reason: str, *, with_pause: bool) -> None:
        options = self._options
        if state.open_until_s is None and now_s - state.closed_at_s >= options.max_open_duration_s:
            state.trips = 0
        doublings = state.trips - (not with_pause)
        pause_s = 0.0
        if doublings >= 0:
            # Bounded, for a replica that is lost all day would overflow a float.
            pause_s = options.open_duration_s * 2.0 ** min(doublings, _MAX_DOUBLINGS)
        state.trips += 1
        state.consecutive_failures = 0
        state.open_until_s = now_s + min(pause_s, options.max_open_duration_s)
        state.trials.clear()
        state.reason = reason
        self.openings += 1

    def _close(self, state: _BreakerState, now_s: float) -> None:
        state.open_until_s = None
        state.closed_at_s = now_s
        state.consecutive_failures = 0
        state.trials.clear()

    def _add(self, replica_id: str) -> _BreakerState:
        if len(self._states) >= self._max_replicas:
            departed = (
                other for other, state in self._states.items() if state.left_at_s is not None
            )
            del self._states[next(departed, next(iter(self._states)))]
        state = self._states[replica_id] = _BreakerState()
        return state
