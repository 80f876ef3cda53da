"""Faults of replicas, transfers and networks, while clients stream."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from baton.control.state.limits import CoordinatorLimits
from baton.domain.fleet import Role
from baton.domain.request import Phase
from baton.policy.placement.port import Disaggregate
from benchmarks._statistics import quantile
from tests.chaos import faults
from tests.chaos.case import Bound, Engines, Figure, Outcome, at_least, at_most, case, exactly
from tests.chaos.history import (
    Ending,
    Exchange,
    ExcludedReplica,
    History,
    longest_first_token_s,
    longest_stall,
)
from tests.chaos.load import HttpClient, Load, open_loop
from tests.chaos.runs import (
    collect_history,
    count_in_phase,
    count_legs,
    count_resumed,
    outcome,
    run_load,
)
from tests.chaos.stage import SETTINGS, SimStage, StageSpec, sim_stage

_P, _D = Role.PREFILL, Role.DECODE
_LIVENESS_S = 2.0
"""After which a link takes an unresponsive replica for dead, by default."""
_FROZEN_S = 10.0
_SETTLE_S = 15.0
_STREAMS = Load(rate_per_s=50, requests=1000)
"""50 a second for 20 s; about 33 streams at a time."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica that was killed under load."""

    name: str
    at_s: float
    lost_at_s: float
    """When the last ingress had noticed."""


# -------------------------------------------------------------------- F1, F2: replicas killed


@case(
    "F1",
    "SIGKILL a decode replica mid-stream at 50 requests/s, three times",
    engines=Engines.SIMULATED,
    minutes=1,
)
def decode_killed(_: Path) -> Outcome:
    """The stream goes on; no token is lost or comes twice; nothing hangs."""
    return asyncio.run(_decode_killed())


async def _decode_killed() -> Outcome:
    kills: list[Kill] = []
    async with sim_stage(StageSpec(roles=(_P, _P, _D, _D, _D), ingresses=2)) as stage:

        async def kill_replicas() -> None:
            for _ in range(3):
                await asyncio.sleep(5.0)
                kills.append(await _kill(stage, stage.busiest(_D)))
                await stage.add_replica(_D)

        exchanges = await run_load(stage, _STREAMS, kill_replicas)
        history = await collect_history(stage, exchanges)
    return outcome(history, _bounds_of_kills(kills, exchanges, stage), _figures_of(kills))


@case(
    "F2",
    "SIGKILL a prefill replica while blocks are pulled from it, three times",
    engines=Engines.SIMULATED,
    minutes=1,
)
def prefill_killed(_: Path) -> Outcome:
    """What was in transfer is computed again or placed elsewhere; the text is right."""
    return asyncio.run(_prefill_killed())


async def _prefill_killed() -> Outcome:
    kills, transfers_in_flight = list[Kill](), list[int]()
    # So that there is always a transfer under way, and a prompt that is being computed: simulated
    # transfers outlive their source, and only who is still computed there is set back by the kill.
    slow = replace(SETTINGS, transfer_setup_s=0.25, prefill_tokens_per_s=12_000.0)
    async with sim_stage(StageSpec(roles=(_P, _P, _D, _D), ingresses=2, settings=slow)) as stage:

        async def kill_in_turn() -> None:
            for _ in range(3):
                await asyncio.sleep(5.0)
                transfers_in_flight.append(count_in_phase(stage, Phase.TRANSFER))
                kills.append(await _kill(stage, stage.busiest(_P)))
                await stage.add_replica(_P)

        exchanges = await run_load(stage, _STREAMS, kill_in_turn)
        history = await collect_history(stage, exchanges)
    bounds = (
        at_least("transfers under way at a kill, fewest", min(transfers_in_flight), 1),
        at_least("requests that a kill set back", count_resumed(stage.records()), 1),
        at_most(
            "longest first token, s (a transfer's deadline is 2)",
            longest_first_token_s(exchanges),
            3.0,
        ),
    )
    return outcome(history, bounds, _figures_of(kills))


