"""Where somebody has CRDs, manifests are held to them, and unknown fields are errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.deploy.against_crds import find_mismatches, schemas

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
def test_what_fits_is_no_finding(tmp_path: Path, spec: dict[str, object]) -> None:
    assert found(tmp_path, **spec) == []


@pytest.mark.parametrize(
    "spec", [{"replica": 2}, {"replicas": "two"}, {"port": []}, {"labels": {"any": 1}}]
)
def test_a_field_that_is_not_named_or_of_another_kind_is_one(
    tmp_path: Path, spec: dict[str, object]
) -> None:
    (line,) = found(tmp_path, **spec)
    assert "RayService" in line
