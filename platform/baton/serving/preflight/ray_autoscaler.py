"""Whether Ray's autoscaler runs on a cluster, and what waits for it (private API of Ray 2.60).

Theory of operation: a pending actor or placement group is all the demand that an autoscaler needs.
Whether one runs is told by nothing that Ray has for users, for a head without any starts the same
monitor, which then merely reports. So it is looked at what that monitor was started with. A head
without a monitor on whose cluster somebody reports has its autoscaler elsewhere: KubeRay's is a
container beside the head, and says to nobody what it may start. Where Ray is another than the one
this was written for, no autoscaler is found: then too few nodes are refused.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil

from baton.domain.errors import ClusterFailed
from baton.serving.preflight.autoscaling_capacity import Growth, NodeKind, Resources
from baton.serving.ray.context import logs_folder
from baton.serving.shared.names import APP

if TYPE_CHECKING:
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

_LOGGER = logging.getLogger(__name__)
_ASK_S = 10.0
_HEAD_ANSWER_S = 60.0
"""The head may have to start a worker process first."""
_MONITOR = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
_CONFIG = "--autoscaling-config="
Types = Mapping[str, Mapping[str, object]]


def growth() -> Growth | None:
    """What the cluster that this process is connected to may grow to; None: it does not grow.

    Raises:
        ClusterFailed: its head does not answer.
    """
    from ray import exceptions

    try:
        return _growth()
    except (ImportError, AttributeError) as error:
        _LOGGER.warning("Ray does not say whether an autoscaler runs: %s", error)
        return None
    except exceptions.RayError as error:
        why = str(error).strip().rpartition("\n")[2]
        raise ClusterFailed(
            f"the Ray cluster does not say whether an autoscaler runs: {why}",
            "look at 'ray status' and 'ray logs cluster'",
        ) from error


def _growth() -> Growth | None:
    from ray._private.state import state
    from ray.core.generated.autoscaler_pb2 import NodeStatus

    status = _status()
    nodes = tuple(
        NodeKind(
            name=node.ray_node_type_name,
            resources=dict(node.total_resources),
            labels=dict(node.labels),
        )
        for node in status.cluster_resource_state.node_states
        if node.status != NodeStatus.DEAD
    )
    told = state.get_cluster_config()
    if told is not None and told.node_group_configs:
        types = tuple(
            NodeKind(
                name=group.name,
                resources=dict(group.resources),
                most=math.inf if group.max_count < 0 else group.max_count,
            )
            for group in told.node_group_configs
        )
        return Growth(nodes=nodes, types=types)
    monitors = _ask_head()
    if not monitors:
        reports = status.autoscaling_state.autoscaler_state_version > 0 or _legacy_reports()
        return Growth(nodes=nodes) if reports else None
    (types_found, *_) = monitors
    return None if types_found is None else Growth(nodes=nodes, types=node_types(types_found))


def waiting_replicas() -> Mapping[str, int]:
    """How many replicas of each deployment of baton's have no node yet."""
    from ray._private.state import state

    found = Counter[str]()
    for actor in state.actor_table(None, None, "PENDING_CREATION").values():
        # `SERVE_REPLICA::baton#decode#1a2b3c`; with no address, no worker was found for it.
        kind, _, name = str(actor["Name"]).partition("::")
        app, _, rest = name.partition("#")
        if kind == "SERVE_REPLICA" and app == APP and not actor["Address"]["IPAddress"]:
            found[rest.partition("#")[0]] += 1
    demand = _status().cluster_resource_state if found else None
    if demand is None or not (
        demand.pending_resource_requests or demand.pending_gang_resource_requests
    ):
        return {}  # they have room, and wait for a process only
    return found


def beyond_autoscaler() -> tuple[Resources, ...]:
    """What the autoscaler says that it has no nodes for, now or ever, of whoever asks for it."""
    state = _status().autoscaling_state
    gangs = [one for gang in state.infeasible_gang_resource_requests for one in gang.requests]
    found = [dict(one.resources_bundle) for one in (*state.infeasible_resource_requests, *gangs)]
    return tuple(one for at, one in enumerate(found) if one not in found[:at])


def node_types(types: Types) -> tuple[NodeKind, ...]:
    """The types of an autoscaler's configuration, as `ray up` has it on the head."""
    return tuple(
        NodeKind(
            name=name,
            resources=cast("Resources", kind.get("resources") or {}),
            labels=cast("Mapping[str, str]", kind.get("labels") or {}),
            most=float(cast("float", kind.get("max_workers", math.inf))),
        )
        for name, kind in types.items()
    )


def _status() -> GetClusterStatusReply:
    from ray._private import worker
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

    told = worker.global_worker.gcs_client.get_cluster_status(timeout_s=_ASK_S)
    return GetClusterStatusReply.FromString(told)


def _legacy_reports() -> bool:
    """Whether an autoscaler of the first kind has reported."""
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.experimental.internal_kv import _internal_kv_get

    return _internal_kv_get(DEBUG_AUTOSCALING_STATUS) is not None


def _ask_head() -> list[Types | None]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    head = next(
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and "node:__internal_head__" in node["Resources"]
    )
    ask = ray.remote(num_cpus=0, max_retries=0)(monitors_here)
    there = NodeAffinitySchedulingStrategy(head, soft=False)
    asked = ask.options(scheduling_strategy=there).remote()
    found: list[Types | None] = ray.get(asked, timeout=_HEAD_ANSWER_S)
    return found


def monitors_here(logs: Path | None = None) -> list[Types | None]:
    """For each monitor of the session on this node, its node types; None where it has none.

    Nothing else of an autoscaler's configuration leaves the node: providers have secrets there.
    """
    folder = logs_folder() if logs is None else logs
    found: list[Types | None] = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if f"--logs-dir={folder}" in words and any(word.endswith(_MONITOR) for word in words):
            found.append(_types_in(words))
    return found


def _types_in(words: list[str]) -> Types | None:
    from ruamel.yaml import YAML

    for word in words:
        if word.startswith(_CONFIG):
            text = Path(word.removeprefix(_CONFIG)).expanduser().read_text(encoding="utf-8")
            read = YAML(typ="safe").load(text)
            limit = read.get("max_workers", 0)
            head = read.get("head_node_type")
            return {
                name: {
                    "resources": kind.get("resources", {}),
                    "labels": kind.get("labels", {}),
                    # Without a bound of its own, a type has that of all together.
                    "max_workers": kind.get("max_workers", 0 if name == head else limit),
                }
                for name, kind in read.get("available_node_types", {}).items()
            }
    return None
