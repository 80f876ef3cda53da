"""Units for machines without Kubernetes: one for everything, or head, nodes and application."""

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
from baton.config.write.yaml_writer import yaml_text
from baton.manifests.cluster_deployment import adapt_to_cluster, explicit_config_values
from baton.manifests.environment import ray_variables
from baton.manifests.node_groups import NodeGroup, front_group, head_group, pool_groups
from baton.manifests.serve_config import serve_config
from baton.manifests.settings import ManifestSettings

_STOP_MARGIN_S: Final = 90
"""After the last stream: Serve's shutdown and the end of other processes."""
_TOKEN_VARIABLES: Final = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/etc/baton/ray-token"}
_CLUSTER_UNITS: Final = (
    "baton-head.service",
    "baton-node@.service",
    "baton-application.service",
)


def systemd_files(loaded: LoadedConfig, settings: ManifestSettings) -> Mapping[str, bytes]:
    """A unit for one machine; and, unless baton terminates TLS, units for several."""
    texts = {
        "baton.service": _unit("baton.service", loaded),
        "baton.yaml": yaml_text(explicit_config_values(loaded)),
    }
    if loaded.config.security.tls == TlsConfig():  # which only one machine ends itself
        texts |= _cluster_units(loaded, settings)
    return {name: text.encode() for name, text in texts.items()}


def _cluster_units(loaded: LoadedConfig, settings: ManifestSettings) -> dict[str, str]:
    deployment = adapt_to_cluster(loaded)
    groups = [front_group(deployment.config), *pool_groups(deployment.config, settings)]
    return {
        **{name: _unit(name, loaded) for name in _CLUSTER_UNITS},
        "serve.yaml": yaml_text(serve_config(deployment)),
        "ray.env": _env_file(ray_variables(deployment.config) | _TOKEN_VARIABLES),
        **{f"nodes/{group.name}.env": _group_env_file(group) for group in groups},
    }


def _unit(name: str, loaded: LoadedConfig) -> str:
    text = (resources.files("baton.manifests") / "templates" / "systemd" / name).read_text()
    stop_s = int(loaded.config.admission.timeouts.total_s) + _STOP_MARGIN_S
    substitutions = {
        "stop_s": str(stop_s),
        "head_options": _ray_options(head_group()),
        "writes": _read_write_paths(loaded.config),
    }
    return Template(text).substitute(substitutions)


def _read_write_paths(config: DeploymentConfig) -> str:
    """A line that lets a unit write to the folder of models."""
    cache_dir = config.cluster.model_cache.path
    return "" if cache_dir is None else f"\nReadWritePaths=-{cache_dir}"


def _env_file(variables: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def _group_env_file(group: NodeGroup) -> str:
    """An EnvironmentFile; the unit splits the value into words."""
    return f"RAY_NODE_OPTIONS={json.dumps(_ray_options(group))}\n"


def _ray_options(group: NodeGroup) -> str:
    options = [f"--num-cpus={group.cpus}"]
    if group.gpus:
        options.append(f"--num-gpus={group.gpus}")
    # Ray detects accelerators, but not baton's own resources.
    baton_resources = {
        name: amount for name, amount in group.resources.items() if name.startswith("baton_")
    }
    if baton_resources:
        options.append(f"--resources={json.dumps(baton_resources, separators=(',', ':'))}")
    if group.labels:
        options.append(
            "--labels=" + ",".join(f"{key}={value}" for key, value in group.labels.items())
        )
    return shlex.join(options)
