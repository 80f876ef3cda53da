"""Artefacts fit the schemas that need no tool; one word misspelt, and they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from tests.deploy import python_checks as checks
from tests.deploy.against_crds import find_mismatches, schemas
from tests.deploy.typos import Typo

Check = Callable[[Path], list[str]]
CHECKS: Mapping[str, Check] = {
    "kuberay": checks.check_ray_service,
    "ray": checks.check_ray_cluster,
    "helm": checks.check_chart_values,
    "kustomize": checks.check_kustomizations,
}
TYPOS = [
    Typo("kuberay", "rayservice.yaml", "workerGroupSpecs:", "workerGroupSpec:"),
    Typo("kuberay", "rayservice.yaml", "minReplicas:", "minReplica:"),
    Typo("kuberay", "rayservice.yaml", "mode: token", "mode: tokens"),
    Typo("kuberay", "rayservice.yaml", "dashboard-host:", "num-cpus:"),
    Typo("ray", "cluster.yaml", "idle_timeout_minutes:", "idle_timeout_minute:"),
    Typo("ray", "cluster.yaml", "head_node_type: head", "head_node_type: haed"),
    Typo("ray", "cluster.yaml", "--env 'RAY_SERVE_HAPROXY_RETRY_ON", "--env RAY_SERVE"),
    Typo("helm", "values.yaml", "role: prefill", "roles: prefill"),
    Typo("helm", "values.yaml", "perNode:", "perNodes:"),
    Typo("kustomize", "base/kustomization.yaml", "services.yaml", "service.yaml"),
    Typo("kustomize", "overlays/gpu/kustomization.yaml", "resources:", "resource:"),
]


@pytest.mark.parametrize("target", CHECKS)
def test_rendered_manifests_fit_the_schemas(example: Path, target: str) -> None:
    assert CHECKS[target](example / target) == []


@pytest.mark.parametrize("typo", TYPOS, ids=str)
def test_a_typo_is_found(example: Path, tmp_path: Path, typo: Typo) -> None:
    assert CHECKS[typo.target](typo.plant(example, tmp_path)) != []


# -------------------------------------------------------------------- custom resources


CRD = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
spec:
  group: ray.io
  names: {kind: RayService}
  versions:
    - name: v1
      schema:
        openAPIV3Schema:
          type: object
          properties:
            apiVersion: {type: string}
            kind: {type: string}
            metadata: {type: object}
            spec:
              type: object
              properties:
                replicas: {type: integer}
                port: {anyOf: [{type: integer}, {type: string}], x-kubernetes-int-or-string: true}
                labels: {type: object, additionalProperties: {type: string}}
                free:
                  type: object
                  x-kubernetes-preserve-unknown-fields: true
                  properties: {a: {type: string}}
"""


def found(folder: Path, **spec: object) -> list[str]:
    (folder / "crds").mkdir()
    (folder / "crds" / "crd.yaml").write_text(CRD)
    made = {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": {"name": "x"}}
    (folder / "manifests").mkdir()
    (folder / "manifests" / "one.yaml").write_text(yaml.safe_dump({**made, "spec": spec}))
    return find_mismatches(schemas(folder / "crds"), folder / "manifests")


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 2, "port": "http"},
        {"port": 8000, "labels": {"any": "thing"}},
        {"free": {"any": "thing"}},
    ],
)
def test_a_valid_manifest_is_no_finding(tmp_path: Path, spec: dict[str, object]) -> None:
    assert found(tmp_path, **spec) == []


@pytest.mark.parametrize(
    "spec", [{"replica": 2}, {"replicas": "two"}, {"port": []}, {"labels": {"any": 1}}]
)
def test_a_field_that_is_not_named_or_of_another_kind_is_one(
    tmp_path: Path, spec: dict[str, object]
) -> None:
    (line,) = found(tmp_path, **spec)
    assert "RayService" in line
