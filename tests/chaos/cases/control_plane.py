"""Those who place no request die: controllers, an ingress, a node, and all of them in any order.

Simulated engines in real time behind everything that a user starts: Ray, Serve, HAProxy, vLLM's
frontend. Parts are killed by their process, under load; what clients saw is compared with what the
engines would have said undisturbed.
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
    minutes_asked,
)
from tests.chaos.clients import (
    AUTOSCALED,
    POOLS,
    START_S,
    WINDOW_S,
    Clients,
    lost_with,
    outcome,
    served,
    steady,
)
from tests.chaos.deployment_processes import Parts, ended, living, node, parts, scraped, until
from tests.chaos.history import Ending
from tests.chaos.load import Load

NOTED_S = 30.0
"""Between two notes of what was used: a controller that is killed loses as much."""
TWO_DOORS = {"server.replicas.min": 2, "server.replicas.max": 2}

# -------------------------------------------------------------------- F6


@case(
    "F6",
    "the controller killed under load: requests are served on, and what it knew comes back",
    engines=Engines.SIMULATED,
    minutes=3.5,
)
def the_controller_dies(folder: Path) -> Outcome:
    """An operator's word, a configuration and usage are there again; nothing is scaled rashly."""
    with parts(folder, **AUTOSCALED) as up:
        up.whole(POOLS, within_s=START_S)
        baton = up.deployment
        baton.ask("apply", *baton.options, "--set", "admission.timeouts.drain=50s", within_s=180)
        baton.ask("scale", "decode", "3", "--for", "30m")
        up.whole(POOLS | {"decode": 3}, within_s=150)
        with served(up, steady("F6")) as clients:
            clients.for_s(62.0)  # what was used is noted every half a minute
            before = _known(up)
            (pid,) = up.replicas(CONTROLLER)
            faults.kill(pid)
            killed_s = time.monotonic()
            back_s = up.until(lambda s: s["up_s"] < time.monotonic() - killed_s, within_s=150)
            clients.for_s(WINDOW_S + 8.0)
            after, ticks = _known(up), baton.ask("explain", "scale", "-n", "100")["ticks"]
            ended = sum(one.ending is not None for one in clients.exchanges)
            uncounted = ended - _used(up)
    awaited = [tick for tick in ticks if "another controller acted" in tick["held"]]
    rash = [what for tick in awaited for what in tick["actions"]]
    bounds = [
        at_most("until another controller answers, s", round(back_s, 1), 20.0),
        exactly("overrides, generation and targets as before", after == before, wanted=True),
        at_least("seconds of ticks that only watched", _spans_s(awaited), WINDOW_S - 2.0),
        exactly("pools scaled while it only watched", len(rash), 0),
        at_most("requests that usage does not know of", uncounted, 10.0 * (NOTED_S + back_s + 6.0)),
    ]
    figures: dict[str, Figure] = {"requests that had ended by then": ended, "state": str(after)}
    return outcome(clients.exchanges, bounds, figures)


def _known(up: Parts) -> dict[str, Any]:
    """What a new controller has to find out again."""
    told = up.status()
    pools = {row["pool"]: row["want"] for row in told["pools"]}
    overrides = {row["pool"]: row["replicas"] for row in told["autoscaler"]["overrides"]}
    return {"generation": told["generation"], "overrides": overrides, "targets": pools}


def _used(up: Parts) -> int:
    """Requests that are known to have ended, of all tenants."""
    return sum(row["requests"] for row in up.deployment.ask("usage")["tenants"])


def _spans_s(ticks: Sequence[dict[str, Any]]) -> float:
    ages_s = [tick["age_s"] for tick in ticks]
    return round(max(ages_s) - min(ages_s), 1) if ages_s else 0.0


