"""The verbs' backend in the rest of baton, loaded only by the verb that needs it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from baton.domain.errors import BatonError
from baton.domain.names.distribution import pip_install_engine

if TYPE_CHECKING:
    from pathlib import Path

    from baton.config import DeploymentConfig, LoadedConfig
    from baton.serving.operator.log_files import LogLine, LogQuery
    from baton.serving.rollout.ports import ApplyOptions

Progress = Callable[[str], None]
Report = Mapping[str, object]
Files = Mapping[str, bytes]


class AttachedDeployment(Protocol):
    """A deployment that was joined once, to be asked as often as wanted."""

    def status(self) -> Report:
        """See `Commands.status`."""
        ...

    def links(self) -> Report:
        """See `Commands.links`."""
        ...

    def requests(self, count: int, *, order: str) -> Report:
        """See `Commands.requests`."""
        ...


class Commands(Protocol):
    """The port that carries out the verbs; `baton.serving.commands` is one.

    Every method but `up`, `doctor` and `demo` raises NotRunning without a deployment, or where
    several run and none is named.
    """

    def up(
        self, config: LoadedConfig, *, block: bool, timeout_s: float | None, progress: Progress
    ) -> Report:
        """Start a deployment; returns when it is healthy, or with `block` when it has ended.

        Raises:
            TimedOut: it was not healthy in time; without a time, engines take as long as they need.
            BatonError: it could not be started.
        """
        ...

    def attach(self, *, address: str | None) -> AbstractContextManager[AttachedDeployment]:
        """The running deployment, for repeated questions."""
        ...

    def status(self, *, address: str | None) -> Report:
        """The running deployment, here or on the Ray cluster at `address`."""
        ...

    def explain_route(self, request_id: str, *, address: str | None) -> Report:
        """How a request was placed, as ingresses remember it.

        Raises:
            UnknownRequest: no ingress remembers it.
        """
        ...

    def requests(self, count: int, *, order: str, address: str | None) -> Report:
        """Records of the last requests, under `requests`; `order` is a `RecordSelection`."""
        ...

    def links(self, *, address: str | None) -> Report:
        """Every pair of replicas between which KV blocks may move, and its state."""
        ...

    def scale(
        self, pool: str, replicas: int, *, for_s: float | None, address: str | None
    ) -> Report:
        """Have exactly `replicas` replicas of a pool, for a time or, with None, until `scale_auto`.

        Raises:
            ScalingRejected: there is no such pool, or it may not have that many.
        """
        ...

    def scale_auto(self, pool: str, *, address: str | None) -> Report:
        """End an operator's override of a pool.

        Raises:
            ScalingRejected: there is no such pool.
        """
        ...

    def apply(self, config: LoadedConfig, options: ApplyOptions, *, progress: Progress) -> Report:
        """Apply a configuration: all of it, or nothing.

        Raises:
            ApplyRejected: it cannot be applied; the previous configuration stays.
        """
        ...

    def rollback(self, to: int | None, options: ApplyOptions, *, progress: Progress) -> Report:
        """Return to an earlier configuration; None: the last good one.

        Raises:
            ApplyRejected: it cannot be applied; the previous configuration stays.
        """
        ...

    def upgrade(self, options: ApplyOptions, *, progress: Progress) -> Report:
        """Replace the running code by the code of this process.

        Raises:
            ApplyRejected: it cannot be replaced.
        """
        ...

    def history(self, *, address: str | None) -> Report:
        """Every configuration that is kept, under `generations`, oldest first."""
        ...

    def running_config(self, *, address: str | None) -> tuple[int, DeploymentConfig]:
        """The generation that runs, and its configuration."""
        ...

    def explain_scale(self, ticks: int, *, address: str | None) -> Report:
        """The last ticks of the autoscaler, oldest first."""
        ...

    def usage(self, *, address: str | None) -> Report:
        """The usage of each tenant, and the rest."""
        ...

    def doctor(  # noqa: PLR0913 - each is an option
        self,
        config: LoadedConfig | None,
        *,
        address: str | None,
        progress: Progress,
        on_checks: Callable[[Report], None],
        url: str | None = None,
        headers: Mapping[str, str] | None = None,
        ca_file: Path | None = None,
    ) -> Report:
        """Numbered checks of the deployment, this machine, and a configuration, under `checks`.

        `on_checks` gets those of the deployment as soon as they are there. `url`, `headers` and
        `ca_file`: how clients call the endpoint.
        Failed checks are not raised: `ok` says whether none failed.
        """
        ...

    def logs(
        self, query: LogQuery, *, follow: bool, progress: Progress, address: str | None = None
    ) -> Iterable[LogLine | None]:
        """Log entries, and with `follow` later entries; None for no news for a moment.

        `progress` gets the nodes whose lines are missing.
        """
        ...

    def join_script(
        self, *, labels: Sequence[str], node_address: str | None, address: str | None
    ) -> Report:
        """The commands for another machine to join: `environment`, `command`, both as a `script`.

        Raises:
            OperatorError: no machine can join.
        """
        ...

    def down(self, *, timeout_s: float, address: str | None = None) -> Report:
        """Drain and stop the deployment.

        Raises:
            TimedOut: something still runs.
        """
        ...

    def demo(self, config: LoadedConfig, *, once: bool, progress: Progress) -> Report:
        """Start a deployment and send it a few requests; stays up until Ctrl-C unless `once`.

        Raises:
            BatonError: it could not be started, or a request failed.
        """
        ...


class NotInstalled(BatonError):
    """A package that this verb needs is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(package)
        self.reason = f"the package '{package}' is not installed"
        self.remedy = f"install baton with an engine: {pip_install_engine()}"

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


def _load_commands() -> Commands:
    try:
        module = importlib.import_module("baton.serving.commands")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "baton":
            raise
        raise NotInstalled(error.name) from error
    return cast(Commands, module)


def _dashboard_files() -> Files:
    files: Callable[[], Files] = importlib.import_module("baton.telemetry.dashboards").files
    return files()


def _rule_files(runbook_base: str | None) -> Files:
    files: Callable[..., Files] = importlib.import_module("baton.telemetry.rules").files
    return files(runbook_base=runbook_base)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Where the verbs get what they do not do themselves."""

    commands: Callable[[], Commands] = _load_commands
    dashboards: Callable[[], Files] = _dashboard_files
    """Files by their path below a folder."""
    rules: Callable[[str | None], Files] = _rule_files
    """Likewise; alerts link to runbooks below the given URL."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
