"""Control commands that the process behind a deployment answers at a local socket."""

from __future__ import annotations

import json
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from baton.domain.errors import DeploymentEnded, NotRunning, TimedOut
from baton.serving.operator.attached import AttachedCluster
from baton.serving.operator.control_socket import (
    ANSWER_TIMEOUT_S,
    SCALE_TIMEOUT_S,
    SOCKET_NAME,
    Answers,
    ControlClient,
    ControlSocket,
    Query,
)
from baton.serving.shared.names import CLUSTER, CONTROLLER, INGRESS

Serve = Callable[[Query], ControlClient]
STATUS = {"model": "tiny", "baton": "0.1"}
LOST = {
    "node_id": "36654b5a0ab3",
    "address": "10.0.0.2",
    "ended_at_s": 9.0,
    "reason": "missing too many heartbeats",
    "replicas": ["decode-7"],
}


def answers(
    deployment: str, method: str, arguments: tuple[object, ...], deadline_s: float
) -> Answers:
    row = {"deployment": deployment, "method": method, "arguments": arguments, "s": deadline_s}
    return Answers(values=[row])


def note(name: str) -> bytes | None:
    text = b'{"what": "apply", "state": "done", "reason": "", "at_s": 0.0}'
    return text if name == "rollout" else None


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    sockets: list[ControlSocket] = []

    def begin(ask: Query) -> ControlClient:
        sockets.append(ControlSocket(tmp_path, query=ask, load_note=note))
        return ControlClient(tmp_path)

    yield begin
    for other in sockets:
        other.close()


def test_a_question_reaches_the_replicas_with_a_deadline_of_seconds(serve: Serve) -> None:
    client = serve(answers)
    assert client.is_reachable()
    (told,) = client.query(INGRESS, "requests", 5, "slowest").values
    assert told == {
        "deployment": INGRESS, "method": "requests", "arguments": [5, "slowest"],
        "s": ANSWER_TIMEOUT_S,
    }  # fmt: skip
    (told,) = client.query(CONTROLLER, "scale", "decode", None, None).values
    assert told["s"] == SCALE_TIMEOUT_S  # type: ignore[index]
    assert client.load_note("rollout") == note("rollout")
    assert client.load_note("another") is None


def test_a_client_that_only_looks_whether_an_owner_answers_is_no_failed_command(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert serve(answers).is_reachable()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(tmp_path / SOCKET_NAME))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert caplog.records == []


@pytest.mark.parametrize("error", [NotRunning("no", "a"), TimedOut("late", "b")])
def test_an_error_of_the_replicas_comes_back_as_itself(
    serve: Serve, error: NotRunning | TimedOut
) -> None:
    def fails(*_: object) -> Answers:
        raise error

    with pytest.raises(type(error)) as caught:
        serve(fails).query(CONTROLLER, "status")
    assert (caught.value.reason, caught.value.remedy) == (error.reason, error.remedy)


def test_while_a_deployment_ends_every_command_is_told_so_at_once(tmp_path: Path) -> None:
    held, client = ControlSocket(tmp_path, query=answers, load_note=note), ControlClient(tmp_path)
    client.check_not_ending()
    held.announce_shutdown()
    for command in (
        client.check_not_ending,
        lambda: client.query(INGRESS, "status"),
        lambda: client.load_note("x"),
    ):
        with pytest.raises(DeploymentEnded, match="is being ended"):
            command()
    held.close()
    client.check_not_ending()  # there is nobody any more to say so


def test_an_unexpected_error_is_reported_and_the_next_question_answered(
    serve: Serve,
) -> None:
    def fails_at_first(deployment: str, *rest: object) -> Answers:
        if deployment == INGRESS:
            raise ZeroDivisionError("oops")
        return Answers(values=["well"])

    client = serve(fails_at_first)
    with pytest.raises(NotRunning, match="ZeroDivisionError: oops"):
        client.query(INGRESS, "status")
    assert client.query(CONTROLLER, "status").values == ["well"]


def test_only_what_control_commands_ask_is_passed_on(serve: Serve) -> None:
    client = serve(answers)
    for deployment, method in ((INGRESS, "commit_config"), ("prefill", "status")):
        with pytest.raises(NotRunning, match="control socket: got"):
            client.query(deployment, method)


