"""A kustomize base, and overlays for what differs between clusters: GPUs and RDMA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from baton.manifests.cluster_deployment import Adapted, Plain
from baton.manifests.kubernetes.kuberay import texts_by_file
from baton.manifests.node_groups import pool_groups
from baton.manifests.pods import RDMA_RESOURCE
from baton.manifests.settings import ManifestSettings
from baton.manifests.yaml_writer import yaml_text

_FILE: Final = "kustomization.yaml"
_GROUPS: Final = "/spec/rayClusterConfig/workerGroupSpecs"
_FRONT_GROUPS: Final = 1
"""Worker groups before the first pool's."""
_TOLERATION: Final = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
_GPU_NODES: Final = {"nvidia.com/gpu.present": "true"}
"""As NVIDIA's GPU operator labels nodes."""

Patches = Callable[[str], list[Plain]]
"""Changes to the group of nodes at a path."""


def kustomize_files(deployment: Adapted, settings: ManifestSettings) -> Mapping[str, bytes]:
    """`base` runs as it is; `overlays/gpu` puts engines on GPU nodes, `overlays/rdma` adds RDMA."""
    base = texts_by_file(deployment, settings, rdma=False)
    files = {f"base/{name}": text for name, text in base.items()}
    files[f"base/{_FILE}"] = _kustomization({"resources": list(base)})
    files[f"overlays/gpu/{_FILE}"] = _overlay("../../base", deployment, settings, _gpu_patches)
    files[f"overlays/rdma/{_FILE}"] = _overlay("../gpu", deployment, settings, _rdma_patches)
    return {name: text.encode() for name, text in files.items()}


def _overlay(below: str, deployment: Adapted, settings: ManifestSettings, patches: Patches) -> str:
    groups = enumerate(pool_groups(deployment.config, settings), start=_FRONT_GROUPS)
    changes = [
        change for index, group in groups if group.gpus for change in patches(f"{_GROUPS}/{index}")
    ]
    kustomization: Plain = {"resources": [below]}
    if changes:
        target = {"group": "ray.io", "version": "v1", "kind": "RayService", "name": settings.name}
        kustomization["patches"] = [{"target": target, "patch": yaml_text(changes)}]
    return _kustomization(kustomization)


def _gpu_patches(group: str) -> list[Plain]:
    pod = f"{group}/template/spec"
    return [
        _add(f"{pod}/tolerations", [_TOLERATION]),
        _add(f"{pod}/nodeSelector", _GPU_NODES),
    ]


def _rdma_patches(group: str) -> list[Plain]:
    container = f"{group}/template/spec/containers/0"
    # In a JSON pointer, `~1` is a slash.
    name = RDMA_RESOURCE.replace("/", "~1")
    return [
        *(_add(f"{container}/resources/{kind}/{name}", "1") for kind in ("requests", "limits")),
        _add(f"{container}/securityContext/capabilities/add", ["IPC_LOCK"]),
    ]


def _add(path: str, value: object) -> Plain:
    return {"op": "add", "path": path, "value": value}


def _kustomization(content: Plain) -> str:
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    return yaml_text(head | content)
