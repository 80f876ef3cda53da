"""Checks of manifests by others' tools: see `scripts/tools manifests prometheus`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import yaml

from tests.deploy.python_checks import documents, objects
from tests.repo.project import ROOT

TOOLS = ROOT / ".tools"
_MANIFEST_TOOLS = TOOLS / "manifests" / "bin"
_NODE = TOOLS / "node"
KUBERNETES = "1.32"
_CORE = frozenset(
    {
        "Ingress",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "PodDisruptionBudget",
        "PodTemplate",
        "Service",
        "ServiceAccount",
    }
)
_OPERATOR_KINDS = {"PodMonitor": "v1", "PrometheusRule": "v1", "ScrapeConfig": "v1alpha1"}
_TIMEOUT_S = 300.0


def missing_tools() -> list[str]:
    """Which of the tools are not here, by what brings them."""
    install_hints = {
        _MANIFEST_TOOLS / "kubernetes-validate": "scripts/tools manifests",
        _NODE / "node_modules/@kubernetes-models/prometheus-operator": "scripts/tools manifests",
        TOOLS / "bin/promtool": "scripts/tools prometheus",
    }
    missing = [f"{path}: {bring}" for path, bring in install_hints.items() if not path.exists()]
    missing += [] if shutil.which("systemd-analyze") else ["systemd-analyze: the package systemd"]
    return missing + ([] if shutil.which("kubectl") else ["kubectl: for kustomize"])


def check_core_kinds(folder: Path) -> list[str]:
    """`kubernetes-validate --strict`: Kubernetes' own kinds, pod templates of Ray's among them."""
    kinds = [
        object_ for object_ in [*objects(folder), *_templates(folder)] if object_["kind"] in _CORE
    ]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "objects.yaml"
        path.write_text(yaml.safe_dump_all(kinds))
        process = _run(
            [_MANIFEST_TOOLS / "kubernetes-validate", "--strict", "-k", KUBERNETES, path]
        )
    lines = process.stdout.splitlines() + process.stderr.splitlines()
    passed = [line for line in lines if line.startswith("INFO ") and " passed " in line]
    problems = [line for line in lines if line not in passed]
    # It lets kinds pass that it does not know, with a word only.
    return problems or (
        [] if len(passed) == len(kinds) else [f"{len(passed)} of {len(kinds)} passed"]
    )


def _templates(folder: Path) -> Iterator[dict[str, object]]:
    for object_ in objects(folder):
        if object_["kind"] != "RayService":
            continue
        spec = cast("dict[str, dict[str, object]]", object_["spec"])["rayClusterConfig"]
        groups = [spec["headGroupSpec"], *cast("list[object]", spec["workerGroupSpecs"])]
        for number, group in enumerate(cast("list[dict[str, object]]", groups)):
            yield {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": f"group-{number}"},
                "template": group["template"],
            }


def check_prometheus_operator(folder: Path) -> list[str]:
    """Monitors and rules against the operator's types, checked by TypeScript."""
    operator_objects = [
        object_ for object_ in objects(folder) if object_["kind"] in _OPERATOR_KINDS
    ]
    lines = []
    for number, entry in enumerate(operator_objects):
        kind = str(entry["kind"])
        module = (
            f"@kubernetes-models/prometheus-operator/monitoring.coreos.com/{_OPERATOR_KINDS[kind]}"
        )
        lines.append(f'import type {{ I{kind} as T{number} }} from "{module}/{kind}";')
        lines.append(f"export const c{number}: T{number} = {json.dumps(entry)};")
    with tempfile.TemporaryDirectory(dir=_NODE) as scratch:
        (Path(scratch) / "check.ts").write_text("\n".join(lines))
        command: list[str | Path] = [
            _NODE / "node_modules/.bin/tsc", "--noEmit", "--strict", "--skipLibCheck",
            "--module", "esnext", "--moduleResolution", "bundler", "--target", "es2022",
            Path(scratch) / "check.ts",
        ]  # fmt: skip
        return [] if not operator_objects else _output_lines(command)


def promtool(folder: Path) -> list[str]:
    """Rules, by Prometheus' own parser; and a scrape configuration where there is one."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        rules = Path(scratch) / "rules.yaml"
        for object_ in objects(folder):
            if object_.get("kind") == "PrometheusRule":
                rules.write_text(json.dumps(object_["spec"]))
                found += _output_lines([TOOLS / "bin/promtool", "check", "rules", rules])
    return found


def scraping(folder: Path) -> list[str]:
    """Prometheus' configuration of compose, and the rules that it names."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(folder / "prometheus.yaml", scratch)
        shutil.copytree(folder / "dashboards" / "rules", Path(scratch) / "rules")
        path = Path(scratch) / "prometheus.yaml"
        # A token's file is there on the machine that has it.
        path.write_text(path.read_text().replace("/run/secrets/console", "/dev/null"))
        return _output_lines([TOOLS / "bin/promtool", "check", "config", path])


