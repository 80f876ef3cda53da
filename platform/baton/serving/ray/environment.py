"""What Ray has read of its environment when it was imported."""

from __future__ import annotations

import os
import sys

from baton.domain.errors import ClusterFailed
from baton.serving.ray import couplings


def reload_environment(*, loopback: bool) -> None:
    """Make an already imported Ray forget what it had read from its environment."""
    from ray._private import ray_constants
    from ray._raylet import (  # type: ignore[attr-defined]  # they are in the extension
        AuthenticationTokenLoader,
        Config,
    )

    couplings.ENVIRONMENT.install(ray_constants, ENABLE_RAY_CLUSTER=not loopback)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def check_serve_not_imported() -> None:
    """Refuse where Ray Serve has read another environment already.

    Raises:
        ClusterFailed: it was imported before.
    """
    constants = sys.modules.get("ray.serve._private.constants")
    haproxy_enabled = os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    if constants is not None and haproxy_enabled != constants.RAY_SERVE_ENABLE_HA_PROXY:
        raise ClusterFailed(
            "ray.serve was imported before its environment was set",
            "import ray.serve only after LocalCluster.start",
        )
