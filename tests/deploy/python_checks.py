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
    return [item for item in yaml.load_all(path.read_text(), yaml.CSafeLoader) if item is not None]


def objects(folder: Path) -> list[dict[str, object]]:
    """Every Kubernetes object of a folder."""
    all_documents = [
        document for path in sorted(folder.glob("*.yaml")) for document in documents(path)
    ]
    return [document for document in all_documents if document.get("kind") != "Kustomization"]


def schema_errors(value: object, schema: Mapping[str, object]) -> list[str]:
    """What does not fit a JSON schema."""
    checker = jsonschema.Draft202012Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in checker.iter_errors(value)]


def check_ray_service(folder: Path) -> list[str]:
    """What a RayService has that KubeRay does not know, and the other way round."""
    services = [object_ for object_ in objects(folder) if object_["kind"] == "RayService"]
    problems = [f"{len(services)} RayServices, expected one"] if len(services) != 1 else []
    problems += [line for service in services for line in schema_errors(service, RAY_SERVICE)]
    return problems or [line for service in services for line in _duplicate_resources(service)]


def _duplicate_resources(service: dict[str, object]) -> Iterator[str]:
    """Resources in two places, which KubeRay's operator refuses."""
    cluster = cast("dict[str, dict[str, dict[str, object]]]", service["spec"])["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cast("list[Object]", cluster["workerGroupSpecs"])]
    for group in groups:
        start_params = cast("dict[str, str]", group.get("rayStartParams", {}))
        duplicated = start_params.keys() & {"num-cpus", "num-gpus", "memory", "resources", "labels"}
        if duplicated and group.get("resources"):
            yield (
                f"{group.get('groupName', 'head')}: resources, and {', '.join(sorted(duplicated))}"
            )


def check_serve_configs(folder: Path) -> list[str]:
    """What Ray Serve would make of a RayService's `serveConfigV2`."""
    problems = []
    for object_ in objects(folder):
        if object_["kind"] == "RayService":
            spec = cast("dict[str, str]", object_["spec"])
            problems += check_serve_config(yaml.load(spec["serveConfigV2"], yaml.CSafeLoader))
    return problems


def check_serve_config(config: object) -> list[str]:
    """What Ray Serve does not accept, and what it would drop without a word."""
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema

    try:
        parsed = ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        return [f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}"]
    accepted = parsed.model_dump(exclude_unset=True)
    return [
        *_dropped_keys(config, accepted, "$"),
        *_application_problems(cast("dict[str, object]", config)),
    ]


def _dropped_keys(given: object, accepted: object, path: str) -> Iterator[str]:
    if path.endswith((".args", ".ray_actor_options.resources")):
        return
    if isinstance(given, Mapping) and isinstance(accepted, Mapping):
        for key, value in given.items():
            if key not in accepted:
                yield f"{path}.{key}: Ray Serve knows no such key"
            else:
                yield from _dropped_keys(value, accepted[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(accepted, list):
        for index, (item, other) in enumerate(zip(given, accepted, strict=True)):
            yield from _dropped_keys(item, other, f"{path}[{index}]")


def _application_problems(config: dict[str, object]) -> Iterator[str]:
    """Whether what is named can be imported, and takes the configuration that goes along."""
    from importlib import import_module

    from baton.serving.application.app import pool_options
    from baton.serving.shared.names import CONTROLLER, INGRESS

    for entry in cast("list[dict[str, object]]", config["applications"]):
        module, _, name = str(entry["import_path"]).partition(":")
        try:
            getattr(import_module(module), name)
            loaded = load_text(json.dumps(cast("dict[str, object]", entry["args"])["config"]))
        except (ImportError, AttributeError, ConfigInvalid, KeyError) as error:
            yield f"{entry['name']}: {error}"
            continue
        deployment_names = {INGRESS, CONTROLLER} | {
            str(pool_options(loaded, it)["name"]) for it in loaded.pools
        }
        for deployment in cast("list[dict[str, object]]", entry.get("deployments", [])):
            if deployment["name"] not in deployment_names:
                yield f"{entry['name']}: there is no deployment {deployment['name']}"


def check_ray_cluster(folder: Path) -> list[str]:
    """What `ray up` would not accept, by the schema that it goes by."""
    (cluster,) = documents(folder / "cluster.yaml")
    problems = schema_errors(cluster, _ray_schema())
    types = cast("dict[str, object]", cluster.get("available_node_types", {}))
    head = cluster.get("head_node_type")
    problems += [] if head in types else [f"$.head_node_type: there is no type {head}"]
    docker = cast("dict[str, list[str]]", cluster.get("docker", {}))
    return problems + [name for name in docker.get("run_options", []) if not _is_one_option(name)]


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


def check_chart_values(folder: Path) -> list[str]:
    """Whether the chart's values fit its schema."""
    schema = json.loads((folder / "values.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    (values,) = documents(folder / "values.yaml")
    return schema_errors(values, schema)


def check_kustomizations(folder: Path) -> list[str]:
    """Whether everything that is named is there, and every patch finds its place."""
    problems = []
    for path in sorted(folder.rglob("kustomization.yaml")):
        (content,) = documents(path)
        folder_name = path.parent.relative_to(folder)
        unknown = content.keys() - {"apiVersion", "kind", "resources", "patches"}
        problems += [f"{folder_name}: {key}: no field that is used here" for key in sorted(unknown)]
        for name in cast("list[str]", content.get("resources", [])):
            if not (path.parent / name).exists():
                problems.append(f"{folder_name}: resources: there is no {name}")
    return problems
