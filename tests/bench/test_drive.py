"""Loads against a real HTTP server: open loop, closed loop, conversations, stops."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from baton.bench.client.client import Api, ClientOptions, CompletionClient, ServedModel
from baton.bench.driver import LoadDriver, LoadResult, PlanShare, Timer
from baton.bench.load import LoadPlan, SyntheticRequests, TokenRange
from baton.bench.prompts.word_prompts import WordCosts
from baton.bench.workers import ClientProcessFailed, LoadJob, _raise_file_limit, run_load
from tests.bench.samples import plan, source
from tests.bench.test_client import said
from tests.fakes.completion_server import (
    SSE_DONE,
    CompletionServer,
    ReceivedRequest,
    events,
    stream_all_tokens,
    token,
)

MODEL = ServedModel(name="tiny", max_tokens=1000)


async def driven(
    server: CompletionServer,
    what: LoadPlan,
    *,
    stop: asyncio.Event | None = None,
    share: PlanShare | None = None,
    max_in_flight: int = 100,
) -> LoadResult:
    async with (
        server.running(),
        CompletionClient(ClientOptions(url=server.url, timeout_s=60)) as client,
    ):
        driver = LoadDriver(
            client, MODEL, what, share=share or PlanShare(), max_in_flight=max_in_flight
        )
        stop = stop or asyncio.Event()
        await driver.prepare(stop)
        return await driver.run(time.monotonic(), stop)


async def test_a_closed_loop_keeps_its_concurrency() -> None:
    under_way, most = 0, 0
    all_there = asyncio.Event()

    async def count(asked: ReceivedRequest) -> AsyncIterator[str]:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        if under_way == 3:
            all_there.set()
        await all_there.wait()
        async for event in stream_all_tokens(asked):
            yield event
        under_way -= 1

    found = await driven(
        CompletionServer(behaviour=count), plan(concurrency=3, max_conversations=12)
    )
    assert [sample.request_index for sample in found.samples] == list(range(12))
    assert most == 3
    assert all(sample.ok and sample.send_delay_s < 0.5 for sample in found.samples)


async def test_a_closed_loop_that_has_time_begins_nothing_after_it() -> None:
    found = await driven(CompletionServer(), plan(concurrency=2, stop_starting_s=0.1))
    assert found.samples
    assert all(sample.due_s <= 0.1 for sample in found.samples)
    assert not found.stopped


def talk(turns: int) -> LoadPlan:
    what = SyntheticRequests(prompt=TokenRange(5, 5), output=TokenRange(2, 2))
    chat = source(requests=what, api=Api.CHAT, word_costs=WordCosts())
    return plan(0.0, 0.0, turns=turns, think_s=0.01, source=chat)


async def test_a_conversation_continues_with_the_answer() -> None:
    server = CompletionServer(behaviour=events(said("yes"), said(" no", last=True), SSE_DONE))
    found = await driven(server, talk(3))
    assert [sample.request_index for sample in found.samples] == list(range(6))
    mine = [request for request in server.requests if request.headers["x-session-id"] == "0-1"]
    asked = sorted(mine, key=lambda request: len(request.body["messages"]))
    assert [len(request.body["messages"]) for request in asked] == [1, 3, 5]
    last = asked[-1].body["messages"]
    assert [item["role"] for item in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1]["content"] == last[3]["content"] == "yes no"
    assert last[:3] == asked[1].body["messages"]


async def test_a_turn_is_due_a_think_time_after_the_answer_to_the_one_before() -> None:
    found = await driven(
        CompletionServer(behaviour=events(said("a", last=True), SSE_DONE)), talk(2)
    )
    for first, second in ((0, 1), (2, 3)):
        gap_s = found.samples[second].due_s - found.samples[first].completed_s
        assert abs(gap_s - 0.01) < 1e-9
        assert found.samples[second].send_delay_s >= 0


async def test_a_turn_that_fails_ends_its_conversation() -> None:
    found = await driven(CompletionServer(behaviour=events("503 Busy", "{}")), talk(3))
    assert (len(found.samples), found.dropped_turns) == (2, 4)


async def test_shares_of_a_load_are_the_load() -> None:
    what = plan(*[0.0] * 11)
    whole = CompletionServer()
    await driven(whole, what)
    parts, together = CompletionServer(), LoadResult()
    for index in range(3):
        together.merge(await driven(parts, what, share=PlanShare(index, 3)))
    assert [sample.request_index for sample in together.samples] == list(range(11))

    def prompts(server: CompletionServer) -> list[list[int]]:
        return sorted(request.body["prompt"] for request in server.requests)

    assert prompts(parts) == prompts(whole)
    assert [PlanShare(index, 3).portion_of(11) for index in range(3)] == [4, 4, 3]


async def test_a_stop_in_closed_loop_leaves_out_what_is_under_way() -> None:
    stop = asyncio.Event()

    async def stuck(asked: ReceivedRequest) -> AsyncIterator[str]:
        if len(server.requests) > 4:
            yield token()
            stop.set()
            await asyncio.Event().wait()
        async for event in stream_all_tokens(asked):
            yield event

    server = CompletionServer(behaviour=stuck)
    found = await driven(server, plan(concurrency=1, max_conversations=100), stop=stop)
    assert (len(found.samples), found.unfinished, found.stopped) == (4, 1, True)


async def test_a_stop_before_anything_was_sent_leaves_all_out() -> None:
    stop = asyncio.Event()
    stop.set()
    found = await driven(CompletionServer(), plan(0.0, 0.0, 0.0), stop=stop)
    assert (found.samples, found.unfinished, found.stopped) == ([], 3, True)


async def test_the_clients_own_delay_is_seen() -> None:
    async def while_we_are_busy(asked: ReceivedRequest) -> AsyncIterator[str]:
        time.sleep(0.1)  # noqa: ASYNC251 - holds the event loop, which is the client's too
        async for event in stream_all_tokens(asked):
            yield event

    found = await driven(CompletionServer(behaviour=while_we_are_busy), plan(0.0, 0.05))
    assert max(found.loop_lags_s) > 0.05
    assert found.samples[1].send_delay_s > 0.02


async def test_an_alarm_never_rings_before_its_time_and_asks_no_timer_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which are late by half a millisecond and more."""
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_at", lambda *_, **__: pytest.fail("a timer of the loop"))
    alarm = Timer()
    for number in range(20):
        at_s = time.monotonic() + 0.0003 * number
        await alarm.sleep_until(at_s)
        assert time.monotonic() >= at_s
    alarm.close()


