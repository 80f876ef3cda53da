"""The autoscaler on real vLLM: one more decode replica under load, and back again without."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.deployments import Deployment, running_deployment
from tests.fakes.scaled_deadline import slowdown

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]
CLIENTS = 12
"""Streams at once, where one decode replica runs four."""
SETS = {
    "pools.decode.replicas.max": 2,
    "model.engine.max_num_seqs": 4,
    "slo.default.ttft": "500ms",
    "slo.default.tpot": "1s",
    "autoscaler.policy": "slo",
    "autoscaler.interval": "1s",
    "autoscaler.scale_up.cooldown": "0s",
    "autoscaler.scale_down.cooldown": "5s",
    "admission.queue_timeout": "60s",
    "admission.policy": "bounded",
}


def decode(status: dict[str, Any]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = status["pools"]
    return next(row for row in rows if row["pool"] == "decode")


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("autoscaled")
    with running_deployment("quickstart.yaml", folder, **SETS) as deployment:
        yield deployment


def test_a_replica_comes_under_load_and_serves(baton: Deployment) -> None:
    with streaming_clients(baton):
        baton.wait_for(lambda status: decode(status)["desired"] == 2, 120)
    # Its engine starts without the load, with which it would share the cores.
    baton.wait_for(lambda status: decode(status)["ready"] == 2, 300)
    with streaming_clients(baton):
        baton.wait_for(lambda status: len(busy(status)) == 2, 120)


@pytest.mark.thorough
def test_it_goes_again_when_there_is_no_load(baton: Deployment) -> None:
    shrunk = baton.wait_for(lambda status: decode(status)["ready"] == 1, 400)
    assert decode(shrunk)["desired"] == 1
    assert len(baton.stream("and one more")) > 0


@contextmanager
def streaming_clients(baton: Deployment) -> Iterator[None]:
    """Meanwhile clients stream, one request after the other; each stream comes whole."""
    over = threading.Event()
    with ThreadPoolExecutor(CLIENTS) as pool:
        streaming = [pool.submit(keep_streaming, baton, n, over) for n in range(CLIENTS)]
        try:
            yield
        finally:
            over.set()
        assert all(future.result(240 * slowdown()) > 0 for future in streaming)


def busy(status: dict[str, Any]) -> set[str]:
    """Decode replicas that run something, as an ingress sees them."""
    (ingress,) = status["ingresses"]
    return {
        row["replica_id"]
        for row in ingress["replicas"]
        if row["replica_id"].startswith("decode-") and row["running_requests"]
    }


def keep_streaming(baton: Deployment, number: int, over: threading.Event) -> int:
    """How many streams came whole; each is another prompt."""
    streams = 0
    while not over.is_set():
        assert baton.stream(f"client {number} asks for the {streams}th time" * 8)
        streams += 1
    return streams
