"""Orders to the Serve controller that Serve has no public call for (private API of Ray 2.60)."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_LOGGER = logging.getLogger(__name__)
_POLL_S = 0.05


def find_controller() -> ActorHandle:
    """The Serve controller of the cluster that this process is connected to; blocks.

    Raises:
        ValueError: no Serve runs there.
    """
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    return cast("ActorHandle", ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE))


def scale(app: str, deployment: str, *, replicas: int, timeout_s: float) -> None:
    """Set how many replicas a deployment is to have; takes effect at once, blocks for milliseconds.

    The app must have been started with `external_scaler_enabled=True`.
    """
    import ray
    from ray.serve._private.common import DeploymentID

    target = DeploymentID(name=deployment, app_name=app)
    call = find_controller().update_deployment_replicas.remote(target, replicas)
    ray.get(call, timeout=timeout_s)


def stop(timeout_s: float) -> bool:
    """Ask Serve to stop all replicas and itself; whether it was gone in time.

    Serve's own `shutdown` waits by a call that fails when the controller dies as it should, which
    Ray reports on the terminal as an error: hence the flag and the polling.
    """
    import ray

    until_s = time.monotonic() + timeout_s
    try:
        ray.get(find_controller().graceful_shutdown.remote(wait=False), timeout=timeout_s)
        while time.monotonic() < until_s:
            find_controller()
            time.sleep(_POLL_S)
    except (ValueError, ray.exceptions.RayActorError):
        return True
    except ray.exceptions.RayError as error:
        _LOGGER.warning("Ray Serve did not stop by itself: %s", error)
    return False
