"""What is sent to an endpoint and when: the same load for the same seed, whoever sends which part.

Theory of operation: a load is a row of *threads*: one request each, or a conversation of several
turns. In open loop each thread has a time, and comes then whatever the endpoint does. In closed
loop there are as many streams as there shall be requests under way, each of which begins the next
thread when its last has ended. Request `n` depends on `n` and the seed alone, so that several
processes can share a load without telling each other anything. Lengths, arrivals and what prompts
share come from the generators that the simulator uses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import assert_never

from baton.bench.client.client import Api, Message, Question
from baton.bench.prompts.datasets import Row
from baton.bench.prompts.token_prompts import PromptMaker
from baton.bench.prompts.word_prompts import WordCosts, WordMaker
from baton.simulator.workloads import arrivals
from baton.simulator.workloads.trace import TraceRequest


class Pace(StrEnum):
    """How arrivals are spaced."""

    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"


@dataclass(frozen=True, slots=True)
class Span:
    """A number of tokens, any from `low` to `high` with the same chance."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One of them."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUp:
    """Requests of random lengths."""

    prompt: Span
    output: Span
    shared_tokens: int = 0
    """At the front of each prompt, one of `shared_prompts` that requests have in common."""
    shared_prompts: int = 1
    classes: tuple[tuple[str, float], ...] = ()
    """SLO classes that requests ask for, and how often, in any unit."""

    def request(self, number: int, seed: str) -> TraceRequest:
        """Request `number`; the same for the same seed."""
        rng = random.Random(f"{seed} {number}")  # noqa: S311 - seeded, not secret
        prompt, output = self.prompt.draw(rng), self.output.draw(rng)
        shared = (rng.randrange(self.shared_prompts),) if self.shared_tokens else ()
        names, weights = [name for name, _ in self.classes], [much for _, much in self.classes]
        return TraceRequest(
            at_s=0.0,
            prompt_tokens=max(prompt, self.shared_tokens),
            output_tokens=output,
            block_ids=shared,
            slo_class=rng.choices(names, weights)[0] if names else None,
        )


@dataclass(frozen=True, slots=True)
class Recorded:
    """The requests of a trace, in order, and again from the start when they are used up."""

    requests: tuple[TraceRequest, ...]

    def request(self, number: int, _seed: str) -> TraceRequest:
        """Request `number`."""
        return self.requests[number % len(self.requests)]


@dataclass(frozen=True, slots=True)
class Rows:
    """The prompts of a file, likewise; each says how long its answer shall be."""

    rows: tuple[Row, ...]

    def request(self, number: int, _seed: str) -> TraceRequest:
        """Request `number`; how long its prompt is, the endpoint will say."""
        output = self.rows[number % len(self.rows)].output_tokens
        assert output is not None, "a row without a length was let in"
        return TraceRequest(0.0, 0, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where requests come from."""

    what: MadeUp | Recorded | Rows
    api: Api
    seed: str
    """Of lengths and classes."""
    texts: str
    """Of what prompts say: with another no cache has them."""
    block_tokens: int = 16
    """Of what `block_ids` of the requests name."""
    vocabulary: int = 8_000
    """Prompts have token ids below this. No model of today knows fewer, and that they come from a
    corner of a larger vocabulary changes nothing about how long they take."""
    words: WordCosts | None = None
    """To make prompts of words; None makes them of token ids."""
    classes: tuple[str, ...] = ()
    """The SLO classes that may be asked for. Traces also name kinds of requests that are no classes
    of who serves them."""


class Maker:
    """Makes the questions of a source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        size = source.block_tokens
        self._tokens = PromptMaker(
            block_tokens=size, vocabulary=source.vocabulary, seed=source.texts
        )
        self._words = None if source.words is None else WordMaker(source.words)

    def request(self, number: int) -> TraceRequest:
        """What request `number` is like."""
        one = self._source.what.request(number, self._source.seed)
        return one if one.slo_class in self._source.classes else one._replace(slo_class=None)

    def question(self, number: int, one: TraceRequest, said: Sequence[Message] = ()) -> Question:
        """How it is asked, after what was said before in its conversation."""
        prompt = self._prompt(number, one, said)
        if self._source.api is Api.CHAT and isinstance(prompt, str):
            prompt = [*said, Message(role="user", content=prompt)]
        return Question(
            prompt=prompt,
            output_tokens=one.output_tokens,
            session_id=one.session_id,
            slo_class=one.slo_class,
        )

    def _prompt(
        self, number: int, one: TraceRequest, said: Sequence[Message]
    ) -> Sequence[int] | str | Sequence[Message]:
        match self._source.what:
            case Rows(rows):
                row = rows[number % len(rows)]
                return row.text if self._source.api is Api.COMPLETIONS else row.messages
            case MadeUp() | Recorded():
                if self._words is None:
                    return self._tokens.prompt(one, number)
                return self._text(self._words, number, one, first=not said)
            case _:
                assert_never(self._source.what)

    def _text(self, words: WordMaker, number: int, one: TraceRequest, *, first: bool) -> str:
        """Blocks with equal ids are equal runs of words, as they are of token ids."""
        size, seed = self._source.block_tokens, self._source.texts
        left = one.prompt_tokens
        text = ""
        for block in one.block_ids if first else ():
            if left <= 0:
                break
            text += words.text(min(size, left), f"{seed} shared {block}", bare=True)
            left -= size
        # What stands around a prompt is paid for once in a conversation, at its front.
        return text + words.text(left, f"{seed} own {number}", bare=not first) if left > 0 else text


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """What does not count, at a run's beginning: so many requests, or so long."""

    requests: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run's load."""

    source: Source
    starts_s: tuple[float, ...] = ()
    """When threads come, from the run's beginning on, in open loop."""
    streams: int | None = None
    """Requests under way at any time in closed loop; None for an open one."""
    threads: int | None = None
    """No more than so many, in closed loop; None until its time is over."""
    until_s: float = float("inf")
    """No thread begins later, in closed loop."""
    turns: int = 1
    think_s: float = 0.0
    """From an answer's end to the next turn."""
    warm_up: WarmUp = WarmUp()

    def counts(self, number: int, due_s: float) -> bool:
        """Whether a request is measured, or of the warm-up."""
        return number >= self.warm_up.requests and due_s >= self.warm_up.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How much is measured: so many requests, or so long; one of the two."""

    requests: int | None = None
    duration_s: float | None = None


def starts(
    pace: Pace, rate_per_s: float, burstiness: float, *, warm_up: WarmUp, length: Length, seed: str
) -> tuple[float, ...]:
    """Times from 0 on at which threads come, of the warm-up and of what is measured.

    Raises:
        ValueError: a rate or a burstiness that is not above 0.
    """
    rng = random.Random(f"{seed} arrivals")  # noqa: S311 - seeded, not secret
    match pace:
        case Pace.CONSTANT:
            times_s = arrivals.constant(rate_per_s)
        case Pace.POISSON:
            times_s = arrivals.poisson(rate_per_s, rng)
        case Pace.GAMMA:
            times_s = arrivals.gamma(rate_per_s, burstiness, rng)
        case _:
            assert_never(pace)
    warm = [next(times_s) for _ in range(warm_up.requests)]
    from_s = warm[-1] if warm else 0.0
    if warm_up.duration_s:
        warm += arrivals.before(warm_up.duration_s, times_s)
        from_s = warm_up.duration_s
    if length.requests is not None:
        return (*warm, *islice(times_s, length.requests))
    assert length.duration_s is not None, "neither a number of requests nor a duration"
    return (*warm, *arrivals.before(from_s + length.duration_s, times_s))
