"""A Helm chart: the RayService follows `config` in its values, whose schema is baton's.

*Theory of operation.* Parts that depend on pools are a handwritten template with loops. Parts that
depend on names and ports alone are rendered here, with Helm's expressions in them. Other content
follows from the configuration in ways that no template can repeat: the chart keeps the values that
it was made from (`files/checks.yaml`), and fails if its values differ. A test compares the rendered
chart with the output of `kuberay`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from typing import Final

import baton
from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.jsonschema import json_schema
from baton.config.write.render import to_plain
from baton.config.write.yaml_writer import yaml_text
from baton.manifests.cluster_deployment import ClusterDeployment, PlainDict
from baton.manifests.environment import ray_variables
from baton.manifests.images import image_name
from baton.manifests.kubernetes.kuberay import AUTOSCALER_OPTIONS, RAY_VERSION
from baton.manifests.monitoring import monitor_objects, rule_groups
from baton.manifests.networking import network_policy, services
from baton.manifests.node_groups import (
    DEFAULT_ENGINE_BYTES,
    RAY_MEMORY_MIB,
    front_group,
    head_group,
    pool_groups,
)
from baton.manifests.pod_limits import RESERVED_PORTS, check_pods
from baton.manifests.pods import (
    POD_SECURITY,
    RAYLET_HEALTH_COMMAND,
    RDMA_RESOURCE,
    memory_request,
    mib_text,
    models_dir,
)
from baton.manifests.settings import ManifestSettings

_NAME_PLACEHOLDER: Final = "the-release"
_NAMESPACE_PLACEHOLDER: Final = "its-space"
_LOOKAHEAD: Final = re.compile(r"\(\?:\[([^]]+)]\|\[([^]]+)]\(\?=\[\1]\)\)\{0,(\d+)}")
"""As in `(?:[a-z0-9]|[_-](?=[a-z0-9])){0,47}`: no separator at the end of a name."""
_PORT_PLACEHOLDER: Final = 900_001
_METRICS_PORT_PLACEHOLDER: Final = 900_002
"""Both are beyond any port, so that nothing else has their digits."""
_EXPRESSIONS: Final = {
    _NAME_PLACEHOLDER: "{{ .Release.Name }}",
    _NAMESPACE_PLACEHOLDER: "{{ .Release.Namespace }}",
    str(_PORT_PLACEHOLDER): "{{ .Values.config.server.port }}",
    str(_METRICS_PORT_PLACEHOLDER): "{{ .Values.config.observability.metrics.port }}",
}
_EXPORT_TIME_KEYS: Final = (
    ("admission", "timeouts", "total"),
    ("observability", "console", "enabled"),
    ("observability", "metrics", "enabled"),
    ("server", "listener"),
)
"""Keys that determine variables and objects when a chart is exported."""
_TEMPLATE_KEYS: Final = (
    *_EXPORT_TIME_KEYS,
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
    template_settings = replace(settings, name=_NAME_PLACEHOLDER, namespace=_NAMESPACE_PLACEHOLDER)
    template_deployment = replace(deployment, config=_with_placeholders(deployment.config))
    texts = {
        "Chart.yaml": yaml_text(_chart(settings)),
        "values.yaml": yaml_text(_chart_values(deployment, settings)),
        "values.schema.json": json.dumps(_values_schema(), indent=2) + "\n",
        "files/checks.yaml": yaml_text(_export_checks(deployment)),
        "files/rules.yaml": rule_groups(),
        "templates/services.yaml": _template(services(template_deployment, template_settings)),
        "templates/networkpolicy.yaml": _template(
            [network_policy(template_deployment, template_settings)]
        ),
        "templates/monitoring.yaml": _conditional(
            "monitoring", _template(monitor_objects(template_deployment, template_settings))
        ),
    }
    folder = resources.files("baton.manifests") / "templates" / "helm" / "templates"
    static_templates = {f"templates/{path.name}": path.read_text() for path in folder.iterdir()}
    return {name: text.encode() for name, text in sorted((texts | static_templates).items())}


def _chart_values(deployment: ClusterDeployment, settings: ManifestSettings) -> PlainDict:
    """The chart's default values: `config`, and the differences between clusters."""
    config = deployment.config
    pool_memory = {group.name: memory_request(group) for group in pool_groups(config, settings)}
    return {
        "image": image_name(deployment, settings),
        "imagePullSecrets": [],
        "config": _chart_config(deployment),
        "keys": bool(deployment.key_files),
        "console": deployment.needs_token,
        "monitoring": True,
        "redis": {},
        "models": {
            "claim": "",
            "room": {
                group.name: mib_text(group.models_bytes)
                for group in pool_groups(config, settings)
                if group.models_bytes
            },
        },
        "gpu": {"perNode": settings.gpus_per_node, "nodeSelector": {}, "tolerations": []},
        "rdma": {"enabled": config.transfer.require_rdma, "resource": RDMA_RESOURCE},
        "memory": {
            "head": memory_request(head_group()),
            "front": memory_request(front_group(config)),
            "engine": mib_text(DEFAULT_ENGINE_BYTES),
            "pools": pool_memory,
            "rayMib": RAY_MEMORY_MIB,
        },
        "autoscaler": AUTOSCALER_OPTIONS,
        "podSecurityContext": POD_SECURITY,
        "probe": {"command": RAYLET_HEALTH_COMMAND},
        "environment": ray_variables(config) | {"HF_HOME": models_dir(config)},
    }


