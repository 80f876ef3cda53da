"""A baton on a Ray cluster that another operator has started: it comes, serves, goes; Ray stays."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from baton.serving.front.haproxy_admin import direct_server_is_up, query_haproxy
from tests.e2e.operators import COMMAND_TIMEOUT_S, UP_TIMEOUT_S, Operator
from tests.e2e.ray_nodes import THIRD, WORKER, RayCluster, open_node, two_nodes
from tests.fakes.scaled_deadline import ScaledDeadline, slowdown

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayCluster]:
    with two_nodes() as found:
        yield found


@pytest.fixture(scope="module")
def operator(nodes: RayCluster) -> Iterator[Operator]:
    """Whose `up` has ended: nothing of its own holds what it has deployed."""
    operator = Operator(nodes)
    report = operator.up()
    assert report["endpoint"] == f"http://127.0.0.1:{operator.port}"
    yield operator
    report = operator.run_json("down", "--timeout", "90s")
    assert report["stopped"] == f"http://127.0.0.1:{operator.port}"
    assert nodes.are_all_running()
    assert "no baton runs" in operator.run_failing("status")
    assert "no baton runs" in operator.run_failing("down")


def test_its_replicas_are_on_the_nodes_that_have_room_and_streams_come(operator: Operator) -> None:
    assert operator.stream() == 8
    report = operator.run_json("status")
    assert report["endpoint"] == f"http://127.0.0.1:{operator.port}"
    assert {row["node"] for row in report["members"]} == {WORKER}


def test_clients_come_by_haproxy_straight_to_the_ingress(operator: Operator) -> None:
    deadline = ScaledDeadline(60)
    while not any(
        direct_server_is_up(query_haproxy(front, "show stat")) for front in _fronts(operator)
    ):
        assert not deadline.is_expired()
        time.sleep(0.5)


def _fronts(operator: Operator) -> list[Path]:
    """By which those HAProxies are asked that listen where its clients come."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            if process.name() == "haproxy":
                command = process.cmdline()
                file = Path(command[command.index("-f") + 1])
                if f":{operator.port}" in file.read_text():
                    found.append(file.with_name("a.sock"))
    return found


def test_every_verb_finds_it_by_the_address_that_ray_itself_goes_by(operator: Operator) -> None:
    assert operator.run_json("links")["links"]
    assert operator.run_json("history")["generation"] >= 0
    assert "tenants" in operator.run_json("usage")
    assert operator.run("top", "--once").returncode == 0
    assert operator.run("explain", "scale").returncode == 0
    examined = operator.run_json("doctor")
    assert not [check for check in examined["checks"] if check["status"] == "FAIL"]


def test_logs_of_all_nodes_are_shown_with_the_node(operator: Operator) -> None:
    logged = operator.run("logs", "-n", "200", "--output", "json")
    assert (logged.returncode, logged.stderr) == (0, "")
    lines = [json.loads(line) for line in logged.stdout.splitlines()]
    nodes = {line["event"]: line["node"] for line in lines if line.get("event")}
    assert nodes["replica_started"] == WORKER
    assert nodes["ingress_started"] != WORKER


def test_a_pool_is_scaled_and_a_configuration_applied_while_a_stream_flows(
    operator: Operator,
) -> None:
    began, found = threading.Event(), list[int]()
    streaming = threading.Thread(target=lambda: found.append(operator.stream(2000, began)))
    streaming.start()
    assert began.wait(60 * slowdown())
    operator.run_json("scale", "decode", "3")
    applied = operator.run_json("apply", *operator.options, "--set", "slo.default.ttft=3s")
    assert applied["outcome"] == "applied", applied
    streaming.join(120 * slowdown())
    assert found == [2000]
    deadline = ScaledDeadline(120)
    while _ready(operator, "decode") < 3:
        assert not deadline.is_expired()


def _ready(operator: Operator, pool: str) -> int:
    rows = operator.run_json("status")["pools"]
    return next(int(row["ready"]) for row in rows if row["pool"] == pool)


def test_a_change_that_needs_a_new_start_is_refused_and_nothing_is_lost(
    operator: Operator,
) -> None:
    error = operator.run_failing(
        "apply", *operator.options, "--set", "server.port=1234", "--allow-restart"
    )
    assert "only a deployment that this machine holds" in error
    assert operator.stream() == 8


