"""`baton doctor`: everything that can be looked at, in one numbered list with what to do.

Facts are gathered first (`doctor_facts`, `doctor_running`), each within a deadline, by code that
judges nothing; checks are pure functions of facts, so that each can be shown a broken set-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from baton.config.schema.deployment import DeploymentConfig
from baton.domain.errors import BatonError, NotRunning
from baton.serving.cluster.cluster_state import ClusterState
from baton.serving.doctor.config import config_checks
from baton.serving.doctor.deployment import nothing_runs, running_checks, running_now
from baton.serving.doctor.facts import Progress, file_fact, machine_now
from baton.serving.doctor.machine import machine_checks
from baton.serving.doctor.result import Check, Verdict, counted
from baton.serving.operator.attached import join, local_state

Report = Mapping[str, object]


def examined(config: DeploymentConfig | None, *, address: str | None, progress: Progress) -> Report:
    """Look at everything; `config` adds the checks that need one.

    Never raises for what it finds: that is what it reports.
    """
    state = _state() if address is None else None
    machine = machine_now(config, progress)
    if state is not None:
        token = file_fact("token of the Ray cluster", Path(state.token_file))
        machine = replace(machine, secrets=(*machine.secrets, token))
    return report(
        (
            ("machine", machine_checks(machine, config)),
            ("configuration", config_checks(machine, config, runs_at=_runs_at(config, state))),
            ("deployment", _deployment_checks(address, state, progress)),
        )
    )


def _state() -> ClusterState | None:
    try:
        return local_state()
    except (NotRunning, OSError):
        return None


def _runs_at(config: DeploymentConfig | None, state: ClusterState | None) -> str | None:
    """The endpoint of what runs here, when it holds what this configuration asks for."""
    if config is None or state is None:
        return None
    ours = state.http_url.rpartition(":")[2] == str(config.server.port)
    return state.http_url if ours else None


def _deployment_checks(
    address: str | None, state: ClusterState | None, progress: Progress
) -> Iterator[Check]:
    try:
        with join(address) as deployment:
            running = running_now(deployment, progress)
    except BatonError as error:
        return nothing_runs(error)
    return running_checks(running)


def report(areas: Iterable[tuple[str, Iterable[Check]]]) -> Report:
    """Checks in order, with their numbers; `ok` unless one failed."""
    rows = [(area, check) for area, checks in areas for check in checks]
    counts = counted(check for _, check in rows)
    return {
        "ok": not counts[Verdict.FAIL],
        "counts": {str(verdict).lower(): count for verdict, count in counts.items()},
        "checks": [
            {"number": number, "area": area} | asdict(check)
            for number, (area, check) in enumerate(rows, start=1)
        ],
    }
