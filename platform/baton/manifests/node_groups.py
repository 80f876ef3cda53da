"""The nodes of a deployment: a group for the front, and one for each pool."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from baton.config.derive.options import shares_gpu
from baton.config.derive.start_deadlines import weights_bytes
from baton.config.schema.deployment import DeploymentConfig, EngineKind, PoolConfig
from baton.domain.names.model_sources import is_on_hub
from baton.manifests.settings import CannotExport, ManifestSettings
from baton.serving.checks.configuration import INGRESS_BYTES, RAY_BYTES, replica_bytes
from baton.serving.shared.names import INGRESS

FRONT_RESOURCE: Final = "baton_front"
"""Ray resource of nodes for ingresses: these run nowhere else, and engines find no CPU there."""
HEAD_RESOURCE: Final = "baton_head"
"""Ray resource of the head, where the controller runs."""
FRONT_SHARE: Final = 0.5
"""Of a node's `FRONT_RESOURCE`: two ingresses fit, so that a single node can replace its
ingress."""
_MIB: Final = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes, with a replica on each or on several."""

    name: str
    start: int
    min: int
    max: int
    cpus: int
    """Of each node, as Ray counts them."""
    gpus: int = 0
    nodes_per_replica: int = 1
    memory_bytes: int = 0
    """The least main memory of a node."""
    models_bytes: int = 0
    """Disk for the model that each node downloads; 0: none, or unknown."""
    memory_limit_bytes: int | None = None
    """Only if the configuration limits a replica's memory."""
    resources: Mapping[str, int] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of Ray's nodes: values, not selectors."""


def head_group() -> NodeGroup:
    """The node of Ray's head and the controller, without engines."""
    return NodeGroup(
        name="head",
        start=1,
        min=1,
        max=1,
        cpus=0,
        memory_bytes=round_up_to_mib(4 * RAY_BYTES),
        resources={HEAD_RESOURCE: 1},
    )


def front_group(config: DeploymentConfig) -> NodeGroup:
    """The nodes of the ingresses."""
    counts = config.server.replicas
    return NodeGroup(
        name=INGRESS,
        start=counts.min,
        min=counts.min,
        max=max(counts.min, counts.max),
        cpus=0,
        memory_bytes=round_up_to_mib(2 * INGRESS_BYTES + RAY_BYTES),
        resources={FRONT_RESOURCE: 1},
    )


def pool_groups(config: DeploymentConfig, settings: ManifestSettings) -> list[NodeGroup]:
    """One group for each pool, in the order of the configuration.

    Raises:
        CannotExport: a replica does not divide into nodes of that many GPUs, or a pool's name is
            invalid.
    """
    for name in config.pools:
        if "_" in name or name == "head":
            raise CannotExport(
                f"pools.{name}: groups of nodes can be called so in no cluster",
                "use '-' for '_', and no pool 'head'",
            )
    return [_pool_group(config, name, settings) for name in config.pools]


def _pool_group(config: DeploymentConfig, name: str, settings: ManifestSettings) -> NodeGroup:
    pool = config.pools[name]
    nodes = _nodes_per_replica(name, pool, settings)
    resources, counts = pool.resources, pool.replicas
    memory_limit_bytes = (
        None if resources.memory_bytes is None else math.ceil(resources.memory_bytes / nodes)
    )
    memory_bytes = math.ceil(replica_bytes(config, pool, hosts=nodes) / nodes)
    accelerator = resources.accelerator
    return NodeGroup(
        name=name,
        start=counts.initial,
        min=counts.min,
        max=counts.max,
        cpus=max(1, math.ceil(resources.cpus / nodes)),
        gpus=int(resources.gpus) // nodes,
        nodes_per_replica=nodes,
        memory_bytes=round_up_to_mib(memory_bytes) + round_up_to_mib(RAY_BYTES),
        models_bytes=_downloaded_bytes(config, pool),
        memory_limit_bytes=None
        if memory_limit_bytes is None
        else round_up_to_mib(memory_limit_bytes) + round_up_to_mib(RAY_BYTES),
        # Ray detects the GPUs of a node; its autoscaler needs them before a node exists.
        resources={} if accelerator is None else {f"accelerator_type:{accelerator}": 1},
        labels=_labels_satisfying(pool.placement.labels),
    )


def _downloaded_bytes(config: DeploymentConfig, pool: PoolConfig) -> int:
    source = config.models[pool.model].source
    if pool.engine.kind is EngineKind.SIM or not is_on_hub(source):
        return 0
    return round_up_to_mib(math.ceil(weights_bytes(source) or 0))


def _labels_satisfying(selectors: Mapping[str, str]) -> dict[str, str]:
    """Labels that satisfy these selectors; a missing label satisfies a negation."""
    return {
        name: selector.removeprefix("in(").removesuffix(")").split(",")[0]
        for name, selector in selectors.items()
        if not selector.startswith("!")
    }


def _nodes_per_replica(name: str, pool: PoolConfig, settings: ManifestSettings) -> int:
    if shares_gpu(pool):
        raise CannotExport(
            f"pools.{name}: got {pool.resources.gpus:g} GPUs for a replica, expected whole GPUs:"
            " pods share none",
            "set resources.gpus to 1, or start Ray on the node yourself and deploy to that",
        )
    gpus, gpus_per_node = int(pool.resources.gpus), settings.gpus_per_node
    nodes = max(1, math.ceil(gpus / gpus_per_node))
    if gpus % nodes:
        raise CannotExport(
            f"pools.{name}: {gpus} GPUs of a replica cannot be shared evenly by {nodes} nodes of"
            f" at most {gpus_per_node}",
            "give how many GPUs a node has with --gpus-per-node, or change parallel.tp and pp",
        )
    return nodes


def round_up_to_mib(size_bytes: float) -> int:
    """A size in whole MiB, in bytes."""
    return math.ceil(size_bytes / _MIB) * _MIB