async def _kill(stage: SimStage, name: str) -> Kill:
    at_s = stage.kill(name)
    for ingress in stage.ingresses:
        await ingress.wait_until(lambda d=ingress: d.lost_at_s(name, since_s=at_s) is not None)  # type: ignore[misc]
    lost_s = [ingress.lost_at_s(name, since_s=at_s) or at_s for ingress in stage.ingresses]
    await stage.disconnect(name)
    return Kill(name, at_s, max(lost_s))


def _bounds_of_kills(
    kills: Sequence[Kill], exchanges: Sequence[Exchange], stage: SimStage
) -> tuple[Bound, ...]:
    stalls_beyond_s = [_beyond_detection_s(kill, exchanges) for kill in kills]
    return (
        at_most("longest stall beyond detection, s", max(stalls_beyond_s), 0.5),
        at_most("longest detection, s", max(kill.lost_at_s - kill.at_s for kill in kills), 1.0),
        at_least("streams that a kill cut", count_resumed(stage.records()), 10),
    )


def _beyond_detection_s(kill: Kill, exchanges: Sequence[Exchange]) -> float:
    """The longest that a stream waited for its next token after its replica was known lost."""
    ends = (b for exchange in exchanges for a, b in exchange.gaps() if a <= kill.at_s <= b)
    return max((end - kill.lost_at_s for end in ends), default=0.0)


def _figures_of(kills: Sequence[Kill]) -> dict[str, Figure]:
    return {
        "kills": len(kills),
        "detection_max_s": max(kill.lost_at_s - kill.at_s for kill in kills),
    }


# -------------------------------------------------------------------- F3: replicas frozen


@case(
    "F3",
    "SIGSTOP a prefill replica for 10 s at 50 requests/s",
    engines=Engines.SIMULATED,
    minutes=1,
)
def prefill_frozen(_: Path) -> Outcome:
    """Deadlines fire, others take over, and it is used again when it goes on."""
    return asyncio.run(_freeze_replica(_P))


@case(
    "F3-decode",
    "SIGSTOP a decode replica for 10 s at 50 requests/s",
    engines=Engines.SIMULATED,
    minutes=1,
)
def decode_frozen(_: Path) -> Outcome:
    """Its streams go on elsewhere, and it is used again when it goes on."""
    return asyncio.run(_freeze_replica(_D))


async def _freeze_replica(role: Role) -> Outcome:
    excluded_replicas, detection_times_s, recovery_times_s = (
        list[ExcludedReplica](),
        list[float](),
        list[float](),
    )
    async with sim_stage(StageSpec(roles=(_P, _P, _D, _D), ingresses=2)) as stage:

        async def freeze() -> None:
            await asyncio.sleep(5.0)
            name = stage.busiest(role)
            since_s = time.monotonic()
            with faults.stopped_processes(stage.replicas[name].pid):
                await asyncio.sleep(_FROZEN_S)
            thawed_s = time.monotonic()
            for ingress in stage.ingresses:
                await ingress.wait_until(lambda d=ingress: d.view(name) is not None)  # type: ignore[misc]
            lost_s = [ingress.lost_at_s(name, since_s=since_s) for ingress in stage.ingresses]
            detection_times_s.extend(at_s - since_s for at_s in lost_s if at_s is not None)
            recovery_times_s.append(time.monotonic() - thawed_s)
            if None not in lost_s:
                from_s = max(at_s for at_s in lost_s if at_s is not None)
                excluded_replicas.append(
                    ExcludedReplica(
                        replica_id=name, from_s=from_s, to_s=thawed_s, reason="it was unresponsive"
                    )
                )

        exchanges = await run_load(stage, _STREAMS, freeze)
        history = await collect_history(stage, exchanges, excluded_replicas)
    (excluded,) = excluded_replicas or [
        ExcludedReplica(replica_id="", from_s=0.0, to_s=0.0, reason="it was not noticed")
    ]
    legs_after = count_legs(stage.records(), excluded.replica_id, since_s=excluded.to_s)
    stall = longest_stall(exchanges)
    bounds = (
        exactly("ingresses that noticed", len(detection_times_s), len(stage.ingresses)),
        at_most(
            "longest until it was noticed, s",
            max(detection_times_s, default=99.0),
            _LIVENESS_S + 0.75,
        ),
        at_most("longest stall of a stream, s", stall.took_s if stall else 0.0, 3.5),
        at_most("longest first token, s", longest_first_token_s(exchanges), 3.5),
        at_most("until it was back after SIGCONT, s", max(recovery_times_s), 3.0),
        at_least("legs that it got after it was back", legs_after, 1),
    )
    return outcome(history, bounds, {"resumed": count_resumed(stage.records())})


