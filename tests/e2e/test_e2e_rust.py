"""A whole baton on Ray in Rust mode with simulated engines: no Python between client and brain."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.e2e.deployments import Deployment, running_deployment, skip_without_rust
from tests.fakes.processes import descendants
from tests.fakes.scaled_deadline import ScaledDeadline

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    skip_without_rust()
    folder = tmp_path_factory.mktemp("rust")
    with running_deployment("sim.yaml", folder, **{"server.api_server": "rust"}) as deployment:
        yield deployment


def programs(baton: Deployment) -> list[psutil.Process]:
    return [
        descendant
        for descendant in descendants(baton.process.pid)
        if descendant.name() == "vllm-rs"
    ]


def test_a_stream_is_prefilled_and_decoded_apart_and_found_by_its_clients_name(
    baton: Deployment,
) -> None:
    baton.assert_hands_off()


def test_the_gate_is_what_answers_at_the_endpoint(baton: Deployment) -> None:
    answer = httpx.get(f"{baton.url}/v1/responses", timeout=20)
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "not found")
    assert httpx.get(f"{baton.url}/health", timeout=20).status_code == 200
    assert len(programs(baton)) == 1


def test_an_ingress_whose_program_died_is_replaced(baton: Deployment) -> None:
    (program,) = programs(baton)
    os.kill(program.pid, signal.SIGKILL)
    baton.wait_for(
        lambda status: (
            # Alone: while the old one is still asked, too, a client may hear its 503.
            [row["healthy"] for row in status["ingresses"]] == [True]
            and [other.pid != program.pid for other in programs(baton)] == [True]
        ),
        120,
    )
    # Until HAProxy finds the new one it sends clients by Serve's proxy, where no ingress serves.
    deadline = ScaledDeadline(60)
    while not httpx.get(f"{baton.url}/health", timeout=20).is_success:
        assert not deadline.is_expired()
        time.sleep(0.2)
    assert len(baton.stream("once more")) > 0
