"""The autoscaler itself, on real vLLM: one more decode replica under load, and back again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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


def test_a_replica_comes_under_load_serves_and_goes_again_when_there_is_none(
    tmp_path: Path,
) -> None:
    with running_deployment("quickstart.yaml", tmp_path, **SETS) as baton:
        over = threading.Event()
        with ThreadPoolExecutor(CLIENTS) as pool:
            streaming = [pool.submit(keep_streaming, baton, n, over) for n in range(CLIENTS)]
            try:
                grown = baton.wait_for(lambda status: decode(status)["ready"] == 2, 300)
                assert decode(grown)["desired"] == 2
                # The one that came is given work, too.
                baton.wait_for(lambda status: len(busy(status)) == 2, 120)
            finally:
                over.set()
            assert all(future.result(240 * slowdown()) > 0 for future in streaming)
        shrunk = baton.wait_for(lambda status: decode(status)["ready"] == 1, 300)
        assert decode(shrunk)["desired"] == 1
        assert len(baton.stream("and one more")) > 0


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
