"""Several processes send one load; what each saw comes together."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import AsyncIterator

import pytest

from baton.bench.client.client import ClientOptions, ServedModel
from baton.bench.load import LoadPlan
from baton.bench.workers import ClientProcessFailed, LoadJob, _raise_file_limit, run_load
from tests.bench.samples import plan
from tests.fakes.completion_server import (
    CompletionServer,
    ReceivedRequest,
    stream_all_tokens,
    token,
)

MODEL = ServedModel(name="tiny", max_tokens=1000)


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


def test_an_interrupt_ends_a_run_with_what_has_ended() -> None:
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
