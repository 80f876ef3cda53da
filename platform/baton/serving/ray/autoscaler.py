"""Whether Ray's autoscaler runs on a cluster, and its demand (private API of Ray 2.60).

Theory of operation: a pending actor or placement group is all the demand that an autoscaler needs.
Ray has no public call that says whether one runs. A head without any starts the same monitor, which
then only reports; so the monitor's arguments decide. If there are reports without a monitor on the
head, the autoscaler runs elsewhere: KubeRay's is a container beside the head, and its node types
are unknown. With another version of Ray no autoscaler is found: then too few nodes are an error.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil

from baton.domain.errors import ClusterFailed
from baton.serving.ray.context import HEAD_NODE_RESOURCE, logs_folder
from baton.serving.shared.names import APP

if TYPE_CHECKING:
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

_LOGGER = logging.getLogger(__name__)
_STATUS_TIMEOUT_S = 10.0
_HEAD_TIMEOUT_S = 60.0
_MONITOR_SCRIPTS = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
_CONFIG_OPTION = "--autoscaling-config="
Resources = Mapping[str, float]
NodeTypeConfigs = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """A node, or a type of which the autoscaler may start some."""

    name: str
    """Of a node: its type."""
    resources: Resources
    labels: Mapping[str, str] = field(default_factory=dict)
    max_nodes: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalingCapacity:
    """A cluster on which an autoscaler starts nodes on demand."""

    nodes: tuple[NodeType, ...]
    node_types: tuple[NodeType, ...] = ()
    """Types that may be started; empty if unknown, as with KubeRay."""


def read_autoscaling_capacity() -> AutoscalingCapacity | None:
    """The possible growth of the connected cluster; None: it has no autoscaler.

    Raises:
        ClusterFailed: its head does not answer.
    """
    from ray import exceptions

    try:
        return _read_capacity()
    except (ImportError, AttributeError) as error:
        _LOGGER.warning("Ray does not say whether an autoscaler runs: %s", error)
        return None
    except exceptions.RayError as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise ClusterFailed(
            f"the Ray cluster does not say whether an autoscaler runs: {reason}",
            "look at 'ray status' and 'ray logs cluster'",
        ) from error


def _read_capacity() -> AutoscalingCapacity | None:
    from ray._private.state import state
    from ray.core.generated.autoscaler_pb2 import NodeStatus

    status = _cluster_status()
    nodes = tuple(
        NodeType(
            name=node.ray_node_type_name,
            resources=dict(node.total_resources),
            labels=dict(node.labels),
        )
        for node in status.cluster_resource_state.node_states
        if node.status != NodeStatus.DEAD
    )
    cluster_config = state.get_cluster_config()
    if cluster_config is not None and cluster_config.node_group_configs:
        types = tuple(
            NodeType(
                name=group.name,
                resources=dict(group.resources),
                max_nodes=math.inf if group.max_count < 0 else group.max_count,
            )
            for group in cluster_config.node_group_configs
        )
        return AutoscalingCapacity(nodes=nodes, node_types=types)
    monitors = _monitors_on_head()
    if not monitors:
        has_reported = (
            status.autoscaling_state.autoscaler_state_version > 0 or _legacy_autoscaler_reports()
        )
        return AutoscalingCapacity(nodes=nodes) if has_reported else None
    (configured_types, *_) = monitors
    return (
        None
        if configured_types is None
        else AutoscalingCapacity(nodes=nodes, node_types=node_types(configured_types))
    )


def pending_replicas() -> Mapping[str, int]:
    """How many replicas of each deployment of baton's have no node yet."""
    from ray._private.state import state

    counts = Counter[str]()
    for actor in state.actor_table(None, None, "PENDING_CREATION").values():
        # `SERVE_REPLICA::baton#decode#1a2b3c`; with no address, no worker was found for it.
        kind, _, name = str(actor["Name"]).partition("::")
        app, _, replica_name = name.partition("#")
        if kind == "SERVE_REPLICA" and app == APP and not actor["Address"]["IPAddress"]:
            counts[replica_name.partition("#")[0]] += 1
    demand = _cluster_status().cluster_resource_state if counts else None
    if demand is None or not (
        demand.pending_resource_requests or demand.pending_gang_resource_requests
    ):
        return {}  # they have room, and wait for a process only
    return counts


