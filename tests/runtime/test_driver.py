"""The driver: events in, commands carried out, deadlines kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.control.coordinator import Coordinator
from baton.control.probing.prober import ProbeOptions
from baton.control.state.limits import CoordinatorLimits
from baton.domain.cache import CacheUpdate
from baton.domain.commands import Delivery, RequestRecord
from baton.domain.errors import BatonError, LinkFailed, NoCapacity, QueueFull, RequestInvalid
from baton.domain.events import (
    CacheChanged,
    LoadReported,
    ReplicaJoined,
    ReplicaLost,
    StepCompleted,
)
from baton.domain.fleet import Load, LossReason, Role
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegOutput
from baton.domain.request import FinishReason, Phase, Request
from baton.policy.placement.port import Disaggregate
from baton.runtime.driver import Driver
from baton.runtime.process.clock import MonotonicClock
from tests.fakes.facts import replica_facts
from tests.fakes.placers import placer

SOON_S = 5.0


def request(request_id: str, max_tokens: int = 2) -> Request:
    return Request(
        request_id=request_id, prompt_token_ids=(5, 6), max_tokens=max_tokens, arrived_at_s=0.0
    )


class Outside:
    """The link, the frontend and the recorder of a driver under test, in one."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, Leg]] = []
        self.aborted: list[tuple[str, tuple[str, ...]]] = []
        self.released: list[tuple[str, KvHandle]] = []
        self.synced: list[str] = []
        self.checked: list[tuple[str, str, str]] = []
        self.reported: list[tuple[str, str]] = []
        self.checking = asyncio.Event()
        self.delivered: list[Delivery] = []
        self.failed: dict[str, BatonError] = {}
        self.records: list[RequestRecord] = []
        self.refuse_with: dict[str, LegFailure] = {}
        self.ended = asyncio.Event()

    def submit(self, replica_id: str, leg: Leg) -> LegFailure | None:
        if failure := self.refuse_with.get(replica_id):
            return failure
        self.submitted.append((replica_id, leg))
        return None

    def abort(self, replica_id: str, leg_ids: Sequence[str]) -> None:
        self.aborted.append((replica_id, tuple(leg_ids)))

    def release(self, replica_id: str, kv_handle: KvHandle) -> None:
        self.released.append((replica_id, kv_handle))

    def sync_cache(self, replica_id: str) -> None:
        self.synced.append(replica_id)

    def check_side_channel(self, replica_id: str, source_id: str, address: str) -> None:
        self.checked.append((replica_id, source_id, address))
        self.checking.set()

    def report_broken_agent(self, replica_id: str, reason: str) -> None:
        self.reported.append((replica_id, reason))

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        self.delivered.extend(deliveries)

    def fail(self, request_id: str, error: BatonError) -> None:
        self.failed[request_id] = error

    def record(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.ended.set()


def rig(
    limits: CoordinatorLimits | None = None, *, probing: ProbeOptions | None = None
) -> tuple[Driver, Outside]:
    outside = Outside()
    machine = Coordinator(
        limits=limits or CoordinatorLimits(), placer=placer(Disaggregate.ALWAYS), probing=probing
    )
    driver = Driver(
        machine, link=outside, frontend=outside, recorder=outside, clock=MonotonicClock()
    )
    return driver, outside


def machine_of(driver: Driver) -> Coordinator:
    return driver._coordinator


async def test_a_request_becomes_a_leg_and_its_tokens_reach_the_frontend() -> None:
    driver, outside = rig()
    driver.on_event(ReplicaJoined(facts=replica_facts("m0")))
    driver.on_request(request("r"))
    ((replica_id, leg),) = outside.submitted
    outputs = (LegOutput(leg.leg_id, (1, 2), FinishReason.LENGTH),)
    driver.on_event(StepCompleted(replica_id=replica_id, outputs=outputs))
    assert [d.token_ids for d in outside.delivered] == [(1, 2)]
    assert outside.records[0].outcome is Phase.FINISHED
    driver.close()


async def test_a_request_that_is_too_large_for_the_link_is_told_so_and_sent_nowhere_else() -> None:
    driver, outside = rig()
    for name in ("m0", "m1"):
        driver.on_event(ReplicaJoined(facts=replica_facts(name)))
        outside.refuse_with[name] = LegFailure.INVALID
    driver.on_request(request("r"))
    error = outside.failed["r"]
    assert isinstance(error, RequestInvalid)
    assert "too large for a message" in str(error)
    assert len(outside.records[0].legs) == 1
    driver.close()


async def test_an_error_of_one_command_is_raised_after_all_others_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, outside = rig()
    driver.on_event(ReplicaJoined(facts=replica_facts("m0")))
    for name in ("r", "s"):
        driver.on_request(request(name))
    (_, first), (_, second) = outside.submitted

    def deliver(_: Sequence[Delivery]) -> None:
        raise LinkFailed("frontend", "nobody reads it")

    monkeypatch.setattr(outside, "deliver", deliver)
    ends = [LegOutput(leg.leg_id, (1, 2), FinishReason.LENGTH) for leg in (first, second)]
    with pytest.raises(LinkFailed):
        driver.on_event(StepCompleted(replica_id="m0", outputs=tuple(ends)))
    assert [record.request_id for record in outside.records] == ["r", "s"]
    driver.close()


async def test_a_closed_driver_does_not_wake_up_for_any_event() -> None:
    driver, outside = rig(CoordinatorLimits(total_timeout_s=0.02))
    driver.on_event(ReplicaJoined(facts=replica_facts("m0")))
    driver.on_request(request("r"))
    driver.close()
    driver.on_event(ReplicaLost(replica_id="m0", reason=LossReason.LEFT))
    told = len(outside.submitted), dict(outside.failed)
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, passed.set)
    await passed.wait()
    assert (len(outside.submitted), outside.failed) == told


