"""Ports of the scaling loop; `controller.serve_fleet` implements them on Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.control.autoscaling.autoscaler import Override
from baton.domain.demand import CoordinatorReport
from baton.domain.fleet import Role
from baton.policy.scaling.actions import FlipReplicas
from baton.serving.ray.serve_control import DeploymentState

Reports = tuple[tuple[CoordinatorReport, ...], tuple[str, ...]]
"""The reports, and why each missing one is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TickInputs:
    """Inputs of a turn."""

    states: Mapping[str, DeploymentState] = field(default_factory=dict)
    reports: tuple[CoordinatorReport, ...] = ()
    missing: tuple[str, ...] = ()
    """The missing answers, and why."""
    unresponsive_ingresses: int = 0
    """Ingresses among them; 1 also where none could be asked."""


class ScaledFleet(Protocol):
    """The loop's access to the deployment. Every call has a deadline of its own."""

    async def states(self) -> Mapping[str, DeploymentState]:
        """Every pool that Serve knows."""
        ...

    async def reports(self) -> Reports:
        """The reports of ingresses, and why each missing one is missing."""
        ...

    async def scale(self, pool: str, replicas: int) -> None:
        """Set the desired replicas of a pool."""
        ...

    async def set_role(self, pool: str, replica_ids: Sequence[str], role: Role) -> None:
        """Set the role of these replicas."""
        ...


class ControllerStore(Protocol):
    """State that outlives a controller. Every call has a deadline of its own."""

    async def claim(self) -> bool:
        """Become the owner; whether another was before."""
        ...

    async def is_owner(self) -> bool:
        """Whether no other loop has claimed it since."""
        ...

    async def load(self) -> dict[str, Override]:
        """Overrides by pool, including those that expired."""
        ...

    async def save(self, overrides: Mapping[str, Override]) -> None:
        """Keep overrides."""
        ...


class TickListener(Protocol):
    """Gets the reports of ingresses."""

    async def on_tick(self, inputs: TickInputs) -> None:
        """Take one turn's inputs."""
        ...


def replicas_to_flip(action: FlipReplicas, reports: Sequence[CoordinatorReport]) -> tuple[str, ...]:
    """Up to `action.replicas` replicas of the pool that do not have the new role yet."""
    roles = {
        replica_id: role
        for report in reports
        for pool in report.pools
        if pool.pool == action.pool
        for replica_id, role in pool.roles
    }
    candidates = sorted(replica_id for replica_id, role in roles.items() if role is not action.role)
    return tuple(candidates[: action.replicas])
