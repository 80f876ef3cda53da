"""What nodes a deployment stands on: one group for the front, one for each pool."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from baton.config.derive.gpu_fractions import shares_gpu
from baton.config.derive.start_deadlines import weights_bytes
from baton.config.schema.deployment import DeploymentConfig, EngineKind, PoolConfig
from baton.domain.names.model_sources import is_on_hub
from baton.manifests.settings import CannotExport, ManifestSettings
from baton.serving.preflight.checks import INGRESS_BYTES, RAY_BYTES, replica_bytes
from baton.serving.shared.names import INGRESS

FRONT: Final = "baton_front"
"""Ray's resource of nodes for ingresses: these run nowhere else, and engines find no CPU there."""
HEAD: Final = "baton_head"
"""Ray's resource of the head, where the controller is, so that others know where to find it."""
FRONT_SHARE: Final = 0.5
"""Of a node's `FRONT`: two ingresses fit on one, so that one can be replaced where there is one."""
_MIB: Final = 1024**2
RAY_MIB: Final = math.ceil(RAY_BYTES / _MIB)
"""What Ray needs of a node's memory besides."""
DEFAULT_ENGINE_BYTES: Final = 4 * 1024**3
"""Of a node for engines of which nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes that are alike, one replica on each, or each replica on several."""

    name: str
    start: int
    min: int
    max: int
    cpus: int
    """Of each node, as Ray counts them."""
    gpus: int = 0
    hosts: int = 1
    """Nodes that one replica spans."""
    memory_bytes: int = 0
    """Main memory that one node needs at least."""
    models_bytes: int = 0
    """Disk that a model takes which each node fetches for itself; 0: it does not, or is unknown."""
    memory_limit_bytes: int | None = None
    """Only where the configuration says what a replica takes."""
    resources: Mapping[str, int] = field(default_factory=dict)
    """Further resources of Ray."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of Ray's nodes, as they are: values, no selectors."""


def head_group() -> NodeGroup:
    """The node of Ray's head and of the controller; no engine is ever put there."""
    return NodeGroup(
        name="head",
        start=1,
        min=1,
        max=1,
        cpus=0,
        memory_bytes=_mib(4 * RAY_BYTES),
        resources={HEAD: 1},
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
        memory_bytes=_mib(2 * INGRESS_BYTES + RAY_BYTES),
        resources={FRONT: 1},
    )


def pool_groups(config: DeploymentConfig, settings: ManifestSettings) -> list[NodeGroup]:
    """One group for each pool, in the order of the configuration.

    Raises:
        CannotExport: a replica cannot be laid out on nodes of that many GPUs, or a pool's name is
            none for a group of nodes.
    """
    for name in config.pools:
        if "_" in name or name == "head":
            raise CannotExport(
                f"pools.{name}: groups of nodes can be called so in no cluster",
                "use '-' for '_', and no pool 'head'",
            )
    return [pool_group(config, name, settings) for name in config.pools]


def pool_group(config: DeploymentConfig, name: str, settings: ManifestSettings) -> NodeGroup:
    """The nodes of one pool.

    Raises:
        CannotExport: as `pool_groups`.
    """
    pool = config.pools[name]
    hosts = _hosts(name, pool, settings)
    resources, counts = pool.resources, pool.replicas
    limit = None if resources.memory_bytes is None else math.ceil(resources.memory_bytes / hosts)
    needed = math.ceil(replica_bytes(config, pool, hosts=hosts) / hosts)
    kind = resources.accelerator
    return NodeGroup(
        name=name,
        start=counts.start,
        min=counts.min,
        max=counts.max,
        cpus=max(1, math.ceil(resources.cpus / hosts)),
        gpus=int(resources.gpus) // hosts,
        hosts=hosts,
        memory_bytes=_mib(needed) + _mib(RAY_BYTES),
        models_bytes=_fetched_bytes(config, pool),
        memory_limit_bytes=None if limit is None else _mib(limit) + _mib(RAY_BYTES),
        # Ray finds out which GPUs a node has; its autoscaler has to be told before there is one.
        resources={} if kind is None else {f"accelerator_type:{kind}": 1},
        labels=_chosen(pool.placement.labels),
    )


def _fetched_bytes(config: DeploymentConfig, pool: PoolConfig) -> int:
    source = config.models[pool.model].source
    if pool.engine.kind is EngineKind.SIM or not is_on_hub(source):
        return 0
    return _mib(math.ceil(weights_bytes(source) or 0))


def _chosen(selectors: Mapping[str, str]) -> dict[str, str]:
    """Labels that a node may have to be chosen; one without a label passes what negates it."""
    return {
        name: selector.removeprefix("in(").removesuffix(")").split(",")[0]
        for name, selector in selectors.items()
        if not selector.startswith("!")
    }


def _hosts(name: str, pool: PoolConfig, settings: ManifestSettings) -> int:
    if shares_gpu(pool):
        raise CannotExport(
            f"pools.{name}: got {pool.resources.gpus:g} GPUs for a replica, wanted whole ones: pods"
            " share none",
            "set resources.gpus to 1, or start Ray on the node yourself and deploy to that",
        )
    gpus, most = int(pool.resources.gpus), settings.gpus_per_node
    hosts = max(1, math.ceil(gpus / most))
    if gpus % hosts:
        raise CannotExport(
            f"pools.{name}: {gpus} GPUs of a replica cannot be shared evenly by {hosts} nodes of"
            f" at most {most}",
            "give how many GPUs a node has with --gpus-per-node, or change parallel.tp and pp",
        )
    return hosts


def _mib(size_bytes: int) -> int:
    """Rounded up to whole MiB, so that manifests are easy to read."""
    return math.ceil(size_bytes / _MIB) * _MIB