def compose(folder: Path) -> list[str]:
    """The compose specification's schema; and that every file that is mounted is there."""
    (content,) = documents(folder / "compose.yaml")
    command: list[str | Path] = [
        _MANIFEST_TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec",
        folder / "compose.yaml",
    ]  # fmt: skip
    found = _output_lines(command)
    for name, service in cast("dict[str, dict[str, list[str]]]", content["services"]).items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./") and not (folder / source).exists():
                found.append(f"{name}: there is no {source}")
    return found


def check_dockerfiles(folder: Path) -> list[str]:
    """`hadolint`, with its warnings."""
    paths = sorted(folder / f"Dockerfile.{kind}" for kind in ("cpu", "cuda"))
    return _output_lines([_MANIFEST_TOOLS / "hadolint", "--failure-threshold", "info", *paths])


def check_units(folder: Path) -> list[str]:
    """`systemd-analyze verify`, with stand-ins for programs that only a machine with baton has."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        program = root / "program"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        for path in sorted(folder.glob("*.service")):
            text = re.sub(r"/usr/lib/baton/bin/\w+", str(program), path.read_text())
            (root / path.name).write_text(text.replace("/etc/baton", f"{folder.resolve()}"))
        problems = []
        for path in sorted(root.glob("*.service")):
            unit = path.rename(root / path.name.replace("@.", "@prefill."))
            command: list[str | Path] = ["systemd-analyze", "verify", "--man=no", unit]
            problems += [line for line in _output_lines(command, always=True) if unit.name in line]
        return problems


def kustomize(folder: Path) -> dict[str, list[dict[str, object]]]:
    """What kustomize makes of the base and of each overlay."""
    built = {}
    for name in ("base", "overlays/gpu", "overlays/rdma"):
        process = _run(["kubectl", "kustomize", folder / name])
        if process.returncode:
            raise ValueError(f"{name}: {process.stderr.strip()}")
        built[name] = [item for item in yaml.load_all(process.stdout, yaml.CSafeLoader) if item]
    return built


def helm(
    folder: Path, values: Mapping[str, object] | None = None, *, name: str = "baton"
) -> tuple[list[str], list[dict[str, object]]]:
    """`helm lint` and `helm template`: findings, and the objects that come of it."""
    (result,) = helm_results(folder, [values or {}], name=name, lint=True)
    objects = [
        item
        for path, text in result.files.items()
        if path.endswith(".yaml")
        for item in yaml.load_all(text, yaml.CSafeLoader)
        if item
    ]
    return result.findings, objects


class HelmResult(NamedTuple):
    """What Helm makes of one set of values."""

    findings: list[str]
    files: dict[str, str]
    """Rendered templates by path."""


def helm_results(
    folder: Path, cases: Sequence[Mapping[str, object]], *, name: str = "baton", lint: bool = False
) -> list[HelmResult]:
    """`helm template` of several sets of values, in one process; it checks their schema, too."""
    program = """
import json, sys
import helm_python as helm
folder, name, lint = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
results = []
with helm.Chart.load(folder) as chart:
    for values in json.load(sys.stdin):
        found, made = [], {}
        if lint:
            messages = helm.lint(folder, values)["messages"]
            found = [m["path"] + ": " + m["error"] for m in messages if m["severity"] > 1]
        try:
            made = chart.render(values, name=name, namespace="baton")
        except helm.HelmError as error:
            found.append(str(error))
        results.append([found, made])
print(json.dumps(results))
"""
    process = _run(
        [_MANIFEST_TOOLS / "python", "-c", program, folder, name, str(lint)],
        stdin=json.dumps(list(cases)),
    )
    if process.returncode:
        return [HelmResult([process.stderr.strip().splitlines()[-1]], {}) for _ in cases]
    return [HelmResult(found, made) for found, made in json.loads(process.stdout)]


def _output_lines(command: Sequence[str | Path], *, always: bool = False) -> list[str]:
    """What a program says when it does not end well."""
    process = _run(command)
    if process.returncode == 0 and not always:
        return []
    return [line for line in (process.stdout + process.stderr).splitlines() if line.strip()]


def _run(
    command: Sequence[str | Path], stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
