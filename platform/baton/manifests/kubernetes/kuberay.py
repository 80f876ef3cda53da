"""A RayService for KubeRay: the application, and the cluster that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from baton.manifests.cluster_deployment import EVERYWHERE, Adapted, Plain
from baton.manifests.monitoring import monitors, rule_file
from baton.manifests.networking import budgets, metadata, policy, services
from baton.manifests.node_groups import NodeGroup, front_group, head_group, pool_groups
from baton.manifests.pod_limits import check_pods
from baton.manifests.pods import (
    Pods,
    engine_probes,
    front_probes,
    head_probes,
    model_claim,
)
from baton.manifests.serve_config import serve_config
from baton.manifests.settings import ManifestSettings
from baton.manifests.yaml_writer import yaml_text

RAY_VERSION: Final = "2.60.0"
"""What the images hold; a test compares it with the lock."""
_IDLE_S: Final = 300
"""A node without a replica is given back after this long, so that one that moves finds room."""
AUTOSCALER: Final[Mapping[str, object]] = {
    "idleTimeoutSeconds": _IDLE_S,
    "upscalingMode": "Default",
    "resources": {
        "requests": {"cpu": "200m", "memory": "512Mi"},
        "limits": {"memory": "512Mi"},
    },
}
"""Ray's autoscaler, which starts and stops pods as replicas come and go."""


def kuberay_files(deployment: Adapted, settings: ManifestSettings) -> Mapping[str, bytes]:
    """One file for each kind of object, and what to do with them."""
    rdma = deployment.config.transfer.require_rdma
    texts = texts_by_file(deployment, settings, rdma=rdma)
    return {name: text.encode() for name, text in texts.items()}


def texts_by_file(
    deployment: Adapted, settings: ManifestSettings, *, rdma: bool
) -> Mapping[str, str]:
    """Every object, by the file it goes to.

    Raises:
        CannotExport: pods cannot give what the configuration asks for.
    """
    check_pods(deployment.config)
    files = {
        "rayservice.yaml": yaml_text(ray_service(deployment, settings, rdma=rdma)),
        "services.yaml": yaml_text(*services(deployment, settings)),
        "disruption.yaml": yaml_text(*budgets(deployment, settings)),
        "networkpolicy.yaml": yaml_text(policy(deployment, settings)),
        "monitoring.yaml": yaml_text(*monitors(deployment, settings)),
        "rules.yaml": rule_file(settings),
    }
    cache = deployment.config.cluster.model_cache
    if cache.size_bytes is not None:
        claim: Plain = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata(f"{settings.name}-models", settings),
            "spec": model_claim(cache),
        }
        files["models.yaml"] = yaml_text(claim)
    return files


def ray_service(deployment: Adapted, settings: ManifestSettings, *, rdma: bool) -> Plain:
    """The RayService."""
    pods = Pods(deployment=deployment, settings=settings, rdma=rdma)
    config = deployment.config
    front = front_group(config)
    at_front = pods.template(front, probes=front_probes(config.server.port), front=True)
    engines = [
        _workers(group, pods.template(group, probes=engine_probes()))
        for group in pool_groups(config, settings)
    ]
    head = head_group()
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": metadata(settings.name, settings),
        "spec": {
            # The head's own front would be one that clients cannot rely on: they come to others.
            "excludeHeadPodFromServeSvc": True,
            "serveConfigV2": yaml_text(serve_config(deployment)),
            "rayClusterConfig": {
                "rayVersion": RAY_VERSION,
                "authOptions": {"mode": "token"},
                "enableInTreeAutoscaling": True,
                "autoscalerOptions": AUTOSCALER,
                "headGroupSpec": {
                    "rayStartParams": {"dashboard-host": EVERYWHERE},
                    "resources": _texts({"CPU": head.cpus, **head.resources}),
                    "template": pods.template(head, probes=head_probes()),
                },
                "workerGroupSpecs": [_workers(front, at_front), *engines],
            },
        },
    }


def _workers(group: NodeGroup, template: Plain) -> Plain:
    resources = {"CPU": group.cpus} | ({"GPU": group.gpus} if group.gpus else {})
    spec: Plain = {
        "groupName": group.name,
        "replicas": group.start,
        "minReplicas": group.min,
        "maxReplicas": group.max,
        "numOfHosts": group.hosts,
        "rayStartParams": {},
        "resources": _texts({**resources, **group.resources}),
    }
    if group.labels:
        spec["labels"] = dict(group.labels)
    return {**spec, "template": template}


def _texts(resources: Mapping[str, int]) -> dict[str, str]:
    return {name: str(amount) for name, amount in resources.items()}
