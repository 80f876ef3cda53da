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

from benchmarks._load import Exchange, GcDisabled
from benchmarks._real_load import TimeoutClient
from benchmarks._statistics import dechunk, events

_DONE = b"[DONE]"
_MIN_CHUNKS = 3
"""For a gap before the second token and one after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What is asked of a system."""

    model: str
    first_token_id: int
    """Prompts are random ids from here ..."""
    last_token_id: int
    """... to here."""
    prompt_lengths_tokens: Sequence[int]
    rounds: int
    """Requests of each length, one at a time."""
    output_tokens: int
    """Of those."""
    concurrencies: Sequence[int]
    """How many at once."""
    stream_prompt_tokens: int
    stream_tokens: int


class LoadFailedError(RuntimeError):
    """A request that failed, or ended too soon."""


class _Chunk(msgspec.Struct):
    choices: list[object] = []
    error: object = None


_CHUNK_DECODER = msgspec.json.Decoder(_Chunk)


def run_load(url: str, plan: LoadPlan, *, seed: int) -> dict[str, object]:
    """Send everything, and say how long it took.

    Raises:
        LoadFailedError: not everything was answered whole.
    """
    rng = random.Random(seed)  # noqa: S311 - a load, no secret

    def bodies(count: int, prompt_tokens: int, max_tokens: int) -> list[bytes]:
        return [_body(rng, plan, prompt_tokens, max_tokens) for _ in range(count)]

    # What is compiled, loaded or shaken hands over at first use.
    for tokens in plan.prompt_lengths_tokens:
        _send(url, bodies(1, tokens, 4), concurrently=False)
    _send(url, bodies(max(plan.concurrencies), plan.stream_prompt_tokens, 8), concurrently=True)
    sequential_metrics = [
        _measure_sequential(url, tokens, bodies(plan.rounds, tokens, plan.output_tokens))
        for tokens in plan.prompt_lengths_tokens
    ]
    concurrent_metrics = [
        _measure_concurrent(url, bodies(count, plan.stream_prompt_tokens, plan.stream_tokens))
        for count in plan.concurrencies
    ]
    return {"alone": sequential_metrics, "together": concurrent_metrics}


def _body(rng: random.Random, plan: LoadPlan, prompt_tokens: int, max_tokens: int) -> bytes:
    ids = [rng.randint(plan.first_token_id, plan.last_token_id) for _ in range(prompt_tokens)]
    return json.dumps(
        {
            "model": plan.model,
            "prompt": ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()


def _measure_sequential(url: str, prompt_tokens: int, bodies: Sequence[bytes]) -> dict[str, object]:
    token_times = _send(url, bodies, concurrently=False)
    gaps_s = [[b - a for a, b in pairwise(times_s)] for times_s in token_times]
    return {
        "prompt_tokens": prompt_tokens,
        "ttft_s": [times_s[0] for times_s in token_times],
        "ttft_p50_s": median(times_s[0] for times_s in token_times),
        "second_token_gap_p50_s": median(item[0] for item in gaps_s),
        "later_gap_p50_s": median(gap for item in gaps_s for gap in item[1:]),
    }


def _measure_concurrent(url: str, bodies: Sequence[bytes]) -> dict[str, object]:
    token_times = _send(url, bodies, concurrently=True)
    tpots_s = [(times_s[-1] - times_s[0]) / (len(times_s) - 1) for times_s in token_times]
    tokens = sum(map(len, token_times))
    # Where everybody decodes: a first token may come while others are still prefilled.
    all_decoding_from_s = max(times_s[0] for times_s in token_times)
    all_decoding_until_s = min(times_s[-1] for times_s in token_times)
    steady_gaps_s = [
        gap
        for times_s in token_times
        for gap in (
            b - a
            for a, b in pairwise(times_s)
            if a >= all_decoding_from_s and b <= all_decoding_until_s
        )
    ]
    return {
        "streams": len(bodies),
        "tpot_p50_s": median(tpots_s),
        "tpot_max_s": max(tpots_s),
        "steady_gap_p50_s": median(steady_gaps_s) if steady_gaps_s else None,
        "ttft_p50_s": median(times_s[0] for times_s in token_times),
        "tokens_per_s": tokens / max(times_s[-1] for times_s in token_times),
    }


def _send(url: str, bodies: Sequence[bytes], *, concurrently: bool) -> list[list[float]]:
    """For each request, when its tokens came after it was sent."""

    async def run() -> list[Exchange]:
        client = TimeoutClient(url)
        try:
            await client.open(len(bodies) if concurrently else 1)
            if concurrently:
                return await client.send_at_times(bodies, [0.0] * len(bodies))
            return await client.send_sequentially(bodies)
        finally:
            client.close()

    with GcDisabled():
        exchanges: list[Exchange] = uvloop.run(run())
    return [_token_times_s(exchange) for exchange in exchanges]


def _token_times_s(exchange: Exchange) -> list[float]:
    if exchange.error:
        raise LoadFailedError(exchange.error)
    times_s: list[float] = []
    is_done = False
    for at_s, data in events(dechunk(exchange.body())):
        if data == _DONE:
            is_done = True
            continue
        chunk = _CHUNK_DECODER.decode(data)
        if not chunk.choices:
            raise LoadFailedError(f"no completion chunk: {data[:300]!r}")
        times_s.append(at_s - exchange.sent_at_s)
    if not is_done or len(times_s) < _MIN_CHUNKS:
        raise LoadFailedError(f"{len(times_s)} chunks, ended: {is_done}")
    return times_s
