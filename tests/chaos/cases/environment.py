"""What baton stands on fails: Ray's store, Prometheus, what reports say, the clock, the disk."""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

import httpx

from baton.domain.demand import CoordinatorReport, DemandTotals, PoolReport
from baton.serving.shared.names import CONTROLLER, INGRESS
from tests.chaos import faults
from tests.chaos.case import Engines, Figure, Outcome, at_least, at_most, case, exactly
from tests.chaos.clients import (
    AUTOSCALED,
    POOLS,
    START_S,
    Clients,
    outcome,
    running_clients,
    steady_load,
)
from tests.chaos.deployment_processes import (
    DeploymentProcesses,
    ended_processes,
    environment,
    kill_to_restart,
    running_processes,
    wait_until,
)
from tests.chaos.faults import NotPossibleError
from tests.fakes.free_ports import free_port
from tests.fakes.processes import start_process, stop_process
from tests.serving.scaled_fleet import FakeFleet, ScalingWorld, plan

# -------------------------------------------------------------------- F9

OUTAGE_S = 30.0
_END_S = 5.0


@case(
    "F9",
    "Ray's control store away for 30 s, nothing of it kept: requests are served on meanwhile",
    engines=Engines.SIMULATED,
    minutes=3,
)
def gcs_killed(folder: Path) -> Outcome:
    """Without Redis it cannot come back; what is measured is the time until Ray itself gives up."""
    with running_processes(folder) as up:
        up.wait_complete(POOLS, timeout_s=START_S)
        with running_clients(up, steady_load("F9")) as clients:
            faults.kill(up.gcs())
            clients.run_for(OUTAGE_S)
    sent = len(clients.exchanges)
    return outcome(
        clients.exchanges, [at_least("requests", sent, 8 * OUTAGE_S)], {"away, s": OUTAGE_S}
    )


@case(
    "F9-redis",
    "Ray's control store away for 30 s and back, kept in Redis: requests are served on, and "
    "operators are obeyed again",
    engines=Engines.SIMULATED,
    minutes=3.5,
)
def gcs_restarted(folder: Path) -> Outcome:
    """It is killed, and started again as it was, which is what KubeRay or systemd would do."""
    with running_redis(folder) as address, ExitStack() as stack:
        stack.enter_context(environment(RAY_REDIS_ADDRESS=address))
        up = stack.enter_context(running_processes(folder, **AUTOSCALED))
        up.wait_complete(POOLS, timeout_s=START_S)
        up.deployment.run_json("scale", "decode", "3")
        up.wait_complete(POOLS | {"decode": 3}, timeout_s=150)
        clients = stack.enter_context(running_clients(up, steady_load("F9-redis")))
        killed = kill_to_restart(up.gcs()).with_option(
            "gcs_server_port", up.state.address.rpartition(":")[2]
        )
        clients.run_for(OUTAGE_S)
        stack.callback(stop_process, killed.restart(), within_s=_END_S)
        back_s = time.monotonic()
        up.wait_complete(POOLS | {"decode": 3}, timeout_s=180)
        status = up.status()
        up.deployment.run_json("scale", "decode", "4")
        up.wait_complete(POOLS | {"decode": 4}, timeout_s=180)
        scaled_s = time.monotonic() - back_s
        clients.run_for(3.0)
        clients.stop()
    bounds = [
        at_most("until a pool has grown by an operator's word, s", round(scaled_s, 1), 60.0),
        exactly("overrides that are known again", len(status["autoscaler"]["overrides"]), 1),
    ]
    figures: dict[str, Figure] = {
        "away, s": OUTAGE_S,
        "turns of the scaling loop that failed": status["autoscaler"]["failed_turns"],
    }
    return outcome(clients.exchanges, bounds, figures)


@contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """A Redis of its own; gone afterwards.

    Raises:
        NotPossibleError: there is none on this machine.
    """
    program, port = shutil.which("redis-server"), free_port()
    if program is None:
        raise NotPossibleError("there is no redis-server: apt-get install redis-server")
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir"]
    process = start_process([*command, str(folder)], folder / "redis.log")
    try:
        until_s = time.monotonic() + 10
        while time.monotonic() < until_s:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
        yield f"127.0.0.1:{port}"
    finally:
        stop_process(process, within_s=_END_S)


# -------------------------------------------------------------------- F10


HANGING_SCRAPES = 5
"""Scrapers at each endpoint."""


