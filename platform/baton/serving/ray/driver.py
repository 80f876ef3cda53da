"""Prepares this process as a driver of Ray: its environment and its messages."""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Any

from baton.domain.errors import ClusterFailed
from baton.serving.ray import couplings

_PATCHED_ATTRIBUTE = "_baton_stderr"
_OWN_RETRY = re.compile(r"Task ServeController\.\w+ failed\. There are infinite retries remaining")
"""Ray's message about calls that wait for Serve's controller while it stops or restarts."""


def reload_environment(*, loopback: bool) -> None:
    """Have an already imported Ray read its environment again."""
    from ray._private import ray_constants
    from ray._raylet import (  # type: ignore[attr-defined]  # they are in the extension
        AuthenticationTokenLoader,
        Config,
    )

    couplings.ENVIRONMENT.install(ray_constants, ENABLE_RAY_CLUSTER=not loopback)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def run_handles_in_own_loop() -> None:
    """Have this process run handles in a loop of their own; call it before `ray.serve` is imported.

    Throughput mode, which is for replicas and which pods set for every process, runs handles in
    the caller's event loop, and a command has none.
    """
    os.environ["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "1"


def hide_serve_messages() -> None:
    """Hide Serve's warnings about its own calls, such as a replica that answers after 0.1 s."""
    # Imported first: its import sets the level.
    import ray.serve  # noqa: F401

    logging.getLogger("ray.serve").setLevel(logging.ERROR)


def hide_unfinished_tasks() -> None:
    """Hide the tracebacks of Serve's tasks that the end of a connection interrupts."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def check_serve_not_imported() -> None:
    """Check that Ray Serve has not read another environment before.

    Raises:
        ClusterFailed: it has.
    """
    constants = sys.modules.get("ray.serve._private.constants")
    haproxy_enabled = os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    if constants is not None and haproxy_enabled != constants.RAY_SERVE_ENABLE_HA_PROXY:
        raise ClusterFailed(
            "ray.serve was imported before its environment was set",
            "import ray.serve only after LocalCluster.start",
        )


def redirect_ray_messages() -> None:
    """Have messages of Ray printed on standard error, without colours, from now on. Idempotent.

    Ray reports dead nodes to every driver, despite `log_to_driver`, and prints on standard output
    from a thread of its own: into the middle of `baton status -o json`, for example. Messages about
    retries that belong to every stop are left out.
    """
    from ray._private import worker

    print_message = getattr(worker, "print_to_stdstream", None)
    if hasattr(print_message, _PATCHED_ATTRIBUTE):
        return
    os.environ["RAY_COLOR_PREFIX"] = "0"  # Ray's own colours go into pipes, too

    def on_stderr(data: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - Ray's
        assert print_message is not None, "it is there where the row fits"
        lines = [line for line in data["lines"] if not _OWN_RETRY.search(str(line))]
        if lines:
            print_message({**data, "lines": lines, "is_err": True}, *args, **kwargs)

    setattr(on_stderr, _PATCHED_ATTRIBUTE, True)
    couplings.MESSAGES.install(worker, print_to_stdstream=on_stderr)
