"""Settings of manifests beyond the configuration: names, and the image."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from baton.domain.errors import OperatorError
from baton.telemetry.rules.render import check_runbook_base

_MAX_NAME_LENGTH: Final = 40
"""Names of Kubernetes have 63 characters; suffixes such as `-ingress` need the rest."""
_IMAGE_PATTERN: Final = re.compile(r"[!-~]+")
"""Without white space; the registry knows whether it exists."""
_NAME_PATTERN: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


class CannotExport(OperatorError):
    """The form of deployment cannot satisfy the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSettings:
    """Names of objects, their image, and GPUs of nodes."""

    name: str = "baton"
    """Of the deployment: the prefix of every object's name."""
    namespace: str = "baton"
    """Of Kubernetes."""
    image: str | None = None
    """None: the image of the Dockerfiles, by baton's version."""
    gpus_per_node: int = 8
    """Replicas with more GPUs span nodes. Source: HGX and DGX machines have eight."""
    runbook_base: str | None = None
    """URL of a copy of the runbooks, to which alerts link; None: alerts name the page."""

    def __post_init__(self) -> None:
        for option, name in (("--name", self.name), ("--namespace", self.namespace)):
            if not _NAME_PATTERN.fullmatch(name) or len(name) > _MAX_NAME_LENGTH:
                raise CannotExport(
                    f"got the name {name!r}, expected lower-case letters, digits and '-',"
                    f" {_MAX_NAME_LENGTH} at most",
                    f"give another one with {option}",
                )
        if self.image is not None and not _IMAGE_PATTERN.fullmatch(self.image):
            raise CannotExport(
                f"got the image {self.image!r}, expected a name such as registry/baton:tag",
                "give another one with --image, or leave it out for the Dockerfiles' image",
            )
        if self.runbook_base is not None:
            check_runbook_base(self.runbook_base)
        if self.gpus_per_node < 1:
            raise CannotExport(
                f"got {self.gpus_per_node} GPUs of a node, expected one at least",
                "give how many a node has with --gpus-per-node",
            )
