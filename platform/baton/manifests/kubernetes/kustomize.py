"""A kustomize base, and overlays for GPUs and RDMA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from baton.config.write.yaml_writer import yaml_text
from baton.manifests.cluster_deployment import ClusterDeployment, PlainDict
from baton.manifests.kubernetes.kuberay import manifests_by_file
from baton.manifests.node_groups import pool_groups
from baton.manifests.pods import RDMA_RESOURCE
from baton.manifests.settings import ManifestSettings

_KUSTOMIZATION_FILE: Final = "kustomization.yaml"
_WORKER_GROUPS_PATH: Final = "/spec/rayClusterConfig/workerGroupSpecs"
_FRONT_GROUP_COUNT: Final = 1
_TOLERATION: Final = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
_GPU_NODE_SELECTOR: Final = {"nvidia.com/gpu.present": "true"}
"""The label of NVIDIA's GPU operator."""

PatchFactory = Callable[[str], list[PlainDict]]
"""Operations on the worker group at a path."""


def kustomize_files(
    deployment: ClusterDeployment, settings: ManifestSettings
) -> Mapping[str, bytes]:
    """`base` runs as it is; `overlays/gpu` puts engines on GPU nodes, `overlays/rdma` adds RDMA."""
    base = manifests_by_file(deployment, settings, rdma=False)
    files = {f"base/{name}": text for name, text in base.items()}
    files[f"base/{_KUSTOMIZATION_FILE}"] = _kustomization({"resources": list(base)})
    files[f"overlays/gpu/{_KUSTOMIZATION_FILE}"] = _overlay(
        "../../base", deployment, settings, _gpu_patches
    )
    files[f"overlays/rdma/{_KUSTOMIZATION_FILE}"] = _overlay(
        "../gpu", deployment, settings, _rdma_patches
    )
    return {name: text.encode() for name, text in files.items()}


def _overlay(
    base: str, deployment: ClusterDeployment, settings: ManifestSettings, patches: PatchFactory
) -> str:
    groups = enumerate(pool_groups(deployment.config, settings), start=_FRONT_GROUP_COUNT)
    operations = [
        change
        for index, group in groups
        if group.gpus
        for change in patches(f"{_WORKER_GROUPS_PATH}/{index}")
    ]
    kustomization: PlainDict = {"resources": [base]}
    if operations:
        target = {"group": "ray.io", "version": "v1", "kind": "RayService", "name": settings.name}
        kustomization["patches"] = [{"target": target, "patch": yaml_text(operations)}]
    return _kustomization(kustomization)


def _gpu_patches(group_path: str) -> list[PlainDict]:
    pod_path = f"{group_path}/template/spec"
    return [
        _add_operation(f"{pod_path}/tolerations", [_TOLERATION]),
        _add_operation(f"{pod_path}/nodeSelector", _GPU_NODE_SELECTOR),
    ]


def _rdma_patches(group_path: str) -> list[PlainDict]:
    container_path = f"{group_path}/template/spec/containers/0"
    # A JSON pointer has `~1` for a slash.
    name = RDMA_RESOURCE.replace("/", "~1")
    return [
        *(
            _add_operation(f"{container_path}/resources/{kind}/{name}", "1")
            for kind in ("requests", "limits")
        ),
        _add_operation(f"{container_path}/securityContext/capabilities/add", ["IPC_LOCK"]),
    ]


def _add_operation(path: str, value: object) -> PlainDict:
    return {"op": "add", "path": path, "value": value}


def _kustomization(content: PlainDict) -> str:
    header = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return yaml_text(header | content)
