"""A cluster for `ray up`, on AWS instances that Ray starts and stops, and its application.

*Theory of operation.* Instances have eight accelerators. A node declares all of its instance, so
that Ray fills it with replicas before it starts another. `min_workers` fits the fewest replicas.
`max_workers` fits the most; if pools differ, it is an instance for each, because other pools'
replicas may take the room.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.yaml_writer import yaml_text
from baton.manifests.cluster_deployment import KEYS_DIR, TOKEN_FILE, ClusterDeployment, PlainDict
from baton.manifests.environment import ray_variables
from baton.manifests.images import image_name
from baton.manifests.node_groups import NodeGroup, front_group, head_group, pool_groups
from baton.manifests.pod_limits import secret_files
from baton.manifests.pods import models_dir
from baton.manifests.serve_config import serve_config
from baton.manifests.settings import CannotExport, ManifestSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """An AWS instance type with eight accelerators."""

    name: str
    cpus: int
    memory_gib: int


INSTANCE_TYPES: Final[Mapping[str, InstanceType]] = {
    "H200": InstanceType(name="p5en.48xlarge", cpus=192, memory_gib=2048),
    "H100": InstanceType(name="p5.48xlarge", cpus=192, memory_gib=2048),
    "A100": InstanceType(name="p4d.24xlarge", cpus=96, memory_gib=1152),
    "L40S": InstanceType(name="g6e.48xlarge", cpus=192, memory_gib=1536),
    "L4": InstanceType(name="g6.48xlarge", cpus=192, memory_gib=768),
    "A10G": InstanceType(name="g5.48xlarge", cpus=192, memory_gib=768),
}
"""By accelerator. Source: AWS' list of accelerated instances."""
_GPUS_PER_INSTANCE: Final = 8
_RAY_MEMORY_FRACTION: Final = 0.7
"""Of an instance's memory: the rest is Ray's object store. Source: Ray 2.60's default."""
_CPU_INSTANCE: Final = "m7i.4xlarge"
_LOCAL_CONSOLE_TOKEN: Final = "~/.baton/console-token"  # noqa: S105 - a path
"""On the machine that runs `ray up`, unless configured."""
_RAY_TOKEN_FILE: Final = "~/.ray/auth_token"  # noqa: S105 - where Ray looks for it, not what it is
_OPEN_FILES_OPTION: Final = "--ulimit nofile=65536:65536"
_HEAD_START_COMMAND: Final = (
    "ray start --head --port=6379 --dashboard-host=127.0.0.1"
    " --autoscaling-config=~/ray_bootstrap_config.yaml"
)
_WORKER_START_COMMAND: Final = "ray start --address=$RAY_HEAD_IP:6379"


def ray_up_files(deployment: ClusterDeployment, settings: ManifestSettings) -> Mapping[str, bytes]:
    """`cluster.yaml` for `ray up`, `serve.yaml` for `serve deploy` on that cluster.

    `serve-anywhere.yaml` is for an existing cluster with any nodes.

    Raises:
        CannotExport: a pool needs an accelerator without a known instance type, or more than an
            instance has; or the path of a secret's file is relative.
    """
    return {
        "cluster.yaml": yaml_text(_cluster(deployment, settings)).encode(),
        "serve.yaml": yaml_text(serve_config(deployment)).encode(),
        "serve-anywhere.yaml": yaml_text(serve_config(deployment, pin_to_nodes=False)).encode(),
    }


def _cluster(deployment: ClusterDeployment, settings: ManifestSettings) -> PlainDict:
    front = front_group(deployment.config)
    pools = pool_groups(deployment.config, settings)
    instances = [(front, _CPU_INSTANCE), *_assign_instances(pools, deployment.config)]
    node_types: dict[str, object] = {"head": _node_type(head_group(), _CPU_INSTANCE)}
    node_types |= {group.name: _node_type(group, machine) for group, machine in instances}
    return {
        "cluster_name": settings.name,
        "max_workers": sum(group.max * group.nodes_per_replica for group, _ in instances),
        "idle_timeout_minutes": 5,
        "provider": {"type": "aws", "region": "us-east-1", "cache_stopped_nodes": False},
        "auth": {"ssh_user": "ubuntu"},
        "docker": {
            "image": image_name(deployment, settings),
            "container_name": settings.name,
            "pull_before_run": True,
            "run_options": [
                _OPEN_FILES_OPTION,
                *_model_cache_options(deployment.config),
                *_env_options(deployment),
            ],
        },
        "file_mounts": _file_mounts(deployment),
        "available_node_types": node_types,
        "head_node_type": "head",
        "head_start_ray_commands": ["ray stop", _HEAD_START_COMMAND],
        "worker_start_ray_commands": ["ray stop", _WORKER_START_COMMAND],
    }


