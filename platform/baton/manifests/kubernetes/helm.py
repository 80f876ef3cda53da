"""A Helm chart: the RayService follows `config` in its values, whose schema is baton's.

*Theory of operation.* Templates are handwritten; they follow the values. No template can derive the
variables of Ray from the configuration. So the chart keeps the keys that it was made from
(`files/export.yaml`), and fails if its values differ. Tests compare the rendered chart with the
output of `kuberay`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Final

import baton
from baton.config.write.jsonschema import json_schema
from baton.config.write.render import to_plain
from baton.config.write.yaml_writer import yaml_text
from baton.manifests.cluster_deployment import ClusterDeployment, PlainDict
from baton.manifests.kubernetes.chart_values import chart_values, values_file, values_schema
from baton.manifests.kubernetes.kuberay import RAY_VERSION
from baton.manifests.monitoring import rule_groups
from baton.manifests.node_groups import pool_groups
from baton.manifests.pod_limits import RESERVED_PORTS, check_pods
from baton.manifests.settings import ManifestSettings
from baton.serving.checks.configuration import (
    CPU_KV_BYTES,
    MAX_SHARD_BYTES,
    RAY_BYTES,
    SIM_REPLICA_BYTES,
    VLLM_REPLICA_BYTES,
)

_LOOKAHEAD: Final = re.compile(r"\(\?:\[([^]]+)]\|\[([^]]+)]\(\?=\[\1]\)\)\{0,(\d+)}")
"""As in `(?:[a-z0-9]|[_-](?=[a-z0-9])){0,47}`: no separator at the end of a name."""
_EXPORT_TIME_KEYS: Final = (("admission", "timeouts", "total"), ("server", "listener"))
"""Keys that determine variables when a chart is exported."""
_TEMPLATE_KEYS: Final = (
    *_EXPORT_TIME_KEYS,
    ("observability", "console", "enabled"),
    ("observability", "metrics", "enabled"),
    ("observability", "metrics", "port"),
    ("server", "host"),
    ("server", "port"),
)
"""Keys that templates read, so that values have them even at their defaults."""


def helm_files(deployment: ClusterDeployment, settings: ManifestSettings) -> Mapping[str, bytes]:
    """The chart.

    Raises:
        CannotExport: pods cannot satisfy the configuration.
    """
    check_pods(deployment.config)
    pool_groups(deployment.config, settings)  # it raises where replicas do not divide into nodes
    values = chart_values(
        deployment, settings, config=_chart_config(deployment), config_schema=_config_schema()
    )
    texts = {
        "Chart.yaml": yaml_text(_chart(settings)),
        "values.yaml": values_file(values),
        "values.schema.json": json.dumps(values_schema(values), indent=2) + "\n",
        "files/export.yaml": yaml_text(_export_facts(deployment)),
        "files/rules.yaml": rule_groups(None),
    }
    folder = resources.files("baton.manifests") / "templates" / "helm" / "templates"
    templates = {f"templates/{path.name}": path.read_text() for path in folder.iterdir()}
    return {name: text.encode() for name, text in sorted((texts | templates).items())}


def _config_schema() -> PlainDict:
    """The configuration's schema for Helm, with the keys that templates read required."""
    schema = _without_lookahead(
        {key: value for key, value in json_schema().items() if key != "$schema"}
    )
    assert isinstance(schema, dict), "a schema is a mapping"
    return schema | {"allOf": [_required(path) for path in _TEMPLATE_KEYS]}


def _required(path: tuple[str, ...]) -> PlainDict:
    """A schema that requires the key at a path."""
    if not path:
        return {}
    first, *rest = path
    return {"required": [first], "properties": {first: _required(tuple(rest))}}


def _without_lookahead(schema: object) -> object:
    """The same schema for Helm, whose regular expressions have no lookahead."""
    if isinstance(schema, list):
        return [_without_lookahead(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    converted = {key: _without_lookahead(value) for key, value in schema.items()}
    pattern = converted.get("pattern")
    if isinstance(pattern, str) and (match := _LOOKAHEAD.search(pattern)):
        characters, separators, max_repeats = match.groups()
        converted["pattern"] = pattern.replace(match[0], f"(?:[{separators}]?[{characters}])*")
        converted["maxLength"] = int(max_repeats) + 1
    return converted


def _chart_config(deployment: ClusterDeployment) -> PlainDict:
    values: PlainDict = json.loads(json.dumps(deployment.explicit_values))
    for path in _TEMPLATE_KEYS:
        section = values
        for key in path[:-1]:
            child = section.setdefault(key, {})
            assert isinstance(child, dict), "a section is written as a mapping"
            section = child
        section[path[-1]] = _config_value(deployment, path)
    return values


def _export_facts(deployment: ClusterDeployment) -> PlainDict:
    """Facts that templates read: keys at the export, reserved ports, memory of processes."""
    return {
        "exported": {".".join(path): _config_value(deployment, path) for path in _EXPORT_TIME_KEYS},
        "taken": [
            {"first": ports.first, "last": ports.last, "by": ports.owner}
            for ports in RESERVED_PORTS
        ],
        "bytes": {
            "ray": RAY_BYTES,
            "worker": VLLM_REPLICA_BYTES,
            "shard": MAX_SHARD_BYTES,
            "cpuKv": CPU_KV_BYTES,
            "simulated": SIM_REPLICA_BYTES,
        },
    }


def _config_value(deployment: ClusterDeployment, path: tuple[str, ...]) -> object:
    value: object = to_plain(deployment.config)
    for key in path:
        assert isinstance(value, Mapping), "a section is written as a mapping"
        value = value[key]
    return value


def _chart(settings: ManifestSettings) -> PlainDict:
    return {
        "apiVersion": "v2",
        "name": settings.name,
        "description": "LLMs on vLLM in separate prefill and decode pools, on KubeRay",
        "type": "application",
        "version": baton.__version__,
        "appVersion": f"{baton.__version__}-ray-{RAY_VERSION}",
        "kubeVersion": ">=1.28.0-0",
    }