def _values_schema() -> PlainDict:
    """JSON Schema of the values, with the configuration's schema for `config`."""
    text: PlainDict = {"type": "string"}
    whole: PlainDict = {"type": "integer", "minimum": 0}
    text_map: PlainDict = {"type": "object", "additionalProperties": text}
    config = _without_lookahead(
        {key: value for key, value in json_schema().items() if key != "$schema"}
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_closed_object(
            {
                "image": text | {"minLength": 1},
                "imagePullSecrets": {"type": "array", "items": {"type": "object"}},
                "config": config,
                "keys": {"type": "boolean"},
                "console": {"type": "boolean"},
                "monitoring": {"type": "boolean"},
                "redis": {"type": "object"},
                "models": _closed_object({"claim": text, "room": text_map}),
                "gpu": _closed_object(
                    {
                        "perNode": {"type": "integer", "minimum": 1},
                        "nodeSelector": text_map,
                        "tolerations": {"type": "array", "items": {"type": "object"}},
                    }
                ),
                "rdma": _closed_object({"enabled": {"type": "boolean"}, "resource": text}),
                "memory": _closed_object(
                    {
                        "head": text,
                        "front": text,
                        "engine": text,
                        "pools": text_map,
                        "rayMib": whole,
                    }
                ),
                "autoscaler": {"type": "object"},
                "podSecurityContext": {"type": "object"},
                "probe": _closed_object({"command": {"type": "array", "items": text}}),
                "environment": text_map,
                "global": {"type": "object"},
            }
        ),
    }


def _closed_object(properties: Mapping[str, object]) -> PlainDict:
    return {"type": "object", "additionalProperties": False, "properties": dict(properties)}


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


def _export_checks(deployment: ClusterDeployment) -> PlainDict:
    return {
        "exported": {".".join(path): _config_value(deployment, path) for path in _EXPORT_TIME_KEYS},
        "taken": [
            {"first": ports.first, "last": ports.last, "by": ports.owner}
            for ports in RESERVED_PORTS
        ],
    }


def _config_value(deployment: ClusterDeployment, path: tuple[str, ...]) -> object:
    value: object = to_plain(deployment.config)
    for key in path:
        assert isinstance(value, Mapping), "a section is written as a mapping"
        value = value[key]
    return value


def _with_placeholders(config: DeploymentConfig) -> DeploymentConfig:
    observability = config.observability
    metrics = replace(observability.metrics, port=_METRICS_PORT_PLACEHOLDER)
    return replace(
        config,
        server=replace(config.server, port=_PORT_PLACEHOLDER),
        observability=replace(observability, metrics=metrics),
    )


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


def _template(objects: list[PlainDict]) -> str:
    text = yaml_text(*objects)
    for name, expression in _EXPRESSIONS.items():
        text = text.replace(name, expression)
    return text


def _conditional(flag: str, text: str) -> str:
    return f"{{{{- if .Values.{flag} }}}}\n{text}{{{{- end }}}}\n"
