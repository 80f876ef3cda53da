"""The same requests for every system: prompts of several lengths alone, and several streams."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import msgspec
import uvloop

from benchmarks._load import Exchange, Undisturbed
from benchmarks._real_load import PatientClient
from benchmarks._statistics import dechunk, events

_DONE = b"[DONE]"
_FEWEST_CHUNKS = 3
"""For a gap before the second token and one after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """What is asked of a system."""

    model: str
    first_word: int
    """Prompts are random ids from here ..."""
    last_word: int
    """... to here."""
    prompts_tokens: Sequence[int]
    rounds: int
    """Requests of each length, one at a time."""
    answer_tokens: int
    """Of those."""
    streams: Sequence[int]
    """How many at once."""
    stream_prompt_tokens: int
    stream_tokens: int


class LadderFailedError(RuntimeError):
    """A request that failed, or ended too soon."""


class _Chunk(msgspec.Struct):
    choices: list[object] = []
    error: object = None


_CHUNK = msgspec.json.Decoder(_Chunk)


def climb(url: str, ladder: Ladder, *, seed: int) -> dict[str, object]:
    """Send everything, and say how long it took.

    Raises:
        LadderFailedError: not everything was answered whole.
    """
    rng = random.Random(seed)  # noqa: S311 - a load, no secret

    def bodies(count: int, prompt_tokens: int, max_tokens: int) -> list[bytes]:
        return [_body(rng, ladder, prompt_tokens, max_tokens) for _ in range(count)]

    # What is compiled, loaded or shaken hands over at first use.
    for tokens in ladder.prompts_tokens:
        _sent(url, bodies(1, tokens, 4), at_once=False)
    _sent(url, bodies(max(ladder.streams), ladder.stream_prompt_tokens, 8), at_once=True)
    alone = [
        _alone(url, tokens, bodies(ladder.rounds, tokens, ladder.answer_tokens))
        for tokens in ladder.prompts_tokens
    ]
    together = [
        _together(url, bodies(count, ladder.stream_prompt_tokens, ladder.stream_tokens))
        for count in ladder.streams
    ]
    return {"alone": alone, "together": together}


def _body(rng: random.Random, ladder: Ladder, prompt_tokens: int, max_tokens: int) -> bytes:
    ids = [rng.randint(ladder.first_word, ladder.last_word) for _ in range(prompt_tokens)]
    return json.dumps(
        {
            "model": ladder.model,
            "prompt": ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()


def _alone(url: str, prompt_tokens: int, bodies: Sequence[bytes]) -> dict[str, object]:
    answers = _sent(url, bodies, at_once=False)
    gaps_s = [[b - a for a, b in pairwise(times_s)] for times_s in answers]
    return {
        "prompt_tokens": prompt_tokens,
        "ttft_s": [times_s[0] for times_s in answers],
        "ttft_p50_s": median(times_s[0] for times_s in answers),
        "second_token_gap_p50_s": median(one[0] for one in gaps_s),
        "later_gap_p50_s": median(gap for one in gaps_s for gap in one[1:]),
    }


def _together(url: str, bodies: Sequence[bytes]) -> dict[str, object]:
    answers = _sent(url, bodies, at_once=True)
    tpots_s = [(times_s[-1] - times_s[0]) / (len(times_s) - 1) for times_s in answers]
    tokens = sum(map(len, answers))
    # Where everybody decodes: a first token may come while others are still prefilled.
    from_s = max(times_s[0] for times_s in answers)
    until_s = min(times_s[-1] for times_s in answers)
    steady = [
        gap
        for times_s in answers
        for gap in (b - a for a, b in pairwise(times_s) if a >= from_s and b <= until_s)
    ]
    return {
        "streams": len(bodies),
        "tpot_p50_s": median(tpots_s),
        "tpot_max_s": max(tpots_s),
        "steady_gap_p50_s": median(steady) if steady else None,
        "ttft_p50_s": median(times_s[0] for times_s in answers),
        "tokens_per_s": tokens / max(times_s[-1] for times_s in answers),
    }


def _sent(url: str, bodies: Sequence[bytes], *, at_once: bool) -> list[list[float]]:
    """For each request, when its tokens came after it was sent."""

    async def run() -> list[Exchange]:
        client = PatientClient(url)
        try:
            await client.open(len(bodies) if at_once else 1)
            if at_once:
                return await client.at_times(bodies, [0.0] * len(bodies))
            return await client.one_by_one(bodies)
        finally:
            client.close()

    with Undisturbed():
        exchanges: list[Exchange] = uvloop.run(run())
    return [_times_s(one) for one in exchanges]


def _times_s(exchange: Exchange) -> list[float]:
    if exchange.problem:
        raise LadderFailedError(exchange.problem)
    times_s: list[float] = []
    ended = False
    for at_s, data in events(dechunk(exchange.body())):
        if data == _DONE:
            ended = True
            continue
        chunk = _CHUNK.decode(data)
        if not chunk.choices:
            raise LadderFailedError(f"no completion chunk: {data[:300]!r}")
        times_s.append(at_s - exchange.sent_at_s)
    if not ended or len(times_s) < _FEWEST_CHUNKS:
        raise LadderFailedError(f"{len(times_s)} chunks, ended: {ended}")
    return times_s
