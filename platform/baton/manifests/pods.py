"""Pods of Ray's nodes: one container each, not root, with secrets and models mounted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from baton.config.schema.cluster import ModelCache
from baton.config.schema.deployment import DeploymentConfig
from baton.manifests.cluster_deployment import KEYS_DIR, TOKEN_FILE, ClusterDeployment, PlainDict
from baton.manifests.environment import ray_variables
from baton.manifests.images import BATON_UID, MODELS_DIR, image_name
from baton.manifests.node_groups import NodeGroup
from baton.manifests.pod_limits import AGENT_PORT, HEAD_PORTS, METRICS_PORT
from baton.manifests.settings import ManifestSettings

GROUP_LABEL: Final = "baton/group"
"""The group of nodes of a pod."""
NAME_LABEL: Final = "app.kubernetes.io/instance"
RDMA_RESOURCE: Final = "rdma/hca"
"""As in the RDMA device plugins' examples; an overlay or value can name another."""
_HEAD_CPU_REQUEST: Final = "500m"
_FRONT_CPU_REQUEST: Final = 2
"""One core for an ingress, one for HAProxy."""
_MIB: Final = 1024**2
_SECRET_FILE_MODE: Final = 0o440
POD_SECURITY: Final[Mapping[str, object]] = {
    "runAsNonRoot": True,
    "runAsUser": BATON_UID,
    "runAsGroup": BATON_UID,
    "fsGroup": BATON_UID,
    "seccompProfile": {"type": "RuntimeDefault"},
}
RAYLET_HEALTH_COMMAND: Final = (
    "bash",
    "-c",
    "wget --tries 1 -T 4 -q -O- "
    f"http://localhost:{AGENT_PORT}/api/local_raylet_healthz | grep -q success",
)
"""Exits with 0 while a node's raylet lives, as KubeRay's own probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTemplates:
    """Makes the pods of one deployment."""

    deployment: ClusterDeployment
    settings: ManifestSettings
    rdma: bool = False

    @property
    def _model_cache(self) -> ModelCache:
        return self.deployment.config.cluster.model_cache

    def template(self, group: NodeGroup, *, probes: PlainDict, is_front: bool = False) -> PlainDict:
        """The template of a group's pods."""
        is_engine = not is_front and group.name != "head"
        spec: PlainDict = {
            "automountServiceAccountToken": False,
            "securityContext": POD_SECURITY,
            "containers": [self._container(group, probes, is_engine=is_engine, is_front=is_front)],
            "volumes": _volumes(self.deployment, self.settings.name),
        }
        if group.name == "head":
            del spec["automountServiceAccountToken"]  # Ray's autoscaler asks for pods from there
        else:
            # Streams of an evicted pod resume elsewhere; the grace period is for those that end in
            # time.
            spec["terminationGracePeriodSeconds"] = 60
        if is_front:
            spec["topologySpreadConstraints"] = [_spread_constraint(self.settings.name, group.name)]
        return {"metadata": {"labels": pod_labels(self.settings.name, group.name)}, "spec": spec}

    def _container(
        self, group: NodeGroup, probes: PlainDict, *, is_engine: bool, is_front: bool
    ) -> PlainDict:
        rdma = self.rdma and is_engine
        # RDMA pins more memory than an unprivileged process may.
        capabilities = {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if rdma else {})
        return {
            "name": f"ray-{'head' if group.name == 'head' else 'worker'}",
            "image": image_name(self.deployment, self.settings),
            "env": _environment(self.deployment, self.settings.name),
            "ports": _ports(self.deployment, group, is_front=is_front),
            "envFrom": [
                {"secretRef": {"name": f"{self.settings.name}-environment", "optional": True}}
            ],
            "resources": _resources(
                group,
                is_front=is_front,
                needs_rdma=rdma,
                stores_models=not _is_cache_shared(self._model_cache),
            ),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": capabilities,
            },
            **probes,
            "volumeMounts": _volume_mounts(self.deployment),
        }


def pod_labels(name: str, group: str) -> dict[str, str]:
    """Services, policies and monitors select the pods of a group by these."""
    return {"app.kubernetes.io/name": "baton", NAME_LABEL: name, GROUP_LABEL: group}


