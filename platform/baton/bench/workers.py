"""Sends a load from one process, or from several where one core is not enough.

Theory of operation: each process builds its own share of the plan from the plan itself, says that
it is ready, is told when the run begins (the monotonic clock is the same in all processes of a
machine), and hands its samples back at the end. A SIGINT stops each; what has ended until then is
kept. A process that dies takes the run with it.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TypeVar

from baton.bench.client.client import ClientOptions, CompletionClient, ServedModel
from baton.bench.driver import Driven, Driver, Share
from baton.bench.load import Plan
from baton.domain.errors import OperatorError

T = TypeVar("T")

_READY_WITHIN_S = 120.0
"""For processes to start and to make their questions."""
_SOON_S = 0.2
"""From when all are ready until the run begins."""
_TOLD_EVERY_S = 0.5
_OTHER_FILES = 128
"""That a process has open beside its connections."""
_SLACK_S = 30.0
"""For what a run needs beside its load and the deadline of its last answer."""


class ClientFailed(OperatorError):
    """A process that sends a part of the load has ended, or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """All that it takes to send a plan."""

    client: ClientOptions
    model: ServedModel
    plan: Plan
    max_in_flight: int = 1024
    clients: int = 1


def run_async(what: Coroutine[None, None, T]) -> T:
    """Run it in an event loop: uvloop's where that is installed, which costs less per read."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(what)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(what)


def drive(errand: Errand, on_progress: Callable[[int], None]) -> Driven:
    """Send a plan and return what came of it; Ctrl-C ends it early, with what has ended.

    Raises:
        ClientFailed: one of several processes has died or does not answer.
    """
    if errand.clients == 1:
        return run_async(_drive(errand, Share(), time.monotonic, on_progress))
    return _drive_together(errand, on_progress)


def _allow_files(wanted: int) -> None:
    """Let this process have so many connections open.

    Raises:
        ClientFailed: it may not; they would fail, and look like the endpoint's failures.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ClientFailed(
            f"this process may have {hard} files open, wanted {wanted}",
            "give a lower --max-in-flight, or raise the limit with 'ulimit -n'",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _drive(
    errand: Errand,
    share: Share,
    begin: Callable[[], float],
    on_progress: Callable[[int], None],
) -> Driven:
    """Send a share; `begin`, called when all is ready, says when the run begins."""
    _allow_files(share.part(errand.max_in_flight) + _OTHER_FILES)
    stop = asyncio.Event()
    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    async with CompletionClient(errand.client) as client:
        driver = Driver(
            client,
            errand.model,
            errand.plan,
            share=share,
            max_in_flight=errand.max_in_flight,
            on_progress=on_progress,
        )
        await driver.prepare(stop)
        with _little_garbage():
            began_at_s = await asyncio.to_thread(begin)
            return await driver.run(began_at_s, stop)


@contextmanager
def _little_garbage() -> Iterator[None]:
    """What was made before the run is not looked through in it: that would stop all answers."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# ------------------------------------------------------------------ several processes
def _drive_together(errand: Errand, on_progress: Callable[[int], None]) -> Driven:
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, SpawnProcess] = {}
    for index in range(errand.clients):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_work, args=(errand, Share(index, errand.clients), theirs), daemon=True
        )
        process.start()
        theirs.close()
        workers[ours] = process
    try:
        with _passing_on_interrupts(list(workers.values())):
            _start_all(list(workers))
            return _collect(workers, _limit_s(errand), on_progress)
    finally:
        for connection, process in workers.items():
            connection.close()
            process.join(1.0)
            if process.is_alive():
                process.terminate()


def _work(errand: Errand, share: Share, parent: Connection) -> None:
    """Be one of the processes."""

    def begin() -> float:
        parent.send(None)
        if not parent.poll(_READY_WITHIN_S):
            raise TimeoutError("the others are not ready")
        began_at_s: float = parent.recv()
        return began_at_s

    told_at_s = 0.0

    def tell(done: int) -> None:
        nonlocal told_at_s
        if (now_s := time.monotonic()) - told_at_s >= _TOLD_EVERY_S:
            told_at_s = now_s
            parent.send(done)

    parent.send(run_async(_drive(errand, share, begin, tell)))


def _start_all(connections: list[Connection]) -> None:
    """Wait until all are ready and tell them when to begin."""
    end_at_s = time.monotonic() + _READY_WITHIN_S
    for number, connection in enumerate(connections):
        try:
            if not connection.poll(max(0.0, end_at_s - time.monotonic())):
                raise _failed(number, f"is not ready after {_READY_WITHIN_S:g} s")
            connection.recv()
        except (EOFError, OSError) as error:
            raise _failed(number, "ended before it was ready") from error
    began_at_s = time.monotonic() + _SOON_S
    for connection in connections:
        connection.send(began_at_s)


def _collect(
    workers: dict[Connection, SpawnProcess], limit_s: float, on_progress: Callable[[int], None]
) -> Driven:
    whole = Driven()
    end_at_s = time.monotonic() + limit_s
    open_, done = {one: number for number, one in enumerate(workers)}, [0] * len(workers)
    while open_:
        ready = wait(list(open_), timeout=max(0.0, end_at_s - time.monotonic()))
        if not ready:
            raise _failed(next(iter(open_.values())), f"has not ended after {limit_s:.0f} s")
        for connection in ready:
            assert isinstance(connection, Connection), "only connections are waited for"
            try:
                said: Driven | int = connection.recv()
            except (EOFError, OSError) as error:
                raise _failed(open_[connection], "ended before its load did") from error
            if isinstance(said, Driven):
                whole.add(said)
                done[open_.pop(connection)] = len(said.samples)
            else:
                done[open_[connection]] = said
            on_progress(sum(done))
    return whole


def _limit_s(errand: Errand) -> float:
    """Until when every process must have ended, in seconds from the beginning."""
    plan = errand.plan
    answers = plan.turns * (errand.client.deadline_s + plan.think_s) + _SLACK_S
    if plan.starts_s:
        return plan.starts_s[-1] + answers
    if plan.threads is None:
        return plan.until_s + answers
    return plan.threads * answers


@contextmanager
def _passing_on_interrupts(processes: list[SpawnProcess]) -> Iterator[None]:
    """A SIGINT reaches the processes also where only this one is sent it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(_number: int, _frame: object) -> None:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)

    before = signal.signal(signal.SIGINT, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _failed(number: int, what: str) -> ClientFailed:
    return ClientFailed(
        f"client process {number + 1} {what}",
        "look at what it wrote, and try with fewer --clients",
    )