def test_a_second_deployment_gets_the_name_of_the_first(operator: Operator) -> None:
    error = operator.run_failing("up", *operator.options)
    assert f"already: http://127.0.0.1:{operator.port}" in error


def test_nodes_join_an_existing_cluster_of_another_owner(operator: Operator) -> None:
    assert f"ray start --address {operator.nodes.address}" in operator.run_failing("join")


def test_an_open_cluster_is_served_on_where_the_file_says_that_this_is_meant(
    tmp_path: Path,
) -> None:
    with open_node() as nodes:
        operator = Operator(nodes)
        error = operator.run_failing("up", *operator.options)
        assert "without a token, and its clients can run code on every node" in error
        meant = ("--set", "cluster.allow_open=true", "--set", "pools.decode.replicas.initial=1")
        # What does not come up in time is taken away again.
        assert "not ready after 2 s" in operator.run_failing(
            "up", *operator.options, *meant, "--timeout", "2s"
        )
        assert "no baton runs" in operator.run_failing("status")
        exported = operator.run(
            *("manifests", "export", "--target", "ray", "--out", str(tmp_path)),
            *(*operator.options, *meant),
        )
        assert exported.returncode == 0, exported.stderr
        done = subprocess.run(
            [
                *(Path(sys.executable).with_name("serve"), "deploy", "-a", nodes.dashboard),
                tmp_path / "serve-anywhere.yaml",
            ],
            env=nodes.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S * slowdown(),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        deadline = ScaledDeadline(UP_TIMEOUT_S)
        while not _serves(operator):
            assert not deadline.is_expired(), operator.run("status").stdout
            time.sleep(1.0)
        assert operator.stream() == 8
        assert operator.run_json("status")["members"]
        assert operator.run_json("down")["cluster"] == nodes.address
        assert nodes.are_all_running()


def _serves(operator: Operator) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{operator.port}/health", timeout=10).is_success
    except httpx.TransportError:
        return False


def test_a_lost_node_is_named_with_its_controller_until_another_node_replaces_it() -> None:
    with two_nodes() as nodes, tempfile.TemporaryDirectory(prefix="bt-", dir="/tmp") as folder:
        operator = Operator(nodes)
        operator.up()
        nodes.kill_node(WORKER)
        killed_at_s = time.monotonic()
        deadline = ScaledDeadline(60)
        while not (lost := operator.run_json("status").get("lost_nodes")):
            assert not deadline.is_expired()
        _print_seconds("status names it", killed_at_s)
        assert [row["node"] for row in lost] == [WORKER]
        pools = {name.rpartition("-")[0] for name in lost[0]["replicas"]}
        assert {"controller", "prefill", "decode"} <= pools
        losses = operator.run_json("status")["losses"]
        assert {loss["replica_id"] for loss in losses} == set(lost[0]["replicas"])
        assert all("its node was lost" in loss["detail"] for loss in losses)
        asked_at_s = time.monotonic()
        assert f"node {WORKER}" in _check(operator, "lost nodes", "FAIL")
        _print_seconds("doctor, to its end", asked_at_s)
        with nodes.joined_node(THIRD, Path(folder)):
            deadline = ScaledDeadline(120)
            while not _is_complete(status := operator.run_json("status")):
                assert not deadline.is_expired(), status
            assert operator.stream() == 8
            assert {row["node"] for row in status["members"]} == {THIRD}
            assert f"node {WORKER}" in _check(operator, "lost nodes", "WARN")


def _is_complete(status: dict[str, Any]) -> bool:
    """Whether the controller answers, and every pool has its replicas."""
    pools = status.get("pools", [])
    return bool(pools) and all(pool["ready"] >= pool["desired"] for pool in pools)


def _check(operator: Operator, name: str, status: str) -> str:
    """The detail of a check of `baton doctor` that has this result."""
    checks = json.loads(operator.run("doctor", "--output", "json").stdout)["checks"]
    (check,) = (check for check in checks if check["name"] == name)
    assert check["status"] == status, check
    return str(check["detail"])


def _print_seconds(text: str, since_s: float) -> None:
    sys.stdout.write(f"{text}: {time.monotonic() - since_s:.0f} s\n")
