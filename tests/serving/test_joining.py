"""What another machine is told, that is to join a deployment's cluster."""

from __future__ import annotations

import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from baton.serving.cluster.cluster_state import ClusterState
from baton.serving.cluster.node_join import CannotJoin, join_instructions, save_environment
from baton.serving.front.data_path import DataPath


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


def test_nobody_joins_a_cluster_that_listens_on_loopback(state: ClusterState) -> None:
    alone = replace(state, address="127.0.0.1:6379")
    with pytest.raises(CannotJoin, match=r"only this machine reaches it") as raised:
        join_instructions(alone, labels=(), node_address=None)
    assert "cluster.node_address" in raised.value.remedy


def test_what_is_kept_is_its_owners_alone(state: ClusterState) -> None:
    (kept,) = Path(state.run_dir).glob("joining.json")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