def _model_cache_options(config: DeploymentConfig) -> list[str]:
    """Models are kept in the configured folder of the machine, else in the container."""
    cache_dir = config.cluster.model_cache.path
    return [] if cache_dir is None else [f"-v {shlex.quote(f'{cache_dir}:{cache_dir}')}"]


def _file_mounts(deployment: ClusterDeployment) -> dict[str, str]:
    """Files of this machine, by path in containers."""
    # Ray's token: `openssl rand -hex 32 > ~/.ray/auth_token; chmod 600 ~/.ray/auth_token`.
    files = {_RAY_TOKEN_FILE: _RAY_TOKEN_FILE}
    files |= {str(KEYS_DIR / name): here for name, here in deployment.key_files.items()}
    if deployment.needs_token:
        files[str(TOKEN_FILE)] = deployment.token_file or _LOCAL_CONSOLE_TOKEN
    for path, file in secret_files(deployment.config):
        if not file.startswith("/"):
            raise CannotExport(
                f"{path} is read from the file {file}, and containers have folders of their own",
                "give the whole path, from / on",
            )
        files[file] = file
    return files


def _assign_instances(
    pools: Sequence[NodeGroup], config: DeploymentConfig
) -> list[tuple[NodeGroup, str]]:
    """Instance type and counts of each pool; without GPUs, an instance for each replica."""
    assigned = []
    for group in pools:
        if not group.gpus:
            assigned.append((group, _CPU_INSTANCE))
            continue
        instance_type = _find_instance_type(group, config.pools[group.name].resources.accelerator)
        replicas_per_instance = _replicas_per_instance(
            instance_type, group, config.pools[group.name].placement.max_per_node
        )
        # If pools differ, other pools' replicas may take the room on this pool's instances.
        is_uniform = all(
            _replica_shape(group, config) == _replica_shape(pool, config)
            for pool in pools
            if pool.gpus
        )
        max_instances = math.ceil(group.max / replicas_per_instance) if is_uniform else group.max
        min_instances = math.ceil(group.min / replicas_per_instance)
        instance_group = replace(
            group,
            cpus=instance_type.cpus,
            gpus=_GPUS_PER_INSTANCE,
            min=min_instances,
            max=max_instances,
        )
        assigned.append((instance_group, instance_type.name))
    return assigned


def _replica_shape(group: NodeGroup, config: DeploymentConfig) -> tuple[object, ...]:
    pool = config.pools[group.name]
    return group.gpus, group.cpus, group.nodes_per_replica, pool.resources, pool.placement


def _replicas_per_instance(
    instance_type: InstanceType, group: NodeGroup, max_per_node: int | None
) -> int:
    """Replicas that fit an instance; a replica of several nodes uses whole instances."""
    if group.gpus > _GPUS_PER_INSTANCE or group.cpus > instance_type.cpus:
        raise CannotExport(
            f"pools.{group.name}: a node is to have {group.gpus} GPUs and {group.cpus} CPUs, and"
            f" {instance_type.name} has {_GPUS_PER_INSTANCE} and {instance_type.cpus}",
            "give fewer with --gpus-per-node or resources.cpus, or edit the node type",
        )
    if group.nodes_per_replica > 1:
        return 1
    limits = [_GPUS_PER_INSTANCE // group.gpus, instance_type.cpus // group.cpus]
    if group.memory_limit_bytes is not None:
        memory_bytes = instance_type.memory_gib * 1024**3 * _RAY_MEMORY_FRACTION
        limits.append(int(memory_bytes // group.memory_limit_bytes))
    return max(1, min([*limits, *([] if max_per_node is None else [max_per_node])]))


def _node_type(group: NodeGroup, instance_name: str) -> PlainDict:
    resources: dict[str, int] = {"CPU": group.cpus}
    if group.gpus:
        resources["GPU"] = group.gpus
    node: PlainDict = {
        "resources": {**resources, **group.resources},
        "node_config": {"InstanceType": instance_name},
    }
    if group.labels:
        node["labels"] = dict(group.labels)
    if group.name == "head":
        return node
    return {
        "min_workers": group.min * group.nodes_per_replica,
        "max_workers": group.max * group.nodes_per_replica,
        **node,
    }


def _find_instance_type(group: NodeGroup, accelerator: str | None) -> InstanceType:
    if accelerator is None or accelerator not in INSTANCE_TYPES:
        raise CannotExport(
            f"pools.{group.name}: no machine is known with the accelerator {accelerator}",
            f"set resources.accelerator to one of {', '.join(INSTANCE_TYPES)}, or edit the"
            " node type",
        )
    return INSTANCE_TYPES[accelerator]


def _env_options(deployment: ClusterDeployment) -> list[str]:
    variables = ray_variables(deployment.config) | {
        "RAY_AUTH_MODE": "token",
        "HF_HOME": models_dir(deployment.config),
    }
    # Ray puts these into a shell's command line.
    return [f"--env {shlex.quote(f'{name}={value}')}" for name, value in sorted(variables.items())]
