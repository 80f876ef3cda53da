"""Three nodes: one takes requests, one prefills, one decodes; real vLLM, NIXL over TCP between."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import psutil
import pytest

from tests.chaos import faults
from tests.cluster.network import InterfaceBytes, unavailable_reason
from tests.cluster.nodes import Cluster, running_cluster
from tests.fakes.processes import descendants

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason()),
]
STREAMS = 4
LONG = 160
"""Tokens of a stream that is still under way when its node goes."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("three")
    with running_cluster("three-nodes.yaml", folder, joining=("prefill", "decode")) as found:
        yield found


def prompts(count: int, *, seed: int) -> list[list[int]]:
    """Prompts of 200 to 1,500 tokens, no two with a common beginning."""
    chance = random.Random(seed)
    lengths = [chance.randrange(200, 1500) for _ in range(count)]
    return [[chance.randrange(300, 8000) for _ in range(length)] for length in lengths]


def test_tokens_stream_from_one_node_after_another_has_prefilled(
    three: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks cross the wire between the two: its counters have at least what engines counted."""
    asked = prompts(8, seed=1)
    three.deployment.stream(asked[0], max_tokens=1)  # the pair shakes hands
    pulled, before = _pulled(three), _wires(three)
    for prompt in asked[1:]:
        three.deployment.stream(prompt, max_tokens=16)
    link, after = _pulled(three), _wires(three)
    moved_bytes = link["moved_bytes"] - pulled["moved_bytes"]
    sent_bytes = after["prefill"].sent_bytes - before["prefill"].sent_bytes
    received_bytes = after["decode"].received_bytes - before["decode"].received_bytes
    with capsys.disabled():
        print(  # noqa: T201 - the figures are what it is run for
            f"\n{link['source_id']} -> {link['target_id']} over {link['transport']}:"
            f" {link['pulls'] - pulled['pulls']} pulls, {moved_bytes} bytes,"
            f" p50 {link['p50_s']} s, p99 {link['p99_s']} s, {link['bytes_per_s']:.3g} bytes/s;"
            f" on the wire: prefill sent {sent_bytes}, decode received {received_bytes}"
        )
    assert link["target_id"].startswith("decode-")
    assert link["transport"] == "tcp"
    assert link["pulls"] - pulled["pulls"] >= len(asked) - 1
    assert sent_bytes >= moved_bytes
    assert received_bytes >= moved_bytes


def test_replicas_are_on_the_nodes_that_their_labels_name(three: Cluster) -> None:
    pids = three.deployment.pids()
    for name, node in three.nodes.items():
        below = {child.pid for child in descendants(node.raylet)}
        (replica,) = [pid for replica, pid in pids.items() if replica.startswith(f"{name}-")]
        assert replica in below


def test_streams_go_on_elsewhere_when_the_decode_nodes_raylet_is_killed(
    three: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every stream ends with the tokens that it would have had."""
    asked = prompts(STREAMS, seed=2)
    undisturbed = [three.deployment.stream(prompt, max_tokens=LONG) for prompt in asked]
    under_way = Barrier(STREAMS + 1, timeout=60)

    def stream(prompt: list[int]) -> str:
        def on_chunk(count: int) -> None:
            if count == 1:
                under_way.wait()

        return three.deployment.stream(prompt, max_tokens=LONG, on_chunk=on_chunk)

    raylet = three.nodes["decode"].raylet
    family = descendants(raylet)
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(stream, prompt) for prompt in asked]
        under_way.wait()
        faults.kill(raylet)
        began_s = time.monotonic()
        told = [other.result(timeout=180) for other in streams]
    took_s = time.monotonic() - began_s
    _, left = psutil.wait_procs(family, timeout=30)
    with capsys.disabled():
        print(  # noqa: T201 - as above
            f"\n{STREAMS} streams of {LONG} tokens ended {took_s:.1f} s after raylet {raylet} was"
            f" killed; {sum(a == b for a, b in zip(told, undisturbed, strict=True))} as undisturbed"
        )
    assert told == undisturbed
    assert not left, f"processes of the lost node live on: {left}"


def test_requests_are_served_without_that_node(three: Cluster) -> None:
    assert three.deployment.stream(prompts(1, seed=3)[0], max_tokens=16)


def _pulled(three: Cluster) -> dict[str, Any]:
    """The link from prefill to decode, as the ingress knows it."""
    rows: list[dict[str, Any]] = three.deployment.run_json("links")["links"]
    (link,) = [row for row in rows if row["source_id"].startswith("prefill-")]
    return link


def _wires(three: Cluster) -> dict[str, InterfaceBytes]:
    return {name: node.network.interface_bytes() for name, node in three.nodes.items()}
