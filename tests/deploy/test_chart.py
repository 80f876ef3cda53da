"""The chart follows its values as far as it can, and says where it must be exported again.

`make check-deploy` fetches Helm and runs these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from baton.config.load import load_config
from baton.manifests.export import Target, manifest_files
from baton.manifests.settings import ManifestSettings
from tests.deploy import python_checks, tool_checks
from tests.repo.project import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

Object = dict[str, object]
GPU_EXAMPLE = ROOT / "configs" / "gpu-example.yaml"


def pool(**keys: object) -> Object:
    """Values with one more pool."""
    return {"pools": {"spare": {"model": "llama-8b", "role": "prefill", **keys}}}


def rendered(example: Path, config: Object, **values: object) -> list[Object]:
    found, made = tool_checks.helm(example / "helm", {"config": config, **values})
    assert found == []
    return made


def group(made: list[Object], name: str) -> Object:
    (service,) = (object_ for object_ in made if object_["kind"] == "RayService")
    cluster = cast("dict[str, dict[str, list[Object]]]", service["spec"])["rayClusterConfig"]
    (found,) = (entry for entry in cluster["workerGroupSpecs"] if entry["groupName"] == name)
    return found


def of_kuberay(*sets: str) -> Mapping[str, str]:
    loaded = load_config([GPU_EXAMPLE], sets=sets)
    files = manifest_files(Target.KUBERAY, loaded, ManifestSettings())
    return {name: content.decode() for name, content in files.items()}


def test_every_object_has_the_ports_of_the_values(example: Path, tmp_path: Path) -> None:
    config = {"server": {"port": 9000}, "observability": {"metrics": {"port": 9500}}}
    ours = [entry for entry in rendered(example, config) if entry["kind"] != "RayService"]
    for name, text in of_kuberay("server.port=9000", "observability.metrics.port=9500").items():
        (tmp_path / name).write_text(text)
    theirs = [
        object_ for object_ in python_checks.objects(tmp_path) if object_["kind"] != "RayService"
    ]
    assert _sorted(ours) == _sorted(theirs)
    assert "9400" not in json.dumps(ours)


def _sorted(objects: list[Object]) -> list[str]:
    return sorted(json.dumps(object_, sort_keys=True) for object_ in objects)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"admission": {"timeouts": {"total": "1h"}}}, "export it again"),
        ({"server": {"listener": "ingress"}}, "export it again"),
        (pool(resources={"gpus": 9}), "9 GPUs of a replica cannot be shared evenly by 2 nodes"),
        ({"pools": {"a_b": {"model": "llama-8b", "role": "decode"}}}, "use '-' for '_'"),
        ({"pools": {"head": {"model": "llama-8b", "role": "decode"}}}, "no pool 'head'"),
        ({"security": {"tls": {"cert_file": "/a", "key_file": "/b"}}}, "does not use TLS"),
        ({"server": {"port": 8080}}, "Ray's metrics listens"),
        ({"server": {"port": 21100}}, "Ray Serve's front listens"),
        ({"server": {"port": 9400}}, "got server.port"),
        ({"observability": {"metrics": {"port": 8265}}}, "Ray's dashboard listens"),
        ({"observability": {"metrics": {"port": 0}}}, "expected a port"),
        (pool(env={"A": {"file": "/srv/secret"}}), "pools.spare.env.A is read from the file"),
        ({"transfer": {"env": {"A": {"file": "/x"}}}}, "transfer.env.A is read from the file"),
        ({"tenants": {"acme": {"keys_file": "secrets/acme"}}}, "expected /etc/baton/keys/"),
    ],
    ids=str,
)
def test_the_chart_refuses_configurations_that_an_export_refuses(
    example: Path, config: Object, why: str
) -> None:
    found, _ = tool_checks.helm(example / "helm", {"config": config})
    assert any(why in line for line in found)


def test_nodes_are_labelled_as_the_manifests_label_them(example: Path) -> None:
    labels = {"zone": "in(a, b)", "rack": "r7", "spot": "!true"}
    found = group(rendered(example, pool(placement={"labels": labels})), "spare")
    assert found["labels"] == {"zone": "a", "rack": "r7"}
    none = group(rendered(example, pool(placement={"labels": {"spot": "!true"}})), "spare")
    assert "labels" not in none


def test_a_pool_that_may_rest_at_zero_can_have_a_replica(example: Path) -> None:
    found = group(rendered(example, pool(replicas={"min": 0})), "spare")
    assert [found[key] for key in ("minReplicas", "replicas", "maxReplicas")] == [0, 0, 1]


def test_keys_of_tenants_are_mounted_where_a_tenant_has_some(example: Path) -> None:
    config: Object = {"tenants": {"acme": {"keys_file": "/etc/baton/keys/acme"}}}
    pod = json.dumps(group(rendered(example, config), "ingress")["template"])
    assert '"secretName": "baton-keys"' in pod
    assert '"mountPath": "/etc/baton/keys"' in pod
    assert "baton-keys" not in json.dumps(rendered(example, {}))


def test_engines_get_rdma_where_the_values_require_it(example: Path) -> None:
    made = rendered(example, {"transfer": {"require_rdma": True}})
    assert "rdma/hca" in json.dumps(group(made, "decode"))
    assert "rdma/hca" not in json.dumps(group(made, "ingress"))


@pytest.mark.parametrize(
    "cache",
    [
        {"path": "/data/models"},
        {"claim": "weights"},
        {"size": "500GiB", "storage_class": "shared"},
    ],
    ids=lambda cache: next(iter(cache)),
)
def test_pods_keep_models_where_the_values_say(
    example: Path, tmp_path: Path, cache: Object
) -> None:
    ours = rendered(example, {"cluster": {"model_cache": cache}})
    sets = [f"cluster.model_cache.{key}={value}" for key, value in cache.items()]
    for name, text in of_kuberay(*sets).items():
        (tmp_path / name).write_text(text)
    theirs = python_checks.objects(tmp_path)
    for name in ("ingress", "prefill", "decode"):
        assert group(ours, name)["template"] == group(theirs, name)["template"]
    claims = [
        [entry for entry in made if entry["kind"] == "PersistentVolumeClaim"]
        for made in (ours, theirs)
    ]
    assert claims[0] == claims[1]
    assert bool(claims[0]) == ("size" in cache)
