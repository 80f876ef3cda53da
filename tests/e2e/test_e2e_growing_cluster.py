"""A Ray cluster whose autoscaler starts nodes: replicas that wait for room bring them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.e2e.operators import UP_TIMEOUT_S, Operator
from tests.e2e.ray_nodes import RayCluster, autoscaling_node
from tests.fakes.scaled_deadline import ScaledDeadline, slowdown

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
_TYPES = {
    "small": {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 3},
}
_ROOM = tuple(
    word
    for pool in ("prefill", "decode")
    for name in ("resources.cpus=1", "replicas.initial=1", "replicas.min=1", "replicas.max=4")
    for word in ("--set", f"pools.{pool}.{name}")
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="v2"),
        pytest.param(False, id="v1", marks=pytest.mark.thorough),
    ],
)
def nodes(request: pytest.FixtureRequest) -> Iterator[RayCluster]:
    with autoscaling_node(_TYPES, v2=bool(request.param)) as found:
        yield found


def test_nodes_come_for_replicas_and_an_impossible_replica_is_refused_at_once(
    nodes: RayCluster,
) -> None:
    operator = Operator(nodes)
    for sets, message in (
        ("pools.decode.resources.cpus=3", "a replica needs a node with 3 CPUs, and no node"),
        ("tenants.acme.keys_file=/no/such/keys", "/no/such/keys: cannot be read: No such file"),
        (
            "pools.decode.replicas.initial=6",
            "has 6 with all the nodes that its autoscaler may start",
        ),
    ):
        asked = ("--set", "pools.decode.replicas.max=6", "--set", sets)
        assert message in operator.run_failing("up", *operator.options, *_ROOM, *asked)
    done = operator.run("up", *operator.options, *_ROOM, timeout_s=UP_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert "waiting for nodes: " in done.stderr
    assert "replica of decode wants 1 CPU" in done.stderr
    assert operator.stream() == 8
    # One more has no room on what came.
    operator.run_json("scale", "decode", "3")
    deadline = ScaledDeadline(UP_TIMEOUT_S)
    while _ready(operator) < 3:
        assert not deadline.is_expired(), operator.run("status").stdout
        time.sleep(1.0 * slowdown())
    operator.run_json("down", "--timeout", "90s")
    assert nodes.are_all_running()


def _ready(operator: Operator) -> int:
    rows = operator.run_json("status")["pools"]
    return next(int(row["ready"]) for row in rows if row["pool"] == "decode")
