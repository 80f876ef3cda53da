"""Loads come in open loop, and clients write down what they see over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest

from tests.chaos.history import Ending, Exchange
from tests.chaos.load import HttpClient, Load, copy_requests, open_loop, send_sequentially
from tests.fakes.completion_server import (
    SSE_DONE,
    Behaviour,
    CompletionServer,
    ReceivedRequest,
    chunk,
)


def token(number: int, *, last: bool = False) -> str:
    finish = "length" if last else None
    return chunk(choices=[{"text": "a", "token_ids": [number], "finish_reason": finish}])


async def well(asked: ReceivedRequest) -> AsyncIterator[str]:
    """As many tokens as are asked for, counted from the prompt's last."""
    last = asked.body["prompt"][-1]
    for number in range(asked.body["max_tokens"]):
        yield token(last + number + 1, last=number == asked.body["max_tokens"] - 1)
    yield SSE_DONE


async def asked_of(behaviour: Behaviour, *, deadline_s: float = 5.0) -> Exchange:
    """What a client writes down of one request."""
    exchange = Exchange(request_id="a-name", prompt=(3, 4), max_tokens=3)
    async with CompletionServer(behaviour).running() as server, HttpClient(server.url) as client:
        await send_sequentially([exchange], client.send, deadline_s=deadline_s)
    return exchange


def test_a_load_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    load = Load(rate_per_s=10, requests=20)
    assert load.plan_requests() == load.plan_requests()
    other = Load(rate_per_s=10, requests=20, seed=1)
    assert [plan_request.prompt for plan_request in load.plan_requests()] != [
        plan_request.prompt for plan_request in other.plan_requests()
    ]


def test_arrivals_are_at_the_rate_that_is_asked_for() -> None:
    planned = Load(rate_per_s=50, requests=2000, prompt_tokens=(1, 2)).plan_requests()
    times = [exchange.planned_at_s for exchange in planned]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(40, rel=0.1)
    assert len({exchange.request_id for exchange in planned}) == 2000


def test_lengths_and_ids_are_within_what_is_asked_for_and_prompts_share_beginnings() -> None:
    load = Load(
        rate_per_s=1,
        requests=200,
        prompt_tokens=(10, 40),
        output_tokens=(2, 5),
        shared_prompts=2,
        vocabulary=(30, 60),
    )
    planned = load.plan_requests()
    assert {len(exchange.prompt) for exchange in planned} == set(range(10, 41))
    assert {exchange.max_tokens for exchange in planned} == {2, 3, 4, 5}
    assert {token for exchange in planned for token in exchange.prompt} == set(range(30, 60))
    assert len({exchange.prompt[:9] for exchange in planned}) == 2
    assert len({exchange.prompt for exchange in planned}) > 190


async def test_requests_come_at_their_times_however_long_others_take() -> None:
    begun_s: list[float] = []

    async def ask(exchange: Exchange) -> None:
        begun_s.append(time.monotonic())
        await asyncio.sleep(0.2)

    load = Load(rate_per_s=200, requests=20)
    started_s = time.monotonic()
    exchanges = await open_loop(load, ask)
    lag_s = [
        at_s - started_s - other.planned_at_s
        for at_s, other in zip(begun_s, exchanges, strict=True)
    ]
    assert min(lag_s) >= 0
    assert max(lag_s) < 1, "they waited for each other"


async def test_a_request_past_its_deadline_has_no_ending() -> None:
    async def hang(_: Exchange) -> None:
        await asyncio.Event().wait()

    (exchange,) = await open_loop(Load(rate_per_s=1000, requests=1, deadline_s=0.02), hang)
    assert exchange.endings == []
    assert "no end within 0.02 s" in exchange.reason


async def test_a_stream_is_written_down_with_its_tokens_and_times() -> None:
    exchange = await asked_of(well)
    assert (exchange.status, exchange.endings, exchange.tokens) == (
        200,
        [Ending.FINISHED],
        [5, 6, 7],
    )
    assert len(exchange.times_s) == 3
    assert exchange.sent_at_s < exchange.times_s[0] <= (exchange.ended_at_s or 0)


