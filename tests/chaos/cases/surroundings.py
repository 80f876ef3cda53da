"""What baton stands on fails: Ray's store, Prometheus, what reports say, the clock, the disk."""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import subprocess
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
from tests.chaos.clients import AUTOSCALED, POOLS, START_S, Clients, outcome, served, steady
from tests.chaos.deployment_processes import (
    Parts,
    ended,
    environment,
    kill_to_restart,
    parts,
    until,
)
from tests.chaos.faults import NotPossibleError
from tests.fakes.free_ports import free_port
from tests.serving.scaled_fleet import Fleet, World, plan

# -------------------------------------------------------------------- F9

AWAY_S = 30.0


@case(
    "F9",
    "Ray's control store away for 30 s, nothing of it kept: requests are served on meanwhile",
    engines=Engines.SIMULATED,
    minutes=3,
)
def the_store_dies(folder: Path) -> Outcome:
    """Without Redis it cannot come back; what is measured is the time until Ray itself gives up."""
    with parts(folder) as up:
        up.whole(POOLS, within_s=START_S)
        with served(up, steady("F9")) as clients:
            faults.kill(up.gcs())
            clients.for_s(AWAY_S)
    sent = len(clients.exchanges)
    return outcome(clients.exchanges, [at_least("requests", sent, 8 * AWAY_S)], {"away, s": AWAY_S})


@case(
    "F9-redis",
    "Ray's control store away for 30 s and back, kept in Redis: requests are served on, and "
    "operators are obeyed again",
    engines=Engines.SIMULATED,
    minutes=3.5,
)
def the_store_comes_back(folder: Path) -> Outcome:
    """It is killed, and started again as it was, which is what KubeRay or systemd would do."""
    with redis(folder) as address, ExitStack() as stack:
        stack.enter_context(environment(RAY_REDIS_ADDRESS=address))
        up = stack.enter_context(parts(folder, **AUTOSCALED))
        up.whole(POOLS, within_s=START_S)
        up.deployment.ask("scale", "decode", "3")
        up.whole(POOLS | {"decode": 3}, within_s=150)
        clients = stack.enter_context(served(up, steady("F9-redis")))
        gone = kill_to_restart(up.gcs()).with_option(
            "gcs_server_port", up.state.address.rpartition(":")[2]
        )
        clients.for_s(AWAY_S)
        stack.callback(_end, gone.again())
        back_s = time.monotonic()
        up.whole(POOLS | {"decode": 3}, within_s=180)
        told = up.status()
        up.deployment.ask("scale", "decode", "4")
        up.whole(POOLS | {"decode": 4}, within_s=180)
        scaled_s = time.monotonic() - back_s
        clients.for_s(3.0)
        clients.stop()
    bounds = [
        at_most("until a pool has grown by an operator's word, s", round(scaled_s, 1), 60.0),
        exactly("overrides that are known again", len(told["autoscaler"]["overrides"]), 1),
    ]
    figures: dict[str, Figure] = {
        "away, s": AWAY_S,
        "turns of the scaling loop that failed": told["autoscaler"]["failed_turns"],
    }
    return outcome(clients.exchanges, bounds, figures)


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """A Redis of its own; gone afterwards.

    Raises:
        NotPossibleError: there is none on this machine.
    """
    program, port = shutil.which("redis-server"), free_port()
    if program is None:
        raise NotPossibleError("there is no redis-server: apt-get install redis-server")
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir"]
    with (folder / "redis.log").open("wb") as output:
        process = subprocess.Popen([*command, str(folder)], stdout=output, stderr=output)
    try:
        until_s = time.monotonic() + 10
        while time.monotonic() < until_s:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
        yield f"127.0.0.1:{port}"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)
    process.kill()
    process.wait()


# -------------------------------------------------------------------- F10


MUTE = 5
"""Scrapers at each endpoint."""


