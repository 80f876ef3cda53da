"""Checks of manifests by others' tools: see `scripts/tools manifests prometheus`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import yaml

from tests.deploy.python_checks import documents, objects
from tests.repo.project import ROOT

TOOLS = ROOT / ".tools"
_OWN = TOOLS / "manifests" / "bin"
_NODE = TOOLS / "node"
KUBERNETES = "1.32"
_CORE = frozenset(
    {"Service", "PodDisruptionBudget", "NetworkPolicy", "PersistentVolumeClaim", "PodTemplate"}
)
_WATCHED = {"PodMonitor": "v1", "PrometheusRule": "v1", "ScrapeConfig": "v1alpha1"}
_LIMIT_S = 120.0


def missing_tools() -> list[str]:
    """Which of the tools are not here, by what brings them."""
    fetched = {
        _OWN / "kubernetes-validate": "scripts/tools manifests",
        _NODE / "node_modules/@kubernetes-models/prometheus-operator": "scripts/tools manifests",
        TOOLS / "bin/promtool": "scripts/tools prometheus",
    }
    found = [f"{path}: {bring}" for path, bring in fetched.items() if not path.exists()]
    found += [] if shutil.which("systemd-analyze") else ["systemd-analyze: the package systemd"]
    return found + ([] if shutil.which("kubectl") else ["kubectl: for kustomize"])


def core_kinds(folder: Path) -> list[str]:
    """`kubernetes-validate --strict`: Kubernetes' own kinds, pod templates of Ray's among them."""
    kinds = [one for one in [*objects(folder), *_templates(folder)] if one["kind"] in _CORE]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "objects.yaml"
        path.write_text(yaml.safe_dump_all(kinds))
        done = _run([_OWN / "kubernetes-validate", "--strict", "-k", KUBERNETES, path])
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    passed = [line for line in lines if line.startswith("INFO ") and " passed " in line]
    wrong = [line for line in lines if line not in passed]
    # It lets kinds pass that it does not know, with a word only.
    return wrong or ([] if len(passed) == len(kinds) else [f"{len(passed)} of {len(kinds)} passed"])


def _templates(folder: Path) -> Iterator[dict[str, object]]:
    for one in objects(folder):
        if one["kind"] != "RayService":
            continue
        spec = cast("dict[str, dict[str, object]]", one["spec"])["rayClusterConfig"]
        groups = [spec["headGroupSpec"], *cast("list[object]", spec["workerGroupSpecs"])]
        for number, group in enumerate(cast("list[dict[str, object]]", groups)):
            yield {
                "apiVersion": "v1",
                "kind": "PodTemplate",
                "metadata": {"name": f"group-{number}"},
                "template": group["template"],
            }


def prometheus_operator(folder: Path) -> list[str]:
    """Monitors and rules against the operator's types, checked by TypeScript."""
    watched = [one for one in objects(folder) if one["kind"] in _WATCHED]
    lines = []
    for number, one in enumerate(watched):
        kind = str(one["kind"])
        where = f"@kubernetes-models/prometheus-operator/monitoring.coreos.com/{_WATCHED[kind]}"
        lines.append(f'import type {{ I{kind} as T{number} }} from "{where}/{kind}";')
        lines.append(f"export const c{number}: T{number} = {json.dumps(one)};")
    with tempfile.TemporaryDirectory(dir=_NODE) as scratch:
        (Path(scratch) / "check.ts").write_text("\n".join(lines))
        command: list[str | Path] = [
            _NODE / "node_modules/.bin/tsc", "--noEmit", "--strict", "--skipLibCheck",
            "--module", "esnext", "--moduleResolution", "bundler", "--target", "es2022",
            Path(scratch) / "check.ts",
        ]  # fmt: skip
        return [] if not watched else _complaints(command)


