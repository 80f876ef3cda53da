"""Faults of what is between replicas, while clients stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from baton.domain.commands import RequestRecord
from baton.domain.fleet import Role
from baton.domain.handoff import HandoffMode
from baton.policy.placement.port import Disaggregate
from tests.chaos import faults
from tests.chaos.case import Bound, Engines, Figure, Outcome, at_least, at_most, case
from tests.chaos.faults import NotPossibleError
from tests.chaos.history import Exchange, longest_stall
from tests.chaos.load import Load
from tests.chaos.proxy import NO_IMPAIRMENT, ChaosProxy, LinkConditions
from tests.chaos.runs import collect_history, count_resumed, no_fault, outcome, run_load
from tests.chaos.stage import SETTINGS, SimStage, StageSpec, sim_stage

_P, _D = Role.PREFILL, Role.DECODE

# -------------------------------------------------------------------- F5: transfers slow


@case(
    "F5",
    "transfers at a hundredth of their bandwidth: placement goes local, and comes back",
    engines=Engines.SIMULATED,
    minutes=2,
)
def transfers_slow(_: Path) -> Outcome:
    """The link's estimate rises and requests avoid it."""
    return asyncio.run(_transfers_slow())


async def _transfers_slow() -> Outcome:
    load = Load(rate_per_s=8, requests=720, prompt_tokens=(800, 1600), output_tokens=(16, 48))
    change_times_s: list[float] = []
    # One decodes for everybody, so that prompts are better computed elsewhere.
    plan = StageSpec(
        roles=(_P, _P, _D),
        disaggregate=Disaggregate.AUTO,
        settings=replace(SETTINGS, prefill_tokens_per_s=30_000.0, transfer_bytes_per_s=25e9),
    )
    async with sim_stage(plan) as stage:
        (decode,) = stage.replicas_of_role(_D)

        async def slow_down() -> None:
            await asyncio.sleep(10.0)
            change_times_s.append(time.monotonic())
            await stage.replicas[decode].send_command("slow transfers", 100.0)
            await asyncio.sleep(20.0)
            change_times_s.append(time.monotonic())
            await stage.replicas[decode].send_command("slow transfers", 1.0)

        exchanges = await run_load(stage, load, slow_down)
        history = await collect_history(stage, exchanges)
    slow_s, fast_s = change_times_s
    records = stage.records()
    before = _local_share(records, slow_s - 8, slow_s)
    during = _local_share(records, slow_s + 5, fast_s)
    after = _local_share(records, fast_s + 10, fast_s + 60)
    bounds = (
        at_most("share placed local before", before, 0.5),
        at_least("share placed local from 5 s after the slowdown on", during, 0.95),
    )
    figures: dict[str, Figure] = {
        "share_local_before": before,
        "share_local_during": during,
        "share_local_from_10_s_after_the_end": after,
    }
    return outcome(history, bounds, figures)


def _local_share(records: Sequence[RequestRecord], from_s: float, to_s: float) -> float:
    """Of the requests that came in a time, how many were first placed on one replica."""
    modes = [record.routes[0].mode for record in records if from_s <= record.arrived_at_s < to_s]
    return modes.count(HandoffMode.LOCAL) / max(1, len(modes))


# -------------------------------------------------------------------- F14: packets lost


@case(
    "F14",
    "one packet in ten lost each way between ingresses, prefill and decode replicas",
    engines=Engines.SIMULATED,
    minutes=1,
)
def packets_lost(_: Path) -> Outcome:
    """Slower, and otherwise as ever."""
    try:
        return asyncio.run(_packets_lost())
    except NotPossibleError as reason:
        bound = Bound(
            description="a network that loses packets",
            actual=str(reason),
            expected="one",
            is_met=False,
        )
        return Outcome(bounds=(bound,), note="this machine cannot lose packets")