# -------------------------------------------------------------------- F7: a coordinator killed


@case(
    "F7-sim",
    "SIGKILL one of two coordinators at 50 requests/s, without Ray",
    engines=Engines.SIMULATED,
    minutes=1,
)
def coordinator_killed(_: Path) -> Outcome:
    """Its own streams are cut; nothing of the other's is, and replicas free what it held."""
    return asyncio.run(_coordinator_killed())


async def _coordinator_killed() -> Outcome:
    async with sim_stage(StageSpec(ingresses=0, ingress_processes=2)) as stage:
        first, other = stage.ingress_processes.values()
        async with HttpClient(first.url) as killed_client, HttpClient(other.url) as other_client:
            loads = [
                replace(_STREAMS, rate_per_s=25, requests=n, name=f"at-{n}") for n in (100, 400)
            ]
            async with asyncio.TaskGroup() as group:
                group.create_task(open_loop(loads[0], killed_client.send))
                running = group.create_task(open_loop(loads[1], other_client.send))
                await asyncio.sleep(3.0)
                killed_s = stage.kill_ingress(first.name)
                aborted_s = await _aborted_at_s(stage) - killed_s
        # Of a KV handle on its way to it, the blocks are free when the lease ends.
        counters = await stage.wait_idle(timeout_s=stage.plan.settings.lease_s + _SETTLE_S)
        history = History(
            exchanges=running.result(), expected_tokens=stage.expected_tokens, counters=counters
        )
    bounds = (at_most("until its engines' work was aborted, s", aborted_s, 5.0),)
    return outcome(history, bounds)


async def _aborted_at_s(stage: SimStage) -> float:
    """When every replica serves one coordinator only, and has aborted all work of the other."""
    async with asyncio.timeout(30):
        while {await replica.sessions() for replica in stage.replicas.values()} != {(1, 0)}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return time.monotonic()


# -------------------------------------------------------------------- F17: drains


@case(
    "F17",
    "drain a decode and a prefill replica at 50 requests/s: what runs there ends there",
    engines=Engines.SIMULATED,
    minutes=1,
)
def drain_replicas(_: Path) -> Outcome:
    """Nothing new comes, nothing is cut, and it is free as soon as its streams have ended."""
    return asyncio.run(_drain_case(CoordinatorLimits(), is_migrated=False))


@case(
    "F17-moved",
    "the same with streams that outlast the drain timeout: they are migrated",
    engines=Engines.SIMULATED,
    minutes=1,
)
def drain_and_migrate(_: Path) -> Outcome:
    """A replica is free after the drain timeout and a little, and no token is lost."""
    return asyncio.run(_drain_case(CoordinatorLimits(drain_timeout_s=0.2), is_migrated=True))


async def _drain_case(limits: CoordinatorLimits, *, is_migrated: bool) -> Outcome:
    excluded_replicas, took_s = list[ExcludedReplica](), list[float]()
    async with sim_stage(
        StageSpec(roles=(_P, _P, _D, _D, _D), ingresses=2, limits=limits)
    ) as stage:

        async def drain_two() -> None:
            for role in (_D, _P):
                await asyncio.sleep(5.0)
                name = stage.busiest(role)
                began_s = time.monotonic()
                known_s = await stage.drain(name)
                excluded_replicas.append(
                    ExcludedReplica(replica_id=name, from_s=known_s, reason="its drain")
                )
                took_s.append(await _wait_freed_s(stage, name, began_s))
                await stage.stop(name)

        exchanges = await run_load(stage, _STREAMS, drain_two)
        history = await collect_history(stage, exchanges, excluded_replicas)
    moves = count_resumed(stage.records())
    # A stream of 96 tokens lasts about 0.9 s.
    bounds = (
        at_most(
            "longest until a drained replica was free, s", max(took_s), 1.5 if is_migrated else 5.0
        ),
        at_least("streams moved", moves, 1) if is_migrated else exactly("streams moved", moves, 0),
    )
    return outcome(history, bounds, {"free_after_max_s": max(took_s), "moved": moves})


