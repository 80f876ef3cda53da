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
from tests.chaos.load import HttpClient, Load, copy_requests, open_loop
from tests.chaos.local_ingress import Ingress
from tests.chaos.runs import outcome
from tests.chaos.stage import RayStage, ray_stage

_IDS = (300, 8000)
"""Of the tiny model's vocabulary: no special ones."""
_SETTLE_S = 60.0
_POLL_S = 0.05


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
    return _kill_case(folder, load, pool="decode", after_s=6.0)


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
    return _kill_case(folder, load, pool="prefill", after_s=4.0)


def _kill_case(folder: Path, load: Load, *, pool: str, after_s: float) -> Outcome:
    with ray_stage("quickstart.yaml", folder) as stage:
        stage.wait_links_ok(within_s=_SETTLE_S)
        resumed_before = stage.ingress()["ended"]["resumes"]
        (pid,) = stage.pids(pool).values()
        exchanges = asyncio.run(
            _send_with_fault(stage, load.plan_requests(), lambda: faults.kill(pid), after_s=after_s)
        )
        resumed = stage.ingress()["ended"]["resumes"] - resumed_before
        stage.wait_complete({"prefill": 1, "decode": 1}, within_s=120)
        stage.wait_links_ok(within_s=_SETTLE_S)
        # Afterwards: before, it would have filled the caches with these very prompts.
        undisturbed = asyncio.run(_send_with_fault(stage, copy_requests(exchanges, "again")))
        history = History(
            exchanges=exchanges,
            expected_tokens=_expected_from(undisturbed),
            counters=stage.wait_idle(),
        )
    stall, undisturbed_stall = longest_stall(exchanges), longest_stall(undisturbed)
    assert stall is not None
    assert undisturbed_stall is not None
    bounds = [at_least("requests that the kill set back", resumed, 1)]
    if pool == "decode":
        bounds.append(at_most("longest stall, s", stall.took_s, 3.0))
    return outcome(
        history, bounds, {"resumed": resumed, "stall_undisturbed_s": undisturbed_stall.took_s}
    )


async def _send_with_fault(
    stage: RayStage,
    planned: Sequence[Exchange],
    fault: Callable[[], None] | None = None,
    *,
    after_s: float = 0.0,
) -> list[Exchange]:
    """Requests at their times, and a fault after a while."""
    load = Load(rate_per_s=1, requests=0, deadline_s=120)
    async with HttpClient(stage.url) as client, asyncio.TaskGroup() as group:
        running = group.create_task(open_loop(load, client.send, planned=planned))
        if fault is not None:
            await asyncio.sleep(after_s)
            fault()
    return running.result()


def _expected_from(undisturbed: Sequence[Exchange]) -> Callable[[Exchange], Sequence[int]]:
    """What the same prompt was answered before."""
    answers = {other.prompt: other.tokens for other in undisturbed}
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
    async with _pair_of_engines(folder) as ingress:

        async def send() -> None:
            await asyncio.sleep(6.0)
            view = ingress.view("prefill-0")
            assert view is not None
            await asyncio.to_thread(send_garbage, view.facts.side_channel)
            sent_at_s.append(asyncio.get_running_loop().time())

        async with asyncio.TaskGroup() as group:
            running = group.create_task(open_loop(load, ingress.send))
            await send()
        exchanges = running.result()
        records = tuple(ingress.records)
        await _wait_link_state(ingress, LinkState.OK, within_s=_SETTLE_S)
        undisturbed = await open_loop(load, ingress.send, planned=copy_requests(exchanges, "again"))
        await _wait_idle(ingress)
        history = History(
            exchanges=exchanges,
            expected_tokens=_expected_from(undisturbed),
            records=records,
            counters=ingress.held_resources(),
        )
    later_records = [record for record in records if record.ended_at_s > sent_at_s[0]]
    handoffs = [later_record.routes[0].mode is HandoffMode.PULL for later_record in later_records]
    bounds = [
        at_least("requests handed off after it", handoffs.count(True), 30),
        at_most("requests that were not", handoffs.count(False), 0),
    ]
    return outcome(history, bounds)


@asynccontextmanager
async def _pair_of_engines(folder: Path) -> AsyncIterator[Ingress]:
    """A coordinator with a real prefill and a real decode engine, whose pair is known to work."""
    from tests.engine.vllm_engines import engine_settings, engine_with_peers, payload
    from tests.fakes.tiny_model import tiny_model

    link = LinkOptions(
        heartbeat_timeout_s=10.0
    )  # engines that start take the link's processor away
    # As in configs/quickstart.yaml: two busy cores can make a transfer wait for seconds.
    probing = ProbeOptions(deadline_s=10.0, first_transfer_s=30.0)
    limits = CoordinatorLimits(transfer_deadline_s=10.0, first_token_timeout_s=60.0)
    placer = PredictedPlacer(PredictedOptions(disaggregate=Disaggregate.ALWAYS))
    coordinator = Coordinator(limits=limits, placer=placer, probing=probing)
    model = await asyncio.to_thread(tiny_model, folder)
    async with AsyncExitStack() as stack:
        ingress = Ingress("ingress-0", coordinator, link=link, payload=payload())
        stack.push_async_callback(ingress.close)
        for role in (Role.PREFILL, Role.DECODE):
            name = f"{role}-0"
            engine = engine_with_peers(replace(engine_settings(model, role), replica_id=name))
            host = ReplicaHost(engine, bind="tcp://127.0.0.1:0", link=link)
            await host.start()
            stack.push_async_callback(host.close)
            ingress.link.connect(name, host.address)
        await _wait_link_state(ingress, LinkState.OK, within_s=_SETTLE_S)
        yield ingress


async def _wait_link_state(ingress: Ingress, state: LinkState, *, within_s: float) -> None:
    links = ingress.coordinator.fleet_model.links
    async with asyncio.timeout(within_s):
        while links.state("prefill-0", "decode-0") is not state:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(_POLL_S)


async def _wait_idle(ingress: Ingress, within_s: float = 10.0) -> None:
    """Wait until the ingress holds nothing, or until a timeout."""
    until_s = time.monotonic() + within_s
    while any(ingress.held_resources().values()) and time.monotonic() < until_s:  # noqa: ASYNC110 - polls too
        await asyncio.sleep(_POLL_S)
