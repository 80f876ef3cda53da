"""A cluster for `ray up`, on machines in AWS that Ray starts and stops, and what to serve on it.

*Theory of operation.* Accelerators come by eight. A node declares what its machine has, so that Ray
puts as many replicas there as it has room for, and rents another machine only when none has any
left. `min_workers` is what the fewest replicas need; `max_workers` what the most need, or one
machine for each where pools differ and replicas may stand in each other's way.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from baton.config.schema.deployment import DeploymentConfig
from baton.manifests.cluster_deployment import KEYS, TOKEN, Adapted, Plain
from baton.manifests.environment import ray_variables
from baton.manifests.images import image_of
from baton.manifests.node_groups import NodeGroup, front_group, head_group, pool_groups
from baton.manifests.pod_limits import secret_files
from baton.manifests.pods import models_folder
from baton.manifests.serve_config import serve_config
from baton.manifests.settings import CannotExport, ManifestSettings
from baton.manifests.yaml_writer import yaml_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One that AWS rents out, with eight accelerators."""

    name: str
    cpus: int
    memory_gib: int


MACHINES: Final[Mapping[str, Machine]] = {
    "H200": Machine(name="p5en.48xlarge", cpus=192, memory_gib=2048),
    "H100": Machine(name="p5.48xlarge", cpus=192, memory_gib=2048),
    "A100": Machine(name="p4d.24xlarge", cpus=96, memory_gib=1152),
    "L40S": Machine(name="g6e.48xlarge", cpus=192, memory_gib=1536),
    "L4": Machine(name="g6.48xlarge", cpus=192, memory_gib=768),
    "A10G": Machine(name="g5.48xlarge", cpus=192, memory_gib=768),
}
"""By accelerator. Source: AWS' list of accelerated instances."""
_GPUS: Final = 8
_RAYS_SHARE: Final = 0.7
"""Of a machine's memory: the rest is for objects. Source: Ray 2.60's default."""
_PLAIN: Final = "m7i.4xlarge"
_CONSOLE: Final = "~/.baton/console-token"
"""On the machine of whoever runs `ray up`, where the configuration names no file."""
_TOKEN: Final = "~/.ray/auth_token"  # noqa: S105 - where Ray looks for it, not what it is
_FILES: Final = "--ulimit nofile=65536:65536"
_HEAD: Final = (
    "ray start --head --port=6379 --dashboard-host=127.0.0.1"
    " --autoscaling-config=~/ray_bootstrap_config.yaml"
)
_WORKER: Final = "ray start --address=$RAY_HEAD_IP:6379"


def ray_up_files(deployment: Adapted, settings: ManifestSettings) -> Mapping[str, bytes]:
    """`cluster.yaml` for `ray up`, `serve.yaml` for `serve deploy` on what that starts.

    `serve-anywhere.yaml` is for a cluster that runs already, whose nodes are of any kind.

    Raises:
        CannotExport: a pool wants an accelerator of which no machine is known, or more of a machine
            than it has; or a variable is read from a file whose path is not whole.
    """
    return {
        "cluster.yaml": yaml_text(_cluster(deployment, settings)).encode(),
        "serve.yaml": yaml_text(serve_config(deployment)).encode(),
        "serve-anywhere.yaml": yaml_text(serve_config(deployment, placed=False)).encode(),
    }


def _cluster(deployment: Adapted, settings: ManifestSettings) -> Plain:
    front = front_group(deployment.config)
    pools = pool_groups(deployment.config, settings)
    rented = [(front, _PLAIN), *_rented(pools, deployment.config)]
    kinds: dict[str, object] = {"head": _node(head_group(), _PLAIN)}
    kinds |= {group.name: _node(group, machine) for group, machine in rented}
    return {
        "cluster_name": settings.name,
        "max_workers": sum(group.max * group.hosts for group, _ in rented),
        "idle_timeout_minutes": 5,
        "provider": {"type": "aws", "region": "us-east-1", "cache_stopped_nodes": False},
        "auth": {"ssh_user": "ubuntu"},
        "docker": {
            "image": image_of(deployment, settings),
            "container_name": settings.name,
            "pull_before_run": True,
            "run_options": [_FILES, *_models(deployment.config), *_environment(deployment)],
        },
        "file_mounts": _mounted(deployment),
        "available_node_types": kinds,
        "head_node_type": "head",
        "head_start_ray_commands": ["ray stop", _HEAD],
        "worker_start_ray_commands": ["ray stop", _WORKER],
    }


