"""Who reaches what: services, disruption budgets and a network policy.

*Theory of operation.* The pods of one deployment trust each other, as its processes do. Clients
reach the fronts alone; whoever watches reaches the metrics, which ask for a token; and KubeRay's
operator reaches the head. Everybody else reaches nothing: KV transfers and side channels
have no guard of their own but this.
"""

from __future__ import annotations

from typing import Final

from baton.manifests.cluster_deployment import Adapted, Plain
from baton.manifests.pod_limits import HEAD_PORTS, METRICS_PORT
from baton.manifests.pods import NAME_LABEL, matching, pod_labels
from baton.manifests.settings import ManifestSettings
from baton.serving.shared.names import INGRESS

_EPHEMERAL: Final = (32768, 60999)
"""Linux' range for ports that nobody chose: metrics of ingresses and replicas are there."""
_PROMETHEUS: Final = {"app.kubernetes.io/name": "prometheus"}
_OPERATOR: Final = {"app.kubernetes.io/name": "kuberay-operator"}


def services(deployment: Adapted, settings: ManifestSettings) -> list[Plain]:
    """Where clients come, and where the console and the metrics are."""
    config, name = deployment.config, settings.name
    found = [_service(name, "api", INGRESS, config.server.port, settings)]
    if deployment.has_token:
        port = config.observability.metrics.port
        found.append(_service(f"{name}-console", "observe", "head", port, settings))
    return found


def budgets(deployment: Adapted, settings: ManifestSettings) -> list[Plain]:
    """At most one pod of a group is moved at a time; the head, which holds all state, never."""
    groups = {"head": 0, INGRESS: 1} | dict.fromkeys(deployment.config.pools, 1)
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(f"{settings.name}-{group}", settings),
            "spec": {
                "maxUnavailable": most,
                "selector": matching(pod_labels(settings.name, group)),
            },
        }
        for group, most in groups.items()
    ]


def policy(deployment: Adapted, settings: ManifestSettings) -> Plain:
    """See the module. Outwards everything is allowed: models come from a hub."""
    config = deployment.config
    everywhere: Plain = {"namespaceSelector": {}}
    ours = [{"podSelector": matching({NAME_LABEL: settings.name})}]
    watching: list[Plain] = [_tcp(METRICS_PORT), _tcp(_EPHEMERAL[0]) | {"endPort": _EPHEMERAL[1]}]
    if deployment.has_token:
        watching.insert(0, _tcp(config.observability.metrics.port))
    rules: list[Plain] = [
        {"from": ours},
        {"ports": [_tcp(config.server.port)]},
        {"from": [everywhere | {"podSelector": matching(_PROMETHEUS)}], "ports": watching},
        {
            "from": [everywhere | {"podSelector": matching(_OPERATOR)}],
            "ports": [_tcp(HEAD_PORTS["dashboard"]), _tcp(config.server.port)],
        },
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(settings.name, settings),
        "spec": {
            "podSelector": matching({NAME_LABEL: settings.name}),
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }


def metadata(name: str, settings: ManifestSettings) -> Plain:
    """What an object is called, and whose it is."""
    labels = {"app.kubernetes.io/name": "baton", NAME_LABEL: settings.name}
    return {"name": name, "namespace": settings.namespace, "labels": labels}


def _service(name: str, port_name: str, group: str, port: int, settings: ManifestSettings) -> Plain:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(name, settings),
        "spec": {
            "selector": pod_labels(settings.name, group),
            "ports": [{"name": port_name, "port": port, "targetPort": port_name}],
        },
    }


def _tcp(port: int) -> Plain:
    return {"protocol": "TCP", "port": port}
