"""Those who place no request die: controllers, an ingress, a node, and all of them in any order.

Simulated engines in real time behind everything that a user starts: Ray, Serve, HAProxy, vLLM's
frontend. Parts are killed by their process, under load; what clients saw is compared with what the
engines would have answered undisturbed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from baton.serving.shared.names import CONTROLLER, INGRESS
from tests.chaos import faults
from tests.chaos.case import (
    Engines,
    Figure,
    Outcome,
    at_least,
    at_most,
    case,
    exactly,
    requested_minutes,
)
from tests.chaos.clients import (
    AUTOSCALED,
    POOLS,
    START_S,
    WINDOW_S,
    Clients,
    outcome,
    running_clients,
    steady_load,
    streams_cut_by,
)
from tests.chaos.deployment_processes import (
    DeploymentProcesses,
    added_node,
    ended_processes,
    find_alive,
    running_processes,
    sum_gauges,
    wait_until,
)
from tests.chaos.history import Ending
from tests.chaos.load import Load

SAVED_AFTER_S = 30.0
"""Between two notes of what was used: a controller that is killed loses as much."""
TWO_INGRESSES = {"server.replicas.min": 2, "server.replicas.max": 2}

# -------------------------------------------------------------------- F6


@case(
    "F6",
    "the controller killed under load: requests are served on, and what it knew comes back",
    engines=Engines.SIMULATED,
    minutes=3.5,
)
def controller_killed(folder: Path) -> Outcome:
    """An operator's word, a configuration and usage are there again; nothing is scaled rashly."""
    with running_processes(folder, **AUTOSCALED) as processes:
        processes.wait_complete(POOLS, timeout_s=START_S)
        baton = processes.deployment
        baton.run_json(
            "apply", *baton.options, "--set", "admission.timeouts.drain=50s", timeout_s=180
        )
        baton.run_json("scale", "decode", "3", "--for", "30m")
        processes.wait_complete(POOLS | {"decode": 3}, timeout_s=150)
        with running_clients(processes, steady_load("F6")) as clients:
            clients.run_for(62.0)  # what was used is noted every half a minute
            before = _controller_state(processes)
            (pid,) = processes.replicas(CONTROLLER)
            faults.kill(pid)
            killed_s = time.monotonic()
            back_s = processes.wait_status(
                lambda s: s["up_s"] < time.monotonic() - killed_s, timeout_s=150
            )
            clients.run_for(WINDOW_S + 8.0)
            after, ticks = (
                _controller_state(processes),
                baton.run_json("explain", "scale", "-n", "100")["ticks"],
            )
            ended = sum(exchange.ending is not None for exchange in clients.exchanges)
            uncounted = ended - _counted_requests(processes)
    handover_ticks = [tick for tick in ticks if "another controller acted" in tick["paused_reason"]]
    actions = [what for tick in handover_ticks for what in tick["actions"]]
    bounds = [
        at_most("until another controller answers, s", round(back_s, 1), 20.0),
        exactly("overrides, generation and targets as before", after == before, expected=True),
        at_least("seconds of ticks that only watched", _spans_s(handover_ticks), WINDOW_S - 2.0),
        exactly("pools scaled while it only watched", len(actions), 0),
        at_most(
            "requests that usage does not know of", uncounted, 10.0 * (SAVED_AFTER_S + back_s + 6.0)
        ),
    ]
    figures: dict[str, Figure] = {"requests that had ended by then": ended, "state": str(after)}
    return outcome(clients.exchanges, bounds, figures)


def _controller_state(processes: DeploymentProcesses) -> dict[str, Any]:
    """What a new controller has to find out again."""
    status = processes.status()
    pools = {row["pool"]: row["desired"] for row in status["pools"]}
    overrides = {row["pool"]: row["replicas"] for row in status["autoscaler"]["overrides"]}
    return {"generation": status["generation"], "overrides": overrides, "targets": pools}


def _counted_requests(up: DeploymentProcesses) -> int:
    """Requests that are known to have ended, of all tenants."""
    return sum(row["requests"] for row in up.deployment.run_json("usage")["tenants"])


def _spans_s(ticks: Sequence[dict[str, Any]]) -> float:
    ages_s = [tick["age_s"] for tick in ticks]
    return round(max(ages_s) - min(ages_s), 1) if ages_s else 0.0


