"""Limits of a configuration whose nodes are pods: reserved ports, missing files.

Processes of a pod share its ports, and see only files of the image and mounts. A chart makes the
same checks with its own list of ports, because its configuration can change after the export.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from baton.config.language.fields import SecretRef
from baton.config.schema.deployment import DeploymentConfig
from baton.manifests.environment import FRONT_PORTS
from baton.manifests.settings import CannotExport

AGENT_PORT: Final = 52365
"""Ray's agent of a node, with its health check. Source: Ray 2.60's default."""
METRICS_PORT: Final = 8080
"""Ray's metrics of a node; KubeRay's choice."""
HEAD_PORTS: Final[Mapping[str, int]] = {"gcs": 6379, "dashboard": 8265, "client": 10001}
"""Of Ray's head, by name in its pod. Source: Ray 2.60's defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedPorts:
    """Ports, both ends included, of another process than baton."""

    first: int
    last: int
    owner: str


RESERVED_PORTS: Final = (
    ReservedPorts(first=HEAD_PORTS["gcs"], last=HEAD_PORTS["gcs"], owner="Ray's store"),
    ReservedPorts(first=METRICS_PORT, last=METRICS_PORT, owner="Ray's metrics"),
    ReservedPorts(
        first=HEAD_PORTS["dashboard"], last=HEAD_PORTS["dashboard"], owner="Ray's dashboard"
    ),
    ReservedPorts(
        first=HEAD_PORTS["client"], last=HEAD_PORTS["client"], owner="Ray's client server"
    ),
    ReservedPorts(
        first=FRONT_PORTS.stats, last=FRONT_PORTS.replica_http_max, owner="Ray Serve's front"
    ),
    ReservedPorts(first=AGENT_PORT, last=AGENT_PORT, owner="Ray's agent"),
)
"""Serve has a front on the head too, so the head's ports are reserved on all nodes."""


def check_pods(config: DeploymentConfig) -> None:
    """Check that pods can satisfy the configuration.

    Raises:
        CannotExport: a port is reserved, a secret is in a file that no pod has, or the folder of
            models is relative.
    """
    for key, port in _listen_ports(config).items():
        for reserved in RESERVED_PORTS:
            if reserved.first <= port <= reserved.last:
                raise CannotExport(
                    f"{key} is {port}, on which {reserved.owner} listens in the same pod",
                    "choose another port",
                )
    model_path = config.cluster.model_cache.path
    if model_path is not None and not model_path.startswith("/"):
        raise CannotExport(
            f"cluster.model_cache.path is {model_path!r}, and pods have it from the machine"
            " below them",
            "give the whole path, from / on",
        )
    for path, file in secret_files(config):
        raise CannotExport(
            f"{path} is read from the file {file}, and no pod has that file",
            "name a variable instead, as {env: NAME}, and give that to the pods from a secret",
        )


def secret_files(config: DeploymentConfig) -> Iterator[tuple[str, str]]:
    """Variables of engines that are read from files: path in the configuration, and file."""
    sections = {f"pools.{name}.env": pool.env for name, pool in config.pools.items()}
    for path, variables in (sections | {"transfer.env": config.transfer.env}).items():
        for name, value in variables.items():
            if isinstance(value, SecretRef) and value.file is not None:
                yield f"{path}.{name}", value.file


def _listen_ports(config: DeploymentConfig) -> dict[str, int]:
    observability = config.observability
    ports = {"server.port": config.server.port}
    if observability.metrics.enabled or observability.console.enabled:
        ports["observability.metrics.port"] = observability.metrics.port
    return ports
