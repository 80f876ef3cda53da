"""A Helm chart: the RayService follows `config` in its values, whose schema is baton's own.

*Theory of operation.* What depends on the configuration's pools is a template written by hand, for
it loops over them; what depends on names and ports alone is rendered here, with Helm's expressions
for these. Some of what a chart holds follows from the configuration in ways that no template can
repeat: it keeps what that was made from (`files/checks.yaml`), and fails where its values say
something else. That the chart with its own values gives what `kuberay` gives is a test.
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
from baton.config.write.jsonschema import schema
from baton.config.write.render import plain
from baton.manifests.cluster_deployment import Adapted, Plain
from baton.manifests.environment import ray_variables
from baton.manifests.images import image_of
from baton.manifests.kubernetes.kuberay import AUTOSCALER, RAY_VERSION
from baton.manifests.monitoring import monitors, rule_groups
from baton.manifests.networking import policy, services
from baton.manifests.node_groups import (
    DEFAULT_ENGINE_BYTES,
    RAY_MIB,
    front_group,
    head_group,
    pool_groups,
)
from baton.manifests.pod_limits import TAKEN, check_pods
from baton.manifests.pods import (
    POD_SECURITY,
    RAYLET_LIVES,
    RDMA_RESOURCE,
    memory_of,
    mib_text,
    models_folder,
)
from baton.manifests.settings import ManifestSettings
from baton.manifests.yaml_writer import yaml_text

_NAME: Final = "the-release"
_NAMESPACE: Final = "its-space"
_LOOKS_AHEAD: Final = re.compile(r"\(\?:\[([^]]+)]\|\[([^]]+)]\(\?=\[\1]\)\)\{0,(\d+)}")
"""Of a name: `(?:[a-z0-9]|[_-](?=[a-z0-9])){0,47}`, a separator only before something else."""
_PORT: Final = 900_001
_METRICS_PORT: Final = 900_002
"""No ports, so that nothing else is taken for them."""
_EXPRESSIONS: Final = {
    _NAME: "{{ .Release.Name }}",
    _NAMESPACE: "{{ .Release.Namespace }}",
    str(_PORT): "{{ .Values.config.server.port }}",
    str(_METRICS_PORT): "{{ .Values.config.observability.metrics.port }}",
}
_MADE_FROM: Final = (
    ("admission", "timeouts", "total"),
    ("observability", "console", "enabled"),
    ("observability", "metrics", "enabled"),
    ("server", "front"),
)
"""Keys from which variables and objects are made when a chart is exported."""
_READ: Final = (
    *_MADE_FROM,
    ("observability", "metrics", "port"),
    ("server", "host"),
    ("server", "port"),
)
"""Keys that templates read, which are to be there with their defaults too."""


def helm_files(deployment: Adapted, settings: ManifestSettings) -> Mapping[str, bytes]:
    """The chart.

    Raises:
        CannotExport: pods cannot give what the configuration asks for.
    """
    check_pods(deployment.config)
    named = replace(settings, name=_NAME, namespace=_NAMESPACE)
    following = replace(deployment, config=_with_expressions(deployment.config))
    texts = {
        "Chart.yaml": yaml_text(_chart(settings)),
        "values.yaml": yaml_text(values(deployment, settings)),
        "values.schema.json": json.dumps(values_schema(), indent=2) + "\n",
        "files/checks.yaml": yaml_text(_checks(deployment)),
        "files/rules.yaml": rule_groups(),
        "templates/services.yaml": _template(services(following, named)),
        "templates/networkpolicy.yaml": _template([policy(following, named)]),
        "templates/monitoring.yaml": _when("monitoring", _template(monitors(following, named))),
    }
    folder = resources.files("baton.manifests") / "templates" / "helm" / "templates"
    written = {f"templates/{one.name}": one.read_text() for one in folder.iterdir()}
    return {name: text.encode() for name, text in sorted((texts | written).items())}


def values(deployment: Adapted, settings: ManifestSettings) -> Plain:
    """The chart's own values; all but `config` is what clusters differ in."""
    config = deployment.config
    pools = {group.name: memory_of(group) for group in pool_groups(config, settings)}
    return {
        "image": image_of(deployment, settings),
        "imagePullSecrets": [],
        "config": _configuration(deployment),
        "keys": bool(deployment.key_files),
        "console": deployment.has_token,
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
            "head": memory_of(head_group()),
            "front": memory_of(front_group(config)),
            "engine": mib_text(DEFAULT_ENGINE_BYTES),
            "pools": pools,
            "rayMib": RAY_MIB,
        },
        "autoscaler": AUTOSCALER,
        "podSecurityContext": POD_SECURITY,
        "probe": {"command": RAYLET_LIVES},
        "environment": ray_variables(config) | {"HF_HOME": models_folder(config)},
    }