@case(
    "F10",
    "no Prometheus at all, and scrapers that ask and never read: pools are scaled, requests served",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def prometheus_is_away(folder: Path) -> Outcome:
    """The autoscaler asks ingresses, never Prometheus; who hangs costs one connection."""
    with parts(folder, **AUTOSCALED) as up, ExitStack() as stack:
        up.whole(POOLS, within_s=START_S)
        url = up.deployment.status()["observability"]["url"]
        targets = [one["targets"][0] for one in httpx.get(f"{url}/sd", timeout=5).json()]
        for target in targets:
            for _ in range(MUTE):
                stack.enter_context(_mute(target))
        with served(up, steady("F10")) as clients:
            first = up.status()["autoscaler"]
            clients.for_s(20.0)
            last = up.status()["autoscaler"]
        answered = sum(httpx.get(f"http://{one}/metrics", timeout=5).is_success for one in targets)
    turns = last["turns"] - first["turns"]
    bounds = [
        at_least("turns of the scaling loop in 20 s", turns, 15),
        exactly("turns and calls that failed", last["failed_turns"] + last["failed_calls"], 0),
        exactly("what makes it hold", last["held"], ""),
        exactly("endpoints that answer a scraper that reads", answered, len(targets)),
    ]
    return outcome(
        clients.exchanges,
        bounds,
        {"endpoints": len(targets), "scrapers that never read": MUTE * len(targets)},
    )


@contextmanager
def _mute(target: str) -> Iterator[None]:
    """A scraper that asks for metrics a few times on one connection, and never reads."""
    host, _, port = target.rpartition(":")
    ask = f"GET /metrics HTTP/1.1\r\nHost: {target}\r\n\r\n".encode()
    with socket.socket() as connection:
        # Less than one answer: whoever serves it has to wait in the middle.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(5)
        connection.connect((host, int(port)))
        connection.sendall(5 * ask)
        yield


# -------------------------------------------------------------------- F11

Spoil = Callable[[CoordinatorReport], CoordinatorReport | None]


class _Stale:
    """Says the same again and again."""

    def __init__(self) -> None:
        self._said: CoordinatorReport | None = None

    def __call__(self, report: CoordinatorReport) -> CoordinatorReport:
        self._said = self._said or report
        return self._said


def spoilt_reports() -> dict[str, Spoil]:
    """Ways to spoil a report, by name: each figure that is none, nothing new, nothing at all."""
    ways: dict[str, Spoil] = {"absent": lambda _: None, "stale": _Stale()}
    for text in ("nan", "inf", "-inf", "-1"):
        value = float(text)
        ways |= {f"demand.{name} {text}": partial(_demand, name, value) for name in _DEMAND}
        ways |= {f"pool.{name} {text}": partial(_pools, name, value) for name in _POOL}
        ways |= {f"{name} {text}": partial(_own, name, value) for name in ("in_flight", "held")}
        if not math.isfinite(value):
            ways |= {f"{name} {text}": partial(_own, name, value) for name in ("at_s", "slack_s")}
    return ways


_DEMAND = DemandTotals._fields
_POOL = tuple(
    name for name, known in PoolReport._field_defaults.items() if isinstance(known, int | float)
)


def _own(name: str, value: float, report: CoordinatorReport) -> CoordinatorReport:
    return replace(report, **{name: value})  # type: ignore[arg-type]  # nonsense is what is meant


def _demand(name: str, value: float, report: CoordinatorReport) -> CoordinatorReport:
    spoilt = report.demand._replace(
        **{name: value}  # type: ignore[arg-type]  # nonsense is what is meant
    )
    return replace(report, demand=spoilt)


def _pools(name: str, value: float, report: CoordinatorReport) -> CoordinatorReport:
    pools = tuple(
        pool._replace(**{name: value})  # type: ignore[arg-type]  # nonsense is what is meant
        for pool in report.pools
    )
    return replace(report, pools=pools)


class SpoiltFleet(Fleet):
    """Its ingress reports nonsense for a while."""

    spoil: Spoil | None = None

    def report(self) -> CoordinatorReport:
        """What its ingress says."""
        report = super().report()
        spoilt = report if self.spoil is None else self.spoil(report)
        if spoilt is None:
            raise ConnectionError("nothing comes")
        return spoilt


async def held_while(spoil: Spoil) -> tuple[bool, bool]:
    """Whether the loop holds and says why while reports are spoilt, and goes on after it.

    There is something to do, as soon as they have been so for longer than loads are believed.
    """
    world = World()
    world.fleet = fleet = SpoiltFleet(world.clock)
    loop = world.another_loop(plan())
    await world.settle()
    fleet.spoil = spoil
    await world.turn(6)
    loop.reconfigure(plan(decode=5))
    await world.turn(4)
    held = not fleet.calls and bool(loop.history()[-1].held)
    fleet.spoil = None
    await world.turn(4)
    return held, fleet.targets["decode"] == 5


@case(
    "F11",
    "reports absent, stale or not a number, figure by figure: the autoscaler holds, says why, and "
    "goes on when they are well",
    engines=Engines.NONE,
    minutes=0.2,
)
def reports_are_nonsense(_folder: Path) -> Outcome:
    """The live loop over a fleet of fakes; Prometheus has no part in it."""

    async def tried() -> dict[str, tuple[bool, bool]]:
        return {name: await held_while(spoil) for name, spoil in spoilt_reports().items()}

    found = asyncio.run(tried())
    acted = [name for name, (held, _) in found.items() if not held]
    stuck = [name for name, (_, went_on) in found.items() if not went_on]
    bounds = (
        at_least("ways to spoil a report", len(found), 50),
        exactly("ways in which it acted, or did not say why not", len(acted), 0),
        exactly("ways after which it did not go on", len(stuck), 0),
    )
    return Outcome(bounds=bounds, note="; ".join([*acted, *stuck]))


# -------------------------------------------------------------------- F12

HOUR_S = 3600.0
_MOVER = Path(__file__).parents[1] / "wall_clock"


@case(
    "F12",
    "the wall clock an hour forward, then two back, as every Python process sees it: nothing "
    "fails, nobody is replaced; who dies after it is replaced",
    engines=Engines.SIMULATED,
    minutes=3.5,
)
def the_clock_jumps(folder: Path) -> Outcome:
    """Ray's own, Serve's and baton's; the monotonic clock goes on, as the kernel's does."""
    clock = folder / "clock"
    clock.write_text("0")
    moved = environment(PYTHONPATH=str(_MOVER), BATON_CHAOS_CLOCK=str(clock))
    with moved, parts(folder) as up:
        up.whole(POOLS, within_s=START_S)
        pids = up.serving((*POOLS, INGRESS, CONTROLLER))
        with served(up, steady("F12")) as clients:
            clock.write_text("3600")
            clients.for_s(12.0)
            ahead_s = _clock_of(up, clients) - time.time()  # noqa: TID251 - wall time is what is looked at
            clock.write_text("-3600")
            clients.for_s(12.0)
            behind_s = _clock_of(up, clients) - time.time()  # noqa: TID251 - likewise
            missing = ended(pids, up.serving(pids))
            faults.kill(pids["decode"][0])
            replaced = until(lambda: len(up.replicas("decode")) == POOLS["decode"], 60.0)
            clients.for_s(2.0)
    bounds = [
        at_most("how far the first jump is from an hour, s", abs(ahead_s - HOUR_S), 30.0),
        at_most("how far the second one is, s", abs(behind_s + HOUR_S), 30.0),
        exactly("whose process has ended", missing, wanted="nobody"),
        at_most("until a replica that died after it was replaced, s", replaced, 45.0),
    ]
    return outcome(clients.exchanges, bounds, {})


def _clock_of(up: Parts, clients: Clients) -> float:
    """What an ingress took for the time about a second ago, in its log; seconds since 1970."""
    last = [one.request_id for one in list(clients.exchanges) if one.ending is not None][-10]
    told = up.deployment.ask("logs", "--event", "request_ended", "--request", last)
    return datetime.fromisoformat(str(told["at"])).timestamp()


# -------------------------------------------------------------------- F13


_DISK = Path("/tmp/f13")  # noqa: S108 - made, and a disk of its own, by the case
"""Below it are Ray's sockets, whose paths must be short."""


@case(
    "F13",
    "the disk full where every log goes, for 20 s: nothing fails, nobody dies, logs go on after it",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def the_disk_is_full(folder: Path) -> Outcome:
    """Ray's whole session lies on a disk of its own, which is filled to the last byte."""
    with ExitStack() as stack:
        disk = stack.enter_context(faults.tiny_disk(_DISK, 96 << 20))
        stack.enter_context(environment(TMPDIR=str(disk)))
        up = stack.enter_context(parts(folder))
        assert up.state.run_dir.startswith(str(disk)), f"it lies in {up.state.run_dir}"
        up.whole(POOLS, within_s=START_S)
        pids = up.serving((*POOLS, INGRESS, CONTROLLER))
        with served(up, steady("F13")) as clients:
            faults.fill(disk)
            clients.for_s(20.0)
            full = faults.is_full(disk)
            (disk / "filler").unlink()
            clients.for_s(3.0)
        missing = ended(pids, up.serving(pids))
        last = clients.exchanges[-1].request_id
        told = up.deployment.ask("logs", "--event", "request_ended", "--request", last)
    bounds = [
        exactly("the disk was full to the end", full, wanted=True),
        exactly("whose process has ended", missing, wanted="nobody"),
        exactly("the last request is in the log", last in told["request_id"], wanted=True),
    ]
    return outcome(clients.exchanges, bounds, {})
