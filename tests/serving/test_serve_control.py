"""What Serve says of a deployment, counted exactly, also while it has not acted yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._private import worker

from baton.domain.errors import ClusterFailed
from baton.serving.controller.http_server import target_groups
from baton.serving.ray import serve_control
from baton.serving.ray.driver import redirect_ray_messages
from baton.serving.ray.grpc_port import bind_grpc_to_node
from baton.serving.ray.membership import Member
from baton.serving.ray.serve_control import (
    DeploymentState,
    _failure_reason,
    deployment_replicas,
    deployment_state,
)
from baton.serving.shared.names import INGRESS, METRICS_ADDRESS, REPLICA_ID
from baton.telemetry.catalogue import CATALOGUE, Component

if TYPE_CHECKING:
    from ray.serve._private.common import DeploymentID
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


def test_messages_of_serve_are_shown_only_while_something_is_wrong() -> None:
    assert deployment_state(details(1, "STARTING", message="all is well")).message == ""
    bad = details(1, "STARTING", status="UNHEALTHY", message="no GPU")
    assert deployment_state(bad).message == "no GPU"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "A replica failed to start with exception. Retrying. Error:\nray::ServeReplica()\n"
            '  File "deployment.py", line 7, in build\nRuntimeError: no weights\n',
            "RuntimeError: no weights",
        ),
        (
            "A replica failed to start with exception. Retrying. Error:\n"
            "The actor died unexpectedly before finishing this task.",
            "The actor died unexpectedly before finishing this task.",
        ),
        ("2 replicas take more than 30s to start", "2 replicas take more than 30s to start"),
    ],
)
def test_of_a_message_of_serve_the_line_with_the_cause_is_shown(message: str, shown: str) -> None:
    bad = details(1, "STARTING", status="UNHEALTHY", message=message)
    assert deployment_state(bad).message == shown


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
    gone = pytest.importorskip("ray.exceptions").ActorUnavailableError("unavailable..", b"1" * 16)
    assert _failure_reason(gone, 2.0) == "a replica ended before it answered"


# -------------------------------------------------------------------- messages of Ray


def test_messages_of_ray_go_to_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    for _ in range(2):
        redirect_ray_messages()
    said = {"lines": ["a node has been marked dead"], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(said, ignore_prefix=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("a node has been marked dead") == 1


def test_only_messages_for_the_user_are_shown_and_without_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "print_to_stdstream", worker.print_to_stdstream)
    monkeypatch.delenv("RAY_COLOR_PREFIX", raising=False)
    redirect_ray_messages()
    retried = (
        "Task ServeController.listen_for_change failed. There are infinite retries remaining, so"
        " the task will be retried. Error: The actor is dead because it was killed by `ray.kill`."
    )
    for line in (retried, "Task Replica.run failed. There are 0 retries remaining."):
        worker.print_to_stdstream(
            {"lines": [line], "pid": "raylet", "is_err": False}, ignore_prefix=False
        )
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert lines == ["(raylet) Task Replica.run failed. There are 0 retries remaining."]


def test_a_ray_that_has_no_such_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(worker, "print_to_stdstream")
    redirect_ray_messages()
    assert not hasattr(worker, "print_to_stdstream")


# -------------------------------------------------------------------- Ray's port for gRPC


@pytest.fixture
def serves() -> Iterator[ModuleType]:
    replica = pytest.importorskip("ray.serve._private.replica")
    before = replica.add_port_to_grpc_server
    yield replica
    replica.add_port_to_grpc_server = before


class Server:
    def __init__(self) -> None:
        self.bound: list[str] = []

    def add_insecure_port(self, address: str) -> int:
        self.bound.append(address)
        return 1


@pytest.mark.parametrize(
    ("host", "wanted"), [("127.0.0.1", "127.0.0.1:0"), ("fd00::7", "[fd00::7]:0")]
)
def test_it_listens_at_the_nodes_address_alone(serves: ModuleType, host: str, wanted: str) -> None:
    server = Server()
    bind_grpc_to_node(host)
    bind_grpc_to_node(host)
    serves.add_port_to_grpc_server(server, "[::]:0")
    serves.add_port_to_grpc_server(server, "10.0.0.7:9000")
    assert server.bound == [wanted, "10.0.0.7:9000"]


def test_serve_still_binds_it_in_the_way_that_is_looked_for(serves: ModuleType) -> None:
    assert serves.__file__ is not None
    with open(serves.__file__) as source:  # noqa: PTH123 - a module's own
        assert source.read().count('add_port_to_grpc_server(self._server, "[::]:0")') == 1


# -------------------------------------------------------------------- targets of scrapes


def member(name: str, deployment: str, **metadata: str | None) -> Member:
    return Member(
        replica_id=name, deployment=deployment, metadata=metadata, node_ip=f"10.0.0.{len(name)}"
    )


def replica(name: str, pool: str, address: str | None = "10.0.0.1:5") -> Member:
    return member(name, pool, **{REPLICA_ID: f"{pool}-{name}", METRICS_ADDRESS: address})


def ingress(name: str, address: str | None = "10.0.0.2:6") -> Member:
    return member(name, INGRESS, **{METRICS_ADDRESS: address})


def labels(*members: Member, controller: str | None = None) -> list[Mapping[str, str]]:
    groups = target_groups(members, controller=controller, node="10.0.0.9")
    return [group["labels"] for group in groups]  # type: ignore[misc]


def test_every_process_is_named_with_its_kind() -> None:
    groups = target_groups(
        [replica("ab", "decode"), ingress("xyz")], controller="10.0.0.9:9400", node="10.0.0.9"
    )
    path = {"__metrics_path__": "/metrics"}
    assert groups == [
        {
            "targets": ["10.0.0.9:9400"],
            "labels": path | {"component": "controller", "node": "10.0.0.9"},
        },
        {
            "targets": ["10.0.0.1:5"],
            "labels": path
            | {
                "component": "replica",
                "node": "10.0.0.2",
                "pool": "decode",
                "replica": "decode-ab",
            },
        },
        {
            "targets": ["10.0.0.2:6"],
            "labels": path | {"component": "ingress", "node": "10.0.0.3", "replica": "xyz"},
        },
    ]


def test_a_process_without_metrics_is_not_listed() -> None:
    assert labels(replica("a", "decode", None), ingress("b", None), member("c", "decode")) == []


def test_the_order_is_always_the_same() -> None:
    members = [replica(name, pool) for name in "cab" for pool in ("prefill", "decode")]
    assert labels(*members) == labels(*reversed(members))
    assert [label["replica"] for label in labels(*members)][:2] == ["decode-a", "decode-b"]


def test_no_label_of_a_target_hides_one_of_a_metric_that_comes_from_there() -> None:
    told = labels(replica("a", "decode"), ingress("b"), controller="10.0.0.9:9400")
    assert {entry["component"] for entry in told} == set(Component)
    for target in told:
        own = {
            str(label)
            for metric in CATALOGUE
            if metric.component == target["component"]
            for label in metric.labels
        }
        assert not own & target.keys()


# -------------------------------------------------------------------- pools without replicas


class OrderedPools:
    """A Serve controller that knows no deployment at first."""

    def __init__(self, *, unknown_for: int) -> None:
        self.orders: list[tuple[str, int]] = []
        self._unknown_for = unknown_for
        self.update_deployment_replicas = self

    def remote(self, deployment: DeploymentID, replicas: int) -> object:
        self._unknown_for -= 1
        if self._unknown_for >= 0:
            raise KeyError(deployment.name)
        self.orders.append((deployment.name, replicas))
        return None


def test_a_pool_is_left_without_replicas_as_soon_as_serve_knows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller = OrderedPools(unknown_for=2)
    monkeypatch.setattr(serve_control, "find_controller", lambda: controller)
    monkeypatch.setattr("ray.get", lambda order, **_: order)
    serve_control.stop_replicas("baton", ("spare", "other"), timeout_s=30.0)
    assert controller.orders == [("spare", 0), ("other", 0)]


def test_a_pool_that_serve_never_knows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_control, "find_controller", lambda: OrderedPools(unknown_for=10**6))
    with pytest.raises(ClusterFailed, match="spare: cannot be set to 0 replicas"):
        serve_control.stop_replicas("baton", ("spare",), timeout_s=0.0)
