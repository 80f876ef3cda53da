"""Sends a load to an endpoint and notes what each request met.

Theory of operation: in open loop one task walks the plan. It makes each question ahead of its time,
waits until it is due, takes a slot and starts a task that asks it. Nothing that the endpoint does
moves a due time, and latencies count from then: whoever is sent late, because all slots are taken
or this process is busy, waits as its user would have waited. In closed loop each stream is a task
that asks one question after another. Another task wakes every few milliseconds and notes how late
it does: that much later than they came may answers have been read. A stop cancels what is under
way; it is left out and counted. Several processes each send every n-th thread; they share a clock,
not a loop.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from baton.bench.client.client import CompletionClient, Message, Prepared, ServedModel
from baton.bench.client.samples import Asked, Sample, sample_of
from baton.bench.client.timer import Alarm
from baton.bench.load import Maker, Plan
from baton.simulator.workloads.trace import TraceRequest

_LAG_EVERY_S = 0.02
_AHEAD_BYTES = 128 << 20
"""Of questions that are made before a run begins; the rest is made while it runs."""

_AT_A_TIME = 64
"""Questions, before a stop is looked for."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which threads of a plan are sent from here: every `of`-th, from `index` on."""

    index: int = 0
    of: int = 1

    def numbers(self, most: int | None) -> Iterator[int]:
        """Of the threads."""
        return (
            iter(range(self.index, most, self.of))
            if most is not None
            else count(self.index, self.of)
        )

    def part(self, amount: int) -> int:
        """Of so many streams or slots, those that are here."""
        return amount // self.of + (self.index < amount % self.of)


@dataclass(slots=True, kw_only=True)
class Driven:
    """What came of a load, or of a share of it."""

    samples: list[Sample] = field(default_factory=list)
    """Of those that ended, in order."""
    lags_s: array[float] = field(default_factory=lambda: array("d"))
    """How late the client's own event loop was, every few milliseconds."""
    busy: float = 0.0
    """Of a core that the busiest client used."""
    clipped_prompts: int = 0
    """Cut, since with their output they were longer than the endpoint takes."""
    too_long: int = 0
    """Left out: the output alone is longer."""
    dropped_turns: int = 0
    """Never asked, since a turn before them failed."""
    abandoned: int = 0
    """Under way, or not sent yet, when the run was stopped; those not begun only in open loop."""
    stopped: bool = False

    def add(self, other: Driven) -> None:
        """Another share's."""
        self.samples = sorted([*self.samples, *other.samples])
        self.lags_s.extend(other.lags_s)
        self.busy = max(self.busy, other.busy)
        self.clipped_prompts += other.clipped_prompts
        self.too_long += other.too_long
        self.dropped_turns += other.dropped_turns
        self.abandoned += other.abandoned
        self.stopped = self.stopped or other.stopped


@dataclass(frozen=True, slots=True)
class _Ready:
    """A question that can be sent."""

    number: int
    one: TraceRequest
    prepared: Prepared
    messages: tuple[Message, ...] = ()


