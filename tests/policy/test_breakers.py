"""Circuits: they open after failures, let one in to see, and pause for longer each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.policy.resilience.circuit_breakers import BreakerOptions, CircuitBreakers, CircuitState

OPTIONS = BreakerOptions(failure_threshold=3, open_duration_s=1.0, max_open_duration_s=8.0)


def breakers(**changes: float) -> CircuitBreakers:
    return CircuitBreakers(OPTIONS, **changes)  # type: ignore[arg-type]  # tests name them right


def fail(made: CircuitBreakers, times: int, now_s: float = 0.0) -> None:
    for number in range(times):
        made.on_leg_failed("a", f"leg-{number}", now_s, "it broke")


def opened(now_s: float = 0.0) -> CircuitBreakers:
    made = breakers()
    fail(made, 3, now_s)
    return made


def pause_s(made: CircuitBreakers, now_s: float) -> float:
    """How long the circuit that has just opened stays open; 0 when it is half-open at once."""
    return max((until_s - now_s for _, until_s in made.open_circuits(now_s)), default=0.0)


def test_a_circuit_opens_after_failures_in_a_row_and_no_sooner() -> None:
    made = breakers()
    fail(made, 2)
    assert made.circuit_state("a", 0.0) is CircuitState.CLOSED
    fail(made, 1)
    assert made.circuit_state("a", 0.0) is CircuitState.OPEN
    assert made.openings == 1
    assert "it broke" in made.reason("a")


def test_fewer_failures_are_borne_from_the_next_one_on() -> None:
    made = breakers()
    fail(made, 2)
    made.reconfigure(
        BreakerOptions(failure_threshold=1, open_duration_s=1.0, max_open_duration_s=8.0)
    )
    made.check_integrity()
    assert made.circuit_state("a", 0.0) is CircuitState.CLOSED
    fail(made, 1)
    assert made.circuit_state("a", 0.0) is CircuitState.OPEN
    made.check_integrity()


def test_one_replicas_failures_do_not_count_for_another() -> None:
    made = opened()
    assert made.allows_request("b", 0.0)


def test_a_leg_that_is_done_forgives_the_failures_before_it() -> None:
    made = breakers()
    for _ in range(5):
        fail(made, 2)
        made.on_leg_succeeded("a", "good", 0.0)
    assert made.circuit_state("a", 0.0) is CircuitState.CLOSED


def test_a_first_token_forgives_nothing() -> None:
    """A replica that begins every stream and ends none is no better for it."""
    made = breakers()
    for number in range(3):
        made.on_leg_started("a", f"leg-{number}")
        made.on_first_output("a", f"leg-{number}", 0.0)
        made.on_leg_failed("a", f"leg-{number}", 0.0, "it broke")
    assert made.circuit_state("a", 0.0) is CircuitState.OPEN


def test_an_open_circuit_admits_no_leg_until_its_time_is_over_and_then_one() -> None:
    made = opened()
    assert not made.allows_request("a", 0.99)
    assert made.allows_request("a", 1.0)
    assert made.circuit_state("a", 1.0) is CircuitState.HALF_OPEN
    made.on_leg_started("a", "trial")
    assert not made.allows_request("a", 1.0)


def test_a_trial_with_output_closes_the_circuit() -> None:
    made = opened()
    made.on_leg_started("a", "trial")
    made.on_first_output("a", "trial", 1.5)
    assert made.circuit_state("a", 1.5) is CircuitState.CLOSED
    assert made.allows_request("a", 1.5)


def test_a_trial_that_fails_opens_it_again_for_longer() -> None:
    made = opened()
    made.on_leg_started("a", "trial")
    assert made.on_leg_failed("a", "trial", 1.0, "again")
    assert pause_s(made, 1.0) == 2.0


def test_a_trial_that_ends_without_a_result_makes_room_for_another() -> None:
    made = opened()
    made.on_leg_started("a", "trial")
    made.on_leg_ended("a", "trial")
    assert made.circuit_state("a", 1.0) is CircuitState.HALF_OPEN
    assert made.allows_request("a", 1.0)


def test_legs_from_before_it_opened_say_nothing_new() -> None:
    made = opened()
    made.on_leg_succeeded("a", "old", 1.5)
    assert made.circuit_state("a", 1.5) is CircuitState.HALF_OPEN
    assert not made.on_leg_failed("a", "older", 1.5, "it broke")
    assert made.openings == 1


def test_a_replica_used_for_lack_of_others_may_recover_while_open() -> None:
    made = opened()
    made.on_leg_started("a", "forced")
    made.on_first_output("a", "forced", 0.5)
    assert made.circuit_state("a", 0.5) is CircuitState.CLOSED


def test_a_failure_while_open_does_not_prolong_it() -> None:
    made = opened()
    made.on_leg_started("a", "forced")
    assert not made.on_leg_failed("a", "forced", 0.5, "it broke")
    assert made.circuit_state("a", 1.0) is CircuitState.HALF_OPEN


def test_a_replica_that_comes_and_goes_is_left_alone_for_longer_each_time() -> None:
    made, now_s, pauses = breakers(), 0.0, []
    for _ in range(6):
        made.trip("a", now_s, "it was lost")
        made.on_replica_left("a", now_s)
        pauses.append(pause_s(made, now_s))
        now_s += pauses[-1]
        made.on_replica_joined("a")
        made.on_leg_started("a", "trial")
        made.on_first_output("a", "trial", now_s)
        assert made.circuit_state("a", now_s) is CircuitState.CLOSED
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_long_time_of_being_well_makes_pauses_short_again() -> None:
    made = opened()
    made.on_leg_started("a", "trial")
    made.on_leg_failed("a", "trial", 1.0, "again")
    made.on_leg_started("a", "next")
    made.on_first_output("a", "next", 4.0)
    fail(made, 3, now_s=4.0 + OPTIONS.max_open_duration_s)
    assert pause_s(made, 4.0 + OPTIONS.max_open_duration_s) == 1.0


def test_a_loss_amid_a_pause_is_part_of_it() -> None:
    made = opened()
    made.trip("a", 0.5, "it was lost")
    assert (made.openings, made.circuit_state("a", 1.0)) == (1, CircuitState.HALF_OPEN)


def test_no_more_circuits_are_remembered_than_may_be_and_those_that_left_go_first() -> None:
    made = breakers(max_replicas=2)
    made.trip("stays", 0.0, "lost")
    made.trip("goes", 0.0, "lost")
    made.on_replica_left("goes", 0.0)
    made.trip("new", 0.0, "lost")
    assert made.circuit_state("stays", 0.0) is CircuitState.HALF_OPEN
    assert made.circuit_state("goes", 0.0) is CircuitState.CLOSED
    made.check_integrity()


@pytest.mark.parametrize(
    "wrong",
    [
        {"failure_threshold": 0},
        {"open_duration_s": 0.0},
        {"open_duration_s": 9.0, "max_open_duration_s": 8.0},
    ],
)
def test_senseless_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"breaker: .* expected"):
        BreakerOptions(**wrong)  # type: ignore[arg-type]


_HAPPENINGS = st.lists(
    st.tuples(
        st.sampled_from(["began", "first output", "succeeded", "failed", "over", "trip"]),
        st.sampled_from(["one", "two", "three"]),
        st.floats(0.0, 5.0),
    ),
    max_size=60,
)


@given(_HAPPENINGS)
def test_the_open_time_is_bounded_and_half_open_has_one_trial(
    happenings: list[tuple[str, str, float]],
) -> None:
    made, now_s, live = breakers(), 0.0, set()
    for what, leg, after_s in happenings:
        now_s += after_s
        match what:
            case "began":
                if made.allows_request("a", now_s) and leg not in live:
                    half_open = made.circuit_state("a", now_s) is CircuitState.HALF_OPEN
                    made.on_leg_started("a", leg)
                    live.add(leg)
                    assert made.allows_request("a", now_s) is not half_open
            case "first output":
                made.on_first_output("a", leg, now_s)
            case "succeeded":
                made.on_leg_succeeded("a", leg, now_s)
            case "failed":
                made.on_leg_failed("a", leg, now_s, "it broke")
            case "over":
                made.on_leg_ended("a", leg)
                live.discard(leg)
            case _:
                made.trip("a", now_s, "lost")
        made.check_integrity()
        assert pause_s(made, now_s) <= OPTIONS.max_open_duration_s
        if made.circuit_state("a", now_s) is CircuitState.CLOSED:
            assert made.allows_request("a", now_s)


@given(st.integers(1, 200))
def test_a_replica_that_never_works_gets_ever_fewer_trials(trials: int) -> None:
    made, now_s = opened(), 0.0
    last_s = 0.0
    for number in range(trials):
        now_s += pause_s(made, now_s)
        made.on_leg_started("a", f"trial-{number}")
        made.on_leg_failed("a", f"trial-{number}", now_s, "it broke")
        assert last_s <= pause_s(made, now_s) <= OPTIONS.max_open_duration_s
        last_s = pause_s(made, now_s)