async def test_a_client_sends_the_planned_requests() -> None:
    server = CompletionServer(well)
    exchange = Exchange(request_id="a-name", prompt=(3, 4), max_tokens=3)
    async with (
        server.running(),
        HttpClient(server.url, headers={"Authorization": "Bearer key"}) as client,
    ):
        await client.send(exchange)
    (asked,) = server.requests
    assert asked.body["prompt"] == [3, 4]
    assert (asked.body["temperature"], asked.body["return_token_ids"]) == (0, True)
    assert (asked.headers["x-request-id"], asked.headers["authorization"]) == (
        "a-name",
        "bearer key",
    )


async def cut(_: ReceivedRequest) -> AsyncIterator[str]:
    yield token(5)
    yield token(6)


async def done_early(_: ReceivedRequest) -> AsyncIterator[str]:
    yield token(5)
    yield SSE_DONE


async def done_twice(_: ReceivedRequest) -> AsyncIterator[str]:
    yield token(5, last=True)
    yield SSE_DONE
    yield SSE_DONE


async def error_inside(_: ReceivedRequest) -> AsyncIterator[str]:
    yield token(5)
    yield f"data: {json.dumps({'error': {'message': 'the engine died'}})}\n\n"
    yield SSE_DONE


async def nonsense(_: ReceivedRequest) -> AsyncIterator[str]:
    yield "data: {not json\n\n"


@pytest.mark.parametrize(
    ("behaviour", "endings", "why"),
    [
        (cut, [Ending.CUT], "without [DONE]"),
        (done_early, [Ending.CUT], "finish reason None"),
        (done_twice, [Ending.FINISHED, Ending.CUT], ""),
        (error_inside, [Ending.FAILED], "the engine died"),
        (nonsense, [Ending.CUT], "DecodeError"),
    ],
)
async def test_a_stream_that_does_not_end_well_is_not_taken_for_one_that_does(
    behaviour: Behaviour, endings: list[Ending], why: str
) -> None:
    exchange = await asked_of(behaviour)
    assert exchange.endings == endings
    assert why in exchange.reason


@pytest.mark.parametrize(
    ("response", "status", "retry_after_s", "ending"),
    [
        ("503 Busy\r\nRetry-After: 2", 503, 2.0, Ending.REJECTED),
        ("500 Oh", 500, None, Ending.FAILED),
    ],
    ids=["a refusal", "another error"],
)
async def test_a_rejected_request_gets_the_reason_and_a_retry_time(
    response: str, status: int, retry_after_s: float | None, ending: Ending
) -> None:
    async def refuse(_: ReceivedRequest) -> AsyncIterator[str]:
        yield response
        yield "too much to do"

    exchange = await asked_of(refuse)
    assert (exchange.status, exchange.retry_after_s) == (status, retry_after_s)
    assert (exchange.endings, exchange.reason) == ([ending], "too much to do")


async def test_a_missing_listener_is_a_cut_and_a_mute_server_never_ends() -> None:
    exchange = Exchange(request_id="a", prompt=(3,), max_tokens=3)
    async with HttpClient("http://127.0.0.1:9") as client:
        await send_sequentially([exchange], client.send, deadline_s=5)
    assert exchange.endings == [Ending.CUT]

    async def mute(_: ReceivedRequest) -> AsyncIterator[str]:
        yield token(5)
        await asyncio.sleep(0.3)

    assert (await asked_of(mute, deadline_s=0.1)).endings == []


def test_the_same_requests_can_be_sent_again_by_other_names() -> None:
    first = Load(rate_per_s=10, requests=3).plan_requests()
    second = copy_requests(first, "second")
    assert [exchange.prompt for exchange in second] == [exchange.prompt for exchange in first]
    assert [exchange.request_id for exchange in second] == ["second-0", "second-1", "second-2"]
    assert all(exchange.status is None and not exchange.tokens for exchange in second)