class Driver:
    """Sends one plan, or a share of it; `run` it once."""

    def __init__(
        self,
        client: CompletionClient,
        model: ServedModel,
        plan: Plan,
        *,
        share: Share = Share(),
        max_in_flight: int = 1024,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._model = model
        self._plan = plan
        self._share = share
        self._maker = Maker(plan.source)
        self._slots = asyncio.Semaphore(max(1, share.part(max_in_flight)))
        self._under_way: set[asyncio.Task[None]] = set()
        self._ahead: dict[int, _Ready | None] = {}
        self._driven = Driven()
        self._begun = 0
        self._began_at_s = 0.0
        self._on_progress = on_progress

    async def prepare(self, stop: asyncio.Event) -> None:
        """Make questions ahead of the run, as many as may be kept, or until `stop` is set."""
        most = len(self._plan.starts_s) if self._plan.streams is None else self._plan.threads
        kept = 0
        for thread in self._share.numbers(most or 0):
            number = thread * self._plan.turns
            ready = self._ahead[number] = self._made(number)
            kept += 0 if ready is None else len(ready.prepared.body)
            if kept > _AHEAD_BYTES or stop.is_set():
                return
            if not len(self._ahead) % _AT_A_TIME:
                await asyncio.sleep(0)

    async def run(self, began_at_s: float, stop: asyncio.Event) -> Driven:
        """Send everything and wait for all answers, or until `stop` is set.

        `began_at_s`, of the monotonic clock, is when the plan's times begin.
        """
        self._began_at_s = began_at_s
        alarm = Alarm()
        try:
            await self._run(alarm, stop)
        finally:
            alarm.close()
        return self._result(stop)

    async def _run(self, alarm: Alarm, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            watchers = [
                group.create_task(self._cancel_when(stop, alarm)),
                group.create_task(self._note_lags()),
            ]
            used_s, at_s = time.process_time(), time.monotonic()
            if self._plan.streams is None:
                await self._send_all(group, alarm, stop)
            else:
                await alarm.until(self._began_at_s)
                self._start_streams(group, self._plan.streams, stop)
            if self._under_way:
                await asyncio.wait(self._under_way)
            wall_s = time.monotonic() - at_s
            self._driven.busy = (time.process_time() - used_s) / wall_s if wall_s else 0.0
            for watcher in watchers:
                watcher.cancel()

    def _result(self, stop: asyncio.Event) -> Driven:
        driven = self._driven
        driven.samples.sort()
        if not stop.is_set():
            return driven
        planned = self._begun
        if self._plan.streams is None:
            threads = len(range(self._share.index, len(self._plan.starts_s), self._share.of))
            planned = threads * self._plan.turns - driven.too_long - driven.dropped_turns
        driven.abandoned = planned - len(driven.samples)
        driven.stopped = True
        return driven

    # -------------------------------------------------------------- open loop
    async def _send_all(self, group: asyncio.TaskGroup, alarm: Alarm, stop: asyncio.Event) -> None:
        for thread in self._share.numbers(len(self._plan.starts_s)):
            ready = self._next(thread * self._plan.turns)
            if ready is None:
                continue
            due_at_s = self._began_at_s + self._plan.starts_s[thread]
            if not stop.is_set():
                await alarm.until(due_at_s)
                await self._slots.acquire()
            if stop.is_set():
                return
            self._start(group, self._converse(ready, due_at_s, stop)).add_done_callback(
                lambda _: self._slots.release()
            )

    # -------------------------------------------------------------- closed loop
    def _start_streams(self, group: asyncio.TaskGroup, streams: int, stop: asyncio.Event) -> None:
        threads = self._share.numbers(self._plan.threads)
        for _ in range(self._share.part(streams)):
            self._start(group, self._stream(threads, stop))

    async def _stream(self, threads: Iterator[int], stop: asyncio.Event) -> None:
        end_at_s = self._began_at_s + self._plan.until_s
        for thread in threads:
            due_at_s = time.monotonic()
            if stop.is_set() or due_at_s >= end_at_s:
                return
            if (ready := self._next(thread * self._plan.turns)) is not None:
                await self._converse(ready, due_at_s, stop)

    # -------------------------------------------------------------- one thread
    async def _converse(self, ready: _Ready, due_at_s: float, stop: asyncio.Event) -> None:
        """Ask a question, and those that follow on its answer."""
        last = ready.number + self._plan.turns - 1
        while True:
            self._begun += 1
            answer = await self._client.ask(ready.prepared)
            one = ready.one
            asked = Asked(
                number=ready.number,
                due_at_s=due_at_s,
                prompt_tokens=one.prompt_tokens,
                output_tokens=one.output_tokens,
                slo_class=one.slo_class,
            )
            sample = sample_of(asked, answer, self._began_at_s)
            self._driven.samples.append(sample)
            self._on_progress(len(self._driven.samples))
            if ready.number == last:
                return
            if not sample.ok:
                self._driven.dropped_turns += last - ready.number
                return
            reply = Message(role="assistant", content="".join(answer.text))
            following = self._made(ready.number + 1, (*ready.messages, reply))
            if following is None:
                return
            due_at_s = self._began_at_s + sample.end_s + self._plan.think_s
            await _until(due_at_s, stop)
            ready = following

    def _start(
        self, group: asyncio.TaskGroup, what: Coroutine[None, None, None]
    ) -> asyncio.Task[None]:
        task = group.create_task(what)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    def _next(self, number: int) -> _Ready | None:
        return self._ahead.pop(number) if number in self._ahead else self._made(number)

    def _made(self, number: int, said: tuple[Message, ...] = ()) -> _Ready | None:
        """A question, ready to be sent; None if the endpoint cannot take it."""
        one = self._fitting(self._maker.request(number))
        if one is None:
            return None
        turns = self._plan.turns
        if turns > 1:
            one = one._replace(session_id=f"{self._plan.source.texts}-{number // turns}")
        question = self._maker.question(number, one, said)
        prepared = self._client.prepare(
            self._model.name, question, keep_text=number % turns < turns - 1
        )
        messages = question.messages if turns > 1 else ()
        return _Ready(number, one, prepared, messages)

    def _fitting(self, one: TraceRequest) -> TraceRequest | None:
        """The request with its prompt cut to what the endpoint takes; None if nothing is left."""
        most = self._model.max_tokens
        if most is None or one.prompt_tokens + one.output_tokens <= most:
            return one
        room = most - one.output_tokens
        if room < 1:
            self._driven.too_long += 1
            return None
        self._driven.clipped_prompts += 1
        return one._replace(prompt_tokens=room)

    # -------------------------------------------------------------- beside it
    async def _cancel_when(self, stop: asyncio.Event, alarm: Alarm) -> None:
        await stop.wait()
        alarm.ring()
        for task in list(self._under_way):
            task.cancel()

    async def _note_lags(self) -> None:
        while True:
            wanted_s = time.monotonic() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._driven.lags_s.append(max(0.0, time.monotonic() - wanted_s))


async def _until(due_at_s: float, stop: asyncio.Event) -> None:
    """Wait for a time, or for `stop` if that comes first."""
    wait_s = due_at_s - time.monotonic()
    if wait_s <= 0:
        await asyncio.sleep(0)  # answers are read even while requests are behind their time
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await stop.wait()
