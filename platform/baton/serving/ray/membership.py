"""Follows the running replicas of some deployments in Ray Serve.

Theory of operation: one task asks the Serve controller, as Serve's own routers do, by a call that
returns after a change or after a minute. An answer replaces the view of the deployments that it
names. If the whole view has changed, `on_change` is called. While the controller is unreachable,
the last view stands. After a failure the task looks up the controller again, and forgets versions:
a controller that has restarted without its state is believed at once. It also repeats the full
question from time to time.

A replica with an order to stop leaves the view at once, long before its process ends: absence means
"give it no new work", not "its work is lost".

Losses are replicas whose processes ended by themselves. Ray keeps dead actors in its table, with
the reason, but does not learn the exit status of a worker. Two traces of a process make the reason
more exact. A crash writes the signal into the process's own log. The kernel reports a process that
it killed for memory. Both are found only for replicas on the node of the process that asks.

Ray calls a node dead after 15 s without a health check. Serve finds its replicas unresponsive
sooner, and orders them to stop. So the replicas that a lost node ran are those whose actors ended
shortly before Ray called it dead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from baton.domain.errors import TimedOut
from baton.runtime.process.background_task import BackgroundTask
from baton.serving.ray import serve_control

if TYPE_CHECKING:
    from ray.core.generated.gcs_pb2 import GcsNodeInfo
    from ray.serve._private.common import DeploymentID, RunningReplicaInfo
    from ray.serve._private.long_poll import LongPollNamespace, UpdatedObject

    _Key: TypeAlias = tuple[LongPollNamespace, DeploymentID]

_LOGGER = logging.getLogger(__name__)
_UNKNOWN_VERSION = -1
"""A version that no answer has, so that the controller answers at once."""
_TAIL_BYTES = 64 * 1024
_KERNEL_BYTES = 8192
"""Of one message of the kernel, at most. Source: kmsg documentation of Linux."""
_MAX_LOSSES = 10
_NODE_DIED, _WORKER_DIED = 3, 1
"""Of `ActorDiedErrorContext.reason` (Ray 2.60); others are orders to end."""
_EXPECTED_ENDS = frozenset({"EXPECTED_TERMINATION", "AUTOSCALER_DRAIN_IDLE"})
"""Of `NodeDeathInfo.reason` (Ray 2.60): a node that was stopped, or was not needed."""
_NODE_TIMEOUT_S = 75.0
"""Ray calls a node dead within this time: 5 health checks, each of 10 s at most and 3 s apart."""
STORE_NAME = "Ray's control store"
_STORE_TIMEOUT_S = 4.0
_SIGNAL = re.compile(r"\*\*\* (SIG[A-Z]+) received|Fatal Python error: (.+)")
_EXIT_CODE = re.compile(r"exit code (\d+)")
_KILLED_PID = re.compile(r"Killed process (\d+) ")
_LAST_ERROR = re.compile(r"(?:[\w.]+\.)?(\w*(?:Error|Exception|Failed)\b: .+)")
"""As the last line of a traceback: it begins its line, unlike an error in a log entry."""
_LAST_LINES = 5
"""An error further from the end of a process's output was not its end."""
_NO_TRACE = "killed (SIGKILL, or out of memory)"
_OUT_OF_MEMORY = "killed by the kernel: out of memory"

DeadActor = Mapping[str, Any]
"""A row of Ray's table of actors."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoss:
    """A replica whose process ended by itself."""

    replica_id: str
    pool: str
    node: str
    pid: int
    ended_at_s: float
    """In seconds since 1970, by the clock of Ray's head."""
    how: str


def dead_actors() -> list[DeadActor]:
    """The cluster's dead actors (private API of Ray 2.60); blocks for milliseconds."""
    from ray._private.state import state

    return list(state.actor_table(None, None, "DEAD").values())


def replica_losses(
    actors: Iterable[DeadActor],
    *,
    app: str,
    pools: Iterable[str],
    last_words: Callable[[int, str], str],
) -> tuple[ReplicaLoss, ...]:
    """The newest losses among dead actors, newest first; replicas that were stopped are none.

    `last_words` has what a process of a pid and an address of a node left behind; empty for none.
    """
    prefixes = {f"SERVE_REPLICA::{app}#{pool}#": pool for pool in pools}
    rows = sorted(actors, key=lambda actor: -float(actor["EndTime"]))
    losses: list[ReplicaLoss] = []
    for actor in rows:
        head, separator, name = str(actor["Name"]).rpartition("#")
        pool = prefixes.get(head + separator)
        pid = int(actor["Pid"])
        if pool is None or pid == 0:  # an actor without a process had not started
            continue
        if (cause := _cause(actor)) is None or len(losses) == _MAX_LOSSES:
            continue
        node = str(actor["Address"]["IPAddress"])
        losses.append(
            ReplicaLoss(
                replica_id=f"{pool}-{name}",
                pool=pool,
                node=node,
                pid=pid,
                ended_at_s=float(actor["EndTime"]) / 1000,
                how=cause or last_words(pid, node) or _NO_TRACE,
            )
        )
    return tuple(losses)