def _models(config: DeploymentConfig) -> list[str]:
    """Models are kept on the machine where a folder of it is named, else in the container."""
    folder = config.cluster.model_cache.path
    return [] if folder is None else [f"-v {shlex.quote(f'{folder}:{folder}')}"]


def _mounted(deployment: Adapted) -> dict[str, str]:
    """Secrets: where they are in every container, and here."""
    # Ray's token: `openssl rand -hex 32 > ~/.ray/auth_token; chmod 600 ~/.ray/auth_token`.
    files = {_TOKEN: _TOKEN}
    files |= {str(KEYS / name): here for name, here in deployment.key_files.items()}
    if deployment.has_token:
        files[str(TOKEN)] = deployment.token_file or _CONSOLE
    for path, file in secret_files(deployment.config):
        if not file.startswith("/"):
            raise CannotExport(
                f"{path} is read from the file {file}, and containers have folders of their own",
                "give the whole path, from / on",
            )
        files[file] = file
    return files


def _rented(pools: Sequence[NodeGroup], config: DeploymentConfig) -> list[tuple[NodeGroup, str]]:
    """Machines of each pool: a replica on each without GPUs, else as many as there is room for."""
    found = []
    for group in pools:
        if not group.gpus:
            found.append((group, _PLAIN))
            continue
        machine = _machine(group, config.pools[group.name].resources.accelerator)
        each = _replicas_on(machine, group, config.pools[group.name].placement.max_per_node)
        # A replica may go to another pool's machine: then this one's has room for as many only if
        # they are alike.
        alike = all(_shape(group, config) == _shape(one, config) for one in pools if one.gpus)
        most = math.ceil(group.max / each) if alike else group.max
        least = math.ceil(group.min / each)
        there = replace(group, cpus=machine.cpus, gpus=_GPUS, min=least, max=most)
        found.append((there, machine.name))
    return found


def _shape(group: NodeGroup, config: DeploymentConfig) -> tuple[object, ...]:
    pool = config.pools[group.name]
    return group.gpus, group.cpus, group.hosts, pool.resources, pool.placement


def _replicas_on(machine: Machine, group: NodeGroup, max_per_node: int | None) -> int:
    """How many replicas one machine has room for; one of several hosts has its machines alone."""
    if group.gpus > _GPUS or group.cpus > machine.cpus:
        raise CannotExport(
            f"pools.{group.name}: a node is to have {group.gpus} GPUs and {group.cpus} CPUs, and"
            f" {machine.name} has {_GPUS} and {machine.cpus}",
            "give fewer with --gpus-per-node or resources.cpus, or write the node type by hand",
        )
    if group.hosts > 1:
        return 1
    room = [_GPUS // group.gpus, machine.cpus // group.cpus]
    if group.memory_limit_bytes is not None:
        memory_bytes = machine.memory_gib * 1024**3 * _RAYS_SHARE
        room.append(int(memory_bytes // group.memory_limit_bytes))
    return max(1, min([*room, *([] if max_per_node is None else [max_per_node])]))


def _node(group: NodeGroup, machine: str) -> Plain:
    resources: dict[str, int] = {"CPU": group.cpus}
    if group.gpus:
        resources["GPU"] = group.gpus
    node: Plain = {
        "resources": {**resources, **group.resources},
        "node_config": {"InstanceType": machine},
    }
    if group.labels:
        node["labels"] = dict(group.labels)
    if group.name == "head":
        return node
    return {"min_workers": group.min * group.hosts, "max_workers": group.max * group.hosts, **node}


def _machine(group: NodeGroup, accelerator: str | None) -> Machine:
    if accelerator is None or accelerator not in MACHINES:
        raise CannotExport(
            f"pools.{group.name}: no machine is known with the accelerator {accelerator}",
            f"set resources.accelerator to one of {', '.join(MACHINES)}, or write the node type"
            " by hand",
        )
    return MACHINES[accelerator]


def _environment(deployment: Adapted) -> list[str]:
    variables = ray_variables(deployment.config) | {
        "RAY_AUTH_MODE": "token",
        "HF_HOME": models_folder(deployment.config),
    }
    # Ray puts these into the command line of a shell.
    return [f"--env {shlex.quote(f'{name}={value}')}" for name, value in sorted(variables.items())]
