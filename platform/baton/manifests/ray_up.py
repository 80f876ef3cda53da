"""A cluster for `ray up`, on machines in AWS that Ray starts and stops, and what to serve on it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Final

from baton.manifests.adapted import Adapted, Plain
from baton.manifests.environment import ray_variables
from baton.manifests.images import MODELS, image_of
from baton.manifests.serve_config import serve_config
from baton.manifests.settings import CannotExport, ManifestSettings
from baton.manifests.shapes import NodeGroup, front_group, head_group, pool_groups
from baton.manifests.text import yaml_text

MACHINES: Final[Mapping[str, str]] = {
    "H200": "p5en.48xlarge",
    "H100": "p5.48xlarge",
    "A100": "p4d.24xlarge",
    "L40S": "g6e.48xlarge",
    "L4": "g6.48xlarge",
    "A10G": "g5.48xlarge",
}
"""The machine with eight of an accelerator. Source: AWS' list of accelerated instances."""
_PLAIN: Final = "m7i.4xlarge"
_CPUS: Final = 16
_TOKEN: Final = "~/.ray/auth_token"  # noqa: S105 - where Ray looks for it, not what it is
_FILES: Final = "--ulimit nofile=65536:65536"
_HEAD: Final = (
    "ray start --head --port=6379 --dashboard-host=127.0.0.1"
    " --autoscaling-config=~/ray_bootstrap_config.yaml"
)
_WORKER: Final = "ray start --address=$RAY_HEAD_IP:6379"


def ray_up_files(deployment: Adapted, settings: ManifestSettings) -> Mapping[str, bytes]:
    """`cluster.yaml` for `ray up`, `serve.yaml` for `serve deploy`.

    Raises:
        CannotExport: a pool wants an accelerator of which no machine is known.
    """
    return {
        "cluster.yaml": yaml_text(_cluster(deployment, settings)).encode(),
        "serve.yaml": yaml_text(serve_config(deployment)).encode(),
    }


def _cluster(deployment: Adapted, settings: ManifestSettings) -> Plain:
    front = front_group(deployment.config)
    pools = pool_groups(deployment.config, settings)
    kinds: dict[str, object] = {"head": _node(head_group(), _PLAIN, {})}
    kinds[front.name] = _node(front, _PLAIN, {})
    for group in pools:
        kind = deployment.config.pools[group.name].resources.accelerator
        kinds[group.name] = _node(group, _machine(group, kind), {})
    most = sum(group.max * group.hosts for group in (front, *pools))
    return {
        "cluster_name": settings.name,
        "max_workers": most,
        "idle_timeout_minutes": 5,
        "provider": {"type": "aws", "region": "us-east-1", "cache_stopped_nodes": False},
        "auth": {"ssh_user": "ubuntu"},
        "docker": {
            "image": image_of(deployment, settings),
            "container_name": settings.name,
            "pull_before_run": True,
            "run_options": [_FILES, *_environment(deployment)],
        },
        # Ray's token: `openssl rand -hex 32 > ~/.ray/auth_token; chmod 600 ~/.ray/auth_token`.
        "file_mounts": {_TOKEN: _TOKEN},
        "available_node_types": kinds,
        "head_node_type": "head",
        "head_start_ray_commands": ["ray stop", _HEAD],
        "worker_start_ray_commands": ["ray stop", _WORKER],
    }


def _node(group: NodeGroup, machine: str, config: Plain) -> Plain:
    resources: dict[str, int] = {"CPU": group.cpus}
    if group.gpus:
        resources["GPU"] = group.gpus
    node: Plain = {
        "resources": {**resources, **group.resources},
        "node_config": {"InstanceType": machine, **config},
    }
    if group.labels:
        node["labels"] = dict(group.labels)
    if group.name == "head":
        return node
    return {"min_workers": group.min * group.hosts, "max_workers": group.max * group.hosts, **node}


def _machine(group: NodeGroup, accelerator: str | None) -> str:
    if not group.gpus:
        return _PLAIN
    if accelerator is None or accelerator not in MACHINES:
        raise CannotExport(
            f"pools.{group.name}: no machine is known with the accelerator {accelerator}",
            f"set resources.accelerator to one of {', '.join(MACHINES)}, or write the node type"
            " by hand",
        )
    return MACHINES[accelerator]


def _environment(deployment: Adapted) -> list[str]:
    variables = ray_variables(deployment.config) | {"RAY_AUTH_MODE": "token", "HF_HOME": MODELS}
    # Ray puts these into the command line of a shell.
    return [f"--env {shlex.quote(f'{name}={value}')}" for name, value in sorted(variables.items())]