async def _wait_freed_s(stage: SimStage, name: str, started_s: float) -> float:
    """How long until a replica holds nothing for anybody."""
    async with asyncio.timeout(60):
        while any((await stage.replicas[name].held_resources()).values()):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.02)
    return time.monotonic() - started_s


# -------------------------------------------------------------------- F18: role changes

_ROLE_PAUSE_S = 0.02
"""Between two changes of a role."""


@case(
    "F18",
    "a thousand role changes and twenty scale-downs at 80 requests/s: no request fails",
    engines=Engines.SIMULATED,
    minutes=2,
)
def roles_changed(_: Path) -> Outcome:
    """Any replica gets any role, with any roles of the others."""
    load = Load(rate_per_s=80, requests=6000, shared_prompts=4)
    return asyncio.run(role_changes(1000, 20, load))


async def role_changes(changes: int, scale_downs: int, load: Load) -> Outcome:
    """Change roles by chance under load; every so often drain a replica and start another."""
    rng, roles = Random(0), dict[str, Role]()
    known_s, free_s, barred, changed_at_s = (
        list[float](),
        list[float](),
        list[ExcludedReplica](),
        0.0,
    )
    plan = StageSpec(
        roles=(_P, _P, _D, _D, Role.MIXED), ingresses=2, disaggregate=Disaggregate.AUTO
    )
    async with sim_stage(plan) as stage:
        roles |= {name: replica.plan.role for name, replica in stage.replicas.items()}

        async def scale_down() -> None:
            name = rng.choice([*roles])
            began_s = time.monotonic()
            barred.append(
                ExcludedReplica(
                    replica_id=name, from_s=await stage.drain(name), reason="its scale-down"
                )
            )
            free_s.append(await _wait_freed_s(stage, name, began_s))
            await stage.stop(name)
            role = roles.pop(name)
            roles[await stage.add_replica(role)] = role

        async def disturb() -> None:
            nonlocal changed_at_s
            every = changes // scale_downs
            for number in range(changes):
                name = rng.choice([*roles])
                roles[name] = rng.choice([role for role in Role if role is not roles[name]])
                known_s.append(await stage.set_role(name, roles[name]))
                if number % every == every // 2:
                    await scale_down()
                changed_at_s = time.monotonic()
                await asyncio.sleep(_ROLE_PAUSE_S)

        exchanges = await run_load(stage, load, disturb)
        history = await collect_history(stage, exchanges, barred)
    bounds = (
        exactly("role changes", len(known_s), changes),
        exactly("scale-downs", len(free_s), scale_downs),
        *_bounds_of_changes(history, changed_at_s),
    )
    figures: dict[str, Figure] = {
        "known_p50_s": quantile(known_s, 0.5),
        "known_p99_s": quantile(known_s, 0.99),
        "free_after_max_s": max(free_s),
        "resumed": count_resumed(stage.records()),
    }
    return outcome(history, bounds, figures)


def _bounds_of_changes(history: History, changed_at_s: float) -> tuple[Bound, ...]:
    exchanges, records = history.exchanges, history.records or ()
    unfinished = sum(exchange.ending is not Ending.FINISHED for exchange in exchanges)
    handed_off = sum(record.prefill_done_at_s is not None for record in records)
    ended_at_s = max(exchange.ended_at_s or math.inf for exchange in exchanges)
    return (
        exactly("requests that did not finish", unfinished, 0),
        at_least("requests that were handed off", handed_off, 1),
        at_most("last change, s after the last request ended", changed_at_s - ended_at_s, 0.0),
    )
