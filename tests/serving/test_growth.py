"""What an autoscaler could bring, what is refused because it never will, and what is waited for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.config import DeploymentConfig
from baton.serving.checks.autoscaling_capacity import infeasible_findings, waiting_line
from baton.serving.checks.configuration import cluster_checks
from baton.serving.checks.facts import ClusterFacts
from baton.serving.checks.result import CheckStatus, lines_with
from baton.serving.ray.autoscaler import AutoscalingCapacity, NodeType, local_monitors, node_types
from tests.serving.configs import example

EMPTY = ClusterFacts(cpus=0, gpus=0, versions={})
HEAD = NodeType(name="", resources={"memory": 1e9})
SMALL = NodeType(name="small", resources={"CPU": 4.0}, max_nodes=2)


def refusals(
    config: DeploymentConfig, capacity: AutoscalingCapacity | None = None
) -> tuple[str, ...]:
    return lines_with(CheckStatus.FAIL, cluster_checks(config, EMPTY, capacity))


def two_cpus(*sets: str) -> DeploymentConfig:
    cpus = [f"pools.{pool}.resources.cpus=2" for pool in ("prefill", "decode")]
    return example("sim.yaml", *cpus, *sets)


def test_too_few_nodes_are_waited_for_only_where_an_autoscaler_starts_some() -> None:
    growth = AutoscalingCapacity(nodes=(HEAD,), node_types=(SMALL,))
    (line,) = refusals(two_cpus())
    assert "ask for 8 CPUs to start with, the cluster has 0" in line
    assert refusals(two_cpus(), growth) == ()


def test_a_replica_that_no_node_has_room_for_is_refused_with_the_types_that_there_are() -> None:
    growth = AutoscalingCapacity(nodes=(HEAD,), node_types=(SMALL,))
    (finding, _) = infeasible_findings(two_cpus("pools.decode.resources.cpus=5"), growth)
    assert "pool 'decode': a replica needs a node with 5 CPUs" in finding.found
    assert "(small: 4 CPUs)" in finding.found


def test_an_existing_node_counts_with_every_autoscaler() -> None:
    large = NodeType(name="", resources={"CPU": 64.0})
    wanted = two_cpus("pools.decode.resources.cpus=5")
    assert (
        infeasible_findings(wanted, AutoscalingCapacity(nodes=(large,), node_types=(SMALL,))) == ()
    )


def test_more_replicas_than_all_nodes_together_have_room_for_are_refused() -> None:
    growth = AutoscalingCapacity(nodes=(SMALL, SMALL), node_types=(SMALL,))
    wanted = two_cpus("pools.decode.replicas.initial=4")
    (finding,) = infeasible_findings(wanted, growth)
    assert "ask for 12 CPUs to start with, the cluster has 8 with all the nodes" in finding.found
    # Of a type that has no bound, or one that more of are there than may be started, more come.
    unbounded = NodeType(name="small", resources={"CPU": 4.0})
    for more in (
        AutoscalingCapacity(nodes=(), node_types=(unbounded,)),
        AutoscalingCapacity(nodes=(SMALL,) * 3, node_types=(SMALL,)),
    ):
        assert infeasible_findings(wanted, more) == ()


def test_labels_are_those_of_a_type_or_of_a_node() -> None:
    wanted = two_cpus("pools.decode.placement.labels.zone=a")
    (finding,) = infeasible_findings(wanted, AutoscalingCapacity(nodes=(), node_types=(SMALL,)))
    assert "and the labels zone: a" in finding.found
    there = NodeType(name="small", resources={"CPU": 4.0}, labels={"zone": "a"}, max_nodes=2)
    assert infeasible_findings(wanted, AutoscalingCapacity(nodes=(), node_types=(there,))) == ()


def test_an_engine_over_several_gpus_needs_a_node_for_each_part_or_one_for_all() -> None:
    node = NodeType(
        name="one",
        resources={"CPU": 8.0, "GPU": 1.0, "accelerator_type:H100": 1.0},
        labels={"baton/network": "rail-optimized"},
    )
    spread = example("llama-405b.yaml")
    packed = example("deepseek-v3.yaml")
    growth = AutoscalingCapacity(nodes=(), node_types=(node,))
    assert not [
        finding for finding in infeasible_findings(spread, growth) if "'decode'" in finding.found
    ]
    (finding,) = [
        finding for finding in infeasible_findings(packed, growth) if "'prefill'" in finding.found
    ]
    assert "8 GPUs" in finding.found


def test_an_autoscaler_that_does_not_say_what_it_starts_is_waited_for() -> None:
    growth = AutoscalingCapacity(nodes=(HEAD,))
    assert refusals(example("llama-405b.yaml"), growth) == ()


def test_waiting_replicas_are_named_by_pool_with_their_resources() -> None:
    wanted = example("gpu-example.yaml")
    line = waiting_line(wanted, {"decode": 2, "prefill": 1, "controller": 1})
    assert line.startswith("waiting for nodes: 2 replicas of decode want 1 GPU")
    assert "each, 1 replica of prefill wants" in line
    assert waiting_line(wanted, {"decode": 0}) == ""


_TYPES = """
max_workers: 5
provider: {type: aws, secret: hush}
head_node_type: head
available_node_types:
  head: {resources: {CPU: 2}, node_config: {}}
  big: {resources: {CPU: 8, GPU: 1}, labels: {zone: a}, node_config: {key: hush}}
  few: {resources: {CPU: 4}, max_workers: 1, node_config: {}}
"""


@contextmanager
def _monitor(folder: Path, *words: str) -> Iterator[None]:
    """A process that is called as Ray's monitor is, and does nothing."""
    script = folder / "autoscaler" / "v2" / "monitor.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text("print(flush=True); input()")
    command = [sys.executable, str(script), f"--logs-dir={folder}", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.communicate("\n")


def test_the_types_of_an_autoscaler_leave_its_node_and_its_secrets_do_not(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(_TYPES)
    with _monitor(tmp_path, f"--autoscaling-config={file}"):
        (found,) = local_monitors(tmp_path)
        assert local_monitors(tmp_path / "another-session") == []
    assert found is not None
    assert "hush" not in str(found)
    kinds = {kind.name: kind for kind in node_types(found)}
    assert {name: kind.max_nodes for name, kind in kinds.items()} == {"head": 0, "big": 5, "few": 1}
    assert (kinds["big"].resources, kinds["big"].labels) == ({"CPU": 8, "GPU": 1}, {"zone": "a"})


def test_a_monitor_that_starts_nothing_is_no_autoscaler(tmp_path: Path) -> None:
    with _monitor(tmp_path):
        assert local_monitors(tmp_path) == [None]


@pytest.mark.parametrize("missing", ["ray._private.state", "ray.core.generated.autoscaler_pb2"])
def test_a_ray_without_what_is_private_has_no_autoscaler_that_is_known(
    missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import ray  # noqa: F401 - all of it is imported before a part of it is missing

    from baton.serving.ray.autoscaler import read_autoscaling_capacity

    monkeypatch.setitem(sys.modules, missing, None)
    assert read_autoscaling_capacity() is None
    assert "does not say whether an autoscaler runs" in caplog.text
