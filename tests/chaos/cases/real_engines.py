"""The same faults on real vLLM on the CPU, with real transfers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from baton.control.coordinator import Coordinator
from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.domain.fleet import Role
from baton.domain.handoff import HandoffMode
from baton.policy.links.estimates import LinkState
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.runtime.link.options import LinkOptions
from baton.runtime.replica_host import ReplicaHost
from tests.chaos import faults
from tests.chaos.case import Engines, Outcome, at_least, at_most, case
from tests.chaos.history import Exchange, History, longest_stall
from tests.chaos.load import HttpClient, Load, again, open_loop
from tests.chaos.local_ingress import Door
from tests.chaos.runs import outcome
from tests.chaos.stage import RayStage, ray_stage

_IDS = (300, 8000)
"""Of the tiny model's vocabulary: no special ones."""
_SETTLE_S = 60.0
_LOOK_S = 0.05


# -------------------------------------------------------------------- F1, F2: a whole deployment


@case(
    "F1-real",
    "SIGKILL the decode replica mid-stream: vLLM on the CPU, on Ray",
    engines=Engines.REAL,
    minutes=4,
)
def decode_killed(folder: Path) -> Outcome:
    """Streams go on at the other replica; no token is lost or comes twice."""
    load = Load(
        rate_per_s=2,
        requests=24,
        prompt_tokens=(64, 400),
        output_tokens=(150, 250),
        vocabulary=_IDS,
    )
    return _killed(folder, load, pool="decode", after_s=6.0)


@case(
    "F2-real",
    "SIGKILL the prefill replica while it computes and hands off: vLLM on the CPU, on Ray",
    engines=Engines.REAL,
    minutes=4,
)
def prefill_killed(folder: Path) -> Outcome:
    """Prompts are computed again elsewhere; the text is right."""
    load = Load(
        rate_per_s=3,
        requests=24,
        prompt_tokens=(1000, 1800),
        output_tokens=(20, 60),
        vocabulary=_IDS,
    )
    return _killed(folder, load, pool="prefill", after_s=4.0)


def _killed(folder: Path, load: Load, *, pool: str, after_s: float) -> Outcome:
    with ray_stage("quickstart.yaml", folder) as stage:
        stage.proven(within_s=_SETTLE_S)
        resumed_before = stage.ingress()["ended"]["resumes"]
        (pid,) = stage.pids(pool).values()
        exchanges = asyncio.run(
            _asked(stage, load.planned(), lambda: faults.kill(pid), after_s=after_s)
        )
        resumed = stage.ingress()["ended"]["resumes"] - resumed_before
        stage.whole({"prefill": 1, "decode": 1}, within_s=120)
        stage.proven(within_s=_SETTLE_S)
        # Afterwards: before, it would have filled the caches with these very prompts.
        undisturbed = asyncio.run(_asked(stage, again(exchanges, "again")))
        history = History(exchanges=exchanges, wanted=_same_as(undisturbed), counters=stage.quiet())
    stall, usual = longest_stall(exchanges), longest_stall(undisturbed)
    assert stall is not None
    assert usual is not None
    bounds = [at_least("requests that the kill set back", resumed, 1)]
    if pool == "decode":
        bounds.append(at_most("longest stall, s", stall.took_s, 3.0))
    return outcome(history, bounds, {"resumed": resumed, "stall_undisturbed_s": usual.took_s})


async def _asked(
    stage: RayStage,
    planned: Sequence[Exchange],
    fault: Callable[[], None] | None = None,
    *,
    after_s: float = 0.0,
) -> list[Exchange]:
    """Requests at their times, and a fault after a while."""
    load = Load(rate_per_s=1, requests=0, deadline_s=120)
    async with HttpClient(stage.url) as client, asyncio.TaskGroup() as group:
        running = group.create_task(open_loop(load, client.ask, planned=planned))
        if fault is not None:
            await asyncio.sleep(after_s)
            fault()
    return running.result()


def _same_as(undisturbed: Sequence[Exchange]) -> Callable[[Exchange], Sequence[int]]:
    """What the same prompt was answered before."""
    answers = {one.prompt: one.tokens for one in undisturbed}
    return lambda exchange: answers[exchange.prompt]


