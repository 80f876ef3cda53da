"""State files: how another shell finds a running baton."""

from __future__ import annotations

import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from baton.serving.cluster.cluster_state import (
    ClusterState,
    process_start_ticks,
    remove_state,
    running_clusters,
    state_folder,
    write_state,
)
from baton.serving.front.data_path import DataPath


@pytest.fixture
def state() -> ClusterState:
    return ClusterState(
        name="baton-abc",
        pid=os.getpid(),
        pid_started_at_s=psutil.Process().create_time(),
        address="127.0.0.1:4711",
        namespace="baton",
        http_url="http://127.0.0.1:8000",
        data_path=DataPath.SERVE_HAPROXY,
        run_dir="/run/baton-abc",
        session_name="session_1",
        token_file=str(Path("/run/baton-abc/token")),
    )


def test_a_written_state_is_found(tmp_path: Path, state: ClusterState) -> None:
    write_state(state, tmp_path)
    assert running_clusters(tmp_path) == (state,)


def test_a_state_file_is_for_its_owner_only(tmp_path: Path, state: ClusterState) -> None:
    assert stat.S_IMODE(write_state(state, tmp_path).stat().st_mode) == 0o600


def test_a_baton_whose_holder_is_gone_is_forgotten(tmp_path: Path, state: ClusterState) -> None:
    ended = psutil.Popen(["true"])
    ended.wait()
    write_state(replace(state, pid=ended.pid), tmp_path)
    assert running_clusters(tmp_path) == ()
    assert list(tmp_path.iterdir()) == []


def test_a_pid_given_to_another_process_is_not_mistaken(
    tmp_path: Path, state: ClusterState
) -> None:
    write_state(replace(state, pid_started_at_s=state.pid_started_at_s - 60), tmp_path)
    assert running_clusters(tmp_path) == ()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="the kernel tells ticks in /proc")
@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_wall_clock_that_jumps_does_not_make_a_baton_be_forgotten(
    tmp_path: Path, state: ClusterState, jump_s: float
) -> None:
    ticks = process_start_ticks(os.getpid())
    assert ticks is not None
    told = replace(state, pid_started_ticks=ticks, pid_started_at_s=state.pid_started_at_s + jump_s)
    write_state(told, tmp_path)
    assert running_clusters(tmp_path) == (told,)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="the kernel tells ticks in /proc")
def test_a_pid_that_began_at_another_tick_is_another_process(
    tmp_path: Path, state: ClusterState
) -> None:
    ticks = process_start_ticks(os.getpid())
    assert ticks is not None
    write_state(replace(state, pid_started_ticks=ticks - 1), tmp_path)
    assert running_clusters(tmp_path) == ()


def test_a_process_that_has_ended_and_was_not_buried_has_no_ticks() -> None:
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert process_start_ticks(ended.pid) is None


def test_a_file_that_cannot_be_read_is_removed(tmp_path: Path, state: ClusterState) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "older-version.json").write_text('{"pid": 1, "data_path": "pigeon"}')
    write_state(state, tmp_path)
    assert running_clusters(tmp_path) == (state,)


def test_several_batons_come_oldest_first(tmp_path: Path, state: ClusterState) -> None:
    other = psutil.Popen(["sleep", "60"])
    try:
        younger = replace(
            state, name="another", pid=other.pid, pid_started_at_s=other.create_time()
        )
        write_state(younger, tmp_path)
        write_state(state, tmp_path)
        assert running_clusters(tmp_path) == (state, younger)
    finally:
        other.kill()
        other.wait()


def test_forgetting_twice_is_fine(tmp_path: Path, state: ClusterState) -> None:
    write_state(state, tmp_path)
    remove_state(state.name, tmp_path)
    remove_state(state.name, tmp_path)
    assert running_clusters(tmp_path) == ()


def test_the_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = state_folder()
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert state_folder() == folder
