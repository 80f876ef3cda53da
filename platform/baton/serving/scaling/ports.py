"""What the scaling loop needs of the world; `serve_fleet` has it on Ray Serve."""

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
"""Those that came, and for each that did not, why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TickInputs:
    """What was seen at the beginning of a turn."""

    states: Mapping[str, DeploymentState] = field(default_factory=dict)
    reports: tuple[CoordinatorReport, ...] = ()
    missing: tuple[str, ...] = ()
    """Who gave no answer, and why."""
    unresponsive_ingresses: int = 0
    """Ingresses among them; 1 also where none could be asked."""


class ScaledFleet(Protocol):
    """What the loop needs of the deployment. Every call has a deadline of its own."""

    async def states(self) -> Mapping[str, DeploymentState]:
        """Every pool that Serve knows."""
        ...

    async def reports(self) -> Reports:
        """What ingresses report, and for each that does not, why."""
        ...

    async def scale(self, pool: str, replicas: int) -> None:
        """Have exactly so many replicas of a pool."""
        ...

    async def set_role(self, pool: str, replica_ids: Sequence[str], role: Role) -> None:
        """Have these replicas play a role."""
        ...


class ControllerStore(Protocol):
    """What outlives a controller. Every call has a deadline of its own."""

    async def claim(self) -> bool:
        """Be the one who acts; whether another was before."""
        ...

    async def is_owner(self) -> bool:
        """Whether nobody else has claimed it since."""
        ...

    async def load(self) -> dict[str, Override]:
        """Overrides by pool, also those that have run out."""
        ...

    async def save(self, overrides: Mapping[str, Override]) -> None:
        """Keep overrides."""
        ...


class TickListener(Protocol):
    """Whoever else wants to hear what ingresses report."""

    async def on_tick(self, inputs: TickInputs) -> None:
        """Take in one turn's looks."""
        ...


def replicas_to_flip(action: FlipReplicas, reports: Sequence[CoordinatorReport]) -> tuple[str, ...]:
    """As many replicas of the pool as are to play another role, of those that do not yet."""
    roles = {
        replica_id: role
        for report in reports
        for pool in report.pools
        if pool.pool == action.pool
        for replica_id, role in pool.roles
    }
    candidates = sorted(replica_id for replica_id, role in roles.items() if role is not action.role)
    return tuple(candidates[: action.replicas])