def _cause(actor: DeadActor) -> str | None:
    """How the process ended, if Ray knows; empty if it does not; None if it was stopped."""
    death = actor["DeathCause"]
    if death.HasField("oom_context"):
        return "ended by Ray, for its node ran out of memory"
    if not death.HasField("actor_died_error_context"):
        return None
    died = death.actor_died_error_context
    if died.reason == _NODE_DIED:
        return "its node was lost"
    if died.reason != _WORKER_DIED or "INTENDED" in died.error_message:
        return None
    code = _EXIT_CODE.search(died.error_message)
    return "" if code is None else f"exit code {code[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """A node that Ray calls dead, although no operator or autoscaler stopped it."""

    node_id: str
    address: str
    ended_at_s: float
    """In seconds since 1970, by the clock of Ray's head."""
    reason: str
    replicas: tuple[str, ...]
    """Ids of the deployment's replicas, ingresses and controller that ran there."""


def find_lost_nodes(app: str) -> tuple[LostNode, ...]:
    """The lost nodes of the connected cluster (private API of Ray 2.60); blocks for 4 s at most.

    Raises:
        TimedOut: Ray's control store did not answer.
    """
    from ray import exceptions
    from ray._private import worker

    try:
        client = worker.global_worker.gcs_client
        nodes = list(client.get_all_node_info(timeout=_STORE_TIMEOUT_S).values())
    except exceptions.RayError as error:
        reason = f"{STORE_NAME} did not answer within {_STORE_TIMEOUT_S:g} s"
        remedy = "see whether the head of the Ray cluster runs: 'ray status'"
        raise TimedOut(reason, remedy) from error
    has_ended = any(node.end_time_ms for node in nodes)
    return lost_nodes(nodes, dead_actors() if has_ended else (), app=app)


def lost_nodes(
    nodes: Iterable[GcsNodeInfo], actors: Iterable[DeadActor], *, app: str
) -> tuple[LostNode, ...]:
    """The newest lost nodes of Ray's tables, newest first; a node that is back is none."""
    rows = sorted(nodes, key=lambda node: -node.end_time_ms)
    alive = {node.node_manager_address for node in rows if not node.end_time_ms}
    ended = list(actors)
    lost: list[LostNode] = []
    for node in rows:
        if not node.end_time_ms or node.node_manager_address in alive or _was_stopped(node):
            continue
        lost.append(
            LostNode(
                node_id=node.node_id.hex(),
                address=node.node_manager_address,
                ended_at_s=node.end_time_ms / 1000,
                reason=node.death_info.reason_message or "Ray gives no reason",
                replicas=tuple(_replicas_on(node, ended, prefix=f"SERVE_REPLICA::{app}#")),
            )
        )
    return tuple(lost[:_MAX_LOSSES])


def _was_stopped(node: GcsNodeInfo) -> bool:
    info = node.death_info
    return info.DESCRIPTOR.enum_types_by_name["Reason"].values_by_number[info.reason].name in (
        _EXPECTED_ENDS
    )


def _replicas_on(node: GcsNodeInfo, actors: Iterable[DeadActor], *, prefix: str) -> list[str]:
    names = []
    for actor in actors:
        since_s = (node.end_time_ms - float(actor["EndTime"])) / 1000
        is_there = actor["Address"]["NodeID"] == node.node_id.hex() and int(actor["Pid"]) > 0
        if is_there and since_s <= _NODE_TIMEOUT_S and str(actor["Name"]).startswith(prefix):
            names.append(str(actor["Name"]).removeprefix(prefix).replace("#", "-"))
    return sorted(names)


def local_last_words(logs: Path, node: str) -> Callable[[int, str], str]:
    """See `replica_losses`; for processes of this node, whose logs are in this folder."""

    def last_words(pid: int, of_node: str) -> str:
        if of_node != node:
            return ""
        if pid in kernel_killed_pids(Path("/dev/kmsg")):
            return _OUT_OF_MEMORY
        paths = [*logs.glob(f"worker-*-{pid}.err"), *logs.glob(f"worker-*-{pid}.out")]
        return next((words for path in paths if (words := _words_in(path))), "")

    return last_words


def _words_in(path: Path) -> str:
    """The signal, or the last error, at the end of a process's output; empty for none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # removed with its session
        return ""
    for line in lines:
        if (match := _SIGNAL.search(line)) is not None:
            return match[1] or match[2].strip()
    last = [line for line in lines if line.strip()][-_LAST_LINES:]
    errors = (match[1].strip() for line in reversed(last) if (match := _LAST_ERROR.match(line)))
    return next(errors, "")


def kernel_killed_pids(messages: Path) -> frozenset[int]:
    """The processes that the kernel killed for want of memory; none where it may not be read."""
    pids: set[int] = set()
    try:
        file = os.open(messages, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return frozenset()
    try:
        while message := os.read(file, _KERNEL_BYTES):
            pids |= {int(pid) for pid in _KILLED_PID.findall(message.decode(errors="replace"))}
    except OSError:  # the end of the messages, or some were overwritten
        pass
    finally:
        os.close(file)
    return frozenset(pids)
