"""A baton on a Ray cluster that somebody else has started: it comes, serves, goes; Ray stays."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from baton.serving.cluster.readiness import ask_haproxy, direct_server_is_up
from tests.e2e.operators import UP_S, VERB_S, Operator
from tests.e2e.ray_nodes import WORKER, Nodes, open_node, two_nodes
from tests.fakes.scaled_deadline import ScaledDeadline, slowness

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes() as found:
        yield found


@pytest.fixture(scope="module")
def operator(nodes: Nodes) -> Iterator[Operator]:
    """Whose `up` has ended: nothing of its own holds what it has deployed."""
    operator = Operator(nodes)
    told = operator.up()
    assert told["endpoint"] == f"http://127.0.0.1:{operator.port}"
    yield operator
    told = operator.asks("down", "--timeout", "90s")
    assert told["stopped"] == f"http://127.0.0.1:{operator.port}"
    assert nodes.all_run()
    assert "no baton runs" in operator.fails("status")
    assert "no baton runs" in operator.fails("down")


def test_its_replicas_are_on_the_nodes_that_have_room_and_streams_come(operator: Operator) -> None:
    assert operator.stream() == 8
    told = operator.asks("status")
    assert told["endpoint"] == f"http://127.0.0.1:{operator.port}"
    assert {row["node"] for row in told["members"]} == {WORKER}


def test_clients_come_by_haproxy_straight_to_the_ingress(operator: Operator) -> None:
    deadline = ScaledDeadline(60)
    while not any(direct_server_is_up(ask_haproxy(one, "show stat")) for one in _fronts(operator)):
        assert not deadline.passed()
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
    assert operator.asks("links")["links"]
    assert operator.asks("history")["generation"] >= 0
    assert "tenants" in operator.asks("usage")
    assert operator.says("top", "--once").returncode == 0
    assert operator.says("explain", "scale").returncode == 0
    examined = operator.asks("doctor")
    assert not [check for check in examined["checks"] if check["verdict"] == "FAIL"]


def test_logs_of_all_nodes_are_shown_with_the_node(operator: Operator) -> None:
    logged = operator.says("logs", "-n", "200", "--output", "json")
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
    assert began.wait(60 * slowness())
    operator.asks("scale", "decode", "3")
    applied = operator.asks("apply", *operator.options, "--set", "slo.default.ttft=3s")
    assert applied["outcome"] == "applied", applied
    streaming.join(120 * slowness())
    assert found == [2000]
    deadline = ScaledDeadline(120)
    while _ready(operator, "decode") < 3:
        assert not deadline.passed()


def _ready(operator: Operator, pool: str) -> int:
    rows = operator.asks("status")["pools"]
    return next(int(row["ready"]) for row in rows if row["pool"] == pool)


def test_what_would_need_a_start_from_nothing_is_refused_and_nothing_is_lost(
    operator: Operator,
) -> None:
    said = operator.fails(
        "apply", *operator.options, "--set", "server.port=1234", "--allow-restart"
    )
    assert "only a deployment that this machine holds" in said
    assert operator.stream() == 8


def test_a_second_deployment_is_told_who_runs_there(operator: Operator) -> None:
    said = operator.fails("up", *operator.options)
    assert f"already: http://127.0.0.1:{operator.port}" in said


def test_nodes_join_a_cluster_of_somebody_elses_as_they_always_did(operator: Operator) -> None:
    assert f"ray start --address {operator.nodes.address}" in operator.fails("join")


def test_an_open_cluster_is_served_on_where_the_file_says_that_this_is_meant(
    tmp_path: Path,
) -> None:
    with open_node() as nodes:
        operator = Operator(nodes)
        said = operator.fails("up", *operator.options)
        assert "lets in whoever reaches it, and whoever it lets in runs code on every node" in said
        meant = ("--set", "cluster.allow_open=true", "--set", "pools.decode.replicas.start=1")
        # What does not come up in time is taken away again.
        assert "not ready after 2 s" in operator.fails(
            "up", *operator.options, *meant, "--timeout", "2s"
        )
        assert "no baton runs" in operator.fails("status")
        exported = operator.says(
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
            timeout=VERB_S * slowness(),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        deadline = ScaledDeadline(UP_S)
        while not _serves(operator):
            assert not deadline.passed(), operator.says("status").stdout
            time.sleep(1.0)
        assert operator.stream() == 8
        assert operator.asks("status")["members"]
        assert operator.asks("down")["cluster"] == nodes.address
        assert nodes.all_run()


def _serves(operator: Operator) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{operator.port}/health", timeout=10).is_success
    except httpx.TransportError:
        return False
