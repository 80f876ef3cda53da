"""Sends a load from one or several processes, because one core may not be enough.

*Theory of operation.* Each process builds its own share of the plan, reports that it is ready, gets
the start time and returns its samples. All processes of a machine have one monotonic clock. A
SIGINT stops each; ended requests are kept. A failed process fails the run.
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
from baton.bench.driver import LoadDriver, LoadResult, PlanShare
from baton.bench.load import LoadPlan
from baton.domain.errors import OperatorError

T = TypeVar("T")

_READY_TIMEOUT_S = 120.0
"""For starting processes and encoding their requests."""
_START_DELAY_S = 0.2
"""From the last ready process to the start of the run."""
_PROGRESS_INTERVAL_S = 0.5
_RESERVED_FILES = 128
"""Open files of a process other than connections."""
_TIMEOUT_MARGIN_S = 30.0
"""Of a run, beyond its load and the deadline of its last answer."""


class ClientProcessFailed(OperatorError):
    """A process that sends a share of the load has ended, or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """A plan, its endpoint and its processes."""

    client_options: ClientOptions
    model: ServedModel
    plan: LoadPlan
    max_in_flight: int = 1024
    processes: int = 1


def run_async(coroutine: Coroutine[None, None, T]) -> T:
    """Run it in an event loop, if possible uvloop's, whose reads cost less."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def run_load(job: LoadJob, on_progress: Callable[[int], None]) -> LoadResult:
    """Send a plan and return the result; Ctrl-C ends it early, with the ended requests.

    Raises:
        ClientProcessFailed: one of several processes has ended or does not answer.
    """
    if job.processes == 1:
        return run_async(_run_share(job, PlanShare(), time.monotonic, on_progress))
    return _run_processes(job, on_progress)


def _raise_file_limit(min_files: int) -> None:
    """Allow `min_files` open files; failed connections would look like the endpoint's failures."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= min_files or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < min_files:
        raise ClientProcessFailed(
            f"this process may have {hard} files open, expected {min_files}",
            "give a lower --max-in-flight, or raise the limit with 'ulimit -n'",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (min_files, hard))


async def _run_share(
    job: LoadJob,
    share: PlanShare,
    get_start_time: Callable[[], float],
    on_progress: Callable[[int], None],
) -> LoadResult:
    _raise_file_limit(share.portion_of(job.max_in_flight) + _RESERVED_FILES)
    stop = asyncio.Event()
    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    async with CompletionClient(job.client_options) as client:
        driver = LoadDriver(
            client,
            job.model,
            job.plan,
            share=share,
            max_in_flight=job.max_in_flight,
            on_progress=on_progress,
        )
        await driver.prepare(stop)
        with _frozen_heap():
            start_at_s = await asyncio.to_thread(get_start_time)
            return await driver.run(start_at_s, stop)


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Excludes existing objects from garbage collection, which would delay reads."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# ------------------------------------------------------------------ several processes
def _run_processes(job: LoadJob, on_progress: Callable[[int], None]) -> LoadResult:
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, SpawnProcess] = {}
    for index in range(job.processes):
        parent_end, child_end = context.Pipe()
        process = context.Process(
            target=_worker_main, args=(job, PlanShare(index, job.processes), child_end), daemon=True
        )
        process.start()
        child_end.close()
        workers[parent_end] = process
    try:
        with _forward_interrupts(list(workers.values())):
            _start_all(list(workers))
            return _collect(workers, _timeout_s(job), on_progress)
    finally:
        for connection, process in workers.items():
            connection.close()
            process.join(1.0)
            if process.is_alive():
                process.terminate()


def _worker_main(job: LoadJob, share: PlanShare, parent: Connection) -> None:

    def get_start_time() -> float:
        parent.send(None)
        if not parent.poll(_READY_TIMEOUT_S):
            raise TimeoutError("the others are not ready")
        began_at_s: float = parent.recv()
        return began_at_s

    reported_at_s = 0.0

    def report_progress(done: int) -> None:
        nonlocal reported_at_s
        if (now_s := time.monotonic()) - reported_at_s >= _PROGRESS_INTERVAL_S:
            reported_at_s = now_s
            parent.send(done)

    parent.send(run_async(_run_share(job, share, get_start_time, report_progress)))


def _start_all(connections: list[Connection]) -> None:
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    for number, connection in enumerate(connections):
        try:
            if not connection.poll(max(0.0, deadline_s - time.monotonic())):
                raise _process_failed(number, f"is not ready after {_READY_TIMEOUT_S:g} s")
            connection.recv()
        except (EOFError, OSError) as error:
            raise _process_failed(number, "ended before it was ready") from error
    start_at_s = time.monotonic() + _START_DELAY_S
    for connection in connections:
        connection.send(start_at_s)


def _collect(
    workers: dict[Connection, SpawnProcess], timeout_s: float, on_progress: Callable[[int], None]
) -> LoadResult:
    total = LoadResult()
    deadline_s = time.monotonic() + timeout_s
    pending, done_counts = (
        {connection: number for number, connection in enumerate(workers)},
        [0] * len(workers),
    )
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            raise _process_failed(
                next(iter(pending.values())), f"has not ended after {timeout_s:.0f} s"
            )
        for connection in ready:
            assert isinstance(connection, Connection), "only connections are waited for"
            try:
                message: LoadResult | int = connection.recv()
            except (EOFError, OSError) as error:
                raise _process_failed(pending[connection], "ended before its load did") from error
            if isinstance(message, LoadResult):
                total.merge(message)
                done_counts[pending.pop(connection)] = len(message.samples)
            else:
                done_counts[pending[connection]] = message
            on_progress(sum(done_counts))
    return total


def _timeout_s(job: LoadJob) -> float:
    """When every process must have ended, in seconds since the start."""
    plan = job.plan
    answer_time_s = plan.turns * (job.client_options.timeout_s + plan.think_s) + _TIMEOUT_MARGIN_S
    if plan.starts_s:
        return plan.starts_s[-1] + answer_time_s
    if plan.max_conversations is None:
        return plan.stop_starting_s + answer_time_s
    return plan.max_conversations * answer_time_s


@contextmanager
def _forward_interrupts(processes: list[SpawnProcess]) -> Iterator[None]:
    """Forwards SIGINT to the processes, even if only this one receives it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(_number: int, _frame: object) -> None:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)

    previous_handler = signal.signal(signal.SIGINT, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _process_failed(number: int, problem: str) -> ClientProcessFailed:
    return ClientProcessFailed(
        f"client process {number + 1} {problem}",
        "read its output, and try with fewer --clients",
    )
