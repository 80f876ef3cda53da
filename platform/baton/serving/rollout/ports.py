"""What applying needs of a deployment that runs, what it is asked for, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.config.diff import Change
from baton.config.schema.deployment import DeploymentConfig
from baton.control.autoscaling.rollout import RolloutRules
from baton.serving.application.builds import BuildRecord, Builds
from baton.serving.rollout.rollout import FleetStatus
from baton.serving.store.config_store import GenerationRecord, GenerationStatus, LiveConfig
from baton.telemetry.histograms import ChangedEdges


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions:
    """How far an operator lets it go."""

    diff: bool = False
    """Only show what differs."""
    dry_run: bool = False
    """Ask everybody, change nothing."""
    allow_restart: bool = False
    timeout_s: float = 600.0
    """Of a restart, and of each stage of a rollout."""
    address: str | None = None
    """Of the Ray cluster; None: the deployment of this machine."""
    wait: bool = True
    """Watch a rollout to its end; otherwise give the order and leave it to Serve."""
    rollback: bool = True
    """Take back what does not work out."""
    bake_s: float = RolloutRules().bake_s
    """How long new replicas are watched after the last of a stage."""


class ApplyTarget(Protocol):
    """A deployment that runs. Every call has a deadline; all of them block."""

    def current(self) -> LiveConfig:
        """What holds now."""
        ...

    def build_record(self) -> BuildRecord:
        """What runs was built from what."""
        ...

    def prepare(self, base_generation: int, config: DeploymentConfig) -> Sequence[str]:
        """Why processes cannot take it, those that do not answer among them; empty: all can."""
        ...

    def commit(self, live: LiveConfig, operation: str) -> bool:
        """Keep it as the next generation; False: somebody else's is."""
        ...

    def distribute(self, live: LiveConfig) -> Sequence[str]:
        """Have every process take it; what went wrong."""
        ...

    def problems(self) -> Sequence[str]:
        """What ails: one line for each ingress that cannot serve; empty: all can."""
        ...

    def sizes(self) -> Mapping[str, int]:
        """How many replicas each pool is to have at present."""
        ...

    def resize(self, pool: str, replicas: int) -> None:
        """Have exactly so many replicas of a pool, from now on."""
        ...

    def replace_blockers(self, config: DeploymentConfig, pools: Sequence[str]) -> Sequence[str]:
        """Why replicas of these pools cannot be replaced one by one; empty: they can."""
        ...

    def growth_blockers(self, config: DeploymentConfig) -> Sequence[str]:
        """Why pools could not have as many replicas as they may; empty: they could."""
        ...

    def deploy_builds(self, builds: Builds) -> None:
        """Have everything built so, from now on; returns at once."""
        ...

    def fleet_status(self, names: Sequence[str]) -> FleetStatus | None:
        """How far a rollout is, and how these deployments fare; None when nobody could say."""
        ...

    def find(self, generation: int) -> DeploymentConfig | None:
        """The configuration of a generation; None when it is not kept."""
        ...

    def history(self) -> Sequence[GenerationRecord]:
        """Every generation that is kept, oldest first."""
        ...

    def set_status(self, generation: int, status: GenerationStatus, why: str = "") -> None:
        """Write down what became of a generation."""
        ...

    def record_code_version(self) -> None:
        """Write down that all of it runs the code of this process."""
        ...

    def record_progress(self, progress: Mapping[str, object]) -> None:
        """Write down how far a rollout is, for whoever asks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """What came of it."""

    generation: int
    """That holds now."""
    changes: tuple[Change, ...] = ()
    histograms: tuple[ChangedEdges, ...] = ()
    """Those that have other edges now, and so begin new series."""
    resized: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Pools, each with its size before and after."""
    replaced: tuple[str, ...] = ()
    """Deployments whose replicas were replaced, one after the other."""
    stage_verdicts: tuple[str, ...] = ()
    """By stage, what its new replicas were found good by."""
    code_versions: tuple[str, str] | None = None
    """The version of baton before and after, where that changed."""
    took_s: float = 0.0
    """From the first question to the last answer."""
    dry_run: bool = False
