"""What a cluster could come to have: its nodes, and the node types of Ray's autoscaler."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from baton.config.derive.selectors import selects
from baton.config.schema.deployment import DeploymentConfig, PoolConfig
from baton.domain.words import few
from baton.serving.application.app import pool_options

Resources = Mapping[str, float]
_ROUNDING = 1e-9
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """A node that is there, or a type of which the autoscaler may start some."""

    name: str
    """Of a node, the type that it is of."""
    resources: Resources
    labels: Mapping[str, str] = field(default_factory=dict)
    most: float = math.inf
    """Nodes of a type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A cluster on which an autoscaler starts nodes for whatever waits for room."""

    nodes: tuple[NodeKind, ...]
    """Those that are there."""
    types: tuple[NodeKind, ...] = ()
    """Those that may come; empty where the autoscaler does not say, as in a pod beside the head."""


def beyond_growth(config: DeploymentConfig, growth: Growth) -> tuple[str, ...]:
    """What the cluster could not run with all the nodes that its autoscaler may start.

    Nothing where that does not say which they are: then it is waited for.
    """
    if not growth.types:
        return ()
    return (*_beyond_kinds(config, growth), *_beyond_totals(config, growth))


def _beyond_kinds(config: DeploymentConfig, growth: Growth) -> Iterator[str]:
    kinds = (*growth.nodes, *growth.types)
    for name, pool in config.pools.items():
        parts = _needs_by_node(config, name)
        for needs in [one for at, one in enumerate(parts) if one not in parts[:at]]:
            if not any(_fits(needs, pool, kind) for kind in kinds):
                yield (
                    f"pool {name!r}: a replica needs a node with {_text(needs, pool)}, and no node"
                    f" and no node type of the cluster's autoscaler has that"
                    f" ({_kinds_text(growth.types)}); lower pools.{name}.resources, or add a type"
                )


def _beyond_totals(config: DeploymentConfig, growth: Growth) -> Iterator[str]:
    there = Counter(node.name for node in growth.nodes)
    names = {kind.name for kind in growth.types}
    for resource in ("CPU", "GPU"):
        wanted = sum(
            pool.replicas.start * needs.get(resource, 0.0)
            for name, pool in config.pools.items()
            for needs in _needs_by_node(config, name)
        )
        most = sum(
            node.resources.get(resource, 0.0) for node in growth.nodes if node.name not in names
        )
        for kind in growth.types:
            if amount := kind.resources.get(resource, 0.0):
                most += amount * max(kind.most, there[kind.name])
        if wanted > most + _ROUNDING:
            yield (
                f"the pools ask for {wanted:g} {resource}s to start with, the cluster has {most:g}"
                " with all the nodes that its autoscaler may start; lower pools.*.replicas.start,"
                " or let it start more"
            )


def _needs_by_node(config: DeploymentConfig, name: str) -> tuple[Resources, ...]:
    """What one replica takes, in parts that may be on different nodes."""
    options = pool_options(config, name)
    bundles = cast("list[dict[str, float]] | None", options.get("placement_group_bundles"))
    if bundles is not None:
        if options["placement_group_strategy"] != "STRICT_PACK":
            return tuple(bundles)
        total = Counter[str]()
        for bundle in bundles:
            total.update(cast("Mapping[str, int]", bundle))
        return (dict(total),)
    actor = cast("Mapping[str, float | str]", options["ray_actor_options"])
    needs = {
        resource: float(actor[option])
        for option, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU"), ("memory", "memory"))
        if option in actor
    }
    if "accelerator_type" in actor:
        needs[f"accelerator_type:{actor['accelerator_type']}"] = 0.001
    return (needs,)


def may_host(config: DeploymentConfig, name: str, kind: NodeKind) -> bool:
    """Whether a replica of a pool, or a part of one, may be on such a node when nobody else is."""
    parts = _needs_by_node(config, name)
    return any(_fits(needs, config.pools[name], kind) for needs in parts)


def _fits(needs: Resources, pool: PoolConfig, kind: NodeKind) -> bool:
    return selects(pool.placement.labels, kind.labels) and all(
        kind.resources.get(resource, 0.0) + _ROUNDING >= amount
        for resource, amount in needs.items()
    )


def waiting_line(config: DeploymentConfig, replicas: Mapping[str, int]) -> str:
    """`waiting for nodes: 2 replicas of decode want 1 GPU and 4 CPUs each`; empty for none."""
    parts = []
    for name, count in sorted(replicas.items()):
        if count and name in config.pools:
            resources = config.pools[name].resources
            needs = {"GPU": resources.gpus, "CPU": resources.cpus}
            what = amounts({resource: amount for resource, amount in needs.items() if amount})
            one = count == 1
            parts.append(
                f"{count} {'replica' if one else 'replicas'} of {name}"
                f" {'wants' if one else 'want'} {what}{'' if one else ' each'}"
            )
    return f"waiting for nodes: {', '.join(parts)}" if parts else ""


def amounts(needs: Resources) -> str:
    """`1 GPU and 4 CPUs`."""
    shown = []
    for resource, amount in needs.items():
        if resource == "memory":
            shown.append(f"{amount / 1024**3:.1f} GiB of memory")
        elif resource.startswith("accelerator_type:"):
            shown.append(f"the accelerator {resource.partition(':')[2]}")
        else:
            shown.append(f"{amount:g} {resource}{'' if amount == 1 else 's'}")
    return " and ".join([*([", ".join(shown[:-1])] if shown[1:] else []), *shown[-1:]])


def _text(needs: Resources, pool: PoolConfig) -> str:
    labels = ", ".join(f"{name}: {value}" for name, value in pool.placement.labels.items())
    return amounts(needs) + (f" and the labels {labels}" if labels else "")


def _kinds_text(kinds: Iterable[NodeKind]) -> str:
    shown = [f"{kind.name}: {amounts(kind.resources) or 'nothing'}" for kind in kinds]
    return few(shown, _SHOWN)