async def test_an_alarm_that_is_rung_does_not_wait() -> None:
    alarm = Timer()
    waiting = asyncio.ensure_future(alarm.sleep_until(time.monotonic() + 1000))
    await asyncio.sleep(0)
    alarm.wake()
    await asyncio.wait_for(waiting, 10)
    alarm.close()


async def test_an_alarm_works_without_a_timer_of_the_kernel() -> None:
    alarm = Timer()
    alarm.close()
    at_s = time.monotonic() + 0.002
    await alarm.sleep_until(at_s)
    assert time.monotonic() >= at_s


# ---------- several processes send one load; what each saw comes together


def errand(url: str, what: LoadPlan, clients: int) -> LoadJob:
    options = ClientOptions(url=url, timeout_s=60)
    return LoadJob(client_options=options, model=MODEL, plan=what, processes=clients)


def test_one_process_sends_it_all() -> None:
    told: list[int] = []
    with CompletionServer().in_thread() as server:
        found = run_load(errand(server.url, plan(*[0.0] * 5), 1), told.append)
    assert [sample.request_index for sample in found.samples] == [0, 1, 2, 3, 4]
    assert told == [1, 2, 3, 4, 5]
    assert 0 < found.busy_fraction < 10


def test_an_interrupt_ends_a_run_with_the_finished_requests() -> None:
    async def first_only(asked: ReceivedRequest) -> AsyncIterator[str]:
        if len(server.requests) > 1:
            yield token()
            os.kill(os.getpid(), signal.SIGINT)
            await stuck.wait()
        async for event in stream_all_tokens(asked):
            yield event

    stuck = asyncio.Event()
    server = CompletionServer(behaviour=first_only)
    with server.in_thread():
        found = run_load(errand(server.url, plan(0.0, 0.2, 1e6), 1), lambda _: None)
    assert found.stopped
    assert [sample.request_index for sample in found.samples] == [0]
    assert found.unfinished == 2


def test_connections_that_a_process_may_not_have_are_refused_before_they_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {"now": (256, 4096)}

    def take(_: int, wanted: tuple[int, int]) -> None:
        limits["now"] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", take)
    _raise_file_limit(200)
    assert limits["now"] == (256, 4096)
    _raise_file_limit(1000)
    assert limits["now"] == (1000, 4096)
    with pytest.raises(ClientProcessFailed, match="may have 4096 files open, expected 5000"):
        _raise_file_limit(5000)


def test_several_processes_send_one_load() -> None:
    with CompletionServer().in_thread() as server:
        what = plan(*(number / 50 for number in range(21)))
        found = run_load(errand(server.url, what, 3), lambda _: None)
        asked = [tuple(request.body["prompt"]) for request in server.requests]
    assert [sample.request_index for sample in found.samples] == list(range(21))
    assert len(set(asked)) == 21
    assert [sample.due_s for sample in found.samples] == pytest.approx(what.starts_s)
    assert all(sample.ok and sample.send_delay_s >= 0 for sample in found.samples)


def test_a_process_that_dies_takes_the_run_with_it() -> None:
    def kill_one() -> None:
        begun.wait(60)
        child = multiprocessing.active_children()[0]
        child.kill()

    async def hold(_: ReceivedRequest) -> AsyncIterator[str]:
        begun.set()
        yield token()
        await asyncio.Event().wait()

    begun = threading.Event()
    killer = threading.Thread(target=kill_one)
    killer.start()
    with (
        CompletionServer(behaviour=hold).in_thread() as server,
        pytest.raises(ClientProcessFailed, match="ended before its load did"),
    ):
        run_load(errand(server.url, plan(0.0, 0.0), 2), lambda _: None)
    killer.join(10)


def test_a_server_closes_what_it_accepts_while_it_ends() -> None:
    with ExitStack() as clients:
        with CompletionServer().in_thread() as server:
            address = "127.0.0.1", int(server.url.rpartition(":")[2])
            for _ in range(4):
                clients.enter_context(socket.create_connection(address))
        gc.collect()  # of a connection that is left open, a warning
