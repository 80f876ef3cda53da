"""Whom Prometheus is to ask, in the words of its HTTP service discovery.

Labels of targets are added to every series that comes from there, so they are none that metrics
have of their own: ingresses and the controller tell of pools by a label of the metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from baton.serving.http.metrics_endpoint import METRICS_PATH
from baton.serving.ray.membership import Member
from baton.serving.shared.metadata import METRICS_ADDRESS, REPLICA_ID
from baton.serving.shared.names import INGRESS
from baton.telemetry.catalogue import Component

TargetGroup = Mapping[str, object]


def target_groups(
    members: Iterable[Member], *, controller: str | None, node: str
) -> list[TargetGroup]:
    """Every process that can be asked, in a stable order.

    Those are left out that do not say where: they serve no metrics, or could not.

    Args:
        members: ingresses and replicas.
        controller: where the controller's own endpoint is; None: nowhere.
        node: which node that runs on.
    """
    groups = [] if controller is None else [_group(controller, Component.CONTROLLER, node=node)]
    for member in sorted(members, key=lambda member: (member.deployment, member.replica_id)):
        address = member.metadata.get(METRICS_ADDRESS)
        if not address:
            continue
        if member.deployment == INGRESS:
            labels = {"replica": member.replica_id}
            component = Component.INGRESS
        else:
            replica_id = str(member.metadata.get(REPLICA_ID, member.replica_id))
            labels = {"pool": member.deployment, "replica": replica_id}
            component = Component.REPLICA
        # An ingress of several models has one for each.
        groups += [
            _group(part, component, node=member.node_ip, **labels)
            for part in str(address).split(",")
        ]
    return groups


def _group(address: str, component: Component, **labels: str) -> TargetGroup:
    target_labels = {"__metrics_path__": METRICS_PATH, "component": str(component), **labels}
    return {"targets": [address], "labels": target_labels}
