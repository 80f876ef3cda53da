"""A driver that lets one replica follow the membership of two others, and does things to them.

Prints one JSON object. Replicas are found by the pids they publish as metadata.
"""

# ruff: noqa: T201 - whoever started this reads what it prints

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import psutil

from baton.serving.cluster.local_cluster import ClusterSettings, LocalCluster
from baton.serving.ray import serve_control
from baton.serving.ray.membership import Member, Membership, MembershipTiming

port, notes_folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
cluster = LocalCluster(
    ClusterSettings(
        http_host="127.0.0.1",
        http_port=port,
        cpus=4,
        # Throughput mode wants handles to be used in an event loop; this driver has none.
        environment={"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"},
    )
)
cluster.start()

import ray  # noqa: E402 - its environment must be set before
from ray import serve  # noqa: E402
from ray.serve._private.common import DeploymentID  # noqa: E402

DRAIN_S = 2.0


def scale(replicas: int, *, timeout_s: float) -> None:
    target = DeploymentID(name="Engine", app_name="app")
    controller = serve_control.find_controller()
    ray.get(controller.update_deployment_replicas.remote(target, replicas), timeout=timeout_s)


@serve.deployment(
    num_replicas=2,
    ray_actor_options={"num_cpus": 0.1},
    health_check_period_s=1,
    graceful_shutdown_timeout_s=20,
    graceful_shutdown_wait_loop_s=0.05,
)
class Engine:
    def __init__(self) -> None:
        context = serve.get_replica_context()
        self.rank_at_init = None if context.rank is None else context.rank.rank

    def record_replica_metadata(self) -> dict[str, Any]:
        context = serve.get_replica_context()
        return {
            "pid": os.getpid(),
            "id": context.replica_id.unique_id,
            "rank_at_init": self.rank_at_init,
            "rank": context.rank.rank,
            "link": f"tcp://127.0.0.1:{os.getpid()}",
        }

    async def __del__(self) -> None:
        note = notes_folder / f"{os.getpid()}.stopping"
        note.write_text(str(time.monotonic()))
        await asyncio.sleep(DRAIN_S)
        note.with_suffix(".drained").write_text(str(time.monotonic()))


@serve.deployment(ray_actor_options={"num_cpus": 0.1}, health_check_period_s=1)
class Watcher:
    def __init__(self, _engine: serve.handle.DeploymentHandle) -> None:
        self.views: list[tuple[float, list[dict[str, Any]]]] = []
        self.membership: Membership | None = None

    async def start(self) -> None:
        self.membership = Membership(
            app="app",
            deployments=["Engine"],
            on_change=self.on_change,
            timing=MembershipTiming(recheck_s=3.0),
        )
        await self.membership.start()

    def on_change(self, view: frozenset[Member]) -> None:
        self.views.append((time.monotonic(), [dict(member.metadata) for member in view]))

    async def report(self) -> list[tuple[float, list[dict[str, Any]]]]:
        return self.views


def bind(deployment: Any, *arguments: object) -> serve.Application:  # noqa: ANN401
    """Ray's decorators hide from the type checker what they return."""
    return cast("serve.Application", deployment.bind(*arguments))


handle = serve.run(
    bind(Watcher, bind(Engine)), name="app", route_prefix=None, external_scaler_enabled=True
)


def views() -> list[tuple[float, list[dict[str, Any]]]]:
    """What the watcher was told, and when."""
    return cast(
        "list[tuple[float, list[dict[str, Any]]]]", handle.report.remote().result(timeout_s=10)
    )


def wait_for_view(
    condition: Callable[[list[dict[str, Any]]], bool], since_s: float, within_s: float = 60.0
) -> tuple[float, list[dict[str, Any]]]:
    """The first view of that kind since then, and how long it took."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        for at_s, members in views():
            if at_s >= since_s and condition(members):
                return at_s - since_s, members
        time.sleep(0.1)
    raise TimeoutError(f"no such view within {within_s} s; last: {views()[-1:]}")


def pids(members: list[dict[str, Any]]) -> set[int]:
    """Process ids of members."""
    return {member["pid"] for member in members}


report: dict[str, Any] = {}
try:
    started_s = time.monotonic()
    handle.begin.remote().result(timeout_s=10)
    report["first_view_s"], first = wait_for_view(lambda m: len(m) == 2, started_s)
    report["first"] = first

    victim = min(pids(first))
    killed_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    report["kill_seen_s"], _ = wait_for_view(lambda m: victim not in pids(m), killed_s)
    report["replaced_s"], second = wait_for_view(
        lambda m: len(m) == 2 and victim not in pids(m), killed_s
    )

    scaled_s = time.monotonic()
    scale(3, timeout_s=5)
    report["scaled_up_s"], third = wait_for_view(lambda m: len(m) == 3, scaled_s)

    controller = ray.get(serve_control.find_controller().get_pid.remote(), timeout=5)
    before = len(views())
    os.kill(controller, signal.SIGKILL)
    lost_s = time.monotonic()
    while True:
        with contextlib.suppress(Exception):
            if ray.get(serve_control.find_controller().get_pid.remote(), timeout=2) != controller:
                break
        time.sleep(0.1)
    report["controller_back_s"] = time.monotonic() - lost_s

    report["views_around_restart"] = [len(members) for _at, members in views()[before - 1 :]]

    shrunk_s = time.monotonic()
    scale(2, timeout_s=20)
    report["scaled_down_s"], last = wait_for_view(lambda m: len(m) == 2, shrunk_s)
    report["smallest_view_after_restart"] = min(len(m) for _at, m in views()[before - 1 :])

    (stopped,) = pids(third) - pids(last)
    drained = notes_folder / f"{stopped}.drained"
    while psutil.pid_exists(stopped) and time.monotonic() < shrunk_s + 60:
        time.sleep(0.02)
    report["stop_told_s"] = float(drained.with_suffix(".stopping").read_text()) - shrunk_s
    report["drained_s"] = float(drained.read_text()) - shrunk_s
    report["exited_s"] = time.monotonic() - shrunk_s
finally:
    stopping_s = time.monotonic()
    report["left"] = sorted(cluster.stop())
    report["stop_s"] = time.monotonic() - stopping_s
    print(json.dumps(report))
