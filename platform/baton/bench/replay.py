"""Replays a trace against a live endpoint, in open loop: requests do not wait for answers.

Theory of operation: one task walks the trace. It makes each prompt ahead of time, waits until the
request is due, takes a slot, and starts a task that asks for it. Nothing that the endpoint does
moves a due time, and latencies count from the due time: whoever is sent late, because all slots
are taken or this process is busy, waits as its user would have waited. Late sends are counted, for
many of them mean that it is the client that is measured. A stop leaves out what has not ended yet.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.bench.client import Answer, CompletionClient, Question, ServedModel
from baton.bench.prompts import PromptMaker
from baton.simulator.outcome import Outcome
from baton.simulator.workloads.trace import Trace, TraceRequest

LATE_S = 0.02
"""A send this much behind its time counts as late: about one step of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """How to replay."""

    vocabulary: int = 8_000
    """Prompts have ids below this. No model of today knows fewer, and that they come from a corner
    of a larger vocabulary changes nothing about how long they take."""
    max_in_flight: int = 1024
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What came of a replay."""

    outcomes: tuple[Outcome, ...]
    """Of those that ended, in order of arrival."""
    failures: Mapping[str, int]
    """Causes, and how often."""
    late_sends: int = 0
    worst_late_s: float = 0.0
    clipped_prompts: int = 0
    """Cut, since with their output they were longer than the endpoint takes."""
    too_long: int = 0
    """Left out: the output alone is longer."""
    short_answers: int = 0
    """Finished with fewer tokens than were asked for."""
    abandoned: int = 0
    """Under way, or not sent yet, when the replay was stopped."""


@dataclass(slots=True)
class _Tally:
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    late_sends: int = 0
    worst_late_s: float = 0.0
    clipped_prompts: int = 0
    too_long: int = 0
    short_answers: int = 0


class Replay:
    """One replay of one trace; `run` it once."""

    def __init__(
        self,
        client: CompletionClient,
        model: ServedModel,
        trace: Trace,
        *,
        options: ReplayOptions,
        on_progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._model = model
        self._trace = trace
        self._prompts = PromptMaker(
            block_tokens=trace.block_tokens, vocabulary=options.vocabulary, seed=options.seed
        )
        self._slots = asyncio.Semaphore(options.max_in_flight)
        self._asking: set[asyncio.Task[None]] = set()
        self._tally = _Tally()
        self._on_progress = on_progress

    async def run(self, stop: asyncio.Event) -> Replayed:
        """Send everything when it is due and wait for all answers, or until `stop` is set."""
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(self._cancel_when(stop))
            await self._send_all(group, stop)
            if self._asking:
                await asyncio.wait(self._asking)
            watcher.cancel()
        tally = self._tally
        return Replayed(
            outcomes=tuple(tally.outcomes[number] for number in sorted(tally.outcomes)),
            failures=dict(tally.failures.most_common()),
            late_sends=tally.late_sends,
            worst_late_s=tally.worst_late_s,
            clipped_prompts=tally.clipped_prompts,
            too_long=tally.too_long,
            short_answers=tally.short_answers,
            abandoned=len(self._trace) - tally.too_long - len(tally.outcomes),
        )

    async def _send_all(self, group: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        if not self._trace.requests:
            return
        start_s = time.monotonic() - self._trace.requests[0].at_s
        for number, whole in enumerate(self._trace.requests):
            one = self._fitting(whole)
            if one is None:
                continue
            question = Question(
                prompt_token_ids=self._prompts.prompt(one, number),
                output_tokens=one.output_tokens,
                session_id=one.session_id,
            )
            due_s = start_s + one.at_s
            await _until(due_s, stop)
            await self._slots.acquire()
            if stop.is_set():
                return
            self._note_late(time.monotonic() - due_s)
            task = group.create_task(self._ask(number, question, due_s))
            self._asking.add(task)
            task.add_done_callback(self._ended)

    async def _ask(self, number: int, question: Question, due_s: float) -> None:
        answer = await self._client.ask(self._model.name, question)
        first_s = self._trace.requests[0].at_s
        self._tally.outcomes[number] = _outcome(
            answer,
            question,
            arrived_at_s=self._trace.requests[number].at_s - first_s,
            due_s=due_s,
        )
        if answer.failure is not None:
            self._tally.failures[answer.failure] += 1
        elif answer.output_tokens is not None:
            self._tally.short_answers += answer.output_tokens < question.output_tokens
        self._on_progress(len(self._tally.outcomes) / len(self._trace))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        self._slots.release()

    async def _cancel_when(self, stop: asyncio.Event) -> None:
        await stop.wait()
        for task in list(self._asking):
            task.cancel()

    def _fitting(self, one: TraceRequest) -> TraceRequest | None:
        """The request with its prompt cut to what the endpoint takes; None if nothing is left."""
        most = self._model.max_tokens
        if most is None or one.prompt_tokens + one.output_tokens <= most:
            return one
        room = most - one.output_tokens
        if room < 1:
            self._tally.too_long += 1
            return None
        self._tally.clipped_prompts += 1
        return one._replace(prompt_tokens=room)

    def _note_late(self, late_s: float) -> None:
        self._tally.late_sends += late_s > LATE_S
        self._tally.worst_late_s = max(self._tally.worst_late_s, late_s)


async def _until(due_s: float, stop: asyncio.Event) -> None:
    """Wait for a time, or for `stop` if that comes first."""
    wait_s = due_s - time.monotonic()
    if wait_s <= 0:
        await asyncio.sleep(0)  # answers are read even while requests are behind their time
        return
    try:
        async with asyncio.timeout(wait_s):
            await stop.wait()
    except TimeoutError:
        pass


def _outcome(answer: Answer, question: Question, *, arrived_at_s: float, due_s: float) -> Outcome:
    """An answer as its client saw it, from when it should have been sent."""
    first_s, last_s = answer.first_at_s, answer.last_at_s
    tokens = answer.output_tokens or answer.chunks
    decoding_s = 0.0 if first_s is None or last_s is None else last_s - first_s
    ended_s = last_s if answer.finished and last_s is not None else answer.ended_at_s
    return Outcome(
        arrived_at_s=arrived_at_s,
        prompt_tokens=len(question.prompt_token_ids),
        cached_tokens=answer.cached_tokens,
        output_tokens=tokens,
        ttft_s=math.inf if first_s is None else first_s - due_s,
        tpot_s=decoding_s / (tokens - 1) if tokens > 1 else 0.0,
        e2e_s=ended_s - due_s,
        ok=answer.finished and answer.failure is None,
        worst_gap_s=answer.worst_gap_s,
    )
