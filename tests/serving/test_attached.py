"""A deployment that was joined: what is asked of one that has ended, or that does not run."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
)

from baton.domain.errors import (
    AmbiguousDeployment,
    ClusterFailed,
    DeploymentEnded,
    NotRunning,
    PreflightFailed,
    TimedOut,
)
from baton.domain.names.addresses import format_endpoint
from baton.serving.application.app import ingress_options
from baton.serving.cluster import local_cluster
from baton.serving.cluster.cluster_state import ClusterState, process_start_ticks, write_state
from baton.serving.cluster.node_join import CannotJoin, join_instructions, save_environment
from baton.serving.commands import _progress_lines
from baton.serving.front.data_path import DataPath
from baton.serving.operator.attached import (
    AttachedCluster,
    attach_deployment,
    connection_refusal,
    find_local_state,
    local_state,
)
from baton.serving.operator.control_socket import Answers
from baton.serving.operator.demo import (
    RequestResult,
    _stream,
    answer_lines,
    pulled_between,
    summary,
)
from baton.serving.operator.existing_cluster import (
    cluster_address,
    deploy_to_cluster,
    with_live_cluster,
)
from baton.serving.operator.local_deployment import (
    LocalDeployment,
    observability_line,
    query_all,
    ready_line,
    replica_counts,
    starting_counts,
)
from baton.serving.ray.packing import pack
from baton.serving.ray.serve_control import error_line, start_failure
from baton.serving.shared.names import CLUSTER
from tests.serving.configs import simulated

ENDED = ClusterState(
    name="one",
    pid=2**22,  # no process has it: Linux stops one below
    pid_started_at_s=0.0,
    address="127.0.0.1:1",
    namespace="baton",
    http_url="http://127.0.0.1:8000",
    data_path=DataPath.SERVE_HAPROXY,
    run_dir="/none",
    session_name="s",
    token_file="/none/token",  # noqa: S106 - a path
)


class _Broadcasts:
    """A handle of Ray Serve's of which each question fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def broadcast(self, *_: object) -> object:
        raise self._error


@pytest.mark.parametrize(
    ("error", "wanted", "match"),
    [
        (KeyError("Deployment(name='ingress') does not exist."), NotRunning, "not deployed yet"),
        (
            RayTaskError("status", "KeyError: 'pool'", KeyError("pool")).as_instanceof_cause(),
            KeyError,
            "pool",
        ),
    ],
)
def test_a_missing_deployment_differs_from_an_error_of_a_replica(
    monkeypatch: pytest.MonkeyPatch, error: Exception, wanted: type[Exception], match: str
) -> None:
    handle = _Broadcasts(error)
    monkeypatch.setattr("ray.serve.get_deployment_handle", lambda *_: handle)
    with pytest.raises(wanted, match=match):
        query_all("ingress", "status")


class _Results:
    """Of a broadcast, of which some replicas gave none."""

    def __init__(self, *results: object) -> None:
        self._results = list(results)

    def broadcast(self, *_: object) -> _Results:
        return self

    def results(self, **options: object) -> list[object]:
        assert options == {"timeout_s": 5.0, "return_exceptions": True}
        return self._results


def test_an_unresponsive_or_ended_replica_costs_no_other_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = _Results(pack("well"), TimeoutError(), RayActorError())
    monkeypatch.setattr("ray.serve.get_deployment_handle", lambda *_: handle)
    answers = query_all("ingress", "status", timeout_s=5.0)
    assert answers.values == ["well"]
    assert answers.failures == [
        "one ingress did not answer 'status' within 5 s",
        "one ingress has just ended",
    ]


@pytest.mark.parametrize(
    ("error", "expected", "match"),
    [
        (TimeoutError(), TimedOut, "did not answer"),
        (RayActorError(), NotRunning, "cannot be asked"),
    ],
)
def test_no_answer_at_all_is_an_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception], match: str
) -> None:
    monkeypatch.setattr("ray.serve.get_deployment_handle", lambda *_: _Results(error, error))
    with pytest.raises(expected, match=match):
        query_all("ingress", "status", timeout_s=5.0)


def test_a_deployment_that_has_ended_is_not_asked() -> None:
    with pytest.raises(DeploymentEnded, match="has ended") as raised:
        AttachedCluster(ENDED).status()
    assert raised.value.retryable is False


