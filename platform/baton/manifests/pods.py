"""The pods of Ray's nodes: one container each, not root, with what the deployment needs mounted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from baton.config.schema.cluster import ModelCache
from baton.config.schema.deployment import DeploymentConfig
from baton.manifests.cluster_deployment import KEYS, TOKEN, Adapted, Plain
from baton.manifests.environment import ray_variables
from baton.manifests.images import BATON_UID, MODELS, image_of
from baton.manifests.node_groups import NodeGroup
from baton.manifests.pod_limits import AGENT_PORT, HEAD_PORTS, METRICS_PORT
from baton.manifests.settings import ManifestSettings

GROUP_LABEL: Final = "baton/group"
"""On every pod: which group of nodes it belongs to."""
NAME_LABEL: Final = "app.kubernetes.io/instance"
RDMA_RESOURCE: Final = "rdma/hca"
"""As the RDMA device plugins' examples name it; another name is a line in an overlay or value."""
_SMALL_CPU: Final = "500m"
_FRONT_CPUS: Final = 2
"""An ingress keeps one core busy, HAProxy the other."""
_MIB: Final = 1024**2
_READ_ONLY: Final = 0o440
POD_SECURITY: Final[Mapping[str, object]] = {
    "runAsNonRoot": True,
    "runAsUser": BATON_UID,
    "runAsGroup": BATON_UID,
    "fsGroup": BATON_UID,
    "seccompProfile": {"type": "RuntimeDefault"},
}
RAYLET_LIVES: Final = (
    "bash",
    "-c",
    "wget --tries 1 -T 4 -q -O- "
    f"http://localhost:{AGENT_PORT}/api/local_raylet_healthz | grep -q success",
)
"""Ends with 0 while a node's raylet lives; KubeRay asks in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """Makes the pods of one deployment."""

    deployment: Adapted
    settings: ManifestSettings
    rdma: bool = False
    """Whether engines get an RDMA device."""

    @property
    def _cache(self) -> ModelCache:
        return self.deployment.config.cluster.model_cache

    def template(self, group: NodeGroup, *, probes: Plain, front: bool = False) -> Plain:
        """What every pod of a group is made from."""
        engine = not front and group.name != "head"
        spec: Plain = {
            "automountServiceAccountToken": False,
            "securityContext": POD_SECURITY,
            "containers": [self._container(group, probes, engine=engine, front=front)],
            "volumes": volumes(self.deployment, self.settings.name),
        }
        if group.name == "head":
            del spec["automountServiceAccountToken"]  # Ray's autoscaler asks for pods from there
        else:
            # An evicted pod's streams go on elsewhere; this is for those that end by themselves.
            spec["terminationGracePeriodSeconds"] = 60
        if front:
            spec["topologySpreadConstraints"] = [_apart(self.settings.name, group.name)]
        return {"metadata": {"labels": pod_labels(self.settings.name, group.name)}, "spec": spec}

    def _container(self, group: NodeGroup, probes: Plain, *, engine: bool, front: bool) -> Plain:
        rdma = self.rdma and engine
        # RDMA pins memory, which only this lets a process do beyond a small limit.
        capabilities = {"drop": ["ALL"]} | ({"add": ["IPC_LOCK"]} if rdma else {})
        return {
            "name": f"ray-{'head' if group.name == 'head' else 'worker'}",
            "image": image_of(self.deployment, self.settings),
            "env": environment(self.deployment, self.settings.name),
            "ports": _ports(self.deployment, group, front=front),
            "envFrom": [
                {"secretRef": {"name": f"{self.settings.name}-environment", "optional": True}}
            ],
            "resources": resources(
                group, front=front, rdma=rdma, own_models=not is_shared(self._cache)
            ),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": capabilities,
            },
            **probes,
            "volumeMounts": mounts(self.deployment),
        }


def pod_labels(name: str, group: str) -> dict[str, str]:
    """By which services, policies and monitors find the pods of a group."""
    return {"app.kubernetes.io/name": "baton", NAME_LABEL: name, GROUP_LABEL: group}


def environment(deployment: Adapted, name: str) -> list[Plain]:
    """Ray's and Serve's variables, where models are kept, and the hub's token if there is one."""
    folder = models_folder(deployment.config)
    variables = ray_variables(deployment.config) | {"HF_HOME": folder}
    listed: list[Plain] = [{"name": key, "value": variables[key]} for key in sorted(variables)]
    of_hub = {"name": f"{name}-hub", "key": "token", "optional": True}
    return [*listed, {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": of_hub}}]


def models_folder(config: DeploymentConfig) -> str:
    """Where models of a hub are kept in a pod."""
    return config.cluster.model_cache.path or MODELS


def claim_name(cache: ModelCache, name: str) -> str | None:
    """The claim by which pods of a deployment share their models; None where there is none."""
    return f"{name}-models" if cache.size_bytes is not None else cache.claim


def is_shared(cache: ModelCache) -> bool:
    """Whether models outlive the pod that fetches them."""
    return (cache.path, cache.claim, cache.size_bytes) != (None, None, None)


def model_claim(cache: ModelCache) -> Plain:
    """What is wanted of the volume that manifests bring along for models."""
    assert cache.size_bytes is not None, "asked for where one is wanted"
    spec: Plain = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": mib_text(math.ceil(cache.size_bytes / _MIB) * _MIB)}},
    }
    if cache.storage_class is not None:
        spec["storageClassName"] = cache.storage_class
    return spec


def resources(
    group: NodeGroup, *, front: bool = False, rdma: bool = False, own_models: bool = False
) -> Plain:
    """What a pod asks for. CPUs have no limit: an engine that is throttled is late.

    With its `own_models` it goes where the disk has room for them: else it would be evicted.
    """
    cpu = str(group.cpus) if group.cpus else str(_FRONT_CPUS) if front else _SMALL_CPU
    requests: Plain = {"cpu": cpu, "memory": memory_of(group)}
    limits: Plain = {}
    if own_models and group.models_bytes:
        requests["ephemeral-storage"] = mib_text(group.models_bytes)
    if group.memory_limit_bytes is not None:
        limits["memory"] = requests["memory"] = mib_text(group.memory_limit_bytes)
    if group.gpus:
        limits["nvidia.com/gpu"] = requests["nvidia.com/gpu"] = str(group.gpus)
    if rdma:
        limits[RDMA_RESOURCE] = requests[RDMA_RESOURCE] = "1"
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def volumes(deployment: Adapted, name: str) -> list[Plain]:
    """Secrets, a place for models, and shared memory for the workers of an engine."""
    found: list[Plain] = [
        {"name": "models", **_models(deployment.config.cluster.model_cache, name)},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    if deployment.key_files:
        found.append(_secret("keys", f"{name}-keys"))
    if deployment.has_token:
        found.append(_secret("console", f"{name}-console"))
    return found


def _models(cache: ModelCache, name: str) -> Plain:
    if cache.path is not None:
        return {"hostPath": {"path": cache.path, "type": "DirectoryOrCreate"}}
    claim = claim_name(cache, name)
    if claim is not None:
        return {"persistentVolumeClaim": {"claimName": claim}}
    return {"emptyDir": {}}


def mounts(deployment: Adapted) -> list[Plain]:
    """Where they are."""
    found: list[Plain] = [
        {"name": "models", "mountPath": models_folder(deployment.config)},
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 - of the container
    ]
    if deployment.key_files:
        found.append({"name": "keys", "mountPath": str(KEYS), "readOnly": True})
    if deployment.has_token:
        found.append({"name": "console", "mountPath": str(TOKEN.parent), "readOnly": True})
    return found


def head_probes() -> Plain:
    """The head is alive while its raylet and the control store answer."""
    alive = _raylet_lives()
    return {"startupProbe": _starting(alive), "livenessProbe": alive, "readinessProbe": alive}


def front_probes(port: int) -> Plain:
    """A front gets requests once it serves them; before that it is only alive."""
    serves: Plain = {
        "httpGet": {"path": "/-/healthz", "port": port},
        "periodSeconds": 5,
        "timeoutSeconds": 3,
        "failureThreshold": 2,
    }
    alive = _raylet_lives()
    return {"startupProbe": _starting(alive), "livenessProbe": alive, "readinessProbe": serves}


def engine_probes() -> Plain:
    """A node of engines is alive while its raylet is; engines are watched by Serve and by baton."""
    return head_probes()


def _raylet_lives() -> Plain:
    return {
        "exec": {"command": list(RAYLET_LIVES)},
        "periodSeconds": 10,
        "timeoutSeconds": 5,
        "failureThreshold": 6,
    }


def _starting(alive: Plain) -> Plain:
    return {**alive, "failureThreshold": 30}


def _ports(deployment: Adapted, group: NodeGroup, *, front: bool) -> list[Plain]:
    ports: dict[str, int] = {"metrics": METRICS_PORT}
    if group.name == "head":
        ports |= HEAD_PORTS
        if deployment.has_token:
            ports["observe"] = deployment.config.observability.metrics.port
    if front:
        ports["api"] = deployment.config.server.port
    return [{"name": name, "containerPort": port} for name, port in ports.items()]


def _apart(name: str, group: str) -> Plain:
    """Fronts go to different machines where there are any."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": pod_labels(name, group)},
    }


def _secret(volume: str, secret: str) -> Plain:
    return {"name": volume, "secret": {"secretName": secret, "defaultMode": _READ_ONLY}}


def memory_of(group: NodeGroup) -> str:
    """The main memory that a node of a group asks for."""
    return mib_text(group.memory_bytes)


def mib_text(size_bytes: int) -> str:
    """A size as Kubernetes writes it."""
    return f"{size_bytes // _MIB}Mi"


def matching(labels: Mapping[str, str]) -> Plain:
    """A selector of pods."""
    return {"matchLabels": dict(labels)}
