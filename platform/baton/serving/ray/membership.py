"""Follows the running replicas of some deployments in Ray Serve.

Theory of operation: one task asks the Serve controller, as Serve's own routers do, by a call that
returns after a change or after a minute. An answer replaces the view of the deployments that it
names. If the whole view has changed, `on_change` is called. While the controller is unreachable,
the last view stands. After a failure the task looks up the controller again, and forgets versions:
a controller that has restarted without its state is believed at once. It also repeats the full
question from time to time.

A replica that was told to stop leaves the view at once, long before its process ends: absence means
"give it no new work", not "its work is lost".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from baton.runtime.process.background_task import BackgroundTask
from baton.serving.ray import serve_control

if TYPE_CHECKING:
    from ray.serve._private.common import DeploymentID, RunningReplicaInfo
    from ray.serve._private.long_poll import LongPollNamespace, UpdatedObject

    _Key: TypeAlias = tuple[LongPollNamespace, DeploymentID]

_LOGGER = logging.getLogger(__name__)
_UNKNOWN_VERSION = -1
"""A version that no answer has, so that the controller answers at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One running replica."""

    replica_id: str
    deployment: str
    metadata: Mapping[str, Any]
    """The replica's `record_replica_metadata` from when it became ready; read-only."""
    node_ip: str

    def __hash__(self) -> int:
        return hash(self.replica_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipTiming:
    """Intervals and deadlines."""

    retry_s: float = 0.5
    lookup_timeout_s: float = 5.0
    recheck_s: float = 30.0
    """The longest time that a change can stay unseen if a notification was lost."""


class _RemoteMethod(Protocol):
    def remote(self, versions: dict[_Key, int]) -> Awaitable[object]: ...


class ServeController(Protocol):
    """The used part of the Serve controller's handle."""

    @property
    def listen_for_change(self) -> _RemoteMethod:
        """Ask for changes since these versions; returns when there are any."""
        ...


class Membership:
    """Follows the running replicas of some deployments of one app."""

    def __init__(
        self,
        *,
        app: str,
        deployments: Sequence[str],
        on_change: Callable[[frozenset[Member]], None],
        timing: MembershipTiming = MembershipTiming(),
        find_controller: Callable[[], ServeController] | None = None,
    ) -> None:
        self._app = app
        self._deployments = tuple(deployments)
        self._on_change = on_change
        self._timing = timing
        self._find_controller = find_controller or cast(
            "Callable[[], ServeController]", serve_control.find_controller
        )
        self._by_deployment: dict[str, frozenset[Member]] = {}
        self._notified: frozenset[Member] | None = None
        self._task = BackgroundTask(f"membership-{app}", self._follow)
        # A thread of its own: while Ray's store is away a lookup hangs for a minute. Repeated
        # lookups would take all threads of this process's default pool.
        self._lookup_executor = ThreadPoolExecutor(1, thread_name_prefix=f"membership-{app}")

    @property
    def members(self) -> frozenset[Member]:
        """The latest view; empty until the controller has answered once."""
        return frozenset().union(*self._by_deployment.values())

    async def start(self) -> None:
        """Begin to follow; returns at once, the first view comes through `on_change`."""
        self._task.start()

    async def stop(self) -> None:
        """Stop following; `on_change` is not called any more. Idempotent."""
        self._lookup_executor.shutdown(wait=False, cancel_futures=True)
        await self._task.stop()

    async def _follow(self) -> None:
        is_connected = True
        while True:
            try:
                await self._poll_until_recheck()
                is_connected = True
            except Exception as error:  # noqa: BLE001 - a boundary: whatever Ray raises, ask again
                _LOGGER.log(
                    logging.WARNING if is_connected else logging.DEBUG,
                    "membership of app %s cannot be followed (%s: %s); keeping the last view of "
                    "%d replicas and asking the Serve controller again",
                    self._app,
                    type(error).__name__,
                    str(error).partition("\n")[0],
                    len(self.members),
                )
                is_connected = False
                await asyncio.sleep(self._timing.retry_s)

    async def _poll_until_recheck(self) -> None:
        """Ask for everything, then for changes only, until the next full question."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timing.lookup_timeout_s):
            controller = await loop.run_in_executor(self._lookup_executor, self._find_controller)
        versions = {_key(self._app, name): _UNKNOWN_VERSION for name in self._deployments}
        answered = False
        try:
            async with asyncio.timeout(self._timing.recheck_s):
                while True:
                    answer = await controller.listen_for_change.remote(versions)
                    answered = True
                    if isinstance(answer, dict):
                        self._apply_update(cast("dict[_Key, UpdatedObject]", answer), versions)
        except TimeoutError:
            # No change for a while is no failure, but the first question is always answered at once
            # if the deployments are known.
            if not answered:
                raise

    def _apply_update(self, answer: dict[_Key, UpdatedObject], versions: dict[_Key, int]) -> None:
        for key, update in answer.items():
            versions[key] = update.snapshot_id
            self._by_deployment[key[1].name] = frozenset(
                _member(replica) for replica in update.object_snapshot.running_replicas
            )
        view = self.members
        if view != self._notified:
            self._on_change(view)
            self._notified = view  # only now: a listener that failed is called again


def _key(app: str, deployment: str) -> _Key:
    from ray.serve._private.common import DeploymentID
    from ray.serve._private.long_poll import LongPollNamespace

    return (LongPollNamespace.DEPLOYMENT_TARGETS, DeploymentID(name=deployment, app_name=app))


def _member(replica: RunningReplicaInfo) -> Member:
    return Member(
        replica_id=replica.replica_id.unique_id,
        deployment=replica.replica_id.deployment_id.name,
        metadata=MappingProxyType(dict(replica.replica_metadata)),
        node_ip=replica.node_ip or "",
    )