def promtool(folder: Path) -> list[str]:
    """Rules, by Prometheus' own parser; and a scrape configuration where there is one."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        rules = Path(scratch) / "rules.yaml"
        for one in objects(folder):
            if one.get("kind") == "PrometheusRule":
                rules.write_text(json.dumps(one["spec"]))
                found += _complaints([TOOLS / "bin/promtool", "check", "rules", rules])
    return found


def scraping(folder: Path) -> list[str]:
    """Prometheus' configuration of compose, and the rules that it names."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(folder / "prometheus.yaml", scratch)
        shutil.copytree(folder / "dashboards" / "rules", Path(scratch) / "rules")
        path = Path(scratch) / "prometheus.yaml"
        # A token's file is there on the machine that has it.
        path.write_text(path.read_text().replace("/run/secrets/console", "/dev/null"))
        return _complaints([TOOLS / "bin/promtool", "check", "config", path])


def compose(folder: Path) -> list[str]:
    """The compose specification's schema; and that every file that is mounted is there."""
    (content,) = documents(folder / "compose.yaml")
    command: list[str | Path] = [
        _OWN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec",
        folder / "compose.yaml",
    ]  # fmt: skip
    found = _complaints(command)
    for name, service in cast("dict[str, dict[str, list[str]]]", content["services"]).items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./") and not (folder / source).exists():
                found.append(f"{name}: there is no {source}")
    return found


def dockerfiles(folder: Path) -> list[str]:
    """`hadolint`, with its warnings."""
    paths = sorted(folder / f"Dockerfile.{kind}" for kind in ("cpu", "cuda"))
    return _complaints([_OWN / "hadolint", "--failure-threshold", "info", *paths])


def units(folder: Path) -> list[str]:
    """`systemd-analyze verify`, with stand-ins for programs that only a machine with baton has."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        program = root / "program"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        for path in sorted(folder.glob("*.service")):
            text = re.sub(r"/usr/lib/baton/bin/\w+", str(program), path.read_text())
            (root / path.name).write_text(text.replace("/etc/baton", f"{folder.resolve()}"))
        found = []
        for path in sorted(root.glob("*.service")):
            unit = path.rename(root / path.name.replace("@.", "@prefill."))
            command: list[str | Path] = ["systemd-analyze", "verify", "--man=no", unit]
            found += [line for line in _complaints(command, always=True) if unit.name in line]
        return found


def kustomize(folder: Path) -> dict[str, list[dict[str, object]]]:
    """What kustomize makes of the base and of each overlay."""
    made = {}
    for name in ("base", "overlays/gpu", "overlays/rdma"):
        done = _run(["kubectl", "kustomize", folder / name])
        if done.returncode:
            raise ValueError(f"{name}: {done.stderr.strip()}")
        made[name] = [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one]
    return made


def helm(
    folder: Path, values: Mapping[str, object] | None = None, *, name: str = "baton"
) -> tuple[list[str], list[dict[str, object]]]:
    """`helm lint` and `helm template`: findings, and the objects that come of it."""
    program = """
import json, sys
import helm_python as helm
folder, name, values = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
found = [one["path"] + ": " + one["error"] for one in helm.lint(folder, values)["messages"]
         if one["severity"] > 1]
made = {}
try:
    with helm.Chart.load(folder) as chart:
        chart.validate_schema(values)
        made = chart.render(values, name=name, namespace="baton")
except helm.HelmError as error:
    found.append(str(error))
print(json.dumps({"found": found, "made": made}))
"""
    done = _run([_OWN / "python", "-c", program, folder, name, json.dumps(values or {})])
    if done.returncode:
        return [done.stderr.strip().splitlines()[-1]], []
    told = json.loads(done.stdout)
    texts = [text for path, text in told["made"].items() if not path.endswith(".tpl")]
    made = [one for text in texts for one in yaml.load_all(text, yaml.CSafeLoader) if one]
    return told["found"], made


def _complaints(command: Sequence[str | Path], *, always: bool = False) -> list[str]:
    """What a program says when it does not end well."""
    done = _run(command)
    if done.returncode == 0 and not always:
        return []
    return [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]


def _run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