def _environment(deployment: ClusterDeployment, name: str) -> list[PlainDict]:
    """Variables of Ray and Serve, the folder of models, and the hub's token if there is one."""
    cache_dir = models_dir(deployment.config)
    variables = ray_variables(deployment.config) | {"HF_HOME": cache_dir}
    entries: list[PlainDict] = [{"name": key, "value": variables[key]} for key in sorted(variables)]
    hub_token = {"name": f"{name}-hub", "key": "token", "optional": True}
    return [*entries, {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": hub_token}}]


def models_dir(config: DeploymentConfig) -> str:
    """The folder of downloaded models in a pod."""
    return config.cluster.model_cache.path or MODELS_DIR


def _claim_name(cache: ModelCache, name: str) -> str | None:
    return f"{name}-models" if cache.size_bytes is not None else cache.claim


def _is_cache_shared(cache: ModelCache) -> bool:
    return (cache.path, cache.claim, cache.size_bytes) != (None, None, None)


def model_claim(cache: ModelCache) -> PlainDict:
    """The spec of the claim for models."""
    assert cache.size_bytes is not None, "asked for where a volume is needed"
    spec: PlainDict = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": mib_text(math.ceil(cache.size_bytes / _MIB) * _MIB)}},
    }
    if cache.storage_class is not None:
        spec["storageClassName"] = cache.storage_class
    return spec


def _resources(
    group: NodeGroup,
    *,
    is_front: bool = False,
    needs_rdma: bool = False,
    stores_models: bool = False,
) -> PlainDict:
    """The resources of a pod. CPUs have no limit: throttling would delay an engine.

    `stores_models` requests disk for the model; otherwise the pod could be evicted.
    """
    cpu = (
        str(group.cpus)
        if group.cpus
        else str(_FRONT_CPU_REQUEST)
        if is_front
        else _HEAD_CPU_REQUEST
    )
    requests: PlainDict = {"cpu": cpu, "memory": memory_request(group)}
    limits: PlainDict = {}
    if stores_models and group.models_bytes:
        requests["ephemeral-storage"] = mib_text(group.models_bytes)
    if group.memory_limit_bytes is not None:
        limits["memory"] = requests["memory"] = mib_text(group.memory_limit_bytes)
    if group.gpus:
        limits["nvidia.com/gpu"] = requests["nvidia.com/gpu"] = str(group.gpus)
    if needs_rdma:
        limits[RDMA_RESOURCE] = requests[RDMA_RESOURCE] = "1"
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def _volumes(deployment: ClusterDeployment, name: str) -> list[PlainDict]:
    """Secrets, models, and shared memory for an engine's workers."""
    entries: list[PlainDict] = [
        {"name": "models", **_models_volume(deployment.config.cluster.model_cache, name)},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    if deployment.key_files:
        entries.append(_secret_volume("keys", f"{name}-keys"))
    if deployment.needs_token:
        entries.append(_secret_volume("console", f"{name}-console"))
    return entries


def _models_volume(cache: ModelCache, name: str) -> PlainDict:
    if cache.path is not None:
        return {"hostPath": {"path": cache.path, "type": "DirectoryOrCreate"}}
    claim = _claim_name(cache, name)
    if claim is not None:
        return {"persistentVolumeClaim": {"claimName": claim}}
    return {"emptyDir": {}}


def _volume_mounts(deployment: ClusterDeployment) -> list[PlainDict]:
    entries: list[PlainDict] = [
        {"name": "models", "mountPath": models_dir(deployment.config)},
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - of the container
    ]
    if deployment.key_files:
        entries.append({"name": "keys", "mountPath": str(KEYS_DIR), "readOnly": True})
    if deployment.needs_token:
        entries.append({"name": "console", "mountPath": str(TOKEN_FILE.parent), "readOnly": True})
    return entries


def raylet_probes() -> PlainDict:
    """Probes of a node's raylet; Serve and baton check what runs on it."""
    probe: PlainDict = {
        "exec": {"command": list(RAYLET_HEALTH_COMMAND)},
        "periodSeconds": 10,
        "timeoutSeconds": 5,
        "failureThreshold": 6,
    }
    return {
        "startupProbe": {**probe, "failureThreshold": 30},
        "livenessProbe": probe,
        "readinessProbe": probe,
    }


def front_probes(port: int) -> PlainDict:
    """Probes of a front, which is ready while it serves requests."""
    readiness: PlainDict = {
        "httpGet": {"path": "/-/healthz", "port": port},
        "periodSeconds": 5,
        "timeoutSeconds": 3,
        "failureThreshold": 2,
    }
    return raylet_probes() | {"readinessProbe": readiness}


def _ports(deployment: ClusterDeployment, group: NodeGroup, *, is_front: bool) -> list[PlainDict]:
    ports: dict[str, int] = {"metrics": METRICS_PORT}
    if group.name == "head":
        ports |= HEAD_PORTS
        if deployment.needs_token:
            ports["observe"] = deployment.config.observability.metrics.port
    if is_front:
        ports["api"] = deployment.config.server.port
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _spread_constraint(name: str, group: str) -> PlainDict:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": pod_labels(name, group)},
    }


def _secret_volume(volume: str, secret: str) -> PlainDict:
    return {"name": volume, "secret": {"secretName": secret, "defaultMode": _SECRET_FILE_MODE}}


def memory_request(group: NodeGroup) -> str:
    """The memory request of a node."""
    return mib_text(group.memory_bytes)


def mib_text(size_bytes: int) -> str:
    """A size as Kubernetes writes it."""
    return f"{size_bytes // _MIB}Mi"


def label_selector(labels: Mapping[str, str]) -> PlainDict:
    """A selector of pods."""
    return {"matchLabels": dict(labels)}
