"""An engine of two workers on two nodes, which Ray starts: as on GPUs, computed by CPUs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.operators import Operator
from tests.e2e.ray_nodes import RayCluster, three_nodes
from tests.fakes.cpu_platform import register
from tests.fakes.processes import find_alive
from tests.fakes.scaled_deadline import ScaledDeadline, slowdown

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]
_CONFIG = """
version: 1
model:
  source: tiny
  max_len: 2048
  engine: {dtype: float32, block_size: 32, kv_cache: 64MiB, extra: {enforce_eager: true}}
pools:
  prefill: {role: prefill, resources: {cpus: 1, gpus: 1}}
  decode:
    role: decode
    parallel: {tp: 2}
    resources: {cpus: 2, gpus: 2}
    placement: {strategy: strict_spread}
router: {disaggregate: always}
admission: {timeouts: {first_token: 60s, resume: 120s}}
transfer:
  deadline: 10s
  probe: {deadline: 10s}
  # As engines on CPUs have it: these would take every core for polling, and fight for each.
  env:
    BATON_NIXL_PROGRESS_DELAY_US: "1000"
    VLLM_CPU_OMP_THREADS_BIND: nobind
    OMP_NUM_THREADS: "1"
"""
_POLL_S = 1.0
"""Each question takes a core for a second, which the engines may need."""
_PROMPT = "Tell me of the two nodes that had one engine between them. " * 4


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    folder = tmp_path_factory.mktemp("wide")
    register(folder)
    (folder / "wide.yaml").write_text(_CONFIG)
    with three_nodes(gpus=1, path=folder) as nodes:
        operator = Operator(nodes)
        operator.options = ("-c", str(folder / "wide.yaml"), *operator.options[2:])
        operator.run_json("up", *operator.options, "--timeout", "600s", timeout_s=700)
        yield operator
        operator.run_json("down", "--timeout", "90s")
        deadline = ScaledDeadline(60)
        while _workers(nodes):
            assert not deadline.is_expired()
            time.sleep(_POLL_S)
        assert nodes.are_all_running()


def test_each_worker_is_on_its_node_and_pulls_its_part(operator: Operator) -> None:
    assert [len(on_node) for on_node in _workers(operator.nodes)] == [1, 1]
    before = _decode(operator)
    assert _text(operator, 8)
    deadline = ScaledDeadline(60)
    while (after := _decode(operator))["pulls"] == before["pulls"]:  # it tells now and then
        assert not deadline.is_expired(), operator.run_json("explain", "route")
        time.sleep(_POLL_S)
    assert after["pulls"] - before["pulls"] == 2
    assert after["moved_bytes"] > before["moved_bytes"]


def test_a_worker_that_is_killed_ends_its_engine_and_streams_go_on(operator: Operator) -> None:
    gone, undisturbed = _decode(operator)["replica_id"], _text(operator, 600)
    began, texts = threading.Event(), []
    asking = threading.Thread(target=lambda: texts.append(_text(operator, 600, began)))
    asking.start()
    assert began.wait(120 * slowdown())
    (doomed,), (other,) = _workers(operator.nodes)
    doomed.kill()
    asking.join(300 * slowdown())
    assert texts == [undisturbed], "the other pool's engine has one worker"
    assert not find_alive([other], 60 * slowdown())
    deadline = ScaledDeadline(300)
    while _decode(operator).get("replica_id", gone) == gone:
        assert not deadline.is_expired()
        time.sleep(_POLL_S)
    assert len(_workers(operator.nodes)) == 2
    assert _text(operator, 8)


def _workers(nodes: RayCluster) -> list[list[psutil.Process]]:
    """The engines' workers, by the node that they are on."""
    found = []
    for node in nodes.processes:
        below = node.children(recursive=True) if node.name() == "raylet" else []
        found.append(
            [process for process in below if "RayWorkerProc" in " ".join(process.cmdline())]
        )
    return [on_node for on_node in found if on_node]


def _decode(operator: Operator) -> dict[str, Any]:
    """The replica that decodes, as the ingress sees it; empty while there is none."""
    rows = operator.run_json("status")["ingresses"][0]["replicas"]
    found: dict[str, Any] = next((row for row in rows if row["pool"] == "decode"), {})
    return found


def _text(operator: Operator, max_tokens: int, began: threading.Event | None = None) -> str:
    body = {"model": "tiny", "prompt": _PROMPT, "max_tokens": max_tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    url, text, last = f"http://127.0.0.1:{operator.port}/v1/completions", "", ""
    with httpx.stream("POST", url, json=body, timeout=120.0 * slowdown()) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                text += event["choices"][0]["text"]
                if began is not None:
                    began.set()
            last = line or last
    assert last == "data: [DONE]"
    return text
