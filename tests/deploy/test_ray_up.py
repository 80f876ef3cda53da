"""`ray up` rents as many machines as replicas need, and brings their secrets."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import yaml

from baton.manifests.export import Target
from baton.manifests.machines.ray_up import INSTANCE_TYPES
from baton.manifests.settings import CannotExport
from tests.deploy.test_rendered import config, export_of

Node = dict[str, dict[str, int]]


def cluster(tmp_path: Path, *sets: str, gpus: int = 1, **settings: object) -> dict[str, object]:
    given = ["pools.decode.resources.accelerator=H100", *sets]
    text = export_of(config(tmp_path, gpus=gpus), Target.RAY, sets=given, **settings)
    return cast("dict[str, object]", yaml.safe_load(text["cluster.yaml"]))


def node(tmp_path: Path, *sets: str, gpus: int = 1, **settings: object) -> Node:
    types = cluster(tmp_path, *sets, gpus=gpus, **settings)["available_node_types"]
    return cast("dict[str, Node]", types)["decode"]


def bounds(found: Node) -> tuple[object, object]:
    return found["min_workers"], found["max_workers"]


def replicas(least: int, most: int) -> str:
    return f"pools.decode.replicas={{min: {least}, max: {most}}}"


@pytest.mark.parametrize("gpus", [1, 2, 8, 16])
def test_a_node_declares_the_resources_of_its_machine(tmp_path: Path, gpus: int) -> None:
    resources = node(tmp_path, gpus=gpus)["resources"]
    assert (resources["GPU"], resources["CPU"]) == (8, INSTANCE_TYPES["H100"].cpus)


def test_replicas_of_one_gpu_share_machines(tmp_path: Path) -> None:
    assert bounds(node(tmp_path, replicas(1, 8))) == (1, 1)
    assert bounds(node(tmp_path, replicas(9, 17))) == (2, 3)
    assert bounds(node(tmp_path, "pools.decode.replicas={min: 0, initial: 1, max: 1}")) == (0, 1)


def test_a_replica_of_two_machines_has_both(tmp_path: Path) -> None:
    assert bounds(node(tmp_path, replicas(1, 3), gpus=16)) == (2, 6)


@pytest.mark.parametrize(
    "limit",
    [
        "pools.decode.placement.max_per_node=2",
        "pools.decode.resources.cpus=96",
        "pools.decode.resources.memory=700GiB",
    ],
)
def test_no_more_replicas_are_counted_on_a_machine_than_may_be_there(
    tmp_path: Path, limit: str
) -> None:
    assert bounds(node(tmp_path, replicas(4, 8), limit)) == (2, 4)


def test_pools_that_differ_may_have_a_machine_for_each_replica(tmp_path: Path) -> None:
    other = "{role: mixed, resources: {gpus: 4, accelerator: H100}, parallel: {tp: 4}}"
    assert bounds(node(tmp_path, replicas(4, 8), f"pools.large={other}")) == (1, 8)


def test_there_may_be_as_many_machines_as_all_kinds_together(tmp_path: Path) -> None:
    found = cluster(tmp_path, replicas(9, 17))
    kinds = cast("dict[str, dict[str, int]]", found["available_node_types"])
    assert found["max_workers"] == sum(kind.get("max_workers", 0) for kind in kinds.values())


def test_a_share_of_a_replica_that_no_machine_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match=r"16 GPUs and 1 CPUs, and p5\.48xlarge has 8"):
        node(tmp_path, gpus=16, gpus_per_node=16)
    with pytest.raises(CannotExport, match="200 CPUs"):
        node(tmp_path, "pools.decode.resources.cpus=200")


def test_every_secret_that_the_application_reads_is_brought(tmp_path: Path) -> None:
    found = cluster(
        tmp_path,
        "tenants.acme.keys_file=secrets/acme.keys",
        "observability.token_file=secrets/token",
        "pools.decode.env.HUB={file: /srv/hub}",
    )
    assert found["file_mounts"] == {
        "~/.ray/auth_token": "~/.ray/auth_token",
        "/etc/baton/keys/acme.keys": "secrets/acme.keys",
        "/etc/baton/console/token": "secrets/token",
        "/srv/hub": "/srv/hub",
    }


def test_a_console_whose_token_is_in_no_file_yet_gets_one_of_a_known_place(tmp_path: Path) -> None:
    mounts = cast("dict[str, str]", cluster(tmp_path)["file_mounts"])
    assert mounts["/etc/baton/console/token"] == "~/.baton/console-token"


def test_a_secret_file_that_depends_on_where_one_stands_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match="give the whole path"):
        cluster(tmp_path, "pools.decode.env.HUB={file: secrets/hub}")