# -------------------------------------------------------------------- F4: garbage


@case(
    "F4",
    "garbage on a real engine's side channel under load: handoffs go on, no pair is quarantined",
    engines=Engines.REAL,
    minutes=3,
)
def garbage_sent(folder: Path) -> Outcome:
    """vLLM's own listener would end, and each new pair with it; none fails here."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    return asyncio.run(_garbage_sent(folder))


async def _garbage_sent(folder: Path) -> Outcome:
    from tests.engine.vllm_fleet import send_garbage

    load = Load(
        rate_per_s=3,
        requests=75,
        prompt_tokens=(100, 300),
        output_tokens=(16, 32),
        vocabulary=_IDS,
    )
    sent_at_s: list[float] = []
    async with _pair_of_engines(folder) as door:

        async def send() -> None:
            await asyncio.sleep(6.0)
            view = door.view("prefill-0")
            assert view is not None
            await asyncio.to_thread(send_garbage, view.facts.side_channel)
            sent_at_s.append(asyncio.get_running_loop().time())

        async with asyncio.TaskGroup() as group:
            running = group.create_task(open_loop(load, door.ask))
            await send()
        exchanges = running.result()
        records = tuple(door.records)
        await _until_state(door, LinkState.OK, within_s=_SETTLE_S)
        undisturbed = await open_loop(load, door.ask, planned=again(exchanges, "again"))
        await _quiet(door)
        history = History(
            exchanges=exchanges,
            wanted=_same_as(undisturbed),
            records=records,
            counters=door.held(),
        )
    later = [one for one in records if one.ended_at_s > sent_at_s[0]]
    handed = [one.routes[0].mode is HandoffMode.PULL for one in later]
    bounds = [
        at_least("requests handed off after it", handed.count(True), 30),
        at_most("requests that were not", handed.count(False), 0),
    ]
    return outcome(history, bounds)


@asynccontextmanager
async def _pair_of_engines(folder: Path) -> AsyncIterator[Door]:
    """A coordinator with a real prefill and a real decode engine, whose pair is known to work."""
    from tests.engine.vllm_engines import engine_settings, payload, peering_engine
    from tests.fakes.tiny_model import tiny_model

    link = LinkOptions(liveness_s=10.0)  # engines that start take the link's processor away
    # As in configs/quickstart.yaml: two busy cores can make a transfer wait for seconds.
    probing = ProbeOptions(deadline_s=10.0, first_transfer_s=30.0)
    limits = CoordinatorLimits(transfer_s=10.0, first_token_s=60.0)
    placer = PredictedPlacer(PredictedOptions(disaggregate=Disaggregate.ALWAYS))
    coordinator = Coordinator(limits=limits, placer=placer, probing=probing)
    model = await asyncio.to_thread(tiny_model, folder)
    async with AsyncExitStack() as stack:
        door = Door("door-0", coordinator, link=link, payload=payload())
        stack.push_async_callback(door.close)
        for role in (Role.PREFILL, Role.DECODE):
            name = f"{role}-0"
            engine = peering_engine(replace(engine_settings(model, role), replica_id=name))
            host = ReplicaHost(engine, bind="tcp://127.0.0.1:0", link=link)
            await host.start()
            stack.push_async_callback(host.close)
            door.link.connect(name, host.address)
        await _until_state(door, LinkState.OK, within_s=_SETTLE_S)
        yield door


async def _until_state(door: Door, state: LinkState, *, within_s: float) -> None:
    links = door.coordinator.knowledge.links
    async with asyncio.timeout(within_s):
        while links.state("prefill-0", "decode-0") is not state:  # noqa: ASYNC110 - told to nobody
            await asyncio.sleep(_LOOK_S)


async def _quiet(door: Door, within_s: float = 10.0) -> None:
    """Wait until the door holds nothing, or long enough."""
    until_s = time.monotonic() + within_s
    while any(door.held().values()) and time.monotonic() < until_s:  # noqa: ASYNC110 - polls too
        await asyncio.sleep(_LOOK_S)
