"""A deployment that was joined: what is asked of one that has ended, or that does not run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from baton.domain.errors import AmbiguousDeployment, DeploymentEnded, NotRunning
from baton.serving.cluster.cluster_state import ClusterState, process_start_ticks, write_state
from baton.serving.front.data_path import DataPath
from baton.serving.operator.attached import AttachedCluster, attach_deployment, local_state
from baton.serving.operator.local_deployment import query_all

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
def test_what_is_not_deployed_yet_is_told_from_what_a_replica_trips_over(
    monkeypatch: pytest.MonkeyPatch, error: Exception, wanted: type[Exception], match: str
) -> None:
    handle = _Broadcasts(error)
    monkeypatch.setattr("ray.serve.get_deployment_handle", lambda *_: handle)
    with pytest.raises(wanted, match=match):
        query_all("ingress", "status")


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


class Asked(AttachedCluster):
    """Answers without anybody to ask."""

    def query(self, deployment: str, method: str, *arguments: object) -> list[object]:
        return [{"up_s": 1.0}]


@pytest.mark.parametrize(
    ("note", "told"),
    [
        (None, None),
        (b"not JSON", None),
        (
            b'{"what": "apply", "state": "under way", "why": "", "at_s": 5.0}',
            {"what": "apply", "state": "under way", "why": "", "age_s": 7.0},
        ),
    ],
)
def test_a_status_says_how_far_the_last_rollout_is_where_that_is_known(
    monkeypatch: pytest.MonkeyPatch, note: bytes | None, told: object
) -> None:
    monkeypatch.setattr("baton.serving.operator.attached.load", lambda _name: note)
    monkeypatch.setattr("baton.serving.operator.attached.unix_time_s", lambda: 12.0)
    assert Asked(None).status().get("rollout") == told


def test_a_store_that_does_not_answer_costs_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_name: str) -> bytes:
        raise ConnectionError("no store")

    monkeypatch.setattr("baton.serving.operator.attached.load", gone)
    assert "rollout" not in Asked(None).status()
