"""How another machine joins the Ray cluster of a deployment.

Theory of operation: who has a cluster's token is let in; and processes of Ray Serve read its
settings from the environment of the raylet that starts them, wherever that is. So a node that joins
needs what the deployment has set for the first one. It keeps that in its own folder, for
`join_instructions` to make a script of. Files of the first node are left out: no other has them,
and nothing of Ray Serve that reads them runs anywhere else.
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
    """Remember what processes of this cluster are told; readable by its owner only."""
    with os.fdopen(
        os.open(run_dir / _ENVIRONMENT_FILE, os.O_WRONLY | os.O_CREAT, 0o600), "w"
    ) as file:
        json.dump({k: v for k, v in environment.items() if str(run_dir) not in v}, file)


def join_instructions(
    state: ClusterState, *, labels: Sequence[str], node_address: str | None
) -> dict[str, object]:
    """What another machine has to run: `environment`, `command`, and both as a `script`.

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
        f"# Joins the deployment at {state.http_url}. Who has the token below owns its cluster.",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())),
        shlex.join(command),
    ]
    return {
        "address": state.address,
        "environment": environment,
        "command": command,
        "script": "\n".join(lines),
    }
