"""Units for bare machines: one that runs everything, or a head, nodes and the application."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib import resources
from string import Template
from typing import Final

from baton.config.load import LoadedConfig
from baton.config.schema.deployment import DeploymentConfig
from baton.config.schema.security import TlsConfig
from baton.manifests.cluster_deployment import adapted, written_keys
from baton.manifests.environment import ray_variables
from baton.manifests.node_groups import NodeGroup, front_group, head_group, pool_groups
from baton.manifests.serve_config import serve_config
from baton.manifests.settings import ManifestSettings
from baton.manifests.yaml_writer import yaml_text

_MARGIN_S: Final = 90
"""For what comes after the last stream: Serve's own shutdown, and ending what still lives."""
_TOKEN: Final = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/etc/baton/ray-token"}
_CLUSTER_UNITS: Final = (
    "baton-head.service",
    "baton-node@.service",
    "baton-application.service",
)


def systemd_files(loaded: LoadedConfig, settings: ManifestSettings) -> Mapping[str, bytes]:
    """A unit for one machine; and, where a cluster can run it, units for several."""
    texts = {
        "baton.service": _unit("baton.service", loaded),
        "baton.yaml": yaml_text(written_keys(loaded)),
    }
    if loaded.config.security.tls == TlsConfig():  # which only one machine ends itself
        texts |= _cluster(loaded, settings)
    return {name: text.encode() for name, text in texts.items()}


def _cluster(loaded: LoadedConfig, settings: ManifestSettings) -> dict[str, str]:
    deployment = adapted(loaded)
    groups = [front_group(deployment.config), *pool_groups(deployment.config, settings)]
    return {
        **{name: _unit(name, loaded) for name in _CLUSTER_UNITS},
        "serve.yaml": yaml_text(serve_config(deployment)),
        "ray.env": _variables(ray_variables(deployment.config) | _TOKEN),
        **{f"nodes/{group.name}.env": _group_variables(group) for group in groups},
    }


def _unit(name: str, loaded: LoadedConfig) -> str:
    text = (resources.files("baton.manifests") / "templates" / "systemd" / name).read_text()
    stop_s = int(loaded.config.admission.timeouts.total_s) + _MARGIN_S
    filled = {
        "stop_s": str(stop_s),
        "head_options": _ray_options(head_group()),
        "writes": _writes(loaded.config),
    }
    return Template(text).substitute(filled)


def _writes(config: DeploymentConfig) -> str:
    """A line for the folder of models, without which a unit could write nothing there."""
    folder = config.cluster.model_cache.path
    return "" if folder is None else f"\nReadWritePaths=-{folder}"


def _variables(variables: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def _group_variables(group: NodeGroup) -> str:
    """Read as an EnvironmentFile; the unit splits it into words, as a shell would."""
    return f"RAY_NODE_OPTIONS={json.dumps(_ray_options(group))}\n"


def _ray_options(group: NodeGroup) -> str:
    options = [f"--num-cpus={group.cpus}"]
    if group.gpus:
        options.append(f"--num-gpus={group.gpus}")
    # Ray finds accelerators by itself where they are; only names of ours have to be told.
    own = {name: amount for name, amount in group.resources.items() if name.startswith("baton_")}
    if own:
        options.append(f"--resources={json.dumps(own, separators=(',', ':'))}")
    if group.labels:
        options.append(
            "--labels=" + ",".join(f"{key}={value}" for key, value in group.labels.items())
        )
    return shlex.join(options)
