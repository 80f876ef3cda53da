"""Artefacts fit the schemas that need no tool; one word misspelt, and they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.deploy import python_checks as checks
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
def test_what_is_rendered_fits(example: Path, target: str) -> None:
    assert CHECKS[target](example / target) == []


@pytest.mark.parametrize("typo", TYPOS, ids=str)
def test_a_typo_is_found(example: Path, tmp_path: Path, typo: Typo) -> None:
    assert CHECKS[typo.target](typo.plant(example, tmp_path)) != []
