"""Pulls are put down to the replica they came from, or to none."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.fleet import LinkTotals, Role
from baton.domain.handoff import KvHandle, Leg, LegKind, LegOutput, LegTimes
from baton.domain.request import FinishReason
from baton.engine.vllm.core.settings import (
    NixlSettings,
    OnLoadFailure,
    VllmEngineSettings,
    engine_arguments,
)
from baton.runtime.known_adapters import KnownAdapters
from tests.fakes.scripted_engine import make_leg

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine import FinishReason as EngineFinishReason
    from vllm.v1.metrics.stats import SchedulerIterationDetails, SchedulerStats

    from baton.engine.vllm.core import legs
    from baton.engine.vllm.core.legs import LiveLegs, PullMeter
    from baton.engine.vllm.core.lora import EngineAdapters
    from baton.engine.vllm.patches.connector import (
        DeferredNotifyAgent,
        SourceTrackingStats,
        SourceTrackingWorker,
        prefix_tokens_to_fetch,
    )
    from baton.engine.vllm.patches.lease_checks import LeaseQueries
    from baton.engine.vllm.wire.codec import EngineCodec
    from tests.fakes.lease_source import LeaseSource, serve_leases


def decode_leg(leg_id: str, source_id: str | None, engine_id: str) -> Leg:
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": engine_id,
        "remote_request_id": "leg-0",
        "remote_host": "10.0.0.1",
        "remote_port": 20000,
        "remote_block_ids": [[1]],
        "tp_size": 1,
    }
    handle = KvHandle(tokens=3, blocks=1, params=msgspec.msgpack.encode(params))
    return make_leg(leg_id, LegKind.DECODE, max_tokens=4, kv_handle=handle, source_id=source_id)


def local_leg(leg_id: str, prompt_tokens: int) -> Leg:
    return make_leg(leg_id, prompt=range(prompt_tokens), max_tokens=9)


def moved(*transfers: tuple[str, int, float]) -> dict[str, object]:
    return {
        "bytes_transferred": [size for _, size, _ in transfers],
        "transfer_duration": [took_s for _, _, took_s in transfers],
        "baton_sources": [engine_id for engine_id, _, _ in transfers],
        "baton_failed_sources": [],
    }


# ------------------------------------------------------------------ with baton's connector
def test_each_transfer_counts_for_the_replica_whose_engine_it_came_from() -> None:
    meter = PullMeter()
    meter.on_leg_submitted(decode_leg("a", "p0", "engine-0"))
    meter.on_leg_submitted(decode_leg("b", "p1", "engine-1"))
    meter.on_step(moved(("engine-1", 100, 0.5), ("engine-0", 7, 0.1), ("engine-1", 50, 0.25)))
    assert set(meter.totals()) == {
        LinkTotals("p0", 1, 7, 0.1),
        LinkTotals("p1", 2, 150, 0.75),
    }


def test_failures_count_for_the_replica_that_was_to_be_pulled_from() -> None:
    meter = PullMeter()
    meter.on_leg_submitted(decode_leg("a", "p0", "engine-0"))
    meter.on_leg_submitted(decode_leg("b", "p1", "engine-1"))
    meter.on_step(
        moved() | {"num_failed_handshakes": [1], "baton_failed_sources": ["engine-1", "engine-1"]}
    )
    assert meter.totals() == (LinkTotals("p1", failures=2),)


def test_an_engine_that_no_leg_told_of_is_in_no_link() -> None:
    meter = PullMeter()
    meter.on_leg_submitted(decode_leg("a", None, "engine-0"))
    meter.on_leg_submitted(local_leg("b", 3))
    meter.on_step(moved(("engine-0", 100, 0.5), ("engine-9", 100, 0.5)))
    assert meter.totals() == ()


def test_a_transfer_that_ends_after_its_leg_still_counts() -> None:
    meter = PullMeter()
    meter.on_leg_submitted(decode_leg("a", "p0", "engine-0"))
    meter.on_fetch_ended("a")
    meter.on_step(moved(("engine-0", 100, 0.5)))
    assert meter.totals() == (LinkTotals("p0", 1, 100, 0.5),)


def test_the_transport_is_asked_for_when_it_is_told() -> None:
    transports = {"p0": ""}
    meter = PullMeter(transports.__getitem__)
    meter.on_leg_submitted(decode_leg("a", "p0", "engine-0"))
    meter.on_step(moved(("engine-0", 100, 0.5)))
    assert meter.totals()[0].transport == ""
    transports["p0"] = "tcp"
    assert meter.totals() == (LinkTotals("p0", 1, 100, 0.5, 0, "tcp"),)


def test_only_the_sources_last_pulled_from_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legs, "_MAX_SOURCES", 2)
    meter = PullMeter()
    for name in ("0", "1", "0", "2"):
        meter.on_leg_submitted(decode_leg(name, f"p{name}", f"engine-{name}"))
        meter.on_step(moved((f"engine-{name}", 1, 0.5)))
    assert {link.source_id: link.pulls for link in meter.totals()} == {"p0": 2, "p2": 1}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_links_add_up_to_the_moved_bytes(transfers: list[tuple[int, int, int]]) -> None:
    meter = PullMeter()
    for n in range(4):
        meter.on_leg_submitted(decode_leg(f"leg-{n}", f"p{n}", f"engine-{n}"))
    for n, size, took_s in transfers:
        meter.on_step(moved((f"engine-{n}", size, took_s)))
    totals = {link.source_id: link for link in meter.totals()}
    for n in range(4):
        mine = [(size, took_s) for source, size, took_s in transfers if source == n]
        link = totals.get(f"p{n}", LinkTotals(f"p{n}"))
        assert link[1:4] == (len(mine), sum(s for s, _ in mine), sum(t for _, t in mine))


# ------------------------------------------------------------------ with a stranger's connector
UNNAMED = {"bytes_transferred": [100], "transfer_duration": [0.5], "num_failed_transfers": [1]}


def test_without_names_all_counts_for_the_one_source_that_legs_wait_for() -> None:
    meter = PullMeter()
    meter.on_leg_submitted(decode_leg("a", "p0", "engine-0"))
    meter.on_leg_submitted(decode_leg("b", "p0", "engine-0"))
    meter.on_step(UNNAMED)
    assert meter.totals() == (LinkTotals("p0", 1, 100, 0.5, 1),)


def test_without_names_nothing_is_put_down_to_one_of_two_sources_or_to_none() -> None:
    meter = PullMeter()
    meter.on_step(UNNAMED)
    meter.on_leg_submitted(decode_leg("a", "p0", "engine-0"))
    meter.on_leg_submitted(decode_leg("b", "p1", "engine-1"))
    meter.on_step(UNNAMED)
    assert meter.totals() == ()
    meter.on_fetch_ended("b")
    meter.on_step(UNNAMED)
    assert meter.totals() == (LinkTotals("p0", 1, 100, 0.5, 1),)


def test_a_leg_of_unknown_source_is_one_source_more() -> None:
    meter = PullMeter()
    meter.on_leg_submitted(decode_leg("a", "p0", "engine-0"))
    meter.on_leg_submitted(decode_leg("b", None, "engine-1"))
    meter.on_step(UNNAMED)
    assert meter.totals() == ()


def test_names_that_do_not_match_the_transfers_are_not_trusted() -> None:
    meter = PullMeter()
    meter.on_leg_submitted(decode_leg("a", "p0", "engine-0"))
    meter.on_leg_submitted(decode_leg("b", "p1", "engine-1"))
    meter.on_fetch_ended("b")
    two = moved(("engine-1", 100, 0.5), ("engine-1", 50, 0.5))
    meter.on_step(two | {"baton_sources": ["engine-1"]})
    assert meter.totals() == (LinkTotals("p0", 2, 150, 1.0),)


# ------------------------------------------------------------------ the connector's own parts
def test_statistics_of_several_workers_become_one_with_their_names() -> None:
    first, second = SourceTrackingStats(), SourceTrackingStats()
    assert first.is_empty()
    second.data |= {"bytes_transferred": [5], "transfer_duration": [0.1], "baton_sources": ["e"]}
    second.data["baton_failed_sources"] = ["f"]
    assert not second.is_empty()
    taken = second.clone_and_reset()
    assert second.is_empty()
    found = first.aggregate(taken).to_dict()
    assert (found["baton_sources"], found["baton_failed_sources"]) == (["e"], ["f"])


def test_a_failure_alone_is_worth_a_report() -> None:
    stats = SourceTrackingStats()
    stats.data["baton_failed_sources"].append("e")
    assert not stats.is_empty()


class Agent:
    """A NIXL agent whose transfers are in the states they were given."""

    def __init__(self, states: dict[int, str]) -> None:
        self._states = states

    def check_xfer_state(self, handle: int) -> str:
        return self._states[handle]

    def get_xfer_telemetry(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(
            xferDuration=1e6, postDuration=0.0, totalBytes=100 * handle, descCount=1
        )

    def release_xfer_handle(self, handle: int) -> None:
        self._states.pop(handle)


@contextmanager
def reading(worker: SourceTrackingWorker) -> Iterator[LeaseSource]:
    """Have the worker read for requests a to d from a source with a side channel of its own."""
    with serve_leases() as source:
        host, _, port = source.address.removeprefix("tcp://").rpartition(":")
        worker._recving_metadata = {
            name: SimpleNamespace(
                remote=SimpleNamespace(
                    engine_id=f"engine-{name}", host=host, port=int(port), request_id=f"of-{name}"
                )
            )
            for name in "abcd"
        }
        worker._failed_remote_engines = set()
        worker._recv_failures = set()
        worker._log_failure = lambda **_context: None
        worker._lease_queries = LeaseQueries(deadline_s=30.0)
        try:
            yield source
        finally:
            worker._lease_queries.close()


def settle(
    worker: SourceTrackingWorker, transfers: dict[str, list[int]], *asked: str
) -> tuple[set[str], set[str]]:
    """Poll as vLLM does, until the sources of these requests have answered."""
    done, failed = worker._pop_done_transfers(transfers)
    polls = 0
    while set(asked) - done:
        assert (polls := polls + 1) < 10_000
        time.sleep(0.001)
        more = worker._pop_done_transfers(transfers)
        done |= more[0]
        failed |= more[1]
    return done, failed


def test_blocks_that_their_source_has_lost_fail_the_read_and_blame_no_link() -> None:
    worker = SourceTrackingWorker.__new__(SourceTrackingWorker)
    worker.xfer_stats = SourceTrackingStats()
    worker.nixl_wrapper = Agent({1: "DONE", 2: "DONE"})
    with reading(worker) as source:
        source.leases.add("of-a")
        transfers = {"a": [1], "b": [2]}
        done, failed = settle(worker, transfers, "a", "b")
    assert (done, failed, transfers) == ({"a", "b"}, {"b"}, {})
    data = worker.xfer_stats.data
    assert data["baton_void_sources"] == ["engine-b"]
    assert data["baton_failed_sources"] == []
    assert data["bytes_transferred"] == [100, 200]


def test_vllm_gets_a_read_only_when_its_source_has_answered() -> None:
    worker = SourceTrackingWorker.__new__(SourceTrackingWorker)
    worker.xfer_stats = SourceTrackingStats()
    worker.nixl_wrapper = Agent({1: "DONE"})
    with reading(worker) as source:
        worker._lease_queries = LeaseQueries(deadline_s=0.0)
        worker._recving_metadata["a"].remote.port = 1  # nobody listens there
        transfers: dict[str, list[int]] = {"a": [1]}
        assert worker._pop_done_transfers(transfers) in ((set(), set()), ({"a"}, {"a"}))
        assert settle(worker, transfers, *transfers)[1] <= {"a"}
        assert worker.xfer_stats.data["baton_void_sources"] == ["engine-a"]
        assert source.leases.are_kept(["of-a"]) == [False]


def test_a_read_that_failed_in_part_is_asked_nothing() -> None:
    worker = SourceTrackingWorker.__new__(SourceTrackingWorker)
    worker.xfer_stats = SourceTrackingStats()
    worker.nixl_wrapper = Agent({1: "DONE"})
    with reading(worker):
        worker._recv_failures = {"a"}
        assert worker._pop_done_transfers({"a": [1]}) == ({"a"}, set())


def test_a_read_says_nothing_to_its_source_and_anything_else_does() -> None:
    calls: list[tuple[object, ...]] = []

    def prepare(operation: str, *sides: object, notif_msg: bytes = b"") -> int:
        calls.append((operation, sides, notif_msg))
        return 7

    agent = DeferredNotifyAgent(SimpleNamespace(make_prepped_xfer=prepare, name="nixl"))
    assert agent.make_prepped_xfer("READ", "here", "there", notif_msg=b"leg:1") == 7
    agent.make_prepped_xfer("WRITE", "here", "there", notif_msg=b"leg:2")
    assert calls == [("READ", ("here", "there"), b""), ("WRITE", ("here", "there"), b"leg:2")]
    assert agent.deferred == [b"leg:1"]
    assert agent.name == "nixl"


def test_worker_counters_go_under_the_engine_they_came_from() -> None:
    worker = SourceTrackingWorker.__new__(SourceTrackingWorker)
    worker.xfer_stats = SourceTrackingStats()
    worker.nixl_wrapper = Agent({1: "DONE", 2: "PROC", 3: "DONE", 4: "ERR", 5: "DONE", 6: "DONE"})
    with reading(worker) as source:
        transfers = {"a": [1, 2], "b": [3, 5], "c": [4], "forgotten": [6]}
        source.leases.add("of-b")
        done, failed = settle(worker, transfers, "b")
        assert transfers == {"a": [2]}
        assert (done, failed) == ({"b", "c", "forgotten"}, {"c"})
    data = worker.xfer_stats.data
    assert data["bytes_transferred"] == [100, 300, 500, 600]
    assert data["baton_sources"] == ["engine-a", "engine-b", "engine-b", ""]
    assert data["baton_failed_sources"] == ["engine-c"]


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (None, None),
        ({}, None),
        ({"do_remote_prefill": True}, None),
        ({"do_remote_prefill": True, "remote_num_tokens": 64}, None),
        ({"do_remote_prefill": False, "baton_prefix_tokens": 64}, None),
        ({"do_remote_prefill": True, "baton_prefix_tokens": 64}, 64),
        ({"do_remote_prefill": True, "baton_prefix_tokens": 64, "remote_num_tokens": 63}, 63),
        ({"do_remote_prefill": True, "baton_prefix_tokens": 999}, 100),
    ],
)
def test_only_a_kv_handle_for_the_front_of_a_prompt_is_handled_apart(
    params: dict[str, object] | None, wanted: int | None
) -> None:
    assert prefix_tokens_to_fetch(params, 100) == wanted


# ------------------------------------------------------------------ legs
def an_output(leg_id: str, *, finish: bool = False) -> EngineCoreOutput:
    reason = EngineFinishReason.LENGTH if finish else None
    return EngineCoreOutput(leg_id, [7], finish_reason=reason)


def a_step(*outputs: EngineCoreOutput, **statistics: object) -> EngineCoreOutputs:
    details = SchedulerIterationDetails(
        iteration_index=0,
        num_ctx_requests=0,
        num_ctx_tokens=0,
        num_generation_requests=len(outputs),
        num_generation_tokens=len(outputs),
        elapsed_ms=10.0,
    )
    stats = SchedulerStats(iteration_details=details, **statistics)
    return EngineCoreOutputs(outputs=list(outputs), scheduler_stats=stats)


def live_legs() -> LiveLegs:
    return LiveLegs(EngineCodec(), lambda _source_id: "", EngineAdapters(KnownAdapters(), slots=1))


def test_a_worker_that_shuts_down_closes_its_lease_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []
    parent = SourceTrackingWorker.__mro__[1]
    monkeypatch.setattr(parent, "shutdown", lambda _worker: closed.append("vLLM's part"))
    monkeypatch.setattr(parent, "__del__", lambda _worker: None, raising=False)
    worker = object.__new__(SourceTrackingWorker)
    worker.shutdown()
    lease_queries = SimpleNamespace(close=lambda: closed.append("lease queries"))
    worker._lease_queries = cast("LeaseQueries", lease_queries)
    worker.shutdown()
    assert closed == ["vLLM's part", "lease queries", "vLLM's part"]


def test_context_is_what_each_running_leg_has_behind_it() -> None:
    legs = live_legs()
    legs.add(local_leg("a", 100))
    legs.add(local_leg("b", 10))
    legs.on_step(a_step(an_output("a")))  # ends a prefill
    assert legs.load().steps.context_tokens == 0
    legs.on_step(a_step(an_output("a"), an_output("b")))
    assert legs.load().steps.context_tokens == 101
    legs.on_step(a_step(an_output("a", finish=True), an_output("b"), an_output("unknown")))
    assert legs.load().steps.context_tokens == 101 + 102 + 11


def test_an_ended_leg_is_forgotten_and_an_unknown_one_is_not_reported() -> None:
    legs = live_legs()
    legs.add(local_leg("a", 3))
    (output,) = legs.on_step(a_step(an_output("a", finish=True), an_output("b")))
    assert (output.leg_id, output.finish) == ("a", FinishReason.LENGTH)
    assert "a" not in legs
    assert legs.load().queued_requests == 0
    assert legs.load().queued_tokens == 0


def test_a_leg_that_never_began_waits_for_nothing() -> None:
    legs = live_legs()
    legs.add(decode_leg("a", "p0", "engine-0"))
    legs.remove("a")
    legs.on_step(a_step(kv_connector_stats=UNNAMED))
    assert legs.links() == ()
    assert legs.load().queued_tokens == 0


def test_pulls_of_a_step_count_before_its_output() -> None:
    legs = live_legs()
    legs.add(decode_leg("a", "p0", "engine-0"))
    legs.on_step(a_step(an_output("a"), kv_connector_stats=UNNAMED))
    assert legs.links() == (LinkTotals("p0", 1, 100, 0.5, 1),)
    assert legs.load().transfers.pulls == 1


# -------------------------------------------------------------------- times of legs


pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.v1.engine import (
        EngineCoreEvent,
        EngineCoreEventType,
        EngineCoreOutput,
        EngineCoreOutputs,
    )
    from vllm.v1.engine import FinishReason as EngineFinishReason

    from baton.engine.vllm.core.legs import LiveLegs
    from baton.engine.vllm.core.lora import EngineAdapters
    from baton.engine.vllm.wire.codec import EngineCodec

QUEUED, SCHEDULED, PREEMPTED = EngineCoreEventType


def live_leg() -> LiveLegs:
    legs = LiveLegs(EngineCodec(), lambda _source_id: "", EngineAdapters(KnownAdapters(), slots=1))
    legs.add(make_leg("a", request_id="r", max_tokens=9))
    return legs


def step(
    legs: LiveLegs,
    at_s: float,
    *events: tuple[EngineCoreEventType, float],
    finish: EngineFinishReason | None = None,
) -> LegOutput:
    noted = [EngineCoreEvent(kind, timestamp) for kind, timestamp in events]
    output = EngineCoreOutput("a", [7], finish_reason=finish, events=noted or None)
    (told,) = legs.on_step(EngineCoreOutputs(outputs=[output], timestamp=at_s))
    return told


def test_a_leg_waits_until_it_is_scheduled_and_then_computes_until_its_first_output() -> None:
    legs = live_leg()
    first = step(legs, 12.0, (QUEUED, 10.0), (SCHEDULED, 11.5))
    assert first.times == LegTimes(1.5, 0.5)
    assert step(legs, 13.0).times is None
    assert step(legs, 14.0, finish=EngineFinishReason.LENGTH).times is None


def test_a_leg_that_was_put_back_before_its_first_output_was_scheduled_once() -> None:
    events = ((QUEUED, 10.0), (SCHEDULED, 11.0), (PREEMPTED, 11.5), (SCHEDULED, 13.0))
    assert step(live_leg(), 14.0, *events).times == LegTimes(1.0, 3.0, 1)


def test_a_leg_that_was_put_back_later_says_so_with_its_last_output() -> None:
    legs = live_leg()
    step(legs, 12.0, (QUEUED, 10.0), (SCHEDULED, 11.0))
    assert step(legs, 20.0, (PREEMPTED, 13.0), (SCHEDULED, 19.0)).times is None
    last = step(legs, 21.0, finish=EngineFinishReason.STOP)
    assert last.times == LegTimes(1.0, 1.0, 1)


def test_a_leg_that_ends_with_its_first_output_says_its_times_once() -> None:
    events = ((QUEUED, 10.0), (SCHEDULED, 11.0))
    only = step(live_leg(), 12.0, *events, finish=EngineFinishReason.LENGTH)
    assert only.times == LegTimes(1.0, 1.0)


def test_an_engine_that_notes_no_events_says_nothing() -> None:
    assert step(live_leg(), 12.0, finish=EngineFinishReason.LENGTH).times is None


def test_a_leg_that_fails_before_it_was_scheduled_says_nothing() -> None:
    assert step(live_leg(), 12.0, (QUEUED, 10.0), finish=EngineFinishReason.ERROR).times is None


# -------------------------------------------------------------------- blocks in host memory


SETTINGS = VllmEngineSettings(
    replica_id="r", pool="p", model_source="m", model_name="m", role=Role.DECODE
)
NIXL = NixlSettings(host="127.0.0.1", port=1, lease_s=7, on_load_failure=OnLoadFailure.FAIL)


def transfer(settings: VllmEngineSettings) -> dict[str, object]:
    told = engine_arguments(settings, None)["kv_transfer_config"]
    assert isinstance(told, dict)
    return told


def test_an_engine_with_both_is_told_of_both_and_pulls_before_it_loads() -> None:
    alone = transfer(replace(SETTINGS, nixl=NIXL))
    both = transfer(replace(SETTINGS, nixl=NIXL, host_memory_bytes=1 << 30))
    assert both["kv_connector"] == "MultiConnector"
    assert both["kv_role"] == alone["kv_role"] == "kv_consumer"
    assert both["kv_load_failure_policy"] == "fail"
    assert both["kv_connector_extra_config"] == {
        "connectors": [
            alone,
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": 1 << 30,
                    "self_describing_kv_events": True,
                },
            },
        ]
    }


def test_an_engine_that_hands_nothing_over_may_still_offload() -> None:
    assert transfer(replace(SETTINGS, host_memory_bytes=5))["kv_connector"] == "OffloadingConnector"


def test_vllm_reads_these_settings_as_they_are_meant() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    both = KVTransferConfig(**transfer(replace(SETTINGS, nixl=NIXL, host_memory_bytes=1 << 30)))
    assert KVConnectorFactory.get_connector_class(both) is MultiConnector
    children = both.kv_connector_extra_config["connectors"]
    configs = [KVTransferConfig(**child, engine_id=both.engine_id) for child in children]
    assert [KVConnectorFactory.get_connector_class(config).__name__ for config in configs] == [
        "NixlConnector",
        "OffloadingConnector",
    ]
