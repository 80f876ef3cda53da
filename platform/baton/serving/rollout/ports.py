"""The port through which changes are applied, with their options and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.config.diff import Change
from baton.config.schema.deployment import DeploymentConfig
from baton.control.autoscaling.rollout import RolloutRules
from baton.serving.application.builds import BuildRecord
from baton.serving.rollout.rollout import RolloutTarget
from baton.serving.store.config_store import GenerationRecord, GenerationStatus, LiveConfig
from baton.telemetry.histograms import ChangedEdges


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions:
    """An operator's options."""

    diff: bool = False
    dry_run: bool = False
    """Check without a change."""
    allow_restart: bool = False
    timeout_s: float = 600.0
    """For a restart, and for each stage of a rollout."""
    address: str | None = None
    """The Ray cluster's address; None: the deployment of this machine."""
    wait: bool = True
    """Watch the rollout to its end; otherwise order it and return."""
    rollback: bool = True
    """Roll back after a failure."""
    bake_s: float = RolloutRules().bake_s
    """How long the new replicas of a stage are watched."""


class ApplyTarget(RolloutTarget, Protocol):
    """A running deployment. All calls block and have a deadline."""

    def current(self) -> LiveConfig:
        """The configuration in force."""
        ...

    def build_record(self) -> BuildRecord:
        """The builds of the running deployments."""
        ...

    def prepare(self, base_generation: int, config: DeploymentConfig) -> Sequence[str]:
        """Why processes cannot take it, or do not answer; empty if all can."""
        ...

    def commit(self, live: LiveConfig, operation: str) -> bool:
        """Store the next generation; False if another command has stored it."""
        ...

    def distribute(self, live: LiveConfig) -> Sequence[str]:
        """Have every process apply it; returns failures."""
        ...

    def problems(self) -> Sequence[str]:
        """Why ingresses cannot serve; empty if all can."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """The desired replicas of each pool."""
        ...

    def resize(self, pool: str, replicas: int) -> None:
        """Set the desired replicas of a pool."""
        ...

    def replace_blockers(self, config: DeploymentConfig, pools: Sequence[str]) -> Sequence[str]:
        """Why replicas of these pools cannot be replaced one by one; empty if they can."""
        ...

    def growth_blockers(self, config: DeploymentConfig) -> Sequence[str]:
        """Why the maximum of replicas would not fit; empty if it would."""
        ...

    def find(self, generation: int) -> DeploymentConfig | None:
        """The configuration of a generation; None if it is not kept."""
        ...

    def history(self) -> Sequence[GenerationRecord]:
        """Every kept generation, oldest first."""
        ...

    def set_status(self, generation: int, status: GenerationStatus, reason: str = "") -> None:
        """Store a generation's status."""
        ...

    def record_code_version(self) -> None:
        """Store that everything runs the code of this process."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """The result of a change."""

    generation: int
    changes: tuple[Change, ...] = ()
    histograms: tuple[ChangedEdges, ...] = ()
    """With new edges; they begin new series."""
    resized: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Before and after."""
    replaced: tuple[str, ...] = ()
    """Deployments, in order."""
    stage_decisions: tuple[str, ...] = ()
    """Why each stage was good."""
    code_versions: tuple[str, str] | None = None
    """Before and after; None if equal."""
    took_s: float = 0.0
    dry_run: bool = False
