"""Network access: services, disruption budgets and a network policy.

Pods of one deployment trust each other. Clients reach the fronts alone; monitoring reaches the
metrics, which need a token; KubeRay's operator reaches the head. Nothing else has access: this
policy is the only guard of KV transfers and side channels.
"""

from __future__ import annotations

from typing import Final

from baton.manifests.cluster_deployment import ClusterDeployment, PlainDict
from baton.manifests.pod_limits import HEAD_PORTS, METRICS_PORT
from baton.manifests.pods import NAME_LABEL, label_selector, pod_labels
from baton.manifests.settings import ManifestSettings
from baton.serving.shared.names import INGRESS

_EPHEMERAL_PORTS: Final = (32768, 60999)
"""Linux' default range, in which ingresses and replicas serve metrics."""
_PROMETHEUS_LABELS: Final = {"app.kubernetes.io/name": "prometheus"}
_KUBERAY_OPERATOR_LABELS: Final = {"app.kubernetes.io/name": "kuberay-operator"}


def services(deployment: ClusterDeployment, settings: ManifestSettings) -> list[PlainDict]:
    """The API for clients; console and metrics."""
    config, name = deployment.config, settings.name
    objects = [_service(name, "api", INGRESS, config.server.port, settings)]
    if deployment.needs_token:
        port = config.observability.metrics.port
        objects.append(_service(f"{name}-console", "observe", "head", port, settings))
    return objects


def disruption_budgets(
    deployment: ClusterDeployment, settings: ManifestSettings
) -> list[PlainDict]:
    """At most one pod of a group is evicted at a time; the head, which holds all state, never."""
    groups = {"head": 0, INGRESS: 1} | dict.fromkeys(deployment.config.pools, 1)
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(f"{settings.name}-{group}", settings),
            "spec": {
                "maxUnavailable": max_unavailable,
                "selector": label_selector(pod_labels(settings.name, group)),
            },
        }
        for group, max_unavailable in groups.items()
    ]


def network_policy(deployment: ClusterDeployment, settings: ManifestSettings) -> PlainDict:
    """See the module. All egress is allowed: models come from a hub."""
    config = deployment.config
    all_namespaces: PlainDict = {"namespaceSelector": {}}
    own_pods = [{"podSelector": label_selector({NAME_LABEL: settings.name})}]
    monitoring_ports: list[PlainDict] = [
        _tcp(METRICS_PORT),
        _tcp(_EPHEMERAL_PORTS[0]) | {"endPort": _EPHEMERAL_PORTS[1]},
    ]
    if deployment.needs_token:
        monitoring_ports.insert(0, _tcp(config.observability.metrics.port))
    rules: list[PlainDict] = [
        {"from": own_pods},
        {"ports": [_tcp(config.server.port)]},
        {
            "from": [all_namespaces | {"podSelector": label_selector(_PROMETHEUS_LABELS)}],
            "ports": monitoring_ports,
        },
        {
            "from": [all_namespaces | {"podSelector": label_selector(_KUBERAY_OPERATOR_LABELS)}],
            "ports": [_tcp(HEAD_PORTS["dashboard"]), _tcp(config.server.port)],
        },
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(settings.name, settings),
        "spec": {
            "podSelector": label_selector({NAME_LABEL: settings.name}),
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }


def metadata(name: str, settings: ManifestSettings) -> PlainDict:
    """Name and labels of an object."""
    labels = {"app.kubernetes.io/name": "baton", NAME_LABEL: settings.name}
    return {"name": name, "namespace": settings.namespace, "labels": labels}


def _service(
    name: str, port_name: str, group: str, port: int, settings: ManifestSettings
) -> PlainDict:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(name, settings),
        "spec": {
            "selector": pod_labels(settings.name, group),
            "ports": [{"name": port_name, "port": port, "targetPort": port_name}],
        },
    }


def _tcp(port: int) -> PlainDict:
    return {"protocol": "TCP", "port": port}
