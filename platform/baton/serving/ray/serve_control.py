"""Calls of Serve that have no public form (private API of Ray 2.60)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from baton.domain.errors import ClusterFailed

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.serve.schema import ApplicationStatusOverview, DeploymentDetails

_LOGGER = logging.getLogger(__name__)
_POLL_S = 0.05
_RUNNING_STATES = frozenset({"RUNNING", "UPDATING", "PENDING_MIGRATION", "RECOVERING"})
"""States of a replica that has been started and not been stopped."""
_FAILED_STATUSES = {"UNHEALTHY", "DEPLOY_FAILED"}
_REPLICA_LOST = "HEALTH_CHECK_FAILED"
"""The trigger of a deployment that lost a replica after it was ready."""
NO_REPLICA_READY = "none of its replicas is ready: it is starting, or could not start"
"""The meaning of Serve's "unavailable" deployment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentState:
    """One deployment, as Serve sees it."""

    name: str
    target: int
    running: int = 0
    starting: int = 0
    """Requested and not there yet, including those that Serve is about to start."""
    stopping: int = 0
    """Ordered to stop, or about to be, and still draining."""
    message: str = ""
    """Serve's complaint, as one line; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentReplicas:
    """The replicas of one deployment, by Serve's ids."""

    target: int
    ready: frozenset[str] = frozenset()
    starting: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResults:
    """Answers of the replicas of a deployment to one call."""

    values: tuple[object, ...] = ()
    failures: tuple[str, ...] = ()
    """Why each of the others gave none."""
    refs: tuple[object, ...] = ()
    """Ray's references to large answers, to be held for a moment: see `serving.ray.packing`."""


def find_controller() -> ActorHandle:
    """The Serve controller of the connected cluster; blocks.

    Raises:
        ValueError: no Serve runs there.
    """
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    return cast("ActorHandle", ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE))


async def scale(app: str, deployment: str, *, replicas: int, timeout_s: float) -> None:
    """Set the desired replicas of a deployment; takes effect at once, within milliseconds.

    The app must have been started with `external_scaler_enabled=True`.
    """
    from ray.serve._private.common import DeploymentID

    target = DeploymentID(name=deployment, app_name=app)
    async with asyncio.timeout(timeout_s):
        controller = await asyncio.to_thread(find_controller)
        await controller.update_deployment_replicas.remote(target, replicas)


def stop_replicas(app: str, deployments: Iterable[str], *, timeout_s: float) -> None:
    """Leave deployments that were just ordered without replicas; blocks until Serve has them.

    Raises:
        ClusterFailed: Serve does not have them in time.
    """
    import ray
    from ray.serve._private.common import DeploymentID

    deadline_at_s = time.monotonic() + timeout_s
    for deployment in deployments:
        target = DeploymentID(name=deployment, app_name=app)
        while True:
            try:
                order = find_controller().update_deployment_replicas.remote(target, 0)
                ray.get(order, timeout=timeout_s)
                break
            except (KeyError, ValueError, ray.exceptions.RayError) as error:
                if time.monotonic() > deadline_at_s:
                    line = str(error).strip().rpartition("\n")[2]
                    raise ClusterFailed(
                        f"{deployment}: cannot be set to 0 replicas: {line}",
                        "see 'baton logs --all', then try again",
                    ) from error
                time.sleep(_POLL_S)


async def restart_serve_controller(*, timeout_s: float) -> None:
    """Have Ray restart Serve's controller, which reads its state from Ray's store.

    Requests do not wait for it. It is back within seconds; until then nothing can be scaled.
    """
    import ray

    async with asyncio.timeout(timeout_s):
        controller = await asyncio.to_thread(find_controller)
        await asyncio.to_thread(ray.kill, controller, no_restart=False)


async def deployment_states(
    app: str, deployments: Iterable[str], *, timeout_s: float
) -> Mapping[str, DeploymentState]:
    """The replicas of each deployment by state, without those that Serve does not know yet."""
    details_by_name = await _details(app, deployments, timeout_s)
    return {name: deployment_state(details) for name, details in details_by_name.items()}


async def replicas_by_deployment(
    app: str, deployments: Iterable[str], *, timeout_s: float
) -> Mapping[str, DeploymentReplicas]:
    """The replica ids of each deployment, without those that Serve does not know yet."""
    details_by_name = await _details(app, deployments, timeout_s)
    return {name: deployment_replicas(details) for name, details in details_by_name.items()}


async def _details(
    app: str, deployments: Iterable[str], timeout_s: float
) -> Mapping[str, DeploymentDetails]:
    async with asyncio.timeout(timeout_s):
        controller = await asyncio.to_thread(find_controller)
        answers = await asyncio.gather(
            *(controller.get_deployment_details.remote(app, name) for name in deployments),
            return_exceptions=True,
        )
    details_by_name: dict[str, DeploymentDetails] = {}
    for details in answers:
        if isinstance(details, BaseException):
            if not isinstance(getattr(details, "cause", details), KeyError):
                raise details
        else:
            details_by_name[details.name] = details
    return details_by_name


