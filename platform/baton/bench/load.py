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
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from typing import assert_never

from baton.bench.client.client import Api, CompletionRequest, Message
from baton.bench.prompts.datasets import DatasetRow
from baton.bench.prompts.word_prompts import WordCosts, WordPromptFactory
from baton.simulator.workloads import arrivals
from baton.simulator.workloads.trace import TraceRequest

_CACHED_BLOCKS = 4096
"""A few megabytes: the blocks that are asked for again and again."""


class ArrivalProcess(StrEnum):
    """How arrivals are spaced."""

    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A number of tokens, any from `low` to `high` with the same chance."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One of them."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticRequests:
    """Requests of random lengths."""

    prompt: TokenRange
    output: TokenRange
    shared_tokens: int = 0
    """At the front of each prompt, one of `shared_prompts` that requests have in common."""
    shared_prompts: int = 1
    classes: tuple[tuple[str, float], ...] = ()
    """SLO classes that requests ask for, and how often, in any unit."""

    def request(self, index: int, seed: str) -> TraceRequest:
        """Request `index`; the same for the same seed."""
        rng = random.Random(f"{seed} {index}")  # noqa: S311 - seeded, not secret
        prompt, output = self.prompt.draw(rng), self.output.draw(rng)
        shared_block_ids = (rng.randrange(self.shared_prompts),) if self.shared_tokens else ()
        names, weights = [name for name, _ in self.classes], [much for _, much in self.classes]
        return TraceRequest(
            at_s=0.0,
            prompt_tokens=max(prompt, self.shared_tokens),
            output_tokens=output,
            block_ids=shared_block_ids,
            slo_class=rng.choices(names, weights)[0] if names else None,
        )


@dataclass(frozen=True, slots=True)
class RecordedRequests:
    """The requests of a trace, in order, and again from the start when they are used up."""

    requests: tuple[TraceRequest, ...]

    def request(self, index: int, _seed: str) -> TraceRequest:
        """Request `index`."""
        return self.requests[index % len(self.requests)]


