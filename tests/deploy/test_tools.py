"""Artefacts pass the validators of those who read them; one word misspelt, and they do not.

`make check-deploy` fetches the tools and runs these. A tool that is not there is a failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pytest
import yaml

from baton.config.load import load_config, load_text
from baton.manifests.export import Target, manifest_files
from baton.manifests.settings import ManifestSettings
from tests.deploy import python_checks, tool_checks
from tests.deploy.rendered import EXAMPLES, export
from tests.deploy.typos import Typo
from tests.repo.project import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

Check = Callable[[Path], list[str]]
Object = dict[str, object]


def built(folder: Path) -> list[str]:
    """What is wrong with what kustomize makes, or why it makes nothing."""
    try:
        made = tool_checks.kustomize(folder)
    except ValueError as error:
        return [str(error)]
    return [line for objects in made.values() for line in of_objects(objects, folder)]


def of_objects(objects: list[Object], folder: Path) -> list[str]:
    """Findings in objects that some tool has made."""
    made = folder / "made"
    made.mkdir(exist_ok=True)
    (made / "all.yaml").write_text(yaml.safe_dump_all(objects))
    return [*python_checks.check_ray_service(made), *tool_checks.check_core_kinds(made)]


def chart(folder: Path) -> list[str]:
    """`helm lint`, `helm template`, and what comes of it."""
    found, objects = tool_checks.helm(folder)
    return found or of_objects(objects, folder.parent)


CHECKS: Mapping[str, tuple[str, Check]] = {
    "serve's schema": ("kuberay", python_checks.check_serve_configs),
    "kubernetes-validate --strict": ("kuberay", tool_checks.check_core_kinds),
    "prometheus operator's types": ("kuberay", tool_checks.check_prometheus_operator),
    "promtool check rules": ("kuberay", tool_checks.promtool),
    "helm lint, helm template": ("helm", chart),
    "kustomize": ("kustomize", built),
    "promtool check config": ("compose", tool_checks.scraping),
    "compose specification": ("compose", tool_checks.compose),
    "hadolint": ("docker", tool_checks.check_dockerfiles),
    "systemd-analyze verify": ("systemd", tool_checks.check_units),
}
TYPOS = [
    ("serve's schema", Typo("kuberay", "rayservice.yaml", "route_prefix:", "route_prefx:")),
    ("serve's schema", Typo("kuberay", "rayservice.yaml", "app_builder:app", "app_bilder:app")),
    ("serve's schema", Typo("kuberay", "rayservice.yaml", "- name: ingress", "- name: ingres")),
    ("serve's schema", Typo("kuberay", "rayservice.yaml", "role: prefill", "roles: prefill")),
    (
        "kubernetes-validate --strict",
        Typo("kuberay", "rayservice.yaml", "livenessProbe:", "livenesProbe:"),
    ),
    ("kubernetes-validate --strict", Typo("kuberay", "services.yaml", "targetPort", "targetport")),
    (
        "kubernetes-validate --strict",
        Typo("kuberay", "disruption.yaml", "maxUnavailable", "maxUnavailible"),
    ),
    (
        "kubernetes-validate --strict",
        Typo("kuberay", "networkpolicy.yaml", "policyTypes", "policyType"),
    ),
    (
        "prometheus operator's types",
        Typo("kuberay", "monitoring.yaml", "podMetricsEndpoints", "podMetricEndpoints"),
    ),
    (
        "prometheus operator's types",
        Typo("kuberay", "monitoring.yaml", "refreshInterval", "refreshIntervall"),
    ),
    ("prometheus operator's types", Typo("kuberay", "rules.yaml", "record:", "records:")),
    ("promtool check rules", Typo("kuberay", "rules.yaml", "rate(", "rat(")),
    ("helm lint, helm template", Typo("helm", "values.yaml", "image:", "imag:")),
    (
        "helm lint, helm template",
        Typo("helm", "templates/rayservice.yaml", '"baton.pod"', '"baton.pods"'),
    ),
    (
        "helm lint, helm template",
        Typo("helm", "templates/_helpers.tpl", "readinessProbe:", "readynessProbe:"),
    ),
    ("kustomize", Typo("kustomize", "overlays/gpu/kustomization.yaml", "/template/", "/templat/")),
    ("kustomize", Typo("kustomize", "overlays/rdma/kustomization.yaml", "patches:", "patchs:")),
    ("promtool check config", Typo("compose", "prometheus.yaml", "http_sd_con", "http_sd_kon")),
    ("compose specification", Typo("compose", "compose.yaml", "network_mode", "network_mod")),
    ("compose specification", Typo("compose", "compose.yaml", "/provisioning:", "/provision:")),
    ("hadolint", Typo("docker", "Dockerfile.cpu", "WORKDIR", "WORKDIRS")),
    ("hadolint", Typo("docker", "Dockerfile.cuda", "apt-get install -y", "apt-get install")),
    (
        "systemd-analyze verify",
        Typo("systemd", "baton.service", "TimeoutStopSec", "TimeoutStopSecs"),
    ),
    ("systemd-analyze verify", Typo("systemd", "baton-node@.service", "[Service]", "[Servise]")),
]


def test_every_tool_is_there() -> None:
    assert tool_checks.missing_tools() == []


@pytest.mark.parametrize("tool", CHECKS)
def test_rendered_manifests_pass(example: Path, tool: str) -> None:
    target, check = CHECKS[tool]
    assert check(example / target) == []


@pytest.mark.parametrize(("tool", "typo"), TYPOS, ids=str)
def test_a_typo_is_found(example: Path, tmp_path: Path, tool: str, typo: Typo) -> None:
    _, check = CHECKS[tool]
    assert check(typo.plant(example, tmp_path)) != []


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_chart_makes_what_the_manifests_are(name: str, tmp_path: Path) -> None:
    found, made = tool_checks.helm(export(name, Target.HELM, tmp_path / "helm"))
    assert found == []
    assert comparable(made) == comparable(
        python_checks.objects(export(name, Target.KUBERAY, tmp_path / "kuberay"))
    )


def test_a_chart_whose_front_are_gates_makes_what_the_manifests_are_and_has_no_other(
    tmp_path: Path,
) -> None:
    path = ROOT / "configs" / "gpu-example.yaml"
    gate = ["server.api_server=rust", "server.listener=ingress", "server.routes=[chat, health]"]
    loaded = load_config([path], sets=gate)
    for target in (Target.HELM, Target.KUBERAY):
        for name, content in manifest_files(target, loaded, ManifestSettings()).items():
            file = tmp_path / target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    found, made = tool_checks.helm(tmp_path / "helm")
    assert found == []
    assert comparable(made) == comparable(python_checks.objects(tmp_path / "kuberay"))
    found, _ = tool_checks.helm(
        tmp_path / "helm", {"config": {"server": {"listener": "ray-serve"}}}
    )
    assert any("export it again" in line for line in found)


def test_the_chart_follows_its_values(tmp_path: Path) -> None:
    folder = export("gpu-example", Target.HELM, tmp_path)
    pool = {"model": "llama-8b", "role": "decode", "resources": {"gpus": 16, "memory": "3GiB"}}
    values = {"config": {"pools": {"wide": pool}}, "rdma": {"enabled": True}}
    found, made = tool_checks.helm(folder, values)
    assert found == []
    (service,) = (entry for entry in made if entry["kind"] == "RayService")
    groups = cast("dict[str, dict[str, list[Object]]]", service["spec"])["rayClusterConfig"]
    (wide,) = (group for group in groups["workerGroupSpecs"] if group["groupName"] == "wide")
    assert wide["numOfHosts"] == 2
    container = cast("dict[str, dict[str, list[Object]]]", wide["template"])["spec"]["containers"][
        0
    ]
    limits = cast("dict[str, dict[str, str]]", container["resources"])["limits"]
    assert limits["nvidia.com/gpu"] == "8"
    assert limits["rdma/hca"] == "1"


@pytest.mark.parametrize(
    ("size", "mib"),
    [
        ("3GiB", 3072),
        ("1TiB", 1024**2),
        ("62500000KiB", 61036),
        ("1TB", 953_675),
        ("500 MB", 477),
        ("64kB", 1),
        ("1.5GiB", 1536),
    ],
)
def test_the_chart_limits_memory_to_the_size_that_is_written(
    tmp_path: Path, size: str, mib: int
) -> None:
    folder = export("gpu-example", Target.HELM, tmp_path)
    rest = limit_of(folder, "1MiB") - 1
    assert limit_of(folder, size) - rest == mib


def limit_of(folder: Path, size: str) -> int:
    """MiB of a pod whose pool has so much memory."""
    pool = {"model": "llama-8b", "role": "decode", "resources": {"memory": size}}
    found, made = tool_checks.helm(folder, {"config": {"pools": {"wide": pool}}})
    assert found == []
    (service,) = (entry for entry in made if entry["kind"] == "RayService")
    groups = cast("dict[str, dict[str, list[Object]]]", service["spec"])["rayClusterConfig"]
    (wide,) = (group for group in groups["workerGroupSpecs"] if group["groupName"] == "wide")
    pod = cast("dict[str, dict[str, list[Object]]]", wide["template"])["spec"]
    limits = cast("dict[str, dict[str, str]]", pod["containers"][0]["resources"])["limits"]
    return int(limits["memory"].removesuffix("Mi"))


def test_the_chart_refuses_a_configuration_that_baton_would_refuse(tmp_path: Path) -> None:
    folder = export("gpu-example", Target.HELM, tmp_path)
    pool = {"role": "decode", "gpu": 1}
    found, _ = tool_checks.helm(folder, {"config": {"pools": {"decode": pool}}})
    assert any("gpu" in line for line in found)


def comparable(objects: list[Object]) -> dict[tuple[str, str], object]:
    """Objects by kind and name, with what may be written in two ways made the same."""
    found: dict[tuple[str, str], object] = {}
    for load in json.loads(json.dumps(objects)):
        if load["kind"] == "RayService":
            spec = load["spec"]
            spec["rayClusterConfig"]["workerGroupSpecs"].sort(key=lambda group: group["groupName"])
            served = yaml.safe_load(spec["serveConfigV2"])
            arguments = served["applications"][0]["args"]
            arguments["config"] = load_text(json.dumps(arguments["config"]))
            spec["serveConfigV2"] = served
        found[load["kind"], load["metadata"]["name"]] = load
    return found
