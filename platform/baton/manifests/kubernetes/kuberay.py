"""A RayService for KubeRay: the application and its cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from baton.config.write.yaml_writer import yaml_text
from baton.manifests.cluster_deployment import ANY_ADDRESS, ClusterDeployment, PlainDict
from baton.manifests.monitoring import monitor_objects, prometheus_rule
from baton.manifests.networking import disruption_budgets, metadata, network_policy, services
from baton.manifests.node_groups import NodeGroup, front_group, head_group, pool_groups
from baton.manifests.pod_limits import check_pods
from baton.manifests.pods import (
    PodTemplates,
    front_probes,
    model_claim,
    raylet_probes,
)
from baton.manifests.serve_config import serve_config
from baton.manifests.settings import ManifestSettings

RAY_VERSION: Final = "2.60.0"
"""The version in the images; a test compares it with the lock."""
_IDLE_TIMEOUT_S: Final = 300
"""Ends a node without a replica; long enough that a moving replica finds room."""
AUTOSCALER_OPTIONS: Final[Mapping[str, object]] = {
    "idleTimeoutSeconds": _IDLE_TIMEOUT_S,
    "upscalingMode": "Default",
    "resources": {
        "requests": {"cpu": "200m", "memory": "512Mi"},
        "limits": {"memory": "512Mi"},
    },
}
"""Of Ray's autoscaler, which starts and stops pods for replicas."""


def kuberay_files(deployment: ClusterDeployment, settings: ManifestSettings) -> Mapping[str, bytes]:
    """One file for each kind of object."""
    rdma = deployment.config.transfer.require_rdma
    texts = manifests_by_file(deployment, settings, rdma=rdma)
    return {name: text.encode() for name, text in texts.items()}


def manifests_by_file(
    deployment: ClusterDeployment, settings: ManifestSettings, *, rdma: bool
) -> Mapping[str, str]:
    """Every object, by file.

    Raises:
        CannotExport: pods cannot satisfy the configuration.
    """
    check_pods(deployment.config)
    files = {
        "rayservice.yaml": yaml_text(ray_service(deployment, settings, rdma=rdma)),
        "services.yaml": yaml_text(*services(deployment, settings)),
        "disruption.yaml": yaml_text(*disruption_budgets(deployment, settings)),
        "networkpolicy.yaml": yaml_text(network_policy(deployment, settings)),
        "monitoring.yaml": yaml_text(*monitor_objects(deployment, settings)),
        "rules.yaml": prometheus_rule(settings),
    }
    cache = deployment.config.cluster.model_cache
    if cache.size_bytes is not None:
        claim: PlainDict = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata(f"{settings.name}-models", settings),
            "spec": model_claim(cache),
        }
        files["models.yaml"] = yaml_text(claim)
    return files


def ray_service(
    deployment: ClusterDeployment, settings: ManifestSettings, *, rdma: bool
) -> PlainDict:
    """The RayService."""
    pods = PodTemplates(deployment=deployment, settings=settings, rdma=rdma)
    config = deployment.config
    front_nodes = front_group(config)
    front_template = pods.template(
        front_nodes, probes=front_probes(config.server.port), is_front=True
    )
    engine_groups = [
        _worker_group(group, pods.template(group, probes=raylet_probes()))
        for group in pool_groups(config, settings)
    ]
    head = head_group()
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": metadata(settings.name, settings),
        "spec": {
            # Clients use the fronts of other nodes.
            "excludeHeadPodFromServeSvc": True,
            "serveConfigV2": yaml_text(serve_config(deployment)),
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION,
                "authOptions": {"mode": "token"},
                "enableInTreeAutoscaling": True,
                "autoscalerOptions": AUTOSCALER_OPTIONS,
                "headGroupSpec": {
                    "rayStartParams": {"dashboard-host": ANY_ADDRESS},
                    "resources": _quantities({"CPU": head.cpus, **head.resources}),
                    "template": pods.template(head, probes=raylet_probes()),
                },
                "workerGroupSpecs": [_worker_group(front_nodes, front_template), *engine_groups],
            },
        },
    }


def _worker_group(group: NodeGroup, template: PlainDict) -> PlainDict:
    resources = {"CPU": group.cpus} | ({"GPU": group.gpus} if group.gpus else {})
    spec: PlainDict = {
        "groupName": group.name,
        "replicas": group.start,
        "minReplicas": group.min,
        "maxReplicas": group.max,
        "numOfHosts": group.nodes_per_replica,
        "rayStartParams": {},
        "resources": _quantities({**resources, **group.resources}),
    }
    if group.labels:
        spec["labels"] = dict(group.labels)
    return {**spec, "template": template}


def _quantities(resources: Mapping[str, int]) -> dict[str, str]:
    return {name: str(amount) for name, amount in resources.items()}