def infeasible_requests() -> tuple[Resources, ...]:
    """Resource requests, of any client, for which the autoscaler has no nodes."""
    state = _cluster_status().autoscaling_state
    gangs = [
        request for gang in state.infeasible_gang_resource_requests for request in gang.requests
    ]
    bundles = [
        dict(infeasible_resource_request.resources_bundle)
        for infeasible_resource_request in (*state.infeasible_resource_requests, *gangs)
    ]
    return tuple(entry for at, entry in enumerate(bundles) if entry not in bundles[:at])


def node_types(types: NodeTypeConfigs) -> tuple[NodeType, ...]:
    """The types of an autoscaler's configuration, as `ray up` has it on the head."""
    return tuple(
        NodeType(
            name=name,
            resources=cast("Resources", node_type.get("resources") or {}),
            labels=cast("Mapping[str, str]", node_type.get("labels") or {}),
            max_nodes=float(cast("float", node_type.get("max_workers", math.inf))),
        )
        for name, node_type in types.items()
    )


def _cluster_status() -> GetClusterStatusReply:
    from ray._private import worker
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

    reply = worker.global_worker.gcs_client.get_cluster_status(timeout_s=_STATUS_TIMEOUT_S)
    return GetClusterStatusReply.FromString(reply)


def _legacy_autoscaler_reports() -> bool:
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.experimental.internal_kv import _internal_kv_get

    return _internal_kv_get(DEBUG_AUTOSCALING_STATUS) is not None


def _monitors_on_head() -> list[NodeTypeConfigs | None]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    head = next(
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and HEAD_NODE_RESOURCE in node["Resources"]
    )
    remote_call = ray.remote(num_cpus=0, max_retries=0)(local_monitors)
    on_head = NodeAffinitySchedulingStrategy(head, soft=False)
    ref = remote_call.options(scheduling_strategy=on_head).remote()
    monitors: list[NodeTypeConfigs | None] = ray.get(ref, timeout=_HEAD_TIMEOUT_S)
    return monitors


def local_monitors(logs: Path | None = None) -> list[NodeTypeConfigs | None]:
    """The node types of each monitor of the session on this node; None for a monitor without any.

    Nothing else of an autoscaler's configuration leaves the node: providers have secrets there.
    """
    folder = logs_folder() if logs is None else logs
    monitors: list[NodeTypeConfigs | None] = []
    for process in psutil.process_iter():
        try:
            arguments = process.cmdline()
        except psutil.Error:
            continue
        if f"--logs-dir={folder}" in arguments and any(
            word.endswith(_MONITOR_SCRIPTS) for word in arguments
        ):
            monitors.append(_configured_types(arguments))
    return monitors


def _configured_types(arguments: list[str]) -> NodeTypeConfigs | None:
    from ruamel.yaml import YAML

    for argument in arguments:
        if argument.startswith(_CONFIG_OPTION):
            text = (
                Path(argument.removeprefix(_CONFIG_OPTION)).expanduser().read_text(encoding="utf-8")
            )
            document = YAML(typ="safe").load(text)
            limit = document.get("max_workers", 0)
            head = document.get("head_node_type")
            return {
                name: {
                    "resources": kind.get("resources", {}),
                    "labels": kind.get("labels", {}),
                    # A type without its own limit has the limit of all together.
                    "max_workers": kind.get("max_workers", 0 if name == head else limit),
                }
                for name, kind in document.get("available_node_types", {}).items()
            }
    return None
