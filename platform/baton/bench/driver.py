"""Sends a load to an endpoint and measures each request.

*Theory of operation.* In open loop one task walks the plan: it encodes each request, waits until it
is due, takes a slot and starts a task. The endpoint never moves a due time, and latencies count
from it: a late send, because all slots are taken or the process is busy, counts as waiting. In
closed loop each stream is a task that sends one request after another. A further task measures the
lag of the event loop, by which reads may be late. A stop cancels requests in flight, which are only
counted. Several processes each send every n-th conversation; they share a clock, not a loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from baton.bench.client.client import CompletionClient, EncodedRequest, Message, ServedModel
from baton.bench.client.samples import RequestSample, SentRequest, build_sample
from baton.bench.load import LoadPlan, RequestFactory
from baton.simulator.workloads.trace import TraceRequest

_LAG_INTERVAL_S = 0.02
_MAX_PREPARED_BYTES = 128 << 20
"""Of requests that are encoded before a run begins."""
_PREPARE_BATCH = 64
"""Requests between two checks for a stop."""
_ABSOLUTE = 1
"""Source: timerfd_settime(2), TFD_TIMER_ABSTIME."""
_NS_PER_S = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("first", _Timespec))


@dataclass(frozen=True, slots=True)
class PlanShare:
    """A share of a plan's conversations: every `shares`-th, from `index` on."""

    index: int = 0
    shares: int = 1

    def conversation_indices(self, limit: int | None) -> Iterator[int]:
        """Indices of this share's conversations below `limit`."""
        return (
            iter(range(self.index, limit, self.shares))
            if limit is not None
            else count(self.index, self.shares)
        )

    def portion_of(self, amount: int) -> int:
        """This share's part of streams or slots."""
        return amount // self.shares + (self.index < amount % self.shares)


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """Results of a load, or of a share of it."""

    samples: list[RequestSample] = field(default_factory=list)
    """Of ended requests, in order."""
    loop_lags_s: array[float] = field(default_factory=lambda: array("d"))
    busy_fraction: float = 0.0
    truncated_prompts: int = 0
    """Cut, because prompt and output exceeded the model's length."""
    skipped_too_long: int = 0
    """Not sent, because the output alone exceeds it."""
    dropped_turns: int = 0
    """Not sent, because an earlier turn failed."""
    unfinished: int = 0
    """In flight when the run was stopped; in open loop also not sent."""
    stopped: bool = False

    def merge(self, other: LoadResult) -> None:
        """Add another share's result."""
        self.samples = sorted([*self.samples, *other.samples])
        self.loop_lags_s.extend(other.loop_lags_s)
        self.busy_fraction = max(self.busy_fraction, other.busy_fraction)
        self.truncated_prompts += other.truncated_prompts
        self.skipped_too_long += other.skipped_too_long
        self.dropped_turns += other.dropped_turns
        self.unfinished += other.unfinished
        self.stopped = self.stopped or other.stopped


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    index: int
    request: TraceRequest
    prepared: EncodedRequest
    messages: tuple[Message, ...] = ()