@pytest.mark.parametrize("garbage", [b"\n", b"{}\n", b"[1]\n", b"\xff\xfe\n", b'{"note": \n'])
def test_an_unreadable_question_gets_an_error(serve: Serve, tmp_path: Path, garbage: bytes) -> None:
    serve(answers)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10.0)
        connection.connect(str(tmp_path / SOCKET_NAME))
        connection.sendall(garbage)
        assert json.loads(connection.makefile("rb").readline())["error"] == "NotRunning"


def test_more_questions_than_may_be_answered_at_once_are_told_to_come_back(serve: Serve) -> None:
    go_on, begun = threading.Event(), threading.Semaphore(0)

    def waits(*_: object) -> Answers:
        begun.release()
        go_on.wait(30.0)
        return Answers(values=["done"])

    client = serve(waits)
    threads = [threading.Thread(target=client.query, args=(CONTROLLER, "status")) for _ in range(8)]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=30.0)
        with pytest.raises(TimedOut, match="8 commands are being answered"):
            client.query(CONTROLLER, "status")
    finally:
        go_on.set()
        for thread in threads:
            thread.join(30.0)


def test_only_its_user_may_open_it_and_it_is_gone_when_it_is_closed(tmp_path: Path) -> None:
    open_socket = ControlSocket(tmp_path, query=answers, load_note=note)
    client = ControlClient(tmp_path)
    assert stat.S_IMODE((tmp_path / SOCKET_NAME).stat().st_mode) == 0o600
    open_socket.close()
    assert not client.is_reachable()
    with pytest.raises(DeploymentEnded):
        client.query(CONTROLLER, "status")


# ---------------------------------------------------------------------- status
def test_a_status_says_what_did_not_answer_and_shows_the_rest(serve: Serve) -> None:
    def ingresses_are_late(deployment: str, *_: object) -> Answers:
        if deployment == INGRESS:
            raise TimedOut("ingress did not answer 'status' within 5 s", "try again")
        return Answers(values=[STATUS] if deployment == CONTROLLER else [])

    report = AttachedCluster(None, serve(ingresses_are_late)).status()
    assert report["unanswered"] == ["ingress did not answer 'status' within 5 s"]
    assert (report["model"], report["ingresses"]) == ("tiny", [])
    assert report["rollout"]["what"] == "apply"  # type: ignore[index]


@pytest.mark.parametrize("gone", [INGRESS, CONTROLLER])
def test_a_status_of_which_a_part_is_not_there_shows_the_rest(serve: Serve, gone: str) -> None:
    def one_is_there(deployment: str, *_: object) -> Answers:
        if deployment == gone:
            raise NotRunning(f"{gone}: none of its replicas is ready", "try again")
        answers: dict[str, list[object]] = {
            CONTROLLER: [STATUS],
            INGRESS: [{"healthy": True}],
        }
        return Answers(values=answers.get(deployment, []))

    report = AttachedCluster(None, serve(one_is_there)).status()
    assert report["unanswered"] == [f"{gone}: none of its replicas is ready"]
    assert ("model" in report, bool(report["ingresses"])) == (gone == INGRESS, gone == CONTROLLER)


def test_a_status_of_which_nothing_is_there_is_an_error(serve: Serve) -> None:
    def none_is_there(deployment: str, *_: object) -> Answers:
        raise NotRunning(f"{deployment}: none of its replicas is ready", "try again")

    with pytest.raises(NotRunning, match=r"controller: none .*; ingress: none "):
        AttachedCluster(None, serve(none_is_there)).status()


def test_a_status_of_a_controller_that_is_late_shows_the_ingresses(serve: Serve) -> None:
    def controller_is_late(deployment: str, *_: object) -> Answers:
        if deployment == CONTROLLER:
            raise TimedOut("controller did not answer", "try again")
        return Answers(values=[{"healthy": True}] if deployment == INGRESS else [])

    report = AttachedCluster(None, serve(controller_is_late)).status()
    assert report["unanswered"] == ["controller did not answer"]
    assert report["ingresses"] == [{"healthy": True}]