async def test_a_link_that_refuses_a_leg_sends_the_request_elsewhere() -> None:
    driver, outside = rig()
    for name in ("m0", "m1"):
        driver.on_event(ReplicaJoined(facts=replica_facts(name)))
    outside.refuse_with["m0"] = LegFailure.OVERLOADED
    driver.on_request(request("r"))
    assert [replica_id for replica_id, _ in outside.submitted] == ["m1"]
    driver.close()


async def test_a_leg_that_never_left_is_not_looked_for_in_reports() -> None:
    """A replica counts the legs that reach it; the next one must not stay unseen for this one."""
    driver, outside = rig()
    for name in ("m0", "m1"):
        driver.on_event(ReplicaJoined(facts=replica_facts(name)))
    outside.refuse_with["m0"] = LegFailure.OVERLOADED
    driver.on_request(request("refused"))
    outside.refuse_with.clear()
    driver.on_request(request("taken"))
    assert [replica_id for replica_id, _ in outside.submitted] == ["m1", "m0"]
    driver.on_event(LoadReported(replica_id="m0", load=Load(), received_legs=1))
    assert driver.fleet().replicas["m0"].unreported_legs == 0
    driver.close()


async def test_a_deadline_fires_without_any_other_event() -> None:
    driver, outside = rig(CoordinatorLimits(queue_timeout_s=0.01))
    driver.on_request(request("r"))
    await asyncio.wait_for(outside.ended.wait(), SOON_S)
    assert isinstance(outside.failed["r"], NoCapacity)
    driver.close()


async def test_an_earlier_deadline_overtakes_a_later_one() -> None:
    driver, outside = rig(CoordinatorLimits(first_token_timeout_s=600.0, queue_timeout_s=0.01))
    driver.on_event(ReplicaJoined(facts=replica_facts("m0")))
    driver.on_request(request("far"))
    outside.refuse_with["m0"] = LegFailure.OVERLOADED
    driver.on_request(request("near"))
    await asyncio.wait_for(outside.ended.wait(), SOON_S)
    assert outside.failed.keys() == {"near"}
    driver.close()


async def test_an_abort_frees_the_replica_and_tells_the_client_nothing() -> None:
    driver, outside = rig()
    driver.on_event(ReplicaJoined(facts=replica_facts("m0")))
    driver.on_request(request("r"))
    ((_, leg),) = outside.submitted
    driver.on_abort(("r",))
    assert outside.aborted == [("m0", (leg.leg_id,))]
    assert (outside.failed, outside.delivered) == ({}, [])
    driver.close()


async def test_a_request_rejected_before_it_is_read_is_counted_once_and_not_recorded() -> None:
    driver, outside = rig(CoordinatorLimits(max_requests=2))
    assert driver.check_admission(2, tenant="default") is None
    assert machine_of(driver).report("c", 0.0).tallies == ()
    driver.on_request(request("r"))
    assert driver.check_admission(1, tenant="default") is None
    error = driver.check_admission(2, tenant="default")
    assert isinstance(error, QueueFull)
    [row] = machine_of(driver).report("c", 0.0).tallies
    assert (row.evaluated, row.shed, row.good) == (2, 2, 0)
    assert (outside.records, outside.failed) == ([], {})
    driver.close()


async def test_a_replica_whose_cache_updates_went_missing_is_asked_for_all() -> None:
    driver, outside = rig()
    driver.on_event(ReplicaJoined(facts=replace(replica_facts("m0"), cache_events=True)))
    for update in (CacheUpdate(1, (), is_snapshot=True), CacheUpdate(2, ())):
        driver.on_event(CacheChanged(replica_id="m0", update=update))
    assert outside.synced == []
    driver.on_event(CacheChanged(replica_id="m0", update=CacheUpdate(4, ())))
    assert outside.synced == ["m0"]
    driver.close()


async def test_a_decode_replica_is_told_to_check_the_side_channel_of_a_prefill_replica() -> None:
    driver, outside = rig(probing=ProbeOptions())
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        facts = replace(replica_facts(name, role), side_channel=f"host-of-{name}:1")
        driver.on_event(ReplicaJoined(facts=facts))
    await asyncio.wait_for(outside.checking.wait(), SOON_S)
    assert outside.checked == [("d0", "p0", "host-of-p0:1")]
    driver.close()


async def test_a_closed_driver_leaves_no_timer_behind() -> None:
    driver, outside = rig(CoordinatorLimits(queue_timeout_s=0.01))
    driver.on_request(request("r"))
    driver.close()
    await asyncio.sleep(0.05)
    assert outside.records == []