@case(
    "F6-serve",
    "Ray Serve's controller killed under load: requests are served on, pools can be scaled again",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def serves_controller_dies(folder: Path) -> Outcome:
    """While it is away an ingress keeps the members it knows; none is taken for gone."""
    with parts(folder) as up:
        up.whole(POOLS, within_s=START_S)
        pids = up.serving((*POOLS, INGRESS, CONTROLLER))
        with served(up, steady("F6-serve")) as clients:
            faults.kill(up.serve_controller())
            killed_s = time.monotonic()
            clients.for_s(10.0)
            up.deployment.wait_for(lambda s: _wants(s, "decode") == 2, 60)
            up.deployment.ask("scale", "decode", "3")
            scaled_s = time.monotonic() - killed_s
            up.whole(POOLS | {"decode": 3}, within_s=150)
            clients.for_s(2.0)
        missing = ended(pids, up.serving(pids))
    bounds = [
        exactly("whose process has ended", missing, wanted="nobody"),
        at_most("until a pool was scaled again, s", round(scaled_s, 1), 45.0),
    ]
    return outcome(clients.exchanges, bounds, {})


def _wants(status: dict[str, Any], pool: str) -> int | None:
    found = [row["want"] for row in status["pools"] if row["pool"] == pool]
    return found[0] if found else None


# -------------------------------------------------------------------- F7


@case(
    "F7",
    "one of two ingresses killed: the other takes new requests, what it had under way is aborted "
    "in 5 s, leases are over within theirs",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def an_ingress_dies(folder: Path) -> Outcome:
    """Streams of half a minute are open; those of the killed one would compute on if nobody saw."""
    long = Load(
        rate_per_s=16.0,
        requests=32,
        prompt_tokens=(32, 200),
        output_tokens=(2600, 2800),
        deadline_s=120.0,
        name="F7-long",
    )
    with parts(folder, **TWO_DOORS) as up:
        up.whole(POOLS, ingresses=2, within_s=START_S)
        targets = up.targets()
        with served(up, steady("F7")) as short, served(up, long) as streams:
            streams.for_s(3.0)
            victim = up.replicas(INGRESS)[0]
            open_before = streams.open() + short.open()
            faults.kill(victim)
            killed_s = time.monotonic()
            aborted_s = until(
                lambda: scraped(targets, "baton_live_legs") <= streams.open() + short.open(), 30.0
            )
            sessions_s = aborted_s + until(
                lambda: scraped(targets, "baton_coordinators") <= len(targets), 30.0
            )
            short.for_s(8.0)
            whole_s = up.whole(POOLS, ingresses=2, within_s=180)
            short.stop()
        quiet_s = until(lambda: scraped(targets, "baton_live_legs", "baton_held_leases") == 0, 60)
    sent = [*short.exchanges, *streams.exchanges]
    lost = lost_with(sent, killed_s)
    rest = [one for one in sent if one not in lost]
    bounds = [
        at_least("streams that ended with it", len(lost), 1),
        at_most("of those that were open", len(lost), open_before),
        at_most("until its work was aborted on every engine, s", round(aborted_s, 2), 5.0),
        at_most("until every engine knew that it is gone, s", round(sessions_s, 2), 5.0),
        at_most("until no leg and no lease is left after the last request, s", quiet_s, 35.0),
    ]
    figures: dict[str, Figure] = {
        "sent after it died": sum(one.sent_at_s > killed_s for one in sent),
        "until there are two again, s": round(whole_s, 1),
    }
    return outcome(rest, bounds, figures)


# -------------------------------------------------------------------- F8


@case(
    "F8",
    "a node lost (its raylet killed) with replicas on it: their streams go on elsewhere",
    engines=Engines.SIMULATED,
    minutes=3.5,
)
def a_node_dies(folder: Path) -> Outcome:
    """A second raylet of this machine; pools grow onto it, then it is killed under load."""
    wanted = {"prefill": 4, "decode": 6}
    with parts(folder) as up:
        up.whole(POOLS, within_s=START_S)
        with node(up, cpus=4, log=folder / "node.log") as raylet:
            for pool, replicas in wanted.items():
                up.deployment.ask("scale", pool, str(replicas))
            up.whole(wanted, within_s=180)
            there = _on_node(up, raylet)
            with served(up, steady("F8")) as clients:
                clients.for_s(3.0)
                began_s = time.monotonic()
                faults.kill(raylet)
                ended_s = until(lambda: not living(chain(*there.values())), 30)
                clients.for_s(5.0)
                up.whole(wanted, within_s=180)
                whole_s = time.monotonic() - began_s
                clients.for_s(2.0)
    lost = sum(map(len, there.values()))
    bounds = [
        at_least("replicas that were on it", lost, 1),
        exactly("ingresses that were on it", len(there[INGRESS]), 0),
        at_most("until none of its processes is left, s", ended_s, 5.0),
        at_most("until pools are as large again, s", round(whole_s, 1), 90.0),
    ]
    return outcome(clients.exchanges, bounds, {name: len(pids) for name, pids in there.items()})


def _on_node(up: Parts, raylet: int) -> dict[str, list[int]]:
    """Processes that a raylet has started, by what they are."""
    below = {child.pid for child in psutil.Process(raylet).children(recursive=True)}
    return {
        name: [pid for pid in up.replicas(name) if pid in below]
        for name in (*POOLS, INGRESS, CONTROLLER)
    }


# -------------------------------------------------------------------- all of them


@dataclass(slots=True)
class Order:
    """Kills one part after the other, in an order drawn by lot."""

    up: Parts
    folder: Path
    rng: random.Random
    pools: dict[str, int]
    done: list[str] = field(default_factory=list)
    ingresses_at_s: list[float] = field(default_factory=list)
    """When one was killed, or the node that one was on."""
    slowest_s: float = 0.0

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
        number, log = len(self.done), self.folder / f"node-{len(self.done)}.log"
        if kind == "node":
            with node(self.up, cpus=4, log=log) as raylet:
                self._grow_onto_it()
                self._lose(raylet, kind, ingress=bool(_on_node(self.up, raylet)[INGRESS]))
        else:
            pids = [self.up.serve_controller()] if "Serve" in kind else self.up.replicas(kind)
            self._lose(self.rng.choice(pids), kind, ingress=kind == INGRESS)
        clients.for_s(self.rng.uniform(1.0, 4.0))
        back_s = self.up.whole(self.pools, ingresses=2, within_s=180)
        self.slowest_s = max(self.slowest_s, back_s)
        assert len(self.done) == number + 1

    def _grow_onto_it(self) -> None:
        """A replica more in each pool: Serve spreads them, so that the new node gets some."""
        for pool in self.pools:
            self.pools[pool] += 1
            self.up.deployment.ask("scale", pool, str(self.pools[pool]))
        self.up.whole(self.pools, ingresses=2, within_s=180)

    def _lose(self, pid: int, kind: str, *, ingress: bool) -> None:
        if ingress:
            self.ingresses_at_s.append(time.monotonic())
        self.done.append(kind)
        faults.kill(pid)
        if kind == "node":
            for pool in self.pools:
                self.pools[pool] -= 1
                self.up.deployment.ask("scale", pool, str(self.pools[pool]))


@case(
    "F8-order",
    "controllers, ingresses, replicas and nodes killed in random order for 20 minutes: nothing is "
    "lost but streams of a killed ingress that had begun",
    engines=Engines.SIMULATED,
    minutes=24,
)
def all_die_in_any_order(folder: Path) -> Outcome:
    """Whoever is killed next is drawn by lot once everybody is there again."""
    length = minutes_asked(20.0)
    with parts(folder, **TWO_DOORS) as up:
        up.whole(POOLS, ingresses=2, within_s=START_S)
        order = Order(up=up, folder=folder, rng=random.Random("order"), pools=dict(POOLS))
        with served(up, steady("order", minutes=3 * length["minutes"] + 3)) as clients:
            order.run(clients, 60 * length["minutes"])
        targets = up.targets()
        quiet_s = until(lambda: scraped(targets, "baton_live_legs", "baton_held_leases") == 0, 60)
    sent = clients.exchanges
    lost = [one for at_s in order.ingresses_at_s for one in lost_with(sent, at_s)]
    bounds = [
        at_least("parts that were killed", len(order.done), 6),
        at_most("until no leg and no lease is left, s", quiet_s, 35.0),
        at_most("longest until everybody was there again, s", round(order.slowest_s, 1), 90.0),
    ]
    figures: dict[str, Figure] = {
        "order": ", ".join(order.done),
        "streams that ended with their ingress": len(lost),
        "ingresses lost": len(order.ingresses_at_s),
        "streams cut": sum(one.ending is Ending.CUT for one in sent),
    }
    return outcome([one for one in sent if one not in lost], bounds, {**figures, **length})
