"""Where nothing is under way and nothing new, either end of a link says so less often."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.domain.events import LoadReported, ReplicaLost
from baton.domain.fleet import Load, LossReason
from baton.policy.prefix_cache.index import IndexOptions
from baton.policy.resilience.liveness import IDLE_GRACE_S, STALE_AFTER_S
from baton.runtime.link import codec, frames
from baton.runtime.link.client import LinkClient
from baton.runtime.link.liveness import HeartbeatMonitor
from baton.runtime.link.options import LinkOptions
from baton.runtime.replica_host import ReplicaHost
from tests.fakes.link_rig import (
    EventLog,
    RawPeer,
    accept_session,
    joined_client,
    raw_coordinator,
    raw_replica,
    running_client,
    running_host,
)
from tests.fakes.scripted_engine import ScriptedEngine, make_leg
from tests.repo.project import ROOT

BY_HAND = LinkOptions(heartbeat_interval_s=100.0, heartbeat_timeout_s=1000.0)
"""No beat is due while a test lasts but those that it asks for."""
ROUNDS = 4


def take_turns(of: LinkClient | ReplicaHost, turns: int) -> None:
    """Do so many times what either end does once in a beat."""
    for _ in range(turns):
        if isinstance(of, LinkClient):
            of._timer.cancel()
            of._tick()
        else:
            server = of._server
            assert server is not None
            assert server._timer is not None
            server._timer.cancel()
            server._tick()


# ---------------------------------------------------------------------- the coordinator's end


@asynccontextmanager
async def before_a_raw_replica() -> AsyncIterator[tuple[RawPeer, bytes, LinkClient, EventLog]]:
    with raw_replica() as (peer, address):
        async with running_client(link=BY_HAND) as (client, log):
            client.connect("r1", address)
            identity = await accept_session(peer, await peer.receive())
            await log.wait_joined()
            take_turns(client, 1)  # after its hello it has no need to beat
            yield peer, identity, client, log


async def told(peer: RawPeer, until: type[frames.FromCoordinator]) -> list[frames.FromCoordinator]:
    """All that a coordinator says up to the first frame of a kind."""
    got: list[frames.FromCoordinator] = []
    while not got or not isinstance(got[-1], until):
        got.append(codec.decode_from_coordinator((await peer.receive())[1:]))
    return got


async def test_a_coordinator_sends_fewer_heartbeats_to_an_idle_replica() -> None:
    async with before_a_raw_replica() as (peer, identity, client, log):
        await peer.send(
            identity, *codec.encode(frames.ReplicaBeat(Load(), draining=False, received_legs=0))
        )
        await log.wait(LoadReported)
        take_turns(client, ROUNDS * BY_HAND.idle_beat_divisor)
        client.submit("r1", make_leg("a"))
        beats = len(await told(peer, frames.Submit)) - 1
        assert beats == ROUNDS


async def test_a_coordinator_sends_all_heartbeats_to_a_busy_replica() -> None:
    async with before_a_raw_replica() as (peer, identity, client, log):
        take_turns(client, ROUNDS)  # nothing was heard of its load yet
        client.submit("r1", make_leg("a"))
        assert len(await told(peer, frames.Submit)) == ROUNDS + 1
        await peer.send(
            identity, *codec.encode(frames.ReplicaBeat(Load(), draining=False, received_legs=0))
        )
        await log.wait(LoadReported)
        client.submit("r1", make_leg("b"))  # which the beat knew nothing of
        take_turns(client, ROUNDS + 1)  # what was just said is as good as a beat
        client.abort("r1", ["a"])
        assert len(await told(peer, frames.Abort)) == 1 + ROUNDS + 1
        beat = frames.ReplicaBeat(Load(running_requests=1), draining=False, received_legs=2)
        await peer.send(identity, *codec.encode(beat))
        await log.wait(LoadReported, 2)
        take_turns(client, ROUNDS + 1)
        client.abort("r1", ["b"])
        assert len(await told(peer, frames.Abort)) == ROUNDS + 1


# ---------------------------------------------------------------------- the replica's end


async def reports(peer: RawPeer, host: ReplicaHost) -> list[frames.ReplicaBeat]:
    """All beats that a replica has sent, up to the one that it sends at once when it drains."""
    host.drain()
    beats: list[frames.ReplicaBeat] = []
    while not beats or not beats[-1].draining:
        frame = await peer.next_frame()
        if isinstance(frame, frames.ReplicaBeat):
            beats.append(frame)
    return beats[1:-1]  # the first one comes with the welcome


async def test_a_replica_repeats_less_often_what_a_coordinator_knows() -> None:
    async with running_host(link=BY_HAND) as (host, _):
        with raw_coordinator(host.address) as peer:
            await peer.open_session()
            take_turns(host, ROUNDS * BY_HAND.idle_beat_divisor)
            assert len(await reports(peer, host)) == ROUNDS


async def test_a_replica_sends_all_heartbeats_to_a_waiting_coordinator() -> None:
    async with running_host(link=BY_HAND) as (host, engine):
        with raw_coordinator(host.address) as peer:
            await peer.open_session()
            await peer.send(*codec.encode(frames.Submit(make_leg("a"))))
            await engine.watch.wait_until(lambda: "a" in engine.running)
            take_turns(host, ROUNDS)
            assert len(await reports(peer, host)) == ROUNDS


async def test_news_are_sent_with_the_next_heartbeat() -> None:
    engine = ScriptedEngine()
    async with (
        running_host(engine, link=BY_HAND) as (host, _),
        joined_client(host, link=BY_HAND) as (_, log),
    ):
        for used in (0.3, 0.4, 0.4, 0.0):
            engine.current_load = Load(kv_used_fraction=used)
            take_turns(host, 1)
        host.drain()
        await log.wait(LoadReported, 5)
        said = [event.load.kv_used_fraction for event in log.of_type(LoadReported)]
        assert said == [0.0, 0.3, 0.4, 0.0, 0.0]


async def test_a_replica_that_works_for_another_coordinator_beats_as_ever() -> None:
    engine = ScriptedEngine()
    async with running_host(engine, link=BY_HAND) as (host, _):
        engine.current_load = Load(running_requests=1)
        with raw_coordinator(host.address) as peer:
            await peer.open_session()
            take_turns(host, ROUNDS)
            assert len(await reports(peer, host)) == ROUNDS


def test_coordinators_expect_no_more_of_an_idle_replica_than_is_documented() -> None:
    options = LinkOptions()
    assert (
        options.idle_beat_divisor * options.heartbeat_interval_s
        <= options.heartbeat_interval_s + IDLE_GRACE_S
    )


def test_a_report_is_stale_when_the_link_of_an_idle_replica_has_ended_and_not_before() -> None:
    options = LinkOptions()
    assert options.idle_extra_s + options.heartbeat_timeout_s == STALE_AFTER_S
    assert options.idle_extra_s == IDLE_GRACE_S
    assert IndexOptions().stale_after_s == STALE_AFTER_S
    idle_interval_s = options.idle_beat_divisor * options.heartbeat_interval_s
    assert idle_interval_s < STALE_AFTER_S
    page = (ROOT / "docs" / "operations" / "routing.md").read_text()
    assert f"| index `stale` | no confirmation for {STALE_AFTER_S:g} s" in page
    page = (ROOT / "docs" / "operations" / "failures.md").read_text()
    assert f"idle replicas every {idle_interval_s:g} s" in page


def test_an_idle_replica_sends_a_heartbeat_in_two_timeouts() -> None:
    assert LinkOptions().idle_beat_divisor == 16
    assert LinkOptions(heartbeat_interval_s=0.5, heartbeat_timeout_s=2.0).idle_beat_divisor == 8
    assert LinkOptions(heartbeat_interval_s=1.0, heartbeat_timeout_s=1.5).idle_beat_divisor == 3
    assert LinkOptions(heartbeat_interval_s=1.0, heartbeat_timeout_s=1.5).idle_extra_s == 2.0


async def test_an_idle_replica_has_a_longer_timeout_until_it_has_work() -> None:
    async with before_a_raw_replica() as (peer, identity, client, log):
        beat = frames.ReplicaBeat(Load(), draining=False, received_legs=0)
        await peer.send(identity, *codec.encode(beat))
        await log.wait(LoadReported)
        now_s, connection = asyncio.get_running_loop().time(), client._connections["r1"]
        connection.tick(
            now_s + BY_HAND.heartbeat_timeout_s + BY_HAND.idle_extra_s - 1, stalled=False
        )
        assert not log.of_type(ReplicaLost)
        client.submit("r1", make_leg("a"))
        connection.tick(now_s + BY_HAND.heartbeat_timeout_s + 1, stalled=False)
        assert [lost.reason for lost in log.of_type(ReplicaLost)] == [LossReason.UNRESPONSIVE]


@pytest.mark.parametrize(("requests", "rests"), [(0, True), (1, False)])
async def test_a_replica_bears_with_a_coordinator_for_as_long_as_that_bears_with_it(
    requests: int, *, rests: bool
) -> None:
    engine = ScriptedEngine()
    engine.current_load = Load(running_requests=requests)
    async with running_host(engine, link=BY_HAND) as (host, _), joined_client(host, link=BY_HAND):
        assert host._server is not None
        (session,) = host._server._sessions.values()
        late_s = asyncio.get_running_loop().time() + BY_HAND.heartbeat_timeout_s + 1
        assert session.heartbeat_monitor.expired(late_s, stalled=False) is not rests


# ---------- when a peer that says nothing is given up
LIVENESS_S = 2.0
BEAT_S = 0.25
REST_S = 1.75


def given_up_after_s(stall_s: float) -> float:
    """How long a dead peer lives on where each look is late by as much."""
    silence, now_s = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S), 0.0
    while True:
        now_s += BEAT_S + stall_s
        if silence.expired(now_s, stalled=stall_s > 0):
            return now_s


def test_an_unresponsive_peer_expires_after_its_timeout() -> None:
    assert LIVENESS_S < given_up_after_s(0.0) <= LIVENESS_S + BEAT_S


def test_a_peer_with_heartbeats_does_not_expire() -> None:
    silence = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S)
    for look in range(100):
        silence.beat(look * 1.9)
        assert not silence.expired((look + 1) * 1.9, stalled=False)


@pytest.mark.parametrize("stall_s", [0.3, 0.5, 1.0])
def test_a_dead_peer_is_given_up_where_every_look_is_late_too(stall_s: float) -> None:
    assert LIVENESS_S < given_up_after_s(stall_s) <= 1.5 * LIVENESS_S + BEAT_S + stall_s


def test_a_process_that_did_not_run_gives_its_peers_a_grace_period() -> None:
    silence = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S)
    assert not silence.expired(60.0, stalled=True)
    assert not silence.expired(60.9, stalled=False)
    silence.beat(60.95)
    assert not silence.expired(120.0, stalled=True), "anew, since it was heard"
    assert silence.expired(121.1, stalled=False)


def test_an_idle_peer_has_a_longer_timeout() -> None:
    silence = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S)
    silence.set_idle()
    assert not silence.expired(LIVENESS_S + REST_S, stalled=False)
    assert silence.expired(LIVENESS_S + REST_S + 0.1, stalled=False)


def test_another_word_does_not_end_a_rest_but_work_does() -> None:
    silence = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S)
    silence.set_idle()
    silence.beat(1.0)
    assert not silence.expired(1.0 + LIVENESS_S + REST_S, stalled=False)
    silence.set_busy(2.0)
    silence.set_busy(3.0)  # more work is no word of its
    assert not silence.expired(2.0 + LIVENESS_S, stalled=False)
    assert silence.expired(2.1 + LIVENESS_S, stalled=False)


def test_idle_time_counts_as_no_missed_heartbeat() -> None:
    silence = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S)
    silence.set_idle()
    silence.set_busy(3.5)  # half of its liveness is left
    assert not silence.expired(REST_S + LIVENESS_S, stalled=False)
    assert silence.expired(REST_S + LIVENESS_S + 0.1, stalled=False)


def test_an_idle_peer_gets_its_grace_period_too() -> None:
    silence = HeartbeatMonitor(LIVENESS_S, 0.0, idle_extra_s=REST_S)
    silence.set_idle()
    assert not silence.expired(60.0, stalled=True)
    assert not silence.expired(60.9, stalled=True)
    assert silence.expired(61.1, stalled=True), "once in a silence"


# --------------------------------------------------------------------------- turns of connections
LINK_TURNS_BEAT_S = 1.0


@dataclass
class ByHand:
    """A loop whose clock is moved by hand, and that runs what is due when it is told to."""

    now_s: float = 100.0
    due_at_s: float = 0.0
    due: Callable[[], None] = field(default=lambda: None)

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, what: Callable[[], None]) -> asyncio.Handle:
        self.due_at_s, self.due = at_s, what
        return asyncio.Handle(what, (), asyncio.get_running_loop())

    def run(self, *, late_s: float = 0.0) -> None:
        self.now_s = self.due_at_s + late_s
        self.due()


@dataclass
class PollRecorder:
    """A connection that keeps when it had its turn, and whether it was excused."""

    replica_id: str
    turns: list[tuple[float, bool]] = field(default_factory=list)

    def tick(self, now_s: float, *, stalled: bool) -> None:
        self.turns.append((now_s, stalled))


@dataclass
class Fleet:
    """A client with connections that are not there."""

    loop: ByHand
    seen: list[PollRecorder]

    def excuses(self) -> Counter[int]:
        return Counter(sum(stalled for _, stalled in listener.turns) for listener in self.seen)


@pytest.fixture
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    client = LinkClient(
        "c", lambda _event: None, options=LinkOptions(heartbeat_interval_s=LINK_TURNS_BEAT_S)
    )
    client._timer.cancel()
    loop, replicas = ByHand(), [PollRecorder(f"r{number}") for number in range(request.param)]
    whole: Any = client
    real, whole._loop = client._loop, loop
    whole._connections = {replica.replica_id: replica for replica in replicas}
    whole._tick_due_at_s = loop.now_s
    client._tick()
    yield Fleet(loop, replicas)
    whole._loop, whole._connections = real, {}
    await client.close()


@pytest.mark.parametrize("fleet", [1, 32, 33, 100, 1000], indirect=True)
async def test_each_has_one_turn_in_a_beat_and_few_at_a_time(fleet: Fleet) -> None:
    while fleet.loop.due_at_s < 105.0 - 1e-6:
        fleet.loop.run()
    at_once = Counter(at_s for listener in fleet.seen for at_s, _ in listener.turns)
    assert max(at_once.values()) <= 32
    for listener in fleet.seen:
        times = [at_s for at_s, _ in listener.turns]
        assert len(times) == 5
        assert all(b - a == pytest.approx(LINK_TURNS_BEAT_S) for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("fleet", [1, 33, 1000], indirect=True)
async def test_after_a_stall_of_this_process_each_is_excused_for_one_turn(fleet: Fleet) -> None:
    for _ in range(40):
        fleet.loop.run()
    assert fleet.excuses() == {0: len(fleet.seen)}
    fleet.loop.run(late_s=1.5 * LINK_TURNS_BEAT_S)
    for _ in range(100):
        fleet.loop.run()
    assert fleet.excuses() == {1: len(fleet.seen)}


@pytest.mark.parametrize("fleet", [1000], indirect=True)
async def test_a_loop_with_long_turns_beats_as_often(fleet: Fleet) -> None:
    # A round has 32 parts; here each begins two and a half parts late.
    while fleet.loop.due_at_s < 105.0:
        fleet.loop.run(late_s=2.5 * LINK_TURNS_BEAT_S / 32)
    assert {len(listener.turns) for listener in fleet.seen} <= {4, 5, 6}
    assert fleet.excuses() == {0: len(fleet.seen)}
