"""How another machine joins the Ray cluster of a deployment.

Theory of operation: a node needs the cluster's token and the environment of the first node, since
processes of Ray Serve read their settings from the environment of their raylet. The deployment
keeps that environment in its folder, without paths of files that only the first node has: no
process on another node reads them.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.domain.errors import OperatorError
from baton.domain.names.addresses import is_loopback_address
from baton.serving.cluster.cluster_state import ClusterState

_ENVIRONMENT_FILE = "joining.json"


class CannotJoin(OperatorError):
    """No other machine can join this cluster."""


def save_environment(run_dir: Path, environment: Mapping[str, str]) -> None:
    """Keep the environment of the cluster's processes; readable by its owner only."""
    with os.fdopen(
        os.open(run_dir / _ENVIRONMENT_FILE, os.O_WRONLY | os.O_CREAT, 0o600), "w"
    ) as file:
        json.dump({k: v for k, v in environment.items() if str(run_dir) not in v}, file)


def join_instructions(
    state: ClusterState, *, labels: Sequence[str], node_address: str | None
) -> dict[str, object]:
    """For another machine: `environment`, `command`, and both as a `script`.

    Raises:
        CannotJoin: the cluster listens on loopback.
    """
    if is_loopback_address(state.address):
        raise CannotJoin(
            f"Ray listens at {state.address}, where only this machine reaches it",
            "set cluster.node_address to an address of this machine that others reach, and start"
            " the deployment again",
        )
    saved_environment = json.loads((Path(state.run_dir) / _ENVIRONMENT_FILE).read_text())
    environment = saved_environment | {"RAY_AUTH_TOKEN": Path(state.token_file).read_text().strip()}
    command = ["ray", "start", "--address", state.address]
    if node_address is not None:
        command += ["--node-ip-address", node_address]
    if labels:
        command += ["--labels", ",".join(labels)]
    lines = [
        f"# Joins the deployment at {state.http_url}. The token below controls its cluster.",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())),
        shlex.join(command),
    ]
    return {
        "address": state.address,
        "environment": environment,
        "command": command,
        "script": "\n".join(lines),
    }