def test_nothing_is_joined_where_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "baton").mkdir(mode=0o700)
    write_state(replace(ENDED, name="stale"), tmp_path / "baton")
    with pytest.raises(NotRunning, match="no deployment of this user"):
        local_state()
    with pytest.raises(NotRunning), attach_deployment(None):
        pytest.fail("something was joined")


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two deployments run here; both are held by this process."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "baton").mkdir(mode=0o700)
    for number in (1, 2):
        one = replace(
            ENDED,
            name=f"held-{number}",
            pid=os.getpid(),
            pid_started_ticks=process_start_ticks(os.getpid()),
            address=f"127.0.0.1:{number}",
            http_url=f"http://127.0.0.1:800{number}",
        )
        write_state(one, tmp_path / "baton")


@pytest.mark.usefixtures("two")
def test_where_two_run_neither_is_taken_for_the_one_that_is_meant() -> None:
    with pytest.raises(AmbiguousDeployment, match="say which with --address") as raised:
        local_state()
    for told in ("http://127.0.0.1:8001 at 127.0.0.1:1", "http://127.0.0.1:8002 at 127.0.0.1:2"):
        assert told in str(raised.value)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("address", ["127.0.0.1:2", "http://127.0.0.1:8002", "127.0.0.1:8002"])
def test_where_two_run_an_address_says_which(address: str) -> None:
    assert local_state(address).name == "held-2"


@pytest.mark.usefixtures("two")
def test_where_two_run_another_address_is_neither() -> None:
    with pytest.raises(NotRunning, match=r"is at 127\.0\.0\.1:3: there is http"):
        local_state("127.0.0.1:3")


class AnsweringCluster(AttachedCluster):
    """Answers without anybody to ask."""

    def query(self, deployment: str, method: str, *arguments: object) -> Answers:
        return Answers(values=[] if deployment == CLUSTER else [{"up_s": 1.0}])


@pytest.mark.parametrize(
    ("note", "told"),
    [
        (None, None),
        (b"not JSON", None),
        (
            b'{"what": "apply", "state": "in progress", "reason": "", "at_s": 5.0}',
            {"what": "apply", "state": "in progress", "reason": "", "age_s": 7.0},
        ),
    ],
)
def test_a_status_says_how_far_the_last_rollout_is_where_that_is_known(
    monkeypatch: pytest.MonkeyPatch, note: bytes | None, told: object
) -> None:
    monkeypatch.setattr("baton.serving.operator.attached.load", lambda _name: note)
    monkeypatch.setattr("baton.serving.operator.attached.unix_time_s", lambda: 12.0)
    assert AnsweringCluster(None).status().get("rollout") == told


def test_a_store_that_does_not_answer_costs_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_name: str) -> bytes:
        raise ConnectionError("no store")

    monkeypatch.setattr("baton.serving.operator.attached.load", gone)
    assert "rollout" not in AnsweringCluster(None).status()


def test_an_endpoint_whose_proxy_has_ended_is_told_by_the_status() -> None:
    with socket.create_server(("127.0.0.1", 0)) as front:
        url = f"http://127.0.0.1:{front.getsockname()[1]}"
        assert connection_refusal(url) == ""
    assert connection_refusal(url).startswith(f"endpoint {url}: connection refused; its proxy has")
    state = replace(ENDED, http_url=url)
    assert AnsweringCluster(state).status()["unanswered"] == [connection_refusal(url)]


# -------------------------------------------------------------------- the demonstration


def asked(*, ok: bool = True, moved_bytes: int = 100, transfer_s: float = 0.2) -> RequestResult:
    return RequestResult(
        ok=ok,
        error="" if ok else "HTTP 500",
        ttft_s=0.5,
        tpot_s=0.01,
        prefill_replica="p",
        decode_replica="d",
        moved_bytes=moved_bytes,
        transfer_s=transfer_s,
    )


def test_the_figures_are_of_the_requests_that_succeeded() -> None:
    figures = summary([asked(), asked(transfer_s=0.4), asked(ok=False, transfer_s=9.0)])
    assert (figures["requests"], figures["ok"]) == (3, 2)
    assert figures["bytes_moved"] == 200
    assert figures["transfer_p50_s"] == 0.3


