"""The requests of a load and their times: equal for equal seeds, however processes share them.

*Theory of operation.* A load is a sequence of conversations of one or more turns. In open loop each
has a start time, regardless of the endpoint. In closed loop as many streams as requests in flight
each begin the next conversation when their last has ended. Request `n` depends on `n` and the seed
alone, so that processes can share a load without communication. Lengths, arrivals and shared
prefixes come from the simulator's generators.
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
"""A few megabytes of frequent blocks."""


class ArrivalProcess(StrEnum):
    """The distribution of gaps between arrivals."""

    CONSTANT = "constant"
    POISSON = "poisson"
    GAMMA = "gamma"


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A uniform number of tokens from `low` to `high`."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """A random number of them."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticRequests:
    """Requests of random lengths."""

    prompt: TokenRange
    output: TokenRange
    shared_tokens: int = 0
    """Length of the prefix of each prompt, one of `shared_prompts`."""
    shared_prompts: int = 1
    classes: tuple[tuple[str, float], ...] = ()
    """Requested SLO classes and their weights."""

    def request(self, index: int, seed: str) -> TraceRequest:
        """Request `index`; equal for equal seeds."""
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
    """The requests of a trace, in order, repeated from the start at its end."""

    requests: tuple[TraceRequest, ...]

    def request(self, index: int, _seed: str) -> TraceRequest:
        """Request `index`."""
        return self.requests[index % len(self.requests)]


@dataclass(frozen=True, slots=True)
class DatasetRequests:
    """The prompts of a file, likewise, with their output lengths."""

    rows: tuple[DatasetRow, ...]

    def request(self, index: int, _seed: str) -> TraceRequest:
        """Request `index`; only the endpoint knows the length of its prompt."""
        output = self.rows[index % len(self.rows)].output_tokens
        assert output is not None, "a row without a length was accepted"
        return TraceRequest(0.0, 0, output)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSource:
    """The source of a load's requests."""

    requests: SyntheticRequests | RecordedRequests | DatasetRequests
    api: Api
    seed: str
    text_seed: str
    """Of texts: another seed makes prompts that are in no cache."""
    block_tokens: int = 16
    vocabulary: int = 8_000
    """Token ids of prompts are smaller. Current models have larger vocabularies; ids do not affect
    times."""
    word_costs: WordCosts | None = None
    """To make prompts of words; None makes them of token ids."""
    slo_classes: tuple[str, ...] = ()
    """SLO classes that may be requested; traces also name kinds of requests that are none."""


class RequestFactory:
    """Makes the requests of a source."""

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
        """The lengths and class of request `index`."""
        request = self._source.requests.request(index, self._source.seed)
        return (
            request
            if request.slo_class in self._source.slo_classes
            else request._replace(slo_class=None)
        )

    def build_completion_request(
        self, index: int, request: TraceRequest, history: Sequence[Message] = ()
    ) -> CompletionRequest:
        """The request for an answer, after its conversation's `history`."""
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
        """Blocks with equal ids are equal words."""
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
        # A chat template's tokens count once in a conversation, at its front.
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
    """The part of a run, in requests or seconds, that is not measured."""

    requests: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The load of one run."""

    source: RequestSource
    starts_s: tuple[float, ...] = ()
    """In open loop: start times of conversations."""
    concurrency: int | None = None
    """In closed loop: requests in flight; else None."""
    max_conversations: int | None = None
    """In closed loop: None for no limit but the time."""
    stop_starting_s: float = float("inf")
    """In closed loop: no conversation begins later."""
    turns: int = 1
    think_s: float = 0.0
    warm_up: WarmUp = WarmUp()

    def is_measured(self, index: int, due_s: float) -> bool:
        """Whether a request is after the warm-up."""
        return index >= self.warm_up.requests and due_s >= self.warm_up.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLength:
    """The measured part of a run: either requests or seconds."""

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
    """Start times of conversations from 0 on, of the warm-up and the measured part.

    Raises:
        ValueError: a rate or burstiness is not above 0.
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

    Blocks with equal ids in the trace are equal tokens; all other tokens are unique. Answers are
    the model's own, so a session's next prompt shares the earlier prompt, but not the earlier
    answer.
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
        """Random ids, equal for equal names; fast, because prompts may have a million."""
        rng = random.Random(f"{self._seed} {name}")  # noqa: S311 - made up, not secret
        random_numbers = array("I", rng.randbytes(4 * tokens))
        vocabulary = self._vocabulary
        return [random_number % vocabulary for random_number in random_numbers]
