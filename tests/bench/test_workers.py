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
from baton.bench.load import Plan
from baton.bench.workers import ClientFailed, Errand, _allow_files, drive
from tests.bench.samples import plan
from tests.fakes.completion_server import Asked, CompletionServer, as_asked, token

MODEL = ServedModel(name="tiny", max_tokens=1000)


def errand(url: str, what: Plan, clients: int) -> Errand:
    options = ClientOptions(url=url, deadline_s=60)
    return Errand(client=options, model=MODEL, plan=what, clients=clients)


def test_one_process_sends_it_all() -> None:
    told: list[int] = []
    with CompletionServer().in_thread() as server:
        found = drive(errand(server.url, plan(*[0.0] * 5), 1), told.append)
    assert [one.number for one in found.samples] == [0, 1, 2, 3, 4]
    assert told == [1, 2, 3, 4, 5]
    assert 0 < found.busy < 10


def test_an_interrupt_ends_a_run_with_what_has_ended() -> None:
    async def first_only(asked: Asked) -> AsyncIterator[str]:
        if len(server.asked) > 1:
            yield token()
            os.kill(os.getpid(), signal.SIGINT)
            await stuck.wait()
        async for event in as_asked(asked):
            yield event

    stuck = asyncio.Event()
    server = CompletionServer(behaviour=first_only)
    with server.in_thread():
        found = drive(errand(server.url, plan(0.0, 0.2, 1e6), 1), lambda _: None)
    assert found.stopped
    assert [one.number for one in found.samples] == [0]
    assert found.abandoned == 2


def test_connections_that_a_process_may_not_have_are_refused_before_they_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {"now": (256, 4096)}

    def take(_: int, wanted: tuple[int, int]) -> None:
        limits["now"] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", take)
    _allow_files(200)
    assert limits["now"] == (256, 4096)
    _allow_files(1000)
    assert limits["now"] == (1000, 4096)
    with pytest.raises(ClientFailed, match="may have 4096 files open, wanted 5000"):
        _allow_files(5000)


def test_several_processes_send_one_load() -> None:
    with CompletionServer().in_thread() as server:
        what = plan(*(number / 50 for number in range(21)))
        found = drive(errand(server.url, what, 3), lambda _: None)
        asked = [tuple(one.body["prompt"]) for one in server.asked]
    assert [one.number for one in found.samples] == list(range(21))
    assert len(set(asked)) == 21
    assert [one.due_s for one in found.samples] == pytest.approx(what.starts_s)
    assert all(one.ok and one.late_s >= 0 for one in found.samples)


def test_a_process_that_dies_takes_the_run_with_it() -> None:
    def kill_one() -> None:
        begun.wait(60)
        child = multiprocessing.active_children()[0]
        child.kill()

    async def hold(_: Asked) -> AsyncIterator[str]:
        begun.set()
        yield token()
        await asyncio.Event().wait()

    begun = threading.Event()
    killer = threading.Thread(target=kill_one)
    killer.start()
    with (
        CompletionServer(behaviour=hold).in_thread() as server,
        pytest.raises(ClientFailed, match="ended before its load did"),
    ):
        drive(errand(server.url, plan(0.0, 0.0), 2), lambda _: None)
    killer.join(10)
