"""A fleet of real engines in one process: one prefills, two decode, and a coordinator decides.

All tests share it and run in the order they stand in: the last ones break the prefill engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from baton.control.coordinator import Coordinator
from baton.control.probing.notices import PairNotice, PairNoticeKind
from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.domain.commands import RequestRecord
from baton.domain.events import ReplicaLost
from baton.domain.fleet import LossReason, Role
from baton.domain.handoff import HandoffMode, Route, RouteReason
from baton.domain.request import Phase
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.policy.prefix_cache.index import IndexMode, IndexOptions
from tests.engine.vllm_fleet import DECODE_REPLICAS, STREAMS, RealFleet, send_garbage
from tests.fakes.tiny_model import tiny_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.thorough,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

QUARANTINE_S = 10.0
LONG_TOKENS = 1600
STREAM_TOKENS = 150
"""Of streams that are to end by themselves."""

LIMITS = CoordinatorLimits(
    transfer_deadline_s=20.0, stall_timeout_s=30.0, first_token_timeout_s=60.0
)
"""Nothing here is to go on for want of time: what is looked for must show by itself."""
PROBING = ProbeOptions(
    interval_s=1.0, deadline_s=10.0, first_transfer_s=30.0, transfer_every_s=3600.0
)
"""A pair whose first transfer went well is only asked from then on: probes move nothing more."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[RealFleet]:
    model = tiny_model(tmp_path_factory.mktemp("models"))
    coordinator = Coordinator(
        limits=LIMITS,
        placer=PredictedPlacer(PredictedOptions(disaggregate=Disaggregate.AUTO)),
        index=IndexOptions(mode=IndexMode.HYBRID),
        probing=PROBING,
    )
    real = RealFleet("first", {}, coordinator)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(real.start("p0", Role.PREFILL, model))
            for name in DECODE_REPLICAS:
                group.create_task(real.start(name, Role.DECODE, model))
        yield real
    finally:
        await real.fleet.close()


@pytest.fixture(autouse=True)
def _accounts(real: RealFleet) -> Iterator[None]:
    yield
    real.check_idle()


def route_of(record: RequestRecord) -> Route:
    """The only route of a request that was placed once and went well."""
    assert (record.outcome, record.resumes) == (Phase.FINISHED, 0), record.resume_reasons
    (route,) = record.routes
    return route


# ------------------------------------------------------------------ all is well
async def test_every_pair_is_proven_by_a_transfer_before_any_request(real: RealFleet) -> None:
    await real.wait_links_ok()
    assert real.pairs().keys() == {("p0", name) for name in DECODE_REPLICAS}
    for row in real.pairs().values():
        assert (row.pulls, row.failures, row.reason) == (1, 0, "")
        assert row.moved_bytes >= real.facts("p0").kv_block_bytes
    assert not real.records


async def test_a_second_turn_is_prefilled_where_its_prefix_is(real: RealFleet) -> None:
    first = real.prompt(330)
    answer, record = await real.run(first, max_tokens=40)
    home = route_of(record).decode_replica_id
    shared = first + answer
    # The last token was sampled, and never computed.
    blocks = (len(shared) - 1) // real.facts(home).block_size_tokens
    await real.wait_until(lambda: real.cached_blocks(home, shared) == blocks)

    before = real.computed_tokens(home)
    second = shared + real.prompt(25)
    _, record = await real.run(second, max_tokens=8)
    route = route_of(record)
    assert (route.mode, route.decode_replica_id) == (HandoffMode.LOCAL, home)
    cached = blocks * real.facts(home).block_size_tokens
    assert record.cached_tokens == cached
    assert real.computed_tokens(home) - before == len(second) - cached
    for state in real.index_states().values():
        assert state is not None
        assert (state.in_sync, state.is_stale, state.gaps) == (True, False, 0)
    assert real.coordinator.fleet_model.index.counters.contradictions == 0


# What is fastest is predicted from measured steps, which on a busy machine may say otherwise.
@pytest.mark.thorough
async def test_a_short_prompt_is_served_by_one_replica_and_moves_nothing(real: RealFleet) -> None:
    await real.wait_links_ok()
    before = real.links()
    tokens, record = await real.run(real.prompt(10), max_tokens=8)
    route = route_of(record)
    assert (route.mode, route.reason) == (HandoffMode.LOCAL, RouteReason.LOCAL_FASTER)
    assert len(tokens) == 8
    assert record.handed_off_blocks == 0
    assert real.links() == before


