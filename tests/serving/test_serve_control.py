"""What Serve says of a deployment, counted exactly, also while it has not acted yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.serving.ray.serve_control import (
    DeploymentState,
    _failure_reason,
    deployment_replicas,
    deployment_state,
)

if TYPE_CHECKING:
    from ray.serve.schema import DeploymentDetails

schema = pytest.importorskip("ray.serve.schema")
common = pytest.importorskip("ray.serve._private.common")


def details(
    target: int, *states: str, status: str = "HEALTHY", message: str = ""
) -> DeploymentDetails:
    replicas = [
        schema.ReplicaDetails(replica_id=f"r{number}", state=state, start_time_s=0.0)
        for number, state in enumerate(states)
    ]
    made = schema.DeploymentDetails.model_construct(
        name="decode",
        status=common.DeploymentStatus(status),
        message=message,
        target_num_replicas=target,
        replicas=replicas,
    )
    return cast("DeploymentDetails", made)


def test_running_replicas_that_are_wanted_take_work() -> None:
    assert deployment_state(details(2, "RUNNING", "RUNNING")) == DeploymentState(
        name="decode", target=2, running=2
    )


def test_a_replica_that_serve_is_about_to_start_counts_as_starting() -> None:
    state = deployment_state(details(3, "RUNNING"))
    assert (state.running, state.starting) == (1, 2)


def test_a_replica_that_serve_is_about_to_stop_counts_as_stopping() -> None:
    state = deployment_state(details(1, "RUNNING", "RUNNING", "STOPPING"))
    assert (state.running, state.stopping) == (1, 2)


def test_starts_that_are_not_wanted_any_more_are_not_waited_for() -> None:
    state = deployment_state(details(1, "RUNNING", "STARTING"))
    assert (state.running, state.starting, state.stopping) == (1, 0, 0)


def test_a_replica_that_serve_has_found_again_takes_work() -> None:
    assert deployment_state(details(1, "RECOVERING")).running == 1


def test_what_serve_complains_of_is_told_only_while_something_is_wrong() -> None:
    assert deployment_state(details(1, "STARTING", message="all is well")).message == ""
    bad = details(1, "STARTING", status="UNHEALTHY", message="no GPU")
    assert deployment_state(bad).message == "no GPU"


def test_replicas_are_told_by_their_ids_and_those_that_stop_are_not() -> None:
    found = deployment_replicas(
        details(2, "RUNNING", "STARTING", "STOPPING", "UPDATING", "RECOVERING")
    )
    assert (found.target, found.ready, found.starting) == (
        2,
        frozenset({"r0", "r3", "r4"}),
        frozenset({"r1"}),
    )


_STATES = st.sampled_from([str(state.value) for state in common.ReplicaState])


@given(target=st.integers(0, 9), states=st.lists(_STATES, max_size=12))
def test_those_that_run_or_start_are_exactly_as_many_as_wanted(
    target: int, states: list[str]
) -> None:
    state = deployment_state(details(target, *states))
    assert state.running + state.starting == target
    assert min(state.running, state.starting, state.stopping) >= 0
    gone = sum(other in {"STARTING", "STOPPED"} for other in states)
    assert state.running + state.stopping == len(states) - gone


def test_a_deployment_without_a_ready_replica_is_told_in_words() -> None:
    exceptions = pytest.importorskip("ray.serve.exceptions")
    deployment = common.DeploymentID(name="ingress", app_name="baton")
    told = _failure_reason(exceptions.DeploymentUnavailableError(deployment), 2.0)
    assert told == "none of its replicas is ready: it is starting, or could not start"
    assert _failure_reason(ValueError("first\nlast"), 2.0) == "ValueError: last"
    assert _failure_reason(TimeoutError(), 2.0) == "could not be called within 2 s"