@dataclass(frozen=True, slots=True)
class DatasetRequests:
    """The prompts of a file, likewise; each says how long its answer shall be."""

    rows: tuple[DatasetRow, ...]

    def request(self, index: int, _seed: str) -> TraceRequest:
        """Request `index`; how long its prompt is, the endpoint will say."""
        output = self.rows[index % len(self.rows)].output_tokens
        assert output is not None, "a row without a length was let in"
        return TraceRequest(0.0, 0, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSource:
    """Where requests come from."""

    requests: SyntheticRequests | RecordedRequests | DatasetRequests
    api: Api
    seed: str
    """Of lengths and classes."""
    text_seed: str
    """Of what prompts say: with another no cache has them."""
    block_tokens: int = 16
    """Of what `block_ids` of the requests name."""
    vocabulary: int = 8_000
    """Prompts have token ids below this. No model of today knows fewer, and that they come from a
    corner of a larger vocabulary changes nothing about how long they take."""
    word_costs: WordCosts | None = None
    """To make prompts of words; None makes them of token ids."""
    slo_classes: tuple[str, ...] = ()
    """The SLO classes that may be asked for. Traces also name kinds of requests that are no classes
    of who serves them."""


class RequestFactory:
    """Makes the questions of a source."""

    def __init__(self, source: RequestSource) -> None:
        self._source = source
        block_tokens = source.block_tokens
        self._token_prompts = TokenPromptFactory(
            block_tokens=block_tokens, vocabulary=source.vocabulary, seed=source.text_seed
        )
        self._word_prompts = (
            None if source.word_costs is None else WordPromptFactory(source.word_costs)
        )

    def request(self, index: int) -> TraceRequest:
        """What request `index` is like."""
        request = self._source.requests.request(index, self._source.seed)
        return (
            request
            if request.slo_class in self._source.slo_classes
            else request._replace(slo_class=None)
        )

    def build_completion_request(
        self, index: int, request: TraceRequest, history: Sequence[Message] = ()
    ) -> CompletionRequest:
        """How it is asked, after what was said before in its conversation."""
        prompt = self._build_prompt(index, request, history)
        if self._source.api is Api.CHAT and isinstance(prompt, str):
            prompt = [*history, Message(role="user", content=prompt)]
        return CompletionRequest(
            prompt=prompt,
            output_tokens=request.output_tokens,
            session_id=request.session_id,
            slo_class=request.slo_class,
        )

    def _build_prompt(
        self, number: int, request: TraceRequest, history: Sequence[Message]
    ) -> Sequence[int] | str | Sequence[Message]:
        match self._source.requests:
            case DatasetRequests(rows):
                row = rows[number % len(rows)]
                return row.text if self._source.api is Api.COMPLETIONS else row.messages
            case SyntheticRequests() | RecordedRequests():
                if self._word_prompts is None:
                    return self._token_prompts.build_prompt(request, number)
                return self._build_text(
                    self._word_prompts, number, request, is_first_turn=not history
                )
            case _:
                assert_never(self._source.requests)

    def _build_text(
        self, words: WordPromptFactory, number: int, request: TraceRequest, *, is_first_turn: bool
    ) -> str:
        """Blocks with equal ids are equal runs of words, as they are of token ids."""
        block_tokens, seed = self._source.block_tokens, self._source.text_seed
        remaining_tokens = request.prompt_tokens
        text = ""
        for block in request.block_ids if is_first_turn else ():
            if remaining_tokens <= 0:
                break
            text += words.build_text(
                min(block_tokens, remaining_tokens), f"{seed} shared {block}", without_overhead=True
            )
            remaining_tokens -= block_tokens
        # What stands around a prompt is paid for once in a conversation, at its front.
        return (
            text
            + words.build_text(
                remaining_tokens, f"{seed} own {number}", without_overhead=not is_first_turn
            )
            if remaining_tokens > 0
            else text
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """What does not count, at a run's beginning: so many requests, or so long."""

    requests: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """One run's load."""

    source: RequestSource
    starts_s: tuple[float, ...] = ()
    """When threads come, from the run's beginning on, in open loop."""
    concurrency: int | None = None
    """Requests under way at any time in closed loop; None for an open one."""
    max_conversations: int | None = None
    """No more than so many, in closed loop; None until its time is over."""
    stop_starting_s: float = float("inf")
    """No thread begins later, in closed loop."""
    turns: int = 1
    think_s: float = 0.0
    """From an answer's end to the next turn."""
    warm_up: WarmUp = WarmUp()

    def is_measured(self, index: int, due_s: float) -> bool:
        """Whether a request is measured, or of the warm-up."""
        return index >= self.warm_up.requests and due_s >= self.warm_up.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLength:
    """How much is measured: so many requests, or so long; one of the two."""

    requests: int | None = None
    duration_s: float | None = None


def start_times(
    process: ArrivalProcess,
    rate_per_s: float,
    burstiness: float,
    *,
    warm_up: WarmUp,
    length: MeasuredLength,
    seed: str,
) -> tuple[float, ...]:
    """Times from 0 on at which threads come, of the warm-up and of what is measured.

    Raises:
        ValueError: a rate or a burstiness that is not above 0.
    """
    rng = random.Random(f"{seed} arrivals")  # noqa: S311 - seeded, not secret
    match process:
        case ArrivalProcess.CONSTANT:
            times_s = arrivals.constant(rate_per_s)
        case ArrivalProcess.POISSON:
            times_s = arrivals.poisson(rate_per_s, rng)
        case ArrivalProcess.GAMMA:
            times_s = arrivals.gamma(rate_per_s, burstiness, rng)
        case _:
            assert_never(process)
    warm_up_times_s = [next(times_s) for _ in range(warm_up.requests)]
    warm_up_end_s = warm_up_times_s[-1] if warm_up_times_s else 0.0
    if warm_up.duration_s:
        warm_up_times_s += arrivals.take_until(warm_up.duration_s, times_s)
        warm_up_end_s = warm_up.duration_s
    if length.requests is not None:
        return (*warm_up_times_s, *islice(times_s, length.requests))
    assert length.duration_s is not None, "neither a number of requests nor a duration"
    return (*warm_up_times_s, *arrivals.take_until(warm_up_end_s + length.duration_s, times_s))


class TokenPromptFactory:
    """Makes the token ids of prompts.

    Blocks with equal ids in the trace are equal runs of tokens; what a trace gives no id is like
    nothing else. What a model answers is its own, so a session's next prompt shares the earlier
    prompt with it, but not the earlier answer.
    """

    def __init__(self, *, block_tokens: int, vocabulary: int, seed: int | str = 0) -> None:
        if block_tokens < 1 or vocabulary < 1:
            raise ValueError(
                f"got blocks of {block_tokens} tokens and a vocabulary of {vocabulary}, expected at"
                " least 1 of each"
            )
        self._block_tokens = block_tokens
        self._vocabulary = vocabulary
        self._seed = seed
        self._cached_block = lru_cache(_CACHED_BLOCKS)(self._block)

    def build_prompt(self, request: TraceRequest, index: int) -> list[int]:
        """The token ids of request `index` of the trace."""
        block_tokens = self._block_tokens
        ids = request.block_ids[: -(-request.prompt_tokens // block_tokens)]
        token_ids: list[int] = []
        for block in ids:
            token_ids += self._cached_block(f"shared {block}")
        own_tokens = request.prompt_tokens - len(token_ids)
        if own_tokens > 0:
            token_ids += self._random_ids(f"own {index}", own_tokens)
        return token_ids[: request.prompt_tokens]

    def _block(self, name: str) -> list[int]:
        return self._random_ids(name, self._block_tokens)

    def _random_ids(self, name: str, tokens: int) -> list[int]:
        """Random ids, the same for the same name; fast, for prompts have up to a million."""
        rng = random.Random(f"{self._seed} {name}")  # noqa: S311 - made up, not secret
        random_numbers = array("I", rng.randbytes(4 * tokens))
        vocabulary = self._vocabulary
        return [random_number % vocabulary for random_number in random_numbers]