async def _packets_lost() -> Outcome:
    with faults.lossy_network(0.1) as network:
        # Links of 0, 1, 2 lose packets, and what 3 pulls from 0 or 1.
        plan = StageSpec(
            roles=(_P, _P, _D, _D), ingresses=2, network=network, networked_roles=(0, 1, 2)
        )
        async with sim_stage(plan) as stage:
            exchanges = await run_load(stage, Load(rate_per_s=50, requests=1000), no_fault)
            # A probe of a pair holds a block for a moment; lost packets make it a long one.
            dropped = network.heal()
            history = await collect_history(stage, exchanges)
    bounds = (at_least("packets lost on the way in", dropped, 500),)
    figures: dict[str, Figure] = {
        "lost_by": network.loss_tool,
        "resumed": count_resumed(stage.records()),
    }
    return outcome(history, bounds, figures)


# -------------------------------------------------------------------- N1: every weather


_CONDITIONS = {
    "late": LinkConditions(delay_s=0.05, jitter_s=0.1),
    "lossy": LinkConditions(loss_probability=0.1),
    "narrow": LinkConditions(bytes_per_s=100_000),
    "dripping": LinkConditions(max_chunk_bytes=200, chunk_pause_s=0.002),
    "stalled": LinkConditions(is_stalled=True),
    "black hole": LinkConditions(is_black_hole=True),
}
_CONDITION_S = 4.0
_NORMAL_S = 3.0


@case(
    "N1",
    "links and side channels of a prefill and a decode replica: late, lossy, narrow, dripping,"
    " stalled, swallowed, reset, half open",
    engines=Engines.SIMULATED,
    minutes=2,
)
def link_conditions(_: Path) -> Outcome:
    """Slower, and nothing lost."""
    return asyncio.run(_link_conditions())


async def _link_conditions() -> Outcome:
    load = Load(rate_per_s=30, requests=1800)
    started_s: dict[str, float] = {}
    async with sim_stage(StageSpec(roles=(_P, _P, _D, _D), has_proxies=True)) as stage:

        async def change() -> None:
            impaired_proxies = _proxies_of(
                stage, stage.replicas_of_role(_P)[0], stage.replicas_of_role(_D)[0]
            )
            for name, conditions in _CONDITIONS.items():
                started_s[name] = time.monotonic()
                for proxy in impaired_proxies:
                    proxy.set_conditions(up=conditions, down=conditions)
                await asyncio.sleep(_CONDITION_S)
                for proxy in impaired_proxies:
                    proxy.set_conditions(up=NO_IMPAIRMENT, down=NO_IMPAIRMENT)
                    if conditions.is_black_hole:
                        proxy.reset()  # what was swallowed is missing in the middle of a stream
                await asyncio.sleep(_NORMAL_S)
            for name, break_connections in (
                ("reset", ChaosProxy.reset),
                ("half open", ChaosProxy.half_open),
            ):
                started_s[name] = time.monotonic()
                for proxy in impaired_proxies:
                    break_connections(proxy)
                await asyncio.sleep(_NORMAL_S + _CONDITION_S)

        exchanges = await run_load(stage, load, change)
        history = await collect_history(stage, exchanges)
    figures: dict[str, Figure] = {
        f"longest_stall_{name.replace(' ', '_')}_s": _longest_stall_from(exchanges, at_s)
        for name, at_s in started_s.items()
    }
    stall = longest_stall(exchanges)
    bounds = (at_most("longest stall of a stream, s", stall.took_s if stall else 0.0, 3.5),)
    return outcome(history, bounds, figures)


def _proxies_of(stage: SimStage, *names: str) -> list[ChaosProxy]:
    links = [proxy for (_, name), proxy in stage.links.items() if name in names]
    return [*links, *(stage.side_channels[name] for name in names)]


def _longest_stall_from(exchanges: Sequence[Exchange], from_s: float) -> float:
    """The longest stall that began while a weather lasted, or just after."""
    to_s = from_s + _CONDITION_S + _NORMAL_S
    gaps = (
        b - a
        for exchange in exchanges
        for a, b in exchange.gaps()
        if from_s - 0.1 <= a < to_s - 0.1
    )
    return max(gaps, default=0.0)