async def test_a_long_prompt_that_would_hold_up_streams_is_prefilled_elsewhere_and_pulled(
    real: RealFleet,
) -> None:
    await real.wait_links_ok()
    prompt = real.prompt(LONG_TOKENS)
    async with real.streams(max_tokens=1500):
        before = real.pairs()
        tokens, record = await real.run(prompt, max_tokens=16)
    route = route_of(record)
    assert (route.mode, route.prefill_replica_id) == (HandoffMode.PULL, "p0")
    assert route.reason is RouteReason.DISAGGREGATED
    chosen, *others = record.decisions[0].options
    assert any(
        other.interference_s > chosen.interference_s
        for other in others
        if other.mode is HandoffMode.LOCAL
    )
    pair = ("p0", route.decode_replica_id)
    await real.wait_until(lambda: real.pairs()[pair].pulls > before[pair].pulls)
    facts = real.facts(route.decode_replica_id)
    moved = real.pairs()[pair].moved_bytes - before[pair].moved_bytes
    assert moved == LONG_TOKENS // facts.block_size_tokens * facts.kv_block_bytes
    assert real.pairs()[pair].failures == 0
    assert [tokens] == await real.run_uncached(prompt, max_tokens=16)


async def test_replicas_change_roles_alive_and_serve_the_other_way_round(real: RealFleet) -> None:
    await real.wait_links_ok()
    processes = {name: engine.process_ids() for name, engine in real.engines.items()}
    prompt = real.prompt(LONG_TOKENS)
    async with real.streams(max_tokens=400):
        await flip(real, p0=Role.DECODE, d0=Role.PREFILL, d1=Role.PREFILL)
        async with unprobing_ingress(real) as other:
            tokens, record = await other.run(prompt, max_tokens=16)
        route = route_of(record)
        assert (route.mode, route.decode_replica_id) == (HandoffMode.PULL, "p0")
        assert route.prefill_replica_id in DECODE_REPLICAS
    await flip(real, p0=Role.PREFILL, d0=Role.DECODE, d1=Role.DECODE)
    assert {name: engine.process_ids() for name, engine in real.engines.items()} == processes
    assert [tokens] == await real.run_uncached(prompt, max_tokens=16)
    await real.wait_links_ok()


async def flip(real: RealFleet, **roles: Role) -> None:
    """Tell replicas what they are meant for, and wait until an ingress has heard of it."""
    for name, role in roles.items():
        assert real.fleet.hosts[name].set_role(role)
    await real.wait_until(
        lambda: all(real.facts(name).role is role for name, role in roles.items())
    )


# ------------------------------------------------------------------ all is not
async def test_malformed_packets_on_a_side_channel_cost_no_pair_and_no_handoff(
    real: RealFleet,
) -> None:
    await real.wait_links_ok()
    real.coordinator.pop_notices()
    await asyncio.to_thread(send_garbage, real.facts("p0").side_channel)
    before = real.links()
    tokens, record = await real.run(real.prompt(LONG_TOKENS), max_tokens=16)
    assert route_of(record).mode is HandoffMode.PULL
    assert len(tokens) == 16
    assert real.links() != before
    await real.wait_links_ok()
    assert not of_kind(real.coordinator.pop_notices(), PairNoticeKind.QUARANTINED)


async def test_killing_the_prefill_replica_under_load_fails_nothing(real: RealFleet) -> None:
    # Engines that have shaken hands can do without the listener, so an ingress that does not look
    # at it hands everything off.
    async with unprobing_ingress(real) as other:
        prompts = [other.prompt(LONG_TOKENS) for _ in range(4)]
        engine = real.engines["p0"]
        async with other.streams(max_tokens=STREAM_TOKENS) as streams:
            long = [other.send(prompt, max_tokens=60) for prompt in prompts]
            await other.wait_until(lambda: engine.load().queued_tokens > 0)
            assert not other.records
            for pid in engine.process_ids():
                os.kill(pid, signal.SIGKILL)
            records = await other.wait_ended(*streams, *long)
        assert {record.outcome for record in records} == {Phase.FINISHED}
        assert {record.routes[0].prefill_replica_id for record in records} == {"p0"}
        assert [len(other.tokens(stream)) for stream in streams] == [STREAM_TOKENS] * STREAMS
        assert any(record.resumes for record in records), "the kill has hit nobody"
        assert [other.tokens(name) for name in long] == await real.run_uncached(
            *prompts, max_tokens=60
        )
        for ingress in (real, other):
            await ingress.wait_until(
                lambda ingress_=ingress: lost(ingress_) == [("p0", LossReason.ENGINE_DEAD)]  # type: ignore[misc]
            )
            assert ingress.fleet.driver.fleet().replicas.keys() == set(DECODE_REPLICAS)


@asynccontextmanager
async def unprobing_ingress(real: RealFleet) -> AsyncIterator[RealFleet]:
    """Another ingress over the same replicas, that checks no pairs and always hands off."""
    placer = PredictedPlacer(PredictedOptions(disaggregate=Disaggregate.ALWAYS))
    other = RealFleet("other", real.engines, Coordinator(limits=LIMITS, placer=placer))
    try:
        for name, host in real.fleet.hosts.items():
            await other.fleet.join(name, host)
        yield other
        other.check_idle()
    finally:
        await other.fleet.close()


def lost(real: RealFleet) -> list[tuple[str, LossReason]]:
    events = real.fleet.events
    return [(event.replica_id, event.reason) for event in events if isinstance(event, ReplicaLost)]


def of_kind(said: tuple[PairNotice, ...], kind: PairNoticeKind) -> list[PairNotice]:
    return [notice for notice in said if notice.kind is kind]