def test_a_node_that_was_lost_with_the_controller_is_named(serve: Serve) -> None:
    def only_ingress_is_left(deployment: str, *_: object) -> Answers:
        if deployment == CONTROLLER:
            raise NotRunning("controller: none of its replicas is ready", "try again")
        answers: dict[str, list[object]] = {CLUSTER: [LOST], INGRESS: [{"healthy": False}]}
        return Answers(values=answers[deployment])

    report = AttachedCluster(None, serve(only_ingress_is_left)).status()
    (row,) = cast("list[dict[str, object]]", report["lost_nodes"])
    assert (row["node"], row["replicas"]) == ("10.0.0.2", ["decode-7"])
    (loss,) = cast("list[dict[str, object]]", report["losses"])
    assert (loss["replica_id"], loss["detail"]) == ("decode-7", "its node was lost")


def test_a_node_that_was_lost_with_everything_is_named_in_the_error(serve: Serve) -> None:
    def none_is_left(deployment: str, *_: object) -> Answers:
        if deployment == CLUSTER:
            return Answers(values=[LOST])
        raise NotRunning(f"{deployment}: none of its replicas is ready", "try again")

    with pytest.raises(NotRunning, match=r"node 10\.0\.0\.2 \(36654b5a\) was lost with decode-7"):
        AttachedCluster(None, serve(none_is_left)).status()


def test_a_control_store_that_does_not_answer_costs_no_status(serve: Serve) -> None:
    def store_is_late(deployment: str, *_: object) -> Answers:
        if deployment == CLUSTER:
            raise TimedOut("Ray's control store did not answer", "try again")
        return Answers(values=[STATUS if deployment == CONTROLLER else {"healthy": True}])

    report = AttachedCluster(None, serve(store_is_late)).status()
    assert report["unanswered"] == ["Ray's control store did not answer"]
    assert "lost_nodes" not in report


def test_an_unanswered_status_is_an_error(serve: Serve) -> None:
    def late(deployment: str, *_: object) -> Answers:
        raise TimedOut(f"{deployment} did not answer", "try again")

    with pytest.raises(TimedOut, match="controller did not answer; ingress did not answer"):
        AttachedCluster(None, serve(late)).status()


def test_a_whole_status_mentions_nothing_unanswered(serve: Serve) -> None:
    def all_answer(deployment: str, *_: object) -> Answers:
        answers: dict[str, list[object]] = {
            CONTROLLER: [STATUS],
            INGRESS: [{"healthy": True}],
        }
        return Answers(values=answers.get(deployment, []))

    report = AttachedCluster(None, serve(all_answer)).status()
    assert "unanswered" not in report


def test_an_unresponsive_ingress_costs_no_other_answer_and_is_named(serve: Serve) -> None:
    members = [
        {"ingress": name, "node": "10.0.0.1", "pid": pid} for name, pid in (("a", 7), ("b", 8))
    ]

    def second_is_silent(deployment: str, *_: object) -> Answers:
        if deployment == CONTROLLER:
            return Answers(values=[STATUS | {"ingress_members": members}])
        if deployment == CLUSTER:
            return Answers(values=[])
        return Answers(values=[{"ingress": "a"}], failures=["one ingress did not answer"])

    report = AttachedCluster(None, serve(second_is_silent)).status()
    assert report["ingresses"] == [{"ingress": "a"}]
    assert report["unresponsive_ingresses"] == members[1:]
    assert report["unanswered"] == ["one ingress did not answer"]
    assert "ingress_members" not in report


def test_pairs_and_requests_are_shown_without_the_ingress_that_does_not_answer(
    serve: Serve,
) -> None:
    def one_answers(*_: object) -> Answers:
        return Answers(values=[[]], failures=["one ingress did not answer"])

    cluster = AttachedCluster(None, serve(one_answers))
    for report in (cluster.links(), cluster.requests(3, order="latest")):
        assert report["unanswered"] == ["one ingress did not answer"]
    with pytest.raises(TimedOut, match="one ingress did not answer"):
        cluster.explain_route("may-be-with-the-silent-one")