class LoadDriver:
    """Sends one plan, or a share of it; `run` it once."""

    def __init__(
        self,
        client: CompletionClient,
        model: ServedModel,
        plan: LoadPlan,
        *,
        share: PlanShare = PlanShare(),
        max_in_flight: int = 1024,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._model = model
        self._plan = plan
        self._share = share
        self._factory = RequestFactory(plan.source)
        self._slots = asyncio.Semaphore(max(1, share.portion_of(max_in_flight)))
        self._tasks: set[asyncio.Task[None]] = set()
        self._prepared: dict[int, _PreparedRequest | None] = {}
        self._load_result = LoadResult()
        self._started_requests = 0
        self._start_at_s = 0.0
        self._on_progress = on_progress

    async def prepare(self, stop: asyncio.Event) -> None:
        """Encode requests ahead of the run, up to a limit of memory or until `stop`."""
        limit = (
            len(self._plan.starts_s)
            if self._plan.concurrency is None
            else self._plan.max_conversations
        )
        prepared_bytes = 0
        for thread in self._share.conversation_indices(limit or 0):
            index = thread * self._plan.turns
            prepared = self._prepared[index] = self._prepare_request(index)
            prepared_bytes += 0 if prepared is None else len(prepared.prepared.body)
            if prepared_bytes > _MAX_PREPARED_BYTES or stop.is_set():
                return
            if not len(self._prepared) % _PREPARE_BATCH:
                await asyncio.sleep(0)

    async def run(self, start_at_s: float, stop: asyncio.Event) -> LoadResult:
        """Send everything and wait for all answers, or until `stop` is set.

        The plan's times count from `start_at_s` of the monotonic clock.
        """
        self._start_at_s = start_at_s
        timer = Timer()
        try:
            await self._run(timer, stop)
        finally:
            timer.close()
        return self._finish(stop)

    async def _run(self, timer: Timer, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            watchers = [
                group.create_task(self._cancel_on_stop(stop, timer)),
                group.create_task(self._measure_loop_lag()),
            ]
            cpu_before_s, wall_before_s = time.process_time(), time.monotonic()
            if self._plan.concurrency is None:
                await self._send_all(group, timer, stop)
            else:
                await timer.sleep_until(self._start_at_s)
                self._start_streams(group, self._plan.concurrency, stop)
            if self._tasks:
                await asyncio.wait(self._tasks)
            wall_s = time.monotonic() - wall_before_s
            self._load_result.busy_fraction = (
                (time.process_time() - cpu_before_s) / wall_s if wall_s else 0.0
            )
            for watcher in watchers:
                watcher.cancel()

    def _finish(self, stop: asyncio.Event) -> LoadResult:
        result = self._load_result
        result.samples.sort()
        if not stop.is_set():
            return result
        planned = self._started_requests
        if self._plan.concurrency is None:
            threads = len(range(self._share.index, len(self._plan.starts_s), self._share.shares))
            planned = threads * self._plan.turns - result.skipped_too_long - result.dropped_turns
        result.unfinished = planned - len(result.samples)
        result.stopped = True
        return result

    # -------------------------------------------------------------- open loop
    async def _send_all(self, group: asyncio.TaskGroup, timer: Timer, stop: asyncio.Event) -> None:
        for thread in self._share.conversation_indices(len(self._plan.starts_s)):
            prepared = self._pop_or_prepare(thread * self._plan.turns)
            if prepared is None:
                continue
            due_at_s = self._start_at_s + self._plan.starts_s[thread]
            if not stop.is_set():
                await timer.sleep_until(due_at_s)
                await self._slots.acquire()
            if stop.is_set():
                return
            self._start_task(
                group, self._run_conversation(prepared, due_at_s, stop)
            ).add_done_callback(lambda _: self._slots.release())

    # -------------------------------------------------------------- closed loop
    def _start_streams(self, group: asyncio.TaskGroup, streams: int, stop: asyncio.Event) -> None:
        threads = self._share.conversation_indices(self._plan.max_conversations)
        for _ in range(self._share.portion_of(streams)):
            self._start_task(group, self._stream(threads, stop))

    async def _stream(self, threads: Iterator[int], stop: asyncio.Event) -> None:
        end_at_s = self._start_at_s + self._plan.stop_starting_s
        for thread in threads:
            due_at_s = time.monotonic()
            if stop.is_set() or due_at_s >= end_at_s:
                return
            if (prepared := self._pop_or_prepare(thread * self._plan.turns)) is not None:
                await self._run_conversation(prepared, due_at_s, stop)

    # -------------------------------------------------------------- one thread
    async def _run_conversation(
        self, prepared: _PreparedRequest, due_at_s: float, stop: asyncio.Event
    ) -> None:
        """Send a request, and the turns that follow on its answer."""
        last_index = prepared.index + self._plan.turns - 1
        while True:
            self._started_requests += 1
            answer = await self._client.complete(prepared.prepared)
            request = prepared.request
            sent_request = SentRequest(
                index=prepared.index,
                due_at_s=due_at_s,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                slo_class=request.slo_class,
            )
            sample = build_sample(sent_request, answer, self._start_at_s)
            self._load_result.samples.append(sample)
            self._on_progress(len(self._load_result.samples))
            if prepared.index == last_index:
                return
            if not sample.ok:
                self._load_result.dropped_turns += last_index - prepared.index
                return
            reply = Message(role="assistant", content="".join(answer.text_pieces))
            next_turn = self._prepare_request(prepared.index + 1, (*prepared.messages, reply))
            if next_turn is None:
                return
            due_at_s = self._start_at_s + sample.completed_s + self._plan.think_s
            await _sleep_until(due_at_s, stop)
            prepared = next_turn

    def _start_task(
        self, group: asyncio.TaskGroup, coroutine: Coroutine[None, None, None]
    ) -> asyncio.Task[None]:
        task = group.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _pop_or_prepare(self, number: int) -> _PreparedRequest | None:
        return (
            self._prepared.pop(number)
            if number in self._prepared
            else self._prepare_request(number)
        )

    def _prepare_request(
        self, number: int, history: tuple[Message, ...] = ()
    ) -> _PreparedRequest | None:
        request = self._fit_to_context(self._factory.request(number))
        if request is None:
            return None
        turns = self._plan.turns
        if turns > 1:
            request = request._replace(
                session_id=f"{self._plan.source.text_seed}-{number // turns}"
            )
        completion_request = self._factory.build_completion_request(number, request, history)
        prepared = self._client.encode(
            self._model.name, completion_request, keep_text=number % turns < turns - 1
        )
        messages = completion_request.messages if turns > 1 else ()
        return _PreparedRequest(index=number, request=request, prepared=prepared, messages=messages)

    def _fit_to_context(self, request: TraceRequest) -> TraceRequest | None:
        """The request with its prompt cut to the model's length; None if nothing is left."""
        max_tokens = self._model.max_tokens
        if max_tokens is None or request.prompt_tokens + request.output_tokens <= max_tokens:
            return request
        max_prompt_tokens = max_tokens - request.output_tokens
        if max_prompt_tokens < 1:
            self._load_result.skipped_too_long += 1
            return None
        self._load_result.truncated_prompts += 1
        return request._replace(prompt_tokens=max_prompt_tokens)

    # -------------------------------------------------------------- beside it
    async def _cancel_on_stop(self, stop: asyncio.Event, timer: Timer) -> None:
        await stop.wait()
        timer.wake()
        for task in list(self._tasks):
            task.cancel()

    async def _measure_loop_lag(self) -> None:
        while True:
            expected_at_s = time.monotonic() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._load_result.loop_lags_s.append(max(0.0, time.monotonic() - expected_at_s))


async def _sleep_until(due_at_s: float, stop: asyncio.Event) -> None:
    wait_s = due_at_s - time.monotonic()
    if wait_s <= 0:
        await asyncio.sleep(0)  # answers are read even while requests are behind their time
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await stop.wait()


class Timer:
    """A timer for one task, accurate to some tens of microseconds.

    Event loops round waits up to whole milliseconds, a few percent of a short TTFT. Linux's timerfd
    does not; other systems use the loop's timers.
    """

    def __init__(self) -> None:
        self._woken = asyncio.Event()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = -1
        with suppress(AttributeError):  # not Linux
            self._file = self._libc.timerfd_create(
                time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC
            )
        if self._file >= 0:
            asyncio.get_running_loop().add_reader(self._file, self._read)

    def close(self) -> None:
        """Close the timer."""
        if self._file >= 0:
            asyncio.get_running_loop().remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def wake(self) -> None:
        """Wake the waiting task now."""
        self._woken.set()

    async def sleep_until(self, at_s: float) -> None:
        """Wait for a time of the monotonic clock, or for `wake`."""
        wait_s = at_s - time.monotonic()
        if wait_s <= 0:
            await asyncio.sleep(0)  # answers are read even while requests are behind their time
            return
        self._woken.clear()
        if self._file < 0 or not self._arm(at_s):
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._woken.wait()
            return
        await self._woken.wait()

    def _arm(self, at_s: float) -> bool:
        whole_ns = int(at_s * _NS_PER_S)
        setting = _Itimerspec(first=_Timespec(whole_ns // _NS_PER_S, whole_ns % _NS_PER_S))
        status: int = self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(setting), None)
        return status == 0

    def _read(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._file, 8)
        self._woken.set()