def test_moved_bytes_are_those_of_the_replica_that_decoded() -> None:
    before = {"decode-a": (300, 0.3), "decode-b": (500, 0.5)}
    after = {"decode-a": (420, 0.5), "decode-c": (70, 0.1)}
    assert pulled_between(before, after, "decode-a") == pytest.approx((120, 0.2))
    assert pulled_between(before, after, "decode-c") == (70, 0.1)
    assert pulled_between(before, after, "decode-b") == (0, 0.0), "a replica that has ended"


def test_nothing_moved_is_not_reported_as_a_transfer_of_no_time() -> None:
    assert summary([asked(moved_bytes=0, transfer_s=0.0)])["transfer_p50_s"] is None


class _Streams(BaseHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        return

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for delta in ({"role": "assistant"}, {"content": "Two run,"}, {"content": " one baton"}):
            self.wfile.write(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


def test_the_text_of_a_demonstration_is_what_the_model_streamed() -> None:
    with HTTPServer(("127.0.0.1", 0), _Streams) as server:
        answering = threading.Thread(target=server.handle_request)
        answering.start()
        url = format_endpoint("http", "127.0.0.1", server.server_port)
        deployment = SimpleNamespace(state=SimpleNamespace(http_url=url))
        problem, times_s, _, text = _stream(cast(LocalDeployment, deployment), "tiny", "r-1", "?")
        answering.join()
    assert (problem, len(times_s), text) == ("", 2, "Two run, one baton")


def test_a_demonstration_shows_the_text_of_one_answer() -> None:
    results = [replace(asked(), ok=False), replace(asked(), answer="Two run\n\x1b[31m one baton")]
    lines = answer_lines(["first?", "second?"], results)
    assert lines == ["prompt: second?", "answer: Two run [31m one baton"]
    assert answer_lines(["first?"], [asked(ok=False)]) == []


def test_without_a_success_there_are_no_times() -> None:
    figures = summary([asked(ok=False)])
    assert (figures["ok"], figures["ttft_p50_s"]) == (0, None)


def test_progress_names_each_deployment_and_its_remaining_work() -> None:
    deployments = {
        "decode": SimpleNamespace(replica_states={"RUNNING": 1, "STARTING": 1, "STOPPING": 0}),
        "ingress": SimpleNamespace(replica_states={"RUNNING": 1, "STOPPING": 1}),
    }
    counts = replica_counts(deployments)
    assert ready_line(counts) == "ready: ingress 1/2 (stopping), decode 1/2"
    assert starting_counts(counts) == {"decode": 1}
    assert ready_line({}) == "waiting for Ray Serve"


def test_the_progress_of_a_detached_start_is_what_its_holder_has_said(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    log.write_text(
        "[   0.0s] starting Ray\nsomething of Ray's\n[ 100.5s] ready: decode 1/1\n"
        "error: no\n[ 100.9s] serving tiny at http://x; Ctrl-C ends it\n[ 101.0s] half a li"
    )
    assert _progress_lines(log) == ["starting Ray", "ready: decode 1/1"]


def test_the_line_of_a_traceback_that_says_what_went_wrong_is_shown() -> None:
    message = "A replica failed:\n  File x\nbaton.domain.errors.EngineStartFailed: no such model\n"
    assert error_line([message]).endswith("EngineStartFailed: no such model")
    assert error_line([]) == ""


SLOW_START = "1 replica takes more than 30s to initialize.\nThis may be caused by a slow __init__."


def application(status: str, **deployments: tuple[str, str, str]) -> ApplicationStatusOverview:
    """What Serve says: of each deployment its status, the status's trigger and a message."""
    return ApplicationStatusOverview(
        status=ApplicationStatus(status),
        message="The deployments are not healthy.",
        last_deployed_time_s=0.0,
        deployments={
            name: DeploymentStatusOverview(
                status=DeploymentStatus(state),
                status_trigger=DeploymentStatusTrigger(trigger),
                replica_states={},
                message=message,
            )
            for name, (state, trigger, message) in deployments.items()
        },
    )


def test_a_replica_that_is_lost_while_others_start_does_not_end_the_start() -> None:
    slow = ("UPDATING", "CONFIG_UPDATE_STARTED", SLOW_START)
    for status in ("UNHEALTHY", "DEPLOY_FAILED"):
        lost = (status, "HEALTH_CHECK_FAILED", "A replica's health check failed.")
        assert start_failure(application(status, decode=lost, ingress=slow)) is None


def test_a_start_whose_replacements_fail_ends_with_their_error_not_with_a_slow_deployments() -> (
    None
):
    error = "Failed three times.\nbaton.domain.errors.EngineStartFailed: out of memory"
    slow = ("UPDATING", "CONFIG_UPDATE_STARTED", SLOW_START)
    for status in ("UNHEALTHY", "DEPLOY_FAILED"):
        decode = (status, "REPLICA_STARTUP_FAILED", error)
        failure = start_failure(application(status, decode=decode, ingress=slow))
        assert failure == "baton.domain.errors.EngineStartFailed: out of memory"


def test_an_application_that_fails_without_a_deployment_gives_its_own_reason() -> None:
    assert start_failure(application("DEPLOY_FAILED")) == "The deployments are not healthy."


def test_where_to_look_is_said_where_there_is_something_to_see() -> None:
    seen = {"url": "http://127.0.0.1:9400", "metrics": True, "console": True}
    assert (
        observability_line({"observability": seen})
        == "console and metrics at http://127.0.0.1:9400"
    )
    assert observability_line({"observability": seen | {"console": False}}).startswith("metrics at")
    assert observability_line({"observability": {"metrics": False, "console": False}}) == ""
    assert observability_line({}) == ""


def test_where_nothing_can_be_seen_yet_the_reason_is_said() -> None:
    seen = {"url": None, "metrics": True, "console": True, "trouble": "127.0.0.1:9400 is taken"}
    assert observability_line({"observability": seen}) == (
        "console and metrics are not there yet: 127.0.0.1:9400 is taken"
    )


# -------------------------------------------------------------------- a cluster that runs already


@pytest.mark.parametrize(
    ("said", "environ", "named"),
    [
        ("", {}, None),
        ("", {"RAY_ADDRESS": "10.0.0.1:6379"}, "10.0.0.1:6379"),
        ("cluster.address=10.0.0.2:6379", {"RAY_ADDRESS": "10.0.0.1:6379"}, "10.0.0.2:6379"),
        ("cluster.address=auto", {}, "auto"),
        ("", {"RAY_ADDRESS": "local"}, None),
        ("", {"RAY_ADDRESS": ""}, None),
    ],
)
def test_the_file_says_where_to_deploy_and_else_the_environment(
    said: str, environ: dict[str, str], named: str | None
) -> None:
    assert cluster_address(simulated(*([said] if said else [])), environ) == named


def test_an_address_that_is_none_is_refused_with_the_file() -> None:
    with pytest.raises(Exception, match=r"cluster\.address: got 'x', expected HOST:PORT"):
        simulated("cluster.address=x")


def test_a_configuration_is_applied_where_it_runs_and_not_where_it_says() -> None:
    live = simulated("cluster.address=10.0.0.2:6379", "cluster.allow_open=true")
    wanted = with_live_cluster(simulated("slo.default.ttft=3s"), live)
    assert wanted.cluster == live.cluster
    assert wanted.slo != live.slo


def test_features_of_batons_own_clusters_are_refused_before_joining_another() -> None:
    gate = ("server.api_server=rust", "server.listener=ingress")
    wanted = simulated("security.tls={cert_file: a.pem, key_file: b.pem}", *gate)
    with pytest.raises(PreflightFailed, match=r"does not use TLS") as raised:
        deploy_to_cluster(wanted, "127.0.0.1:1", timeout_s=1.0, progress=print)
    assert "does not exist on a cluster that runs already" in str(raised.value)


def test_a_cluster_that_does_not_answer_is_one_line() -> None:
    with pytest.raises(ClusterFailed, match=r"nothing answers at 127\.0\.0\.1:1"):
        deploy_to_cluster(simulated(), "127.0.0.1:1", timeout_s=1.0, progress=print)


_SETTINGS_FRAME = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@contextmanager
def listener(answer: bytes) -> Iterator[str]:
    """A program that answers so whatever it is sent, and then says nothing more."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(answer)
                over.wait(60)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", "where an HTTP server listens"),
        (b"220 mail.example ESMTP\r\n", "where another program listens"),
        (b"", r"where another program listens, .*; no reply in"),
    ],
)
def test_a_listener_that_is_no_cluster_is_refused_before_ray_waits_for_it(
    answer: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "_GREETING_TIMEOUT_S", 0.5)
    with listener(answer) as address, pytest.raises(ClusterFailed, match=said) as caught:
        local_cluster.check_store_address(address)
    assert "not that of the endpoint" in caught.value.remedy


def test_the_store_of_a_cluster_is_known_by_its_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    with listener(_SETTINGS_FRAME + b"more") as address:
        local_cluster.check_store_address(address)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with listener(b"\x15\x03\x03\x00\x02\x02\x28") as address:
        local_cluster.check_store_address(address)


def test_ingresses_are_where_the_front_of_the_head_reaches_them() -> None:
    at = "cluster.address=10.0.0.2:6379"
    hidden = ingress_options(simulated(at))["ray_actor_options"]
    assert hidden == {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    shown = ingress_options(simulated(at, "server.host=0.0.0.0"))["ray_actor_options"]
    assert shown == {"num_cpus": 0.01}
    assert ingress_options(simulated())["ray_actor_options"] == {"num_cpus": 0.01}


def test_verbs_go_to_the_cluster_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(NotRunning, match="no deployment of this user runs"):
        find_local_state(None)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert find_local_state(None) is None
    with (
        pytest.raises(ClusterFailed, match=r"nothing answers at 127\.0\.0\.1:1"),
        attach_deployment(None),
    ):
        raise AssertionError("it was joined")


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "http://127.0.0.1:8265"])
def test_the_address_of_something_else_of_rays_is_told_from_the_one_that_is_meant(
    address: str,
) -> None:
    with pytest.raises(ClusterFailed, match=r"expected HOST:PORT of its head's store"):
        deploy_to_cluster(simulated(), address, timeout_s=1.0, progress=print)


# -------------------------------------------------------------------- nodes that join


@pytest.fixture
def state(tmp_path: Path) -> ClusterState:
    (tmp_path / "token").write_text("s3cret\n")
    save_environment(
        tmp_path,
        {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": f"{tmp_path}/token",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{tmp_path}/haproxy.cfg",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "NOTE": "it's two words",
        },
    )
    return ClusterState(
        name="b1",
        pid=1,
        pid_started_at_s=0.0,
        address="10.0.0.1:6379",
        namespace="baton",
        http_url="http://10.0.0.1:8000",
        data_path=DataPath.SERVE_HAPROXY,
        run_dir=str(tmp_path),
        session_name="session",
        token_file=str(tmp_path / "token"),
    )


def test_it_is_told_the_token_and_the_settings_but_no_file_of_the_first_machine(
    state: ClusterState,
) -> None:
    told = join_instructions(state, labels=(), node_address=None)
    assert told["environment"] == {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "s3cret",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "NOTE": "it's two words",
    }
    assert told["command"] == ["ray", "start", "--address", "10.0.0.1:6379"]


def test_the_script_runs_in_a_plain_shell(state: ClusterState, tmp_path: Path) -> None:
    ray = tmp_path / "bin" / "ray"
    ray.parent.mkdir()
    ray.write_text('#!/bin/sh\necho "$RAY_AUTH_TOKEN" "$NOTE" "$@"\n')
    ray.chmod(0o700)
    told = join_instructions(state, labels=("baton/node=a", "rack=7"), node_address="10.0.0.2")
    done = subprocess.run(
        ["/bin/sh"],
        input=str(told["script"]),
        env={"PATH": f"{ray.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    words = "start --address 10.0.0.1:6379 --node-ip-address 10.0.0.2 --labels baton/node=a,rack=7"
    assert done.stdout == f"s3cret it's two words {words}\n"


def test_no_node_joins_a_cluster_that_listens_on_loopback(state: ClusterState) -> None:
    alone = replace(state, address="127.0.0.1:6379")
    with pytest.raises(CannotJoin, match=r"only this machine reaches it") as raised:
        join_instructions(alone, labels=(), node_address=None)
    assert "cluster.node_address" in raised.value.remedy


def test_stored_files_are_readable_by_their_owner_alone(state: ClusterState) -> None:
    (kept,) = Path(state.run_dir).glob("joining.json")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
