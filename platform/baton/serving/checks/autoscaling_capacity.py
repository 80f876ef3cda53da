"""The future capacity of a cluster: its nodes, and the node types of Ray's autoscaler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from baton.config.derive.selectors import matches_labels
from baton.config.schema.deployment import DeploymentConfig, PoolConfig
from baton.domain.names.words import few
from baton.serving.application.app import pool_options
from baton.serving.checks.result import Finding
from baton.serving.ray.autoscaler import AutoscalingCapacity, NodeType, Resources

_TOLERANCE = 1e-9
_MAX_LISTED = 5


def infeasible_findings(
    config: DeploymentConfig, capacity: AutoscalingCapacity
) -> tuple[Finding, ...]:
    """Replicas that the cluster cannot run, even with all nodes that its autoscaler may start.

    Empty for an autoscaler with unknown node types: then the start waits for nodes.
    """
    if not capacity.node_types:
        return ()
    return (*_infeasible_on_any_node(config, capacity), *_infeasible_in_total(config, capacity))


def _infeasible_on_any_node(
    config: DeploymentConfig, capacity: AutoscalingCapacity
) -> Iterator[Finding]:
    node_types = (*capacity.nodes, *capacity.node_types)
    for name, pool in config.pools.items():
        parts = _replica_bundles(config, name)
        for needs in [entry for at, entry in enumerate(parts) if entry not in parts[:at]]:
            if not any(_fits(needs, pool, node_type) for node_type in node_types):
                yield Finding(
                    f"pool {name!r}: a replica needs a node with {_needs_text(needs, pool)},"
                    " and no node and no node type of the cluster's autoscaler has that"
                    f" ({_node_types_text(capacity.node_types)})",
                    f"lower pools.{name}.resources, or add a type",
                )


def too_large_findings(
    config: DeploymentConfig, node_resources: Sequence[Resources]
) -> Iterator[Finding]:
    """Pools whose replicas fit on none of these nodes, even while it is empty."""
    if not node_resources:
        return
    for name in config.pools:
        parts = _replica_bundles(config, name)
        for needs in [entry for at, entry in enumerate(parts) if entry not in parts[:at]]:
            if any(_has_resources(needs, resources) for resources in node_resources):
                continue
            most = {
                resource: max(node.get(resource, 0.0) for node in node_resources)
                for resource in needs
            }
            yield Finding(
                f"pool {name!r}: a replica needs a node with {resources_text(needs)}, and no node"
                f" has that (at most {resources_text(most)})",
                f"lower pools.{name}.resources or parallel, or add such a node",
            )


def _infeasible_in_total(
    config: DeploymentConfig, capacity: AutoscalingCapacity
) -> Iterator[Finding]:
    node_counts = Counter(node.name for node in capacity.nodes)
    type_names = {node_type.name for node_type in capacity.node_types}
    for resource in ("CPU", "GPU"):
        requested = sum(
            pool.replicas.initial * needs.get(resource, 0.0)
            for name, pool in config.pools.items()
            for needs in _replica_bundles(config, name)
        )
        max_amount = sum(
            node.resources.get(resource, 0.0)
            for node in capacity.nodes
            if node.name not in type_names
        )
        for node_type in capacity.node_types:
            if amount := node_type.resources.get(resource, 0.0):
                max_amount += amount * max(node_type.max_nodes, node_counts[node_type.name])
        if requested > max_amount + _TOLERANCE:
            yield Finding(
                f"the pools ask for {requested:g} {resource}s to start with, the cluster has"
                f" {max_amount:g} with all the nodes that its autoscaler may start",
                "lower pools.*.replicas.initial, or let it start more",
            )


def _replica_bundles(config: DeploymentConfig, name: str) -> tuple[Resources, ...]:
    """The resources of one replica, in parts that may be on different nodes."""
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


def may_host(config: DeploymentConfig, name: str, node_type: NodeType) -> bool:
    """Whether a replica of a pool, or a part of one, fits on such a node while it is empty."""
    parts = _replica_bundles(config, name)
    return any(_fits(needs, config.pools[name], node_type) for needs in parts)


def _fits(needs: Resources, pool: PoolConfig, node_type: NodeType) -> bool:
    return matches_labels(pool.placement.labels, node_type.labels) and _has_resources(
        needs, node_type.resources
    )


def _has_resources(needs: Resources, resources: Resources) -> bool:
    return all(
        resources.get(resource, 0.0) + _TOLERANCE >= amount for resource, amount in needs.items()
    )


def waiting_line(config: DeploymentConfig, replicas: Mapping[str, int]) -> str:
    """`waiting for nodes: 2 replicas of decode want 1 GPU and 4 CPUs each`; empty for none."""
    parts = []
    for name, count in sorted(replicas.items()):
        if count and name in config.pools:
            resources = config.pools[name].resources
            needs = {"GPU": resources.gpus, "CPU": resources.cpus}
            needs_text = resources_text(
                {resource: amount for resource, amount in needs.items() if amount}
            )
            is_single = count == 1
            parts.append(
                f"{count} {'replica' if is_single else 'replicas'} of {name}"
                f" {'wants' if is_single else 'want'} {needs_text}{'' if is_single else ' each'}"
            )
    return f"waiting for nodes: {', '.join(parts)}" if parts else ""


def resources_text(needs: Resources) -> str:
    """`1 GPU and 4 CPUs`."""
    parts = []
    for resource, amount in needs.items():
        if resource == "memory":
            parts.append(f"{amount / 1024**3:.1f} GiB of memory")
        elif resource.startswith("accelerator_type:"):
            parts.append(f"the accelerator {resource.partition(':')[2]}")
        else:
            parts.append(f"{amount:g} {resource}{'' if amount == 1 else 's'}")
    return " and ".join([*([", ".join(parts[:-1])] if parts[1:] else []), *parts[-1:]])


def _needs_text(needs: Resources, pool: PoolConfig) -> str:
    labels = ", ".join(f"{name}: {value}" for name, value in pool.placement.labels.items())
    return resources_text(needs) + (f" and the labels {labels}" if labels else "")


def _node_types_text(node_types: Iterable[NodeType]) -> str:
    lines = [
        f"{node_type.name}: {resources_text(node_type.resources) or 'nothing'}"
        for node_type in node_types
    ]
    return few(lines, _MAX_LISTED)
