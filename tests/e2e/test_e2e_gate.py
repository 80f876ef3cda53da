"""A whole baton on Ray whose gates are the front: nothing of Serve's between client and brain."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.e2e.deployments import CONFIGS, Deployment, running_deployment, skip_without_rust
from tests.fakes.processes import descendants

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
INGRESSES = 2


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    skip_without_rust()
    sets = {
        "server.api_server": "rust",
        "server.listener": "ingress",
        "server.replicas.min": INGRESSES,
    }
    with running_deployment("sim.yaml", tmp_path_factory.mktemp("gate"), **sets) as deployment:
        yield deployment


def gates(baton: Deployment) -> dict[int, set[int]]:
    """Every HAProxy of the deployment, and at which ports it listens."""
    found: dict[int, set[int]] = {}
    for process in descendants(baton.process.pid):
        try:
            if process.name() == "haproxy":
                found[process.pid] = {
                    net_connection.laddr[1]
                    for net_connection in process.net_connections(kind="tcp")
                    if net_connection.status == psutil.CONN_LISTEN
                }
        except psutil.Error:
            continue
    return found


def public_port(baton: Deployment) -> int:
    port = urlsplit(baton.url).port
    assert port is not None
    return port


def at_front(baton: Deployment) -> set[int]:
    return {pid for pid, ports in gates(baton).items() if public_port(baton) in ports}


def test_a_stream_is_prefilled_and_decoded_apart_and_found_by_its_clients_name(
    baton: Deployment,
) -> None:
    baton.assert_hands_off()


def test_the_gates_are_all_the_haproxies_there_are_and_share_the_public_port(
    baton: Deployment,
) -> None:
    assert baton.status()["endpoint"] == baton.url
    assert len(gates(baton)) == INGRESSES
    assert at_front(baton) == gates(baton).keys()
    answer = httpx.get(f"{baton.url}/-/routes", timeout=20)
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "not found")
    assert httpx.get(f"{baton.url}/health", timeout=20).status_code == 200


def test_a_deployment_that_is_well_has_a_clean_bill_of_health(baton: Deployment) -> None:
    baton.assert_healthy(pairs=4)


@pytest.mark.parametrize("listener", ["ingress", "ray-serve"])
def test_a_second_deployment_is_told_that_the_port_is_in_use(
    baton: Deployment, listener: str
) -> None:
    error = baton.run_failing(
        "up",
        *("-c", str(CONFIGS / "sim.yaml")),
        *("--set", "server.api_server=rust"),
        *("--set", f"server.listener={listener}"),
        *("--set", f"server.port={public_port(baton)}"),
    )
    assert f":{public_port(baton)} (server.port) is held by" in error


def test_ingresses_are_replaced_while_streams_flow_and_none_is_lost(baton: Deployment) -> None:
    before, over, flows = at_front(baton), threading.Event(), threading.Event()

    def keep_asking(number: int) -> int:
        asked = 0
        while not over.is_set():
            # Each comes by a connection of its own, which the kernel gives to either gate.
            baton.stream(f"prompt {number} {asked}", on_chunk=lambda _count: flows.set())
            asked += 1
        return asked

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(keep_asking, number) for number in range(2)]
        try:
            assert flows.wait(60)
            options = (*baton.options, "--set", "model.revision=two", "--bake", "1s")
            baton.run_json("apply", *options, timeout_s=300)
            baton.wait_for(
                lambda _: len(at_front(baton)) == INGRESSES and not at_front(baton) & before, 120
            )
        finally:
            over.set()
        assert all(stream.result(timeout=90) for stream in asking)


def test_when_a_gate_dies_the_others_serve_and_it_is_replaced(baton: Deployment) -> None:
    victim, *others = at_front(baton)
    os.kill(victim, signal.SIGKILL)
    baton.wait_for(lambda _: at_front(baton) == set(others), 20)
    for number in range(5):
        assert baton.stream(f"after {number}", max_tokens=2)
    baton.wait_for(lambda _: len(at_front(baton)) == INGRESSES, 120)
