"""Checks of manifests that need nothing but what the project installs: findings as lines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import jsonschema  # type: ignore[import-untyped]  # it ships none, and nothing of it is kept
import yaml

from baton.config.load import load_text
from baton.domain.errors import ConfigInvalid
from tests.deploy.kuberay_fields import RAY_SERVICE

Object = Mapping[str, object]


def documents(path: Path) -> list[dict[str, object]]:
    """Every YAML document of a file."""
    return [one for one in yaml.load_all(path.read_text(), yaml.CSafeLoader) if one is not None]


def objects(folder: Path) -> list[dict[str, object]]:
    """Every Kubernetes object of a folder."""
    found = [one for path in sorted(folder.glob("*.yaml")) for one in documents(path)]
    return [one for one in found if one.get("kind") != "Kustomization"]


def of_schema(value: object, schema: Mapping[str, object]) -> list[str]:
    """What does not fit a JSON schema."""
    checker = jsonschema.Draft202012Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in checker.iter_errors(value)]


def ray_service(folder: Path) -> list[str]:
    """What a RayService has that KubeRay does not know, and the other way round."""
    services = [one for one in objects(folder) if one["kind"] == "RayService"]
    found = [f"{len(services)} RayServices, wanted one"] if len(services) != 1 else []
    found += [line for one in services for line in of_schema(one, RAY_SERVICE)]
    return found or [line for one in services for line in _said_twice(one)]


def _said_twice(service: dict[str, object]) -> Iterator[str]:
    """Resources in two places, which KubeRay's operator refuses."""
    cluster = cast("dict[str, dict[str, dict[str, object]]]", service["spec"])["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cast("list[Object]", cluster["workerGroupSpecs"])]
    for group in groups:
        started = cast("dict[str, str]", group.get("rayStartParams", {}))
        both = started.keys() & {"num-cpus", "num-gpus", "memory", "resources", "labels"}
        if both and group.get("resources"):
            yield f"{group.get('groupName', 'head')}: resources, and {', '.join(sorted(both))}"


def served(folder: Path) -> list[str]:
    """What Ray Serve would make of a RayService's `serveConfigV2`."""
    found = []
    for one in objects(folder):
        if one["kind"] == "RayService":
            spec = cast("dict[str, str]", one["spec"])
            found += serve_config(yaml.load(spec["serveConfigV2"], yaml.CSafeLoader))
    return found


def serve_config(config: object) -> list[str]:
    """What Ray Serve does not accept, and what it would drop without a word."""
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    try:
        read = ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        return [f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}"]
    kept = read.model_dump(exclude_unset=True)
    return [*_dropped(config, kept, "$"), *_applications(cast("dict[str, object]", config))]


def _dropped(given: object, kept: object, path: str) -> Iterator[str]:
    if path.endswith((".args", ".ray_actor_options.resources")):
        return
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        for key, value in given.items():
            if key not in kept:
                yield f"{path}.{key}: Ray Serve knows no such key"
            else:
                yield from _dropped(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from _dropped(one, other, f"{path}[{index}]")


def _applications(config: dict[str, object]) -> Iterator[str]:
    """Whether what is named can be imported, and takes the configuration that goes along."""
    from importlib import import_module

    from baton.serving.application.app import pool_options
    from baton.serving.shared.names import CONTROLLER, INGRESS

    for one in cast("list[dict[str, object]]", config["applications"]):
        module, _, name = str(one["import_path"]).partition(":")
        try:
            getattr(import_module(module), name)
            loaded = load_text(json.dumps(cast("dict[str, object]", one["args"])["config"]))
        except (ImportError, AttributeError, ConfigInvalid, KeyError) as error:
            yield f"{one['name']}: {error}"
            continue
        there = {INGRESS, CONTROLLER} | {
            str(pool_options(loaded, it)["name"]) for it in loaded.pools
        }
        for deployment in cast("list[dict[str, object]]", one.get("deployments", [])):
            if deployment["name"] not in there:
                yield f"{one['name']}: there is no deployment {deployment['name']}"


def ray_cluster(folder: Path) -> list[str]:
    """What `ray up` would not accept, by the schema that it goes by."""
    (cluster,) = documents(folder / "cluster.yaml")
    found = of_schema(cluster, _ray_schema())
    types = cast("dict[str, object]", cluster.get("available_node_types", {}))
    head = cluster.get("head_node_type")
    found += [] if head in types else [f"$.head_node_type: there is no type {head}"]
    docker = cast("dict[str, list[str]]", cluster.get("docker", {}))
    return found + [one for one in docker.get("run_options", []) if not _is_one_option(one)]


def _is_one_option(option: str) -> bool:
    """Ray puts options into the command line of a shell: each is a word, or has one behind it."""
    try:
        first, *more = shlex.split(option)
    except ValueError:
        return False
    return first.startswith("--") and len(more) <= 1


@cache
def _ray_schema() -> dict[str, object]:
    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    path = Path(ray.origin).parent / "autoscaler" / "ray-schema.json"
    return cast("dict[str, object]", json.loads(path.read_text()))


def values_of_chart(folder: Path) -> list[str]:
    """Whether the chart's values fit its schema."""
    schema = json.loads((folder / "values.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    (values,) = documents(folder / "values.yaml")
    return of_schema(values, schema)


def kustomization(folder: Path) -> list[str]:
    """Whether everything that is named is there, and every patch finds its place."""
    found = []
    for path in sorted(folder.rglob("kustomization.yaml")):
        (content,) = documents(path)
        here = path.parent.relative_to(folder)
        unknown = content.keys() - {"apiVersion", "kind", "resources", "patches"}
        found += [f"{here}: {key}: no field that is used here" for key in sorted(unknown)]
        for name in cast("list[str]", content.get("resources", [])):
            if not (path.parent / name).exists():
                found.append(f"{here}: resources: there is no {name}")
    return found
