"""A deployment that was joined: what is asked of one that has ended, or that does not run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.domain.errors import DeploymentEnded, NotRunning
from baton.serving.cluster_state import ClusterState, write_state
from baton.serving.data_path import DataPath
from baton.serving.joined import Joined, join, local_state

ENDED = ClusterState(
    name="one",
    pid=2**22,  # no process has it: Linux stops one below
    pid_started_at_s=0.0,
    address="127.0.0.1:1",
    namespace="baton",
    http_url="http://127.0.0.1:8000",
    data_path=DataPath.HAPROXY,
    run_dir="/none",
    session_name="s",
    token_file="/none/token",  # noqa: S106 - a path
)


def test_a_deployment_that_has_ended_is_not_asked() -> None:
    with pytest.raises(DeploymentEnded, match="has ended") as raised:
        Joined(ENDED).status()
    assert raised.value.retryable is False


def test_nothing_is_joined_where_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "baton").mkdir(mode=0o700)
    write_state(replace(ENDED, name="stale"), tmp_path / "baton")
    with pytest.raises(NotRunning, match="no deployment of this user"):
        local_state()
    with pytest.raises(NotRunning), join(None):
        pytest.fail("something was joined")


class Asked(Joined):
    """Answers without anybody to ask."""

    def ask(self, deployment: str, method: str, *arguments: object) -> list[object]:
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
    monkeypatch.setattr("baton.serving.joined.load", lambda _name: note)
    monkeypatch.setattr("baton.serving.joined.wall_s", lambda: 12.0)
    assert Asked(None).status().get("rollout") == told


def test_a_store_that_does_not_answer_costs_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_name: str) -> bytes:
        raise ConnectionError("no store")

    monkeypatch.setattr("baton.serving.joined.load", gone)
    assert "rollout" not in Asked(None).status()
