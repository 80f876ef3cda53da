"""`baton doctor`: all checks in one numbered list with remedies.

Facts are gathered first, each within a deadline; checks are pure functions of facts, so that tests
can show each of them a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from baton.config.schema.deployment import DeploymentConfig
from baton.domain.errors import BatonError, NotRunning
from baton.serving.cluster.cluster_state import ClusterState
from baton.serving.doctor.deployment import deployment_checks, gather_deployment, unreachable_checks
from baton.serving.doctor.facts import Progress, file_fact, gather_machine
from baton.serving.doctor.machine import config_checks, machine_checks
from baton.serving.doctor.result import Check, CheckStatus, count_by_status
from baton.serving.operator.attached import attach_deployment, local_state

Report = Mapping[str, object]


def run_checks(
    config: DeploymentConfig | None, *, address: str | None, progress: Progress
) -> Report:
    """Run all checks; `config` adds those that need one.

    Faults are in the report: it never raises for them.
    """
    state = _running_cluster() if address is None else None
    machine = gather_machine(config, progress)
    if state is not None:
        token = file_fact("token of the Ray cluster", Path(state.token_file))
        machine = replace(machine, secrets=(*machine.secrets, token))
    return build_report(
        (
            ("machine", machine_checks(machine, config)),
            (
                "configuration",
                config_checks(machine, config, running_url=_running_url(config, state)),
            ),
            ("deployment", _run_deployment_checks(address, state, progress)),
        )
    )


def _running_cluster() -> ClusterState | None:
    try:
        return local_state()
    except (NotRunning, OSError):
        return None


def _running_url(config: DeploymentConfig | None, state: ClusterState | None) -> str | None:
    """The running endpoint, if it has the port of this configuration."""
    if config is None or state is None:
        return None
    is_same_port = state.http_url.rpartition(":")[2] == str(config.server.port)
    return state.http_url if is_same_port else None


def _run_deployment_checks(
    address: str | None, state: ClusterState | None, progress: Progress
) -> Iterator[Check]:
    try:
        with attach_deployment(address) as deployment:
            snapshot = gather_deployment(deployment, progress)
    except BatonError as error:
        return unreachable_checks(error)
    return deployment_checks(snapshot)


def build_report(areas: Iterable[tuple[str, Iterable[Check]]]) -> Report:
    """Checks in order, with their numbers; `ok` unless one failed."""
    rows = [(area, check) for area, checks in areas for check in checks]
    counts = count_by_status(check for _, check in rows)
    return {
        "ok": not counts[CheckStatus.FAIL],
        "counts": {str(verdict).lower(): count for verdict, count in counts.items()},
        "checks": [
            {"number": number, "area": area} | asdict(check)
            for number, (area, check) in enumerate(rows, start=1)
        ],
    }
