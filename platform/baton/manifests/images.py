"""Dockerfiles for machines with and without GPUs, and the names of images."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Final

import baton
from baton.manifests.cluster_deployment import ClusterDeployment
from baton.manifests.settings import ManifestSettings

BATON_UID: Final = 10001
"""The user that containers run as; the Dockerfiles make it."""
MODELS_DIR: Final = "/models"
"""Where models from the hub are kept."""


def image_name(deployment: ClusterDeployment, settings: ManifestSettings) -> str:
    """The image that every node runs."""
    if settings.image is not None:
        return settings.image
    return f"baton:{baton.__version__}-{'cuda' if deployment.needs_gpus else 'cpu'}"


def docker_files() -> Mapping[str, bytes]:
    """Both Dockerfiles: images hold baton and engines, and no configuration."""
    folder = resources.files("baton.manifests") / "templates" / "docker"
    dockerignore = (folder / "dockerignore").read_bytes()
    files = {name: (folder / name).read_bytes() for name in ("Dockerfile.cpu", "Dockerfile.cuda")}
    # BuildKit finds what to ignore beside the Dockerfile, by its name.
    return files | {f"{name}.dockerignore": dockerignore for name in files}
