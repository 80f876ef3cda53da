"""Replays against the endpoint: what the client of traces asks for is understood and answered."""

from __future__ import annotations

import asyncio

from baton.bench.client.client import ClientOptions, CompletionClient
from baton.bench.replay import Replay, ReplayOptions, ReplayResult
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.compat.endpoint import Server


async def replayed(server: Server, trace: Trace) -> ReplayResult:
    async with CompletionClient(ClientOptions(url=server.base_url, timeout_s=60)) as client:
        model = await client.get_model()
        assert (model.name, model.max_tokens) == (server.model, server.max_len_tokens)
        replay = Replay(client, model, trace, options=ReplayOptions())
        return await replay.run(asyncio.Event())


async def test_a_trace_is_answered_with_the_lengths_that_it_says(server: Server) -> None:
    requests = [
        TraceRequest(number / 50, 40 + number, 5 + number, (number // 2, 9), f"s{number % 3}")
        for number in range(10)
    ]
    too_long = TraceRequest(0.2, server.max_len_tokens + 7, 4)
    trace = Trace(name="t", requests=(*requests, too_long), block_tokens=16)
    found = await replayed(server, trace)
    assert (found.failures, found.short_answers, found.truncated_prompts) == ({}, 0, 1)
    lengths = [(outcome.prompt_tokens, outcome.output_tokens) for outcome in found.outcomes]
    assert lengths == [
        *((request[1], request[2]) for request in requests),
        (server.max_len_tokens - 4, 4),
    ]
    for outcome in found.outcomes:
        assert outcome.ok
        # This server answers at once, so that all tokens may come in one piece.
        assert 0 < outcome.ttft_s <= outcome.e2e_s
        assert outcome.tpot_s >= 0