def deployment_replicas(details: DeploymentDetails) -> DeploymentReplicas:
    """The ready and starting replicas, without those that stop."""
    states = {replica.replica_id: str(replica.state.value) for replica in details.replicas}
    return DeploymentReplicas(
        target=details.target_num_replicas,
        ready=frozenset(
            replica_id for replica_id, state in states.items() if state in _RUNNING_STATES
        ),
        starting=frozenset(
            replica_id for replica_id, state in states.items() if state == "STARTING"
        ),
    )


def deployment_state(details: DeploymentDetails) -> DeploymentState:
    """A deployment's state from Serve's details.

    Serve acts on a new target within 0.1 s. Its next steps count as begun, so that no caller orders
    them twice.
    """
    states = [str(replica.state.value) for replica in details.replicas]
    target = details.target_num_replicas
    running = sum(state in _RUNNING_STATES for state in states)
    stopping = sum(state == "STOPPING" for state in states)
    surplus = max(0, running - target)
    unhealthy = str(details.status.value) in {"UNHEALTHY", "DEPLOY_FAILED"}
    return DeploymentState(
        name=details.name,
        target=target,
        running=running - surplus,
        starting=max(0, target - (running - surplus)),
        stopping=stopping + surplus,
        message=error_line([details.message]) if unhealthy else "",
    )


async def call_all(
    app: str, deployment: str, method: str, *arguments: object, timeout_s: float
) -> CallResults:
    """Call every replica of a deployment; a failed or late replica costs no other answer."""
    from ray import serve

    try:
        async with asyncio.timeout(timeout_s):
            handle = serve.get_deployment_handle(deployment, app)
            response = handle.broadcast(method, *arguments)
            # Its public `results_async` keeps no answer when one of them is late.
            results: list[Any] = await response._fetch_replica_results_async()  # noqa: SLF001
    except Exception as error:  # noqa: BLE001 - a boundary: every error of Ray means no answer
        return CallResults(failures=(f"{deployment}: {_failure_reason(error, timeout_s)}",))
    calls = [asyncio.ensure_future(result.get_async()) for result in results]
    await asyncio.wait(calls, timeout=timeout_s)
    values: list[object] = []
    failures: list[str] = []
    for call in calls:
        if not call.done() or call.cancelled():
            call.cancel()
            failures.append(f"{deployment}: no answer to {method!r} within {timeout_s:g} s")
        elif (failure := call.exception()) is not None:
            failures.append(f"{deployment}: {_failure_reason(failure, timeout_s)}")
        else:
            values.append(call.result())
    return CallResults(values=tuple(values), failures=tuple(failures), refs=tuple(results))


def _failure_reason(error: BaseException, timeout_s: float) -> str:
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import DeploymentUnavailableError

    if isinstance(error, TimeoutError):
        return f"could not be called within {timeout_s:g} s"
    if isinstance(error, RayActorError):
        return "a replica ended before it answered"
    if isinstance(error, DeploymentUnavailableError):
        return NO_REPLICA_READY
    last = str(error).strip().rpartition("\n")[2]
    return f"{type(error).__name__}: {last}" if last else type(error).__name__


def stop_serve(timeout_s: float) -> bool:
    """Ask Serve to stop all replicas and itself; whether it was gone in time.

    Serve's own `shutdown` waits by a call that fails when the controller ends as it should. Ray
    shows that as an error, so this function polls instead.
    """
    import ray

    deadline_at_s = time.monotonic() + timeout_s
    try:
        ray.get(find_controller().graceful_shutdown.remote(wait=False), timeout=timeout_s)
        while time.monotonic() < deadline_at_s:
            find_controller()
            time.sleep(_POLL_S)
    except (ValueError, ray.exceptions.RayActorError):
        return True
    except ray.exceptions.RayError as error:
        _LOGGER.warning("Ray Serve did not stop by itself: %s", error)
    return False


def start_failure(application: ApplicationStatusOverview) -> str | None:
    """Why Serve cannot start an application; None while it still may.

    A replica that was ready and is lost while others start fails its health check. Serve replaces
    it: only replacements that cannot start are a failure.
    """
    triggers = {
        status.status_trigger.value
        for status in application.deployments.values()
        if status.status.value in _FAILED_STATUSES
    }
    if triggers == {_REPLICA_LOST}:
        return None
    if not triggers and application.status.value not in _FAILED_STATUSES:
        return None
    return failure_reason(application)


def failure_reason(application: ApplicationStatusOverview) -> str:
    """Why an application failed, by its failed deployments.

    Serve has a message for each deployment that is slow, too.
    """
    messages = [
        status.message
        for status in application.deployments.values()
        if status.status.value in _FAILED_STATUSES
    ]
    return error_line(messages) or error_line([application.message]) or "Ray Serve has given up"


def error_line(messages: list[str]) -> str:
    """The last line of a failure that names an error, else its last line."""
    lines = [line.strip() for message in messages for line in message.strip().splitlines()]
    # A heading such as "Retrying. Error:" names none.
    error_lines = [
        line for line in lines if ("Error" in line or "Failed" in line) and not line.endswith(":")
    ]
    return (error_lines or lines or [""])[-1]
