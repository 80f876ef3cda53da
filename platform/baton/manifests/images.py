"""Dockerfiles for machines with and without GPUs, and the names of images."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Final

import baton
from baton.manifests.cluster_deployment import ClusterDeployment
from baton.manifests.settings import ManifestSettings

BATON_UID: Final = 10001
"""The user of containers; the Dockerfiles create it."""
MODELS_DIR: Final = "/models"


def image_name(deployment: ClusterDeployment, settings: ManifestSettings) -> str:
    """The image of every node."""
    if settings.image is not None:
        return settings.image
    return f"baton:{baton.__version__}-{'cuda' if deployment.needs_gpus else 'cpu'}"


def docker_files() -> Mapping[str, bytes]:
    """Both Dockerfiles: images hold baton and engines, and no configuration."""
    folder = resources.files("baton.manifests") / "templates" / "docker"
    dockerignore = (folder / "dockerignore").read_bytes()
    files = {name: (folder / name).read_bytes() for name in ("Dockerfile.cpu", "Dockerfile.cuda")}
    # BuildKit finds the ignore file by the Dockerfile's name.
    return files | {f"{name}.dockerignore": dockerignore for name in files}
