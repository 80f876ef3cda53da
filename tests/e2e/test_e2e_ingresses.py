"""Ingresses come when those that there are have little processor time left."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.deployments import Deployment, running_deployment
from tests.fakes.scaled_deadline import slowdown

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]
CLIENTS = 4
WORDS = 3000
"""Of a text that is made into tokens: work for ingresses alone."""
SETS = {
    "server.replicas.max": 2,
    "pools.prefill.replicas.initial": 1,
    "pools.decode.replicas.initial": 1,
}


def test_a_second_ingress_comes_when_the_first_has_no_processor_time_left(tmp_path: Path) -> None:
    with running_deployment("sim.yaml", tmp_path, **SETS) as baton:
        assert len(baton.status()["ingresses"]) == 1
        over = threading.Event()
        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(keep_asking, baton, over) for _ in range(CLIENTS)]
            try:
                baton.wait_for(
                    lambda status: [row["healthy"] for row in status["ingresses"]] == [True, True],
                    180,
                )
            finally:
                over.set()
            assert all(future.result(120 * slowdown()) > 0 for future in asking)
        assert len(baton.stream("and a stream")) > 0


def keep_asking(baton: Deployment, over: threading.Event) -> int:
    """How many texts were made into tokens."""
    body = {"model": baton.model, "prompt": "the words of a text " * (WORDS // 5)}
    asked = 0
    with httpx.Client(base_url=baton.url, timeout=60 * slowdown()) as client:
        while not over.is_set():
            answer = client.post("/tokenize", json=body)
            assert answer.status_code == 200, answer.text
            asked += 1
    return asked
