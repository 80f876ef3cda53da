from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from baton.domain.cache import CacheChangeKind, CacheTier, unpack_hashes
from baton.domain.events import (
    CacheChanged,
    LegFailed,
    LegsAborted,
    LinksReported,
    LoadReported,
    ReplicaDraining,
    ReplicaJoined,
    SideChannelChecked,
    StepCompleted,
)
from baton.domain.fleet import LossReason
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegKind, LegOutput
from baton.domain.value import evolve
from baton.engine.sim import SimSettings
from baton.simulator.fleet.engines import create_engine, link_settings
from baton.simulator.fleet.replica import FleetContext, ReportingOptions, Session, VirtualReplica
from baton.simulator.network.timeline import Timeline
from baton.simulator.network.transfers import Transfers
from tests.simulator.cores import local_leg

ENGINE = SimSettings(max_len_tokens=400, kv_blocks=32, max_batched_tokens=512, lease_s=1.0)
PROMPT = tuple(range(3, 163))
Kind = TypeVar("Kind")


class Ear:
    """A coordinator that only listens."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def on_replica_event(self, replica: VirtualReplica, event: object) -> None:
        self.heard.append(event)

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.heard if isinstance(event, kind)]

    def outputs(self, leg_id: str) -> list[LegOutput]:
        return [
            output
            for event in self.of(StepCompleted)
            for output in event.outputs
            if output.leg_id == leg_id
        ]

    def ticket(self, leg_id: str) -> KvHandle:
        ticket = self.outputs(leg_id)[-1].kv_handle
        assert ticket is not None
        return ticket


class Stage:
    """Two replicas that a coordinator talks to, without one."""

    def __init__(self, settings: SimSettings = ENGINE, other: SimSettings | None = None) -> None:
        self.line = Timeline()
        self.world = FleetContext(
            timeline=self.line,
            transfers=Transfers(self.line, share=True),
            reporting=ReportingOptions(),
            replace_replica=lambda _: None,
        )
        self.ear = Ear()
        self.source, self.own_source = self._replica("p", settings)
        self.target, self.own = self._replica("d", other or settings)

    def _replica(self, name: str, settings: SimSettings) -> tuple[VirtualReplica, Session]:
        engine = create_engine(settings, engine_id=name, model="sim", address=f"{name}:0")
        facts = engine.facts(replica_id=name, side_channel=f"{name}:0")
        replica = VirtualReplica(facts, engine, link_settings(settings), self.world)
        return replica, replica.open_session(self.ear, 0.001)

    def prefilled(self, leg_id: str = "p") -> KvHandle:
        self.source.submit(self.own_source, evolve(leg(leg_id), kind=LegKind.PREFILL))
        self.line.run(until_s=self.line.now_s + 0.1)
        return self.ear.ticket(leg_id)

    def let_pass(self, duration_s: float) -> None:
        self.line.run(until_s=self.line.now_s + duration_s)


def leg(leg_id: str, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 3) -> Leg:
    return local_leg(leg_id, prompt, max_tokens)


def handoff(ticket: KvHandle, leg_id: str = "d") -> Leg:
    return evolve(leg(leg_id), kind=LegKind.DECODE, kv_handle=ticket)


def test_a_session_begins_with_identity_cache_and_load() -> None:
    stage = Stage()
    stage.target.submit(stage.own, leg("a"))
    stage.let_pass(0.1)
    late = Ear()
    stage.target.open_session(late, 0.001)
    stage.let_pass(0.01)
    joined, cached, load = late.heard
    assert isinstance(joined, ReplicaJoined)
    assert isinstance(cached, CacheChanged)
    assert cached.update.is_snapshot
    assert len(cached.update.changes[0].packed_hashes) == 10 * 8
    assert isinstance(load, LoadReported)
    assert load.load.cache_sequence == cached.update.sequence == 1


def test_cache_changes_are_gathered_and_numbered() -> None:
    stage = Stage()
    for number in range(3):
        stage.target.submit(stage.own, leg(str(number), tuple(range(number, 160 + number))))
        stage.let_pass(0.1)
    updates = [e.update for e in stage.ear.of(CacheChanged) if not e.update.is_snapshot]
    assert [update.sequence for update in updates] == [1, 2, 3]
    kinds = {change.kind for change in updates[0].changes}
    assert kinds == {CacheChangeKind.STORED}


def test_a_requested_snapshot_comes_after_pending_updates() -> None:
    stage = Stage()
    stage.target.submit(stage.own, leg("a"))
    stage.line.run(until_s=0.012)  # computed, and not told yet
    stage.target.sync_cache(stage.own)
    stage.let_pass(0.1)
    updates = [event.update for event in stage.ear.of(CacheChanged)][-2:]
    assert [(update.is_snapshot, update.sequence) for update in updates] == [(False, 1), (True, 1)]


def test_an_abort_is_confirmed_and_frees_everything() -> None:
    stage = Stage()
    stage.target.submit(stage.own, leg("a", max_tokens=100))
    stage.let_pass(0.05)
    stage.target.abort(stage.own, ["a", "never was"])
    said = len(stage.ear.outputs("a"))
    stage.let_pass(0.1)
    assert stage.ear.heard.count(LegsAborted(replica_id="d", leg_ids=("a", "never was"))) == 1
    assert len(stage.ear.outputs("a")) <= said + 1  # one was on its way
    assert stage.target.load().kv_used_fraction == 0


def test_a_leg_that_the_engine_does_not_take_is_said_to_have_failed() -> None:
    stage = Stage()
    stage.target.submit(stage.own, leg("long", (5,) * 400))
    stage.let_pass(0.01)
    assert stage.ear.of(LegFailed) == [
        LegFailed(replica_id="d", leg_id="long", failure=LegFailure.INVALID)
    ]


def test_a_pull_frees_its_source_and_a_leg_that_waits_there_starts() -> None:
    stage = Stage(replace(ENGINE, kv_blocks=25, lease_s=1000.0))
    ticket = stage.prefilled()
    stage.source.submit(stage.own_source, leg("waits", tuple(range(10, 330))))
    stage.let_pass(0.1)
    assert stage.ear.outputs("waits") == []
    stage.target.submit(stage.own, handoff(ticket))
    stage.let_pass(0.2)
    assert len(stage.ear.outputs("d")) == 3
    assert len(stage.ear.outputs("waits")) == 3


def test_a_leg_that_waits_for_leased_blocks_starts_when_the_lease_ends() -> None:
    stage = Stage(replace(ENGINE, kv_blocks=25))
    stage.prefilled()
    stage.source.submit(stage.own_source, leg("waits", tuple(range(10, 330))))
    stage.let_pass(0.5)
    assert stage.ear.outputs("waits") == []
    stage.let_pass(0.8)
    assert len(stage.ear.outputs("waits")) == 3


def test_a_released_kv_handle_frees_the_source() -> None:
    stage = Stage()
    ticket = stage.prefilled()
    assert stage.source.load().kv_used_fraction > 0
    stage.target.release(ticket)
    assert stage.source.load().kv_used_fraction == 0


def test_a_lease_is_renewed_while_a_leg_waits_for_its_blocks() -> None:
    stage = Stage(replace(ENGINE, transfer_setup_s=2.0))
    assert ENGINE.lease_s < 2.0
    stage.target.submit(stage.own, handoff(stage.prefilled()))
    stage.let_pass(3.0)
    assert stage.ear.outputs("d")[0].cached_tokens
    assert stage.target.load().transfers.invalidated_pulls == 0


def test_blocks_that_are_read_after_their_lease_are_computed_again() -> None:
    stage = Stage()
    ticket = stage.prefilled()
    stage.let_pass(2 * ENGINE.lease_s)
    stage.target.submit(stage.own, handoff(ticket))
    stage.let_pass(1.0)
    assert stage.ear.outputs("d")[0].cached_tokens == 0
    totals = stage.target.load().transfers
    assert (totals.pulls, totals.invalidated_pulls, totals.failures) == (1, 1, 0)


def test_a_source_that_is_gone_fails_the_pull_at_once() -> None:
    stage = Stage()
    ticket = stage.prefilled()
    stage.source.die(LossReason.ENGINE_DEAD)
    stage.target.submit(stage.own, handoff(ticket))
    stage.let_pass(0.2)
    assert stage.ear.outputs("d")[0].cached_tokens == 0


def test_a_source_that_dies_during_the_pull_fails_it_at_once() -> None:
    stage = Stage(replace(ENGINE, transfer_setup_s=50.0, lease_s=100.0))
    stage.target.submit(stage.own, handoff(stage.prefilled()))
    stage.let_pass(0.1)
    stage.source.die(LossReason.ENGINE_DEAD)
    stage.let_pass(0.2)
    assert len(stage.ear.outputs("d")) == 3
    assert stage.target.load().transfers.failures == 1


def test_a_dead_replica_says_and_does_nothing_more() -> None:
    stage = Stage()
    stage.target.submit(stage.own, leg("a", max_tokens=100))
    stage.let_pass(0.05)
    stage.target.die(LossReason.ENGINE_DEAD)
    stage.let_pass(0.01)
    said = len(stage.ear.heard)
    stage.target.submit(stage.own, leg("b"))
    stage.target.abort(stage.own, ["a"])
    stage.target.sync_cache(stage.own)
    stage.target.check_side_channel(stage.own, "p", "p:0")
    stage.target.die(LossReason.ENGINE_DEAD)
    stage.let_pass(1.0)
    assert len(stage.ear.heard) == said


def test_links_are_reported_when_something_is_new() -> None:
    stage = Stage()
    stage.target.submit(stage.own, handoff(stage.prefilled()))
    stage.let_pass(0.1)
    for _ in range(2):
        stage.target.report_if_due()
        stage.let_pass(0.01)
    (report,) = stage.ear.of(LinksReported)
    (link,) = report.links
    assert (link.source_id, link.pulls) == ("p", 1)


def test_side_channels_are_checked_for_an_answer_and_for_the_layout() -> None:
    stage = Stage(other=replace(ENGINE, kv_dtype="fp8"))
    alike = Stage()
    for other, address in ((stage, "p:0"), (alike, "p:0"), (alike, "nobody:9")):
        other.target.check_side_channel(other.own, "p", address)
        other.let_pass(0.1)
    assert [event.is_reachable for event in stage.ear.of(SideChannelChecked)] == [False]
    assert [event.is_reachable for event in alike.ear.of(SideChannelChecked)] == [True, False]


def test_all_that_a_host_memory_larger_than_the_kv_cache_holds_is_told() -> None:
    stage = Stage(replace(ENGINE, kv_blocks=25, host_blocks=200))
    assert stage.target.facts.host_blocks == 200
    for number in range(10):
        prompt = tuple(range(300 * number, 300 * (number + 1)))
        stage.target.submit(stage.own, leg(str(number), prompt, max_tokens=1))
        stage.let_pass(0.2)
    late = Ear()
    stage.target.open_session(late, 0.001)
    stage.let_pass(0.1)
    held = {
        change.tier: len(unpack_hashes(change.packed_hashes))
        for change in late.of(CacheChanged)[0].update.changes
    }
    assert held[CacheTier.HOST] > 2 * 25


def test_blocks_come_back_from_the_hosts_memory() -> None:
    stage = Stage(replace(ENGINE, kv_blocks=25, host_blocks=50))
    for number, first in enumerate((3, 200, 3)):
        prompt = tuple(range(first, first + 300))
        stage.target.submit(stage.own, leg(str(number), prompt, max_tokens=1))
        stage.let_pass(0.2)
    assert stage.ear.outputs("2")[0].cached_tokens == 18 * 16


def test_a_draining_replica_says_so_and_takes_no_leg() -> None:
    stage = Stage()
    stage.target.drain()
    stage.target.submit(stage.own, leg("a"))
    stage.let_pass(0.01)
    assert stage.ear.of(ReplicaDraining) == [ReplicaDraining(replica_id="d")]
    assert [event.failure for event in stage.ear.of(LegFailed)] == [LegFailure.DRAINING]
