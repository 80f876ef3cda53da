"""What Ray is asked for where a deployment has several nodes, and engines that span them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from baton.config import DeploymentConfig
from baton.domain.errors import EngineStartFailed, PreflightFailed
from baton.serving.application.app import controller_options, ingress_options, pool_options
from baton.serving.checks.configuration import missing_resources, placement_findings
from baton.serving.checks.facts import ClusterFacts, MachineFacts
from baton.serving.checks.start import await_nodes, start_checks
from baton.serving.replica.engines import local_addresses, side_channel_host
from tests.serving.configs import example

ROOM = ClusterFacts(cpus=1000, gpus=1000, versions={})
HERE = MachineFacts(python="3.11.2", available_memory_bytes=0, gpus=0, versions={})


# ---------------------------------------------------------------- what Ray is asked for


def test_an_engine_over_two_nodes_is_a_group_of_a_bundle_for_each_gpu() -> None:
    options = pool_options(example("llama-405b.yaml"), "decode")
    bundles = options["placement_group_bundles"]
    assert bundles == [{"CPU": 2.0, "GPU": 1.0, "accelerator_type:H100": 0.001}] * 16
    assert options["placement_group_strategy"] == "PACK"
    assert options["placement_group_bundle_label_selector"] == [{"baton/network": "rail-optimized"}]
    assert options["ray_actor_options"] == {"num_cpus": 0}


def test_an_engine_whose_experts_talk_in_every_layer_stays_on_one_node() -> None:
    options = pool_options(example("deepseek-v3.yaml"), "prefill")
    bundles = options["placement_group_bundles"]
    assert isinstance(bundles, list)
    assert len(bundles) == 8
    assert options["placement_group_strategy"] == "STRICT_PACK"
    assert "placement_group_bundle_label_selector" not in options


def test_the_options_of_a_group_are_such_as_ray_serve_takes() -> None:
    serve = pytest.importorskip("ray.serve")
    options = pool_options(example("llama-405b.yaml"), "decode")
    made = serve.deployment(type("Replica", (), {})).options(**options)
    assert len(made._replica_config.placement_group_bundle_label_selector) == 16


def test_a_replica_on_one_gpu_goes_where_its_labels_are() -> None:
    wanted = (
        "pools.decode.placement.labels.rack=in(a, b)",
        "pools.decode.placement.max_per_node=2",
    )
    options = pool_options(example("gpu-example.yaml", *wanted), "decode")
    actor = options["ray_actor_options"]
    assert isinstance(actor, dict)
    assert actor["label_selector"] == {"rack": "in(a, b)"}
    assert options["max_replicas_per_node"] == 2


@pytest.mark.parametrize("options", [ingress_options, controller_options])
def test_ingress_and_controller_stay_where_clients_find_them(
    options: Callable[[DeploymentConfig], dict[str, Any]],
) -> None:
    alone, joined = "cluster.node_address=127.0.0.1", "cluster.node_address=10.0.0.1"
    assert "resources" not in options(example("sim.yaml", alone))["ray_actor_options"]
    actor = options(example("sim.yaml", joined))["ray_actor_options"]
    assert actor["resources"] == {"node:__internal_head__": 0.001}


# ---------------------------------------------------------------- what nodes must bring


def test_labels_that_no_node_has_are_named() -> None:
    wanted = example("sim.yaml", "pools.decode.placement.labels.rack=b")
    racks = replace(ROOM, labels=({"rack": "a"}, {}))
    (finding,) = missing_resources(wanted, racks)
    assert "no node has the labels that pool 'decode' asks for (rack: b)" in finding.found
    assert missing_resources(wanted, replace(ROOM, labels=({"rack": "a"}, {"rack": "b"}))) == ()


@pytest.mark.parametrize(
    ("labels", "having"),
    [
        (({"rack": "a"}, {"rack": "c"}, {}), "nodes have rack: a, c"),
        (
            ({"ray.io/node-id": "1", "zone": "x"}, {"gpu": "h100"}),
            "no node has a label rack, they have gpu, zone",
        ),
        (({},), "no node has a label rack"),
    ],
)
def test_values_that_nodes_have_of_a_label_are_named(
    labels: tuple[dict[str, str], ...], having: str
) -> None:
    wanted = example("sim.yaml", "pools.decode.placement.labels.rack=b")
    (finding,) = placement_findings(wanted, replace(ROOM, labels=labels), None)
    assert finding.found.endswith(f"pool 'decode' asks for (rack: b): {having}")
    assert "pools.decode.placement.labels" in finding.fix


def test_a_replica_that_fits_on_no_node_is_reported_with_the_largest_node() -> None:
    wanted = example("sim.yaml", "pools.decode.resources.cpus=12")
    nodes: tuple[dict[str, float], ...] = ({"CPU": 8.0}, {"CPU": 4.0})
    (finding,) = placement_findings(wanted, replace(ROOM, node_resources=nodes), None)
    assert finding.found == (
        "pool 'decode': a replica needs a node with 12 CPUs, and no node has that (at most 8 CPUs)"
    )
    assert not placement_findings(wanted, replace(ROOM, node_resources=({"CPU": 16.0},)), None)
    assert not placement_findings(wanted, ROOM, None), "nothing is known of nodes"


def test_a_machine_need_not_have_what_other_nodes_bring() -> None:
    alone = {check.name for check in start_checks(example("gpu-example.yaml"), HERE)}
    joined = example("gpu-example.yaml", "cluster.node_address=10.0.0.1")
    assert alone - {check.name for check in start_checks(joined, HERE)} == {"memory", "GPUs"}


def test_nodes_are_waited_for_and_missing_ones_reported_once() -> None:
    rooms = [replace(ROOM, cpus=0), replace(ROOM, cpus=0), ROOM]
    told: list[str] = []
    several = example("sim.yaml", "cluster.node_address=10.0.0.1")
    await_nodes(
        several,
        deadline_at_s=float("inf"),
        progress=told.append,
        read_capacity=lambda: rooms.pop(0),
        sleep=lambda _for_s: None,
    )
    assert rooms == []
    (line,) = told
    assert "the cluster has 0" in line


def test_nodes_that_do_not_come_are_an_error() -> None:
    several = example("sim.yaml", "cluster.node_address=10.0.0.1")
    with pytest.raises(PreflightFailed, match="the cluster has 0"):
        await_nodes(
            several,
            deadline_at_s=0.0,
            progress=lambda _line: None,
            read_capacity=lambda: replace(ROOM, cpus=0),
        )


# ---------------------------------------------------------------- on which interface


def test_a_side_channel_is_where_the_cluster_knows_the_node_unless_it_is_told() -> None:
    assert side_channel_host("private", "10.1.2.3") == "10.1.2.3"
    assert side_channel_host("10.9.9.9", "10.1.2.3") == "10.9.9.9"


def test_a_side_channel_in_a_network_is_at_this_nodes_own_address_there() -> None:
    assert "127.0.0.1" in local_addresses()
    assert side_channel_host("127.0.0.0/8", "10.1.2.3") == "127.0.0.1"


def test_a_node_without_an_address_in_the_network_starts_no_engine() -> None:
    nowhere = "198.51.100.0/24"  # for documentation: nobody has it
    with pytest.raises(
        EngineStartFailed, match=r"node 10\.1\.2\.3 has no address in 198\.51\.100\.0"
    ):
        side_channel_host(nowhere, "10.1.2.3")