@case(
    "F10",
    "no Prometheus at all, and scrapers that ask and never read: pools are scaled, requests served",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def prometheus_down(folder: Path) -> Outcome:
    """The autoscaler asks ingresses, never Prometheus; a client that hangs costs one connection."""
    with running_processes(folder, **AUTOSCALED) as up, ExitStack() as stack:
        up.wait_complete(POOLS, timeout_s=START_S)
        url = up.deployment.status()["observability"]["url"]
        targets = [item["targets"][0] for item in httpx.get(f"{url}/sd", timeout=5).json()]
        for target in targets:
            for _ in range(HANGING_SCRAPES):
                stack.enter_context(_hanging_scrape(target))
        with running_clients(up, steady_load("F10")) as clients:
            first = up.status()["autoscaler"]
            clients.run_for(20.0)
            last = up.status()["autoscaler"]
        answered = sum(
            httpx.get(f"http://{target}/metrics", timeout=5).is_success for target in targets
        )
    turns = last["turns"] - first["turns"]
    bounds = [
        at_least("turns of the scaling loop in 20 s", turns, 15),
        exactly("turns and calls that failed", last["failed_turns"] + last["failed_calls"], 0),
        exactly("what makes it hold", last["paused_reason"], ""),
        exactly("endpoints that answer a scraper that reads", answered, len(targets)),
    ]
    return outcome(
        clients.exchanges,
        bounds,
        {"endpoints": len(targets), "scrapers that never read": HANGING_SCRAPES * len(targets)},
    )


@contextmanager
def _hanging_scrape(target: str) -> Iterator[None]:
    """A scraper that asks for metrics a few times on one connection, and never reads."""
    host, _, port = target.rpartition(":")
    ask = f"GET /metrics HTTP/1.1\r\nHost: {target}\r\n\r\n".encode()
    with socket.socket() as connection:
        # Less than one answer: its server has to wait in the middle.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(5)
        connection.connect((host, int(port)))
        connection.sendall(5 * ask)
        yield


# -------------------------------------------------------------------- F11

CorruptReport = Callable[[CoordinatorReport], CoordinatorReport | None]


class _Stale:
    """Says the same again and again."""

    def __init__(self) -> None:
        self._report: CoordinatorReport | None = None

    def __call__(self, report: CoordinatorReport) -> CoordinatorReport:
        self._report = self._report or report
        return self._report


def corrupted_reports() -> dict[str, CorruptReport]:
    """Ways to spoil a report, by name: each figure that is none, nothing new, nothing at all."""
    corruptions: dict[str, CorruptReport] = {"absent": lambda _: None, "stale": _Stale()}
    for text in ("nan", "inf", "-inf", "-1"):
        value = float(text)
        corruptions |= {
            f"demand.{name} {text}": partial(_corrupt_demand, name, value) for name in _DEMAND
        }
        corruptions |= {
            f"pool.{name} {text}": partial(_corrupt_pools, name, value) for name in _POOL
        }
        corruptions |= {
            f"{name} {text}": partial(_corrupt_report, name, value)
            for name in ("in_flight", "queued")
        }
        if not math.isfinite(value):
            corruptions |= {
                f"{name} {text}": partial(_corrupt_report, name, value)
                for name in ("at_s", "slack_s")
            }
    return corruptions


_DEMAND = DemandTotals._fields
_POOL = tuple(
    name for name, known in PoolReport._field_defaults.items() if isinstance(known, int | float)
)


def _corrupt_report(name: str, value: float, report: CoordinatorReport) -> CoordinatorReport:
    return replace(report, **{name: value})  # type: ignore[arg-type]  # nonsense is what is meant


def _corrupt_demand(name: str, value: float, report: CoordinatorReport) -> CoordinatorReport:
    spoilt = report.demand._replace(
        **{name: value}  # type: ignore[arg-type]  # nonsense is what is meant
    )
    return replace(report, demand=spoilt)


def _corrupt_pools(name: str, value: float, report: CoordinatorReport) -> CoordinatorReport:
    pools = tuple(
        pool._replace(**{name: value})  # type: ignore[arg-type]  # nonsense is what is meant
        for pool in report.pools
    )
    return replace(report, pools=pools)


class CorruptedFleet(FakeFleet):
    """Its ingress reports nonsense for a while."""

    corrupt: CorruptReport | None = None

    def report(self) -> CoordinatorReport:
        """What its ingress says."""
        report = super().report()
        spoilt = report if self.corrupt is None else self.corrupt(report)
        if spoilt is None:
            raise ConnectionError("nothing comes")
        return spoilt


async def paused_while(corrupt: CorruptReport) -> tuple[bool, bool]:
    """Whether the loop holds and says why while reports are spoilt, and goes on after it.

    There is something to do, as soon as they have been so for longer than loads are believed.
    """
    world = ScalingWorld()
    world.fleet = fleet = CorruptedFleet(world.clock)
    loop = world.restart_loop(plan())
    await world.settle()
    fleet.corrupt = corrupt
    await world.tick(6)
    loop.reconfigure(plan(decode=5))
    await world.tick(4)
    is_paused = not fleet.calls and bool(loop.history()[-1].paused_reason)
    fleet.corrupt = None
    await world.tick(4)
    return is_paused, fleet.targets["decode"] == 5


@case(
    "F11",
    "reports absent, stale or not a number, figure by figure: the autoscaler holds, says why, and "
    "goes on when they are well",
    engines=Engines.NONE,
    minutes=0.2,
)
def reports_corrupted(_folder: Path) -> Outcome:
    """The live loop over a fleet of fakes; Prometheus has no part in it."""

    async def try_all() -> dict[str, tuple[bool, bool]]:
        return {name: await paused_while(spoil) for name, spoil in corrupted_reports().items()}

    results = asyncio.run(try_all())
    acted = [name for name, (held, _) in results.items() if not held]
    stuck = [name for name, (_, went_on) in results.items() if not went_on]
    bounds = (
        at_least("ways to spoil a report", len(results), 50),
        exactly("ways in which it acted, or did not say why not", len(acted), 0),
        exactly("ways after which it did not go on", len(stuck), 0),
    )
    return Outcome(bounds=bounds, note="; ".join([*acted, *stuck]))


# -------------------------------------------------------------------- F12

HOUR_S = 3600.0
_MOVER = Path(__file__).parents[1] / "wall_clock"


@case(
    "F12",
    "the wall clock an hour forward, then two back, in every Python process: nothing fails, "
    "no process is replaced; one that dies later is",
    engines=Engines.SIMULATED,
    minutes=3.5,
)
def clock_step(folder: Path) -> Outcome:
    """Ray's own, Serve's and baton's; the monotonic clock goes on, as the kernel's does."""
    clock = folder / "clock"
    clock.write_text("0")
    variables = environment(PYTHONPATH=str(_MOVER), BATON_CHAOS_CLOCK=str(clock))
    with variables, running_processes(folder) as up:
        up.wait_complete(POOLS, timeout_s=START_S)
        pids = up.replica_pids((*POOLS, INGRESS, CONTROLLER))
        with running_clients(up, steady_load("F12")) as clients:
            clock.write_text("3600")
            clients.run_for(12.0)
            ahead_s = _ingress_clock_s(up, clients) - time.time()  # noqa: TID251 - wall time is what is looked at
            clock.write_text("-3600")
            clients.run_for(12.0)
            behind_s = _ingress_clock_s(up, clients) - time.time()  # noqa: TID251 - likewise
            missing = ended_processes(pids, up.replica_pids(pids))
            faults.kill(pids["decode"][0])
            replaced = wait_until(lambda: len(up.replicas("decode")) == POOLS["decode"], 60.0)
            clients.run_for(2.0)
    bounds = [
        at_most("how far the first jump is from an hour, s", abs(ahead_s - HOUR_S), 30.0),
        at_most("how far the second one is, s", abs(behind_s + HOUR_S), 30.0),
        exactly("whose process has ended", missing, expected="none"),
        at_most("until a replica that died after it was replaced, s", replaced, 45.0),
    ]
    return outcome(clients.exchanges, bounds, {})


def _ingress_clock_s(up: DeploymentProcesses, clients: Clients) -> float:
    """What an ingress took for the time about a second ago, in its log; seconds since 1970."""
    last = [
        exchange.request_id for exchange in list(clients.exchanges) if exchange.ending is not None
    ][-10]
    log_lines = up.deployment.run_json("logs", "--event", "request_ended", "--request", last)
    return datetime.fromisoformat(str(log_lines["at"])).timestamp()


# -------------------------------------------------------------------- F13


_DISK = Path("/tmp/f13")  # noqa: S108 - made, and a disk of its own, by the case
"""Below it are Ray's sockets, whose paths must be short."""


@case(
    "F13",
    "the disk of every log full for 20 s: nothing fails, no process dies, logs go on after it",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def disk_full(folder: Path) -> Outcome:
    """Ray's whole session lies on a disk of its own, which is filled to the last byte."""
    with ExitStack() as stack:
        disk = stack.enter_context(faults.tiny_disk(_DISK, 96 << 20))
        stack.enter_context(environment(TMPDIR=str(disk)))
        up = stack.enter_context(running_processes(folder))
        assert up.state.run_dir.startswith(str(disk)), f"it lies in {up.state.run_dir}"
        up.wait_complete(POOLS, timeout_s=START_S)
        pids = up.replica_pids((*POOLS, INGRESS, CONTROLLER))
        with running_clients(up, steady_load("F13")) as clients:
            faults.fill(disk)
            clients.run_for(20.0)
            full = faults.is_full(disk)
            (disk / "filler").unlink()
            clients.run_for(3.0)
        missing = ended_processes(pids, up.replica_pids(pids))
        last = clients.exchanges[-1].request_id
        log_lines = up.deployment.run_json("logs", "--event", "request_ended", "--request", last)
    bounds = [
        exactly("the disk was full to the end", full, expected=True),
        exactly("whose process has ended", missing, expected="none"),
        exactly("the last request is in the log", last in log_lines["request_id"], expected=True),
    ]
    return outcome(clients.exchanges, bounds, {})
