"""Every target of `baton manifests`, and its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

from baton.config.load import LoadedConfig
from baton.manifests.cluster_deployment import adapt_to_cluster
from baton.manifests.images import docker_files
from baton.manifests.kubernetes.helm import helm_files
from baton.manifests.kubernetes.kuberay import kuberay_files
from baton.manifests.kubernetes.kustomize import kustomize_files
from baton.manifests.machines.compose import compose_files
from baton.manifests.machines.ray_up import ray_up_files
from baton.manifests.machines.systemd import systemd_files
from baton.manifests.settings import ManifestSettings

Files = Mapping[str, bytes]


class Target(StrEnum):
    """A form of deployment."""

    KUBERAY = "kuberay"
    HELM = "helm"
    KUSTOMIZE = "kustomize"
    RAY = "ray"
    COMPOSE = "compose"
    SYSTEMD = "systemd"
    DOCKER = "docker"


def manifest_files(target: Target, loaded: LoadedConfig, settings: ManifestSettings) -> Files:
    """Files by path below a folder.

    Raises:
        CannotExport: the target cannot satisfy the configuration.
    """
    return _FILES[target](loaded, settings)


_FILES: Final[Mapping[Target, Callable[[LoadedConfig, ManifestSettings], Files]]] = {
    Target.KUBERAY: lambda loaded, settings: kuberay_files(adapt_to_cluster(loaded), settings),
    Target.HELM: lambda loaded, settings: helm_files(adapt_to_cluster(loaded), settings),
    Target.KUSTOMIZE: lambda loaded, settings: kustomize_files(adapt_to_cluster(loaded), settings),
    Target.RAY: lambda loaded, settings: ray_up_files(adapt_to_cluster(loaded), settings),
    Target.COMPOSE: lambda loaded, settings: compose_files(loaded.config, settings),
    Target.SYSTEMD: systemd_files,
    Target.DOCKER: lambda _loaded, _settings: docker_files(),
}
