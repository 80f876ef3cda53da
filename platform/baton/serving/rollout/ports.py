"""What applying needs of a deployment that runs, what it is asked for, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.config.diff import Change
from baton.config.schema.deployment import DeploymentConfig
from baton.control.autoscaling.rollout import RolloutRules
from baton.serving.application.builds import Builds, Built
from baton.serving.rollout.rollout import Sight
from baton.serving.store.config_store import Fate, Kept, LiveConfig
from baton.telemetry.edges import ChangedEdges


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


class Running(Protocol):
    """A deployment that runs. Every call has a deadline; all of them block."""

    def current(self) -> LiveConfig:
        """What holds now."""
        ...

    def built(self) -> Built:
        """What runs was built from what."""
        ...

    def prepare(self, on_top_of: int, config: DeploymentConfig) -> Sequence[str]:
        """Why processes cannot take it, those that do not answer among them; empty: all can."""
        ...

    def commit(self, live: LiveConfig, by: str) -> bool:
        """Keep it as the next generation; False: somebody else's is."""
        ...

    def tell(self, live: LiveConfig) -> Sequence[str]:
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

    def cannot_replace(self, config: DeploymentConfig, pools: Sequence[str]) -> Sequence[str]:
        """Why replicas of these pools cannot be replaced one by one; empty: they can."""
        ...

    def cannot_grow(self, config: DeploymentConfig) -> Sequence[str]:
        """Why pools could not have as many replicas as they may; empty: they could."""
        ...

    def order(self, builds: Builds) -> None:
        """Have everything built so, from now on; returns at once."""
        ...

    def look(self, names: Sequence[str]) -> Sight | None:
        """How far a rollout is, and how these deployments fare; None when nobody could say."""
        ...

    def find(self, generation: int) -> DeploymentConfig | None:
        """The configuration of a generation; None when it is not kept."""
        ...

    def history(self) -> Sequence[Kept]:
        """Every generation that is kept, oldest first."""
        ...

    def settle(self, generation: int, fate: Fate, why: str = "") -> None:
        """Write down what became of a generation."""
        ...

    def sign(self) -> None:
        """Write down that all of it runs the code of this process."""
        ...

    def note(self, told: Mapping[str, object]) -> None:
        """Write down how far a rollout is, for whoever asks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
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
    why: tuple[str, ...] = ()
    """By stage, what its new replicas were found good by."""
    code: tuple[str, str] | None = None
    """The version of baton before and after, where that changed."""
    took_s: float = 0.0
    """From the first question to the last answer."""
    dry_run: bool = False