def values_schema() -> Plain:
    """JSON Schema of the values: of `config`, it is that of a configuration file."""
    text: Plain = {"type": "string"}
    whole: Plain = {"type": "integer", "minimum": 0}
    texts: Plain = {"type": "object", "additionalProperties": text}
    config = _for_go({key: value for key, value in schema().items() if key != "$schema"})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_closed(
            {
                "image": text | {"minLength": 1},
                "imagePullSecrets": {"type": "array", "items": {"type": "object"}},
                "config": config,
                "keys": {"type": "boolean"},
                "console": {"type": "boolean"},
                "monitoring": {"type": "boolean"},
                "redis": {"type": "object"},
                "models": _closed({"claim": text, "room": texts}),
                "gpu": _closed(
                    {
                        "perNode": {"type": "integer", "minimum": 1},
                        "nodeSelector": texts,
                        "tolerations": {"type": "array", "items": {"type": "object"}},
                    }
                ),
                "rdma": _closed({"enabled": {"type": "boolean"}, "resource": text}),
                "memory": _closed(
                    {"head": text, "front": text, "engine": text, "pools": texts, "rayMib": whole}
                ),
                "autoscaler": {"type": "object"},
                "podSecurityContext": {"type": "object"},
                "probe": _closed({"command": {"type": "array", "items": text}}),
                "environment": texts,
                "global": {"type": "object"},
            }
        ),
    }


def _closed(properties: Mapping[str, object]) -> Plain:
    return {"type": "object", "additionalProperties": False, "properties": dict(properties)}


def _for_go(schema: object) -> object:
    """The same schema for Helm, whose regular expressions know no look-ahead."""
    if isinstance(schema, list):
        return [_for_go(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _for_go(value) for key, value in schema.items()}
    pattern = found.get("pattern")
    if isinstance(pattern, str) and (looks := _LOOKS_AHEAD.search(pattern)):
        inner, between, most = looks.groups()
        found["pattern"] = pattern.replace(looks[0], f"(?:[{between}]?[{inner}])*")
        found["maxLength"] = int(most) + 1
    return found


def _configuration(deployment: Adapted) -> Plain:
    """What is written, and the keys that templates read, which may have their defaults."""
    found: Plain = json.loads(json.dumps(deployment.written))
    for path in _READ:
        section = found
        for key in path[:-1]:
            below = section.setdefault(key, {})
            assert isinstance(below, dict), "a section is written as a mapping"
            section = below
        section[path[-1]] = _value(deployment, path)
    return found


def _checks(deployment: Adapted) -> Plain:
    """What the chart's values are compared with."""
    return {
        "exported": {".".join(path): _value(deployment, path) for path in _MADE_FROM},
        "taken": [{"first": one.first, "last": one.last, "by": one.by} for one in TAKEN],
    }


def _value(deployment: Adapted, path: tuple[str, ...]) -> object:
    found: object = plain(deployment.config)
    for key in path:
        assert isinstance(found, Mapping), "a section is written as a mapping"
        found = found[key]
    return found


def _with_expressions(config: DeploymentConfig) -> DeploymentConfig:
    """The same, with numbers for ports that become expressions."""
    seen = config.observability
    metrics = replace(seen.metrics, port=_METRICS_PORT)
    return replace(
        config,
        server=replace(config.server, port=_PORT),
        observability=replace(seen, metrics=metrics),
    )


def _chart(settings: ManifestSettings) -> Plain:
    return {
        "apiVersion": "v2",
        "name": settings.name,
        "description": "LLMs on vLLM in separate prefill and decode pools, on KubeRay",
        "type": "application",
        "version": baton.__version__,
        "appVersion": f"{baton.__version__}-ray-{RAY_VERSION}",
        "kubeVersion": ">=1.28.0-0",
    }


def _template(objects: list[Plain]) -> str:
    text = yaml_text(*objects)
    for name, expression in _EXPRESSIONS.items():
        text = text.replace(name, expression)
    return text


def _when(value: str, text: str) -> str:
    return f"{{{{- if .Values.{value} }}}}\n{text}{{{{- end }}}}\n"