@case(
    "F6-serve",
    "Ray Serve's controller killed under load: requests are served on, pools can be scaled again",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def serve_controller_killed(folder: Path) -> Outcome:
    """While it is away an ingress keeps the members it knows; none is taken for gone."""
    with running_processes(folder) as up:
        up.wait_complete(POOLS, timeout_s=START_S)
        pids = up.replica_pids((*POOLS, INGRESS, CONTROLLER))
        with running_clients(up, steady_load("F6-serve")) as clients:
            faults.kill(up.serve_controller())
            killed_s = time.monotonic()
            clients.run_for(10.0)
            up.deployment.wait_for(lambda s: _desired_replicas(s, "decode") == 2, 60)
            up.deployment.run_json("scale", "decode", "3")
            scaled_s = time.monotonic() - killed_s
            up.wait_complete(POOLS | {"decode": 3}, timeout_s=150)
            clients.run_for(2.0)
        missing = ended_processes(pids, up.replica_pids(pids))
    bounds = [
        exactly("whose process has ended", missing, expected="none"),
        at_most("until a pool was scaled again, s", round(scaled_s, 1), 45.0),
    ]
    return outcome(clients.exchanges, bounds, {})


def _desired_replicas(status: dict[str, Any], pool: str) -> int | None:
    desired = [row["desired"] for row in status["pools"] if row["pool"] == pool]
    return desired[0] if desired else None


# -------------------------------------------------------------------- F7


@case(
    "F7",
    "one of two ingresses killed: the other takes new requests, what it had under way is aborted "
    "in 5 s, leases are over within theirs",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def ingress_killed(folder: Path) -> Outcome:
    """Streams of half a minute are open; those of the killed one must not compute on."""
    long = Load(
        rate_per_s=16.0,
        requests=32,
        prompt_tokens=(32, 200),
        output_tokens=(2600, 2800),
        deadline_s=120.0,
        name="F7-long",
    )
    with running_processes(folder, **TWO_INGRESSES) as up:
        up.wait_complete(POOLS, ingresses=2, timeout_s=START_S)
        targets = up.targets()
        with running_clients(up, steady_load("F7")) as short, running_clients(up, long) as streams:
            streams.run_for(3.0)
            victim = up.replicas(INGRESS)[0]
            open_before = streams.open_count() + short.open_count()
            faults.kill(victim)
            killed_s = time.monotonic()
            aborted_s = wait_until(
                lambda: (
                    sum_gauges(targets, "baton_live_legs")
                    <= streams.open_count() + short.open_count()
                ),
                30.0,
            )
            sessions_s = aborted_s + wait_until(
                lambda: sum_gauges(targets, "baton_coordinators") <= len(targets), 30.0
            )
            short.run_for(8.0)
            whole_s = up.wait_complete(POOLS, ingresses=2, timeout_s=180)
            short.stop()
        quiet_s = wait_until(
            lambda: sum_gauges(targets, "baton_live_legs", "baton_replica_kv_leases") == 0, 60
        )
    exchanges = [*short.exchanges, *streams.exchanges]
    cut_streams = streams_cut_by(exchanges, killed_s)
    others = [exchange for exchange in exchanges if exchange not in cut_streams]
    bounds = [
        at_least("streams that ended with it", len(cut_streams), 1),
        at_most("of those that were open", len(cut_streams), open_before),
        at_most("until its work was aborted on every engine, s", round(aborted_s, 2), 5.0),
        at_most("until every engine knew that it is gone, s", round(sessions_s, 2), 5.0),
        at_most("until no leg and no lease is left after the last request, s", quiet_s, 35.0),
    ]
    figures: dict[str, Figure] = {
        "sent after it died": sum(exchange.sent_at_s > killed_s for exchange in exchanges),
        "until there are two again, s": round(whole_s, 1),
    }
    return outcome(others, bounds, figures)


# -------------------------------------------------------------------- F8


@case(
    "F8",
    "a node lost (its raylet killed) with replicas on it: their streams go on elsewhere",
    engines=Engines.SIMULATED,
    minutes=3.5,
)
def node_killed(folder: Path) -> Outcome:
    """A second raylet of this machine; pools grow onto it, then it is killed under load."""
    replicas_by_pool = {"prefill": 4, "decode": 6}
    with running_processes(folder) as up:
        up.wait_complete(POOLS, timeout_s=START_S)
        with added_node(up, cpus=4, log=folder / "node.log") as raylet:
            for pool, replicas in replicas_by_pool.items():
                up.deployment.run_json("scale", pool, str(replicas))
            up.wait_complete(replicas_by_pool, timeout_s=180)
            pids_on_node = _on_node(up, raylet)
            with running_clients(up, steady_load("F8")) as clients:
                clients.run_for(3.0)
                started_s = time.monotonic()
                faults.kill(raylet)
                ended_s = wait_until(lambda: not find_alive(chain(*pids_on_node.values())), 30)
                clients.run_for(5.0)
                up.wait_complete(replicas_by_pool, timeout_s=180)
                whole_s = time.monotonic() - started_s
                clients.run_for(2.0)
    killed_count = sum(map(len, pids_on_node.values()))
    bounds = [
        at_least("replicas that were on it", killed_count, 1),
        exactly("ingresses that were on it", len(pids_on_node[INGRESS]), 0),
        at_most("until none of its processes is left, s", ended_s, 5.0),
        at_most("until pools are as large again, s", round(whole_s, 1), 90.0),
    ]
    return outcome(
        clients.exchanges, bounds, {name: len(pids) for name, pids in pids_on_node.items()}
    )


def _on_node(up: DeploymentProcesses, raylet: int) -> dict[str, list[int]]:
    """Processes that a raylet has started, by what they are."""
    below = {child.pid for child in psutil.Process(raylet).children(recursive=True)}
    return {
        name: [pid for pid in up.replicas(name) if pid in below]
        for name in (*POOLS, INGRESS, CONTROLLER)
    }


# -------------------------------------------------------------------- all of them


@dataclass(slots=True)
class KillSequence:
    """Kills one part after the other, in an order drawn by lot."""

    up: DeploymentProcesses
    folder: Path
    rng: random.Random
    pools: dict[str, int]
    kills: list[str] = field(default_factory=list)
    ingresses_at_s: list[float] = field(default_factory=list)
    """When one was killed, or the node that one was on."""
    slowest_recovery_s: float = 0.0

    def run(self, clients: Clients, seconds: float) -> None:
        """Go on for so long."""
        until_s = time.monotonic() + seconds
        kinds = [CONTROLLER, "Serve's controller", INGRESS, *self.pools, "node"]
        while time.monotonic() < until_s:
            self.rng.shuffle(kinds)
            for kind in kinds:
                self._kill(kind, clients)
                if time.monotonic() >= until_s:
                    return

    def _kill(self, kind: str, clients: Clients) -> None:
        number, log = len(self.kills), self.folder / f"node-{len(self.kills)}.log"
        if kind == "node":
            with added_node(self.up, cpus=4, log=log) as raylet:
                self._scale_onto_node()
                self._kill_process(raylet, kind, ingress=bool(_on_node(self.up, raylet)[INGRESS]))
        else:
            pids = [self.up.serve_controller()] if "Serve" in kind else self.up.replicas(kind)
            self._kill_process(self.rng.choice(pids), kind, ingress=kind == INGRESS)
        clients.run_for(self.rng.uniform(1.0, 4.0))
        back_s = self.up.wait_complete(self.pools, ingresses=2, timeout_s=180)
        self.slowest_recovery_s = max(self.slowest_recovery_s, back_s)
        assert len(self.kills) == number + 1

    def _scale_onto_node(self) -> None:
        """A replica more in each pool: Serve spreads them, so that the new node gets some."""
        for pool in self.pools:
            self.pools[pool] += 1
            self.up.deployment.run_json("scale", pool, str(self.pools[pool]))
        self.up.wait_complete(self.pools, ingresses=2, timeout_s=180)

    def _kill_process(self, pid: int, kind: str, *, ingress: bool) -> None:
        if ingress:
            self.ingresses_at_s.append(time.monotonic())
        self.kills.append(kind)
        faults.kill(pid)
        if kind == "node":
            for pool in self.pools:
                self.pools[pool] -= 1
                self.up.deployment.run_json("scale", pool, str(self.pools[pool]))


@case(
    "F8-order",
    "controllers, ingresses, replicas and nodes killed in random order for 20 minutes: nothing is "
    "lost but streams of a killed ingress that had begun",
    engines=Engines.SIMULATED,
    minutes=24,
)
def everything_killed_in_random_order(folder: Path) -> Outcome:
    """The next process to kill is drawn by lot once all are back."""
    length = requested_minutes(20.0)
    with running_processes(folder, **TWO_INGRESSES) as up:
        up.wait_complete(POOLS, ingresses=2, timeout_s=START_S)
        kill_sequence = KillSequence(
            up=up, folder=folder, rng=random.Random("order"), pools=dict(POOLS)
        )
        with running_clients(
            up, steady_load("order", minutes=3 * length["minutes"] + 3)
        ) as clients:
            kill_sequence.run(clients, 60 * length["minutes"])
        targets = up.targets()
        quiet_s = wait_until(
            lambda: sum_gauges(targets, "baton_live_legs", "baton_replica_kv_leases") == 0, 60
        )
    sent = clients.exchanges
    lost = [
        exchange for at_s in kill_sequence.ingresses_at_s for exchange in streams_cut_by(sent, at_s)
    ]
    bounds = [
        at_least("parts that were killed", len(kill_sequence.kills), 6),
        at_most("until no leg and no lease is left, s", quiet_s, 35.0),
        at_most(
            "longest until everybody was there again, s",
            round(kill_sequence.slowest_recovery_s, 1),
            90.0,
        ),
    ]
    figures: dict[str, Figure] = {
        "order": ", ".join(kill_sequence.kills),
        "streams that ended with their ingress": len(lost),
        "ingresses lost": len(kill_sequence.ingresses_at_s),
        "streams cut": sum(exchange.ending is Ending.CUT for exchange in sent),
    }
    return outcome(
        [exchange for exchange in sent if exchange not in lost], bounds, {**figures, **length}
    )
