"""Replays against a real HTTP server: when requests go out, and what is made of the answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from baton.bench.client.client import (
    ClientOptions,
    CompletionClient,
    CompletionRequest,
    EndpointUnusable,
    ServedModel,
)
from baton.bench.replay import Replay, ReplayOptions, ReplayResult
from baton.domain.errors import NotRunning
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.fakes.completion_server import (
    SSE_DONE,
    Behaviour,
    CompletionServer,
    ReceivedRequest,
    chunk,
    events,
    stream_all_tokens,
    token,
    usage,
)

MODEL = ServedModel(name="tiny", max_tokens=1000)


def trace_of(*requests: TraceRequest) -> Trace:
    return Trace(name="t", requests=requests, block_tokens=16)


def at_once(count: int) -> Trace:
    return trace_of(*(TraceRequest(5.0, 20 + number, 3) for number in range(count)))


async def replayed(
    server: CompletionServer,
    trace: Trace,
    *,
    stop: asyncio.Event | None = None,
    deadline_s: float = 60.0,
    max_in_flight: int = 100,
    model: ServedModel = MODEL,
) -> ReplayResult:
    async with (
        server.running(),
        CompletionClient(ClientOptions(url=server.url, timeout_s=deadline_s)) as client,
    ):
        options = ReplayOptions(max_in_flight=max_in_flight)
        replay = Replay(client, model, trace, options=options)
        return await replay.run(stop or asyncio.Event())


async def test_an_answer_is_measured_from_its_stream() -> None:
    server = CompletionServer()
    found = await replayed(server, trace_of(TraceRequest(0, 33, 4, (1, 2), "s-1")))
    (outcome,) = found.outcomes
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (33, 3, 4)
    assert outcome.ok
    assert 0 < outcome.ttft_s <= outcome.e2e_s
    decoding_s = outcome.e2e_s - outcome.ttft_s
    assert outcome.tpot_s == pytest.approx(decoding_s / 3)
    assert outcome.tpot_s <= outcome.max_itl_s <= decoding_s
    assert (found.failures, found.short_answers, found.unfinished) == ({}, 0, 0)


async def test_requests_are_those_of_the_trace() -> None:
    server = CompletionServer()
    await replayed(server, trace_of(TraceRequest(0, 33, 4, (1, 2), "s-1ä")))
    (asked,) = server.requests
    assert len(asked.body["prompt"]) == 33
    assert (asked.body["model"], asked.body["max_tokens"]) == ("tiny", 4)
    assert asked.body["ignore_eos"] is asked.body["stream"] is True
    assert asked.body["stream_options"] == {"include_usage": True}
    assert asked.headers["x-session-id"] == "s-1&#228;"


async def test_no_request_waits_for_an_answer_to_another() -> None:
    all_there = asyncio.Event()

    async def hold(asked: ReceivedRequest) -> AsyncIterator[str]:
        if len(server.requests) == 20:
            all_there.set()
        await all_there.wait()
        async for event in stream_all_tokens(asked):
            yield event

    server = CompletionServer(behaviour=hold)
    found = await replayed(server, at_once(20))
    assert [outcome.prompt_tokens for outcome in found.outcomes] == list(range(20, 40))
    assert all(outcome.ok for outcome in found.outcomes)


async def test_no_request_is_sent_before_it_is_due() -> None:
    sent_at_s = []

    async def note(asked: ReceivedRequest) -> AsyncIterator[str]:
        sent_at_s.append(asyncio.get_running_loop().time())
        async for event in stream_all_tokens(asked):
            yield event

    trace = trace_of(*(TraceRequest(7 + number / 10, 20, 2) for number in range(4)))
    begun_s = asyncio.get_running_loop().time()
    found = await replayed(CompletionServer(behaviour=note), trace)
    assert [outcome.arrived_at_s for outcome in found.outcomes] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert all(at >= begun_s + number / 10 for number, at in enumerate(sent_at_s))


async def test_latency_counts_from_the_due_time_while_a_request_waits_for_a_slot() -> None:
    async def slow(asked: ReceivedRequest) -> AsyncIterator[str]:
        await asyncio.sleep(0.05)  # what is measured
        async for event in stream_all_tokens(asked):
            yield event

    found = await replayed(CompletionServer(behaviour=slow), at_once(3), max_in_flight=1)
    assert found.late_sends == 2
    assert found.max_late_s >= 0.09
    ttfts = [outcome.ttft_s for outcome in found.outcomes]
    assert ttfts == sorted(ttfts)
    assert ttfts[2] >= 0.14


async def test_prompts_that_are_too_long_are_cut_and_outputs_that_are_leave_a_request_out() -> None:
    trace = trace_of(TraceRequest(0, 900, 100), TraceRequest(0, 950, 100), TraceRequest(0, 5, 1000))
    server = CompletionServer(behaviour=lambda _: quick())

    async def quick() -> AsyncIterator[str]:
        yield token(last=True)
        yield usage(100)

    found = await replayed(server, trace)
    assert [len(request.body["prompt"]) for request in server.requests] == [900, 900]
    assert (found.truncated_prompts, found.skipped_too_long, found.unfinished) == (1, 1, 0)
    unbounded = await replayed(
        CompletionServer(behaviour=lambda _: quick()), trace, model=ServedModel(name="tiny")
    )
    assert (unbounded.truncated_prompts, len(unbounded.outcomes)) == (0, 3)


async def test_a_stop_leaves_out_what_has_not_ended() -> None:
    stop = asyncio.Event()

    async def first_only(asked: ReceivedRequest) -> AsyncIterator[str]:
        if len(asked.body["prompt"]) > 20:
            yield token()
            stop.set()
            await asyncio.Event().wait()
        async for event in stream_all_tokens(asked):
            yield event

    requests = (TraceRequest(0, 20, 3), TraceRequest(0.05, 21, 3), TraceRequest(1e6, 22, 3))
    found = await replayed(CompletionServer(behaviour=first_only), trace_of(*requests), stop=stop)
    assert [outcome.prompt_tokens for outcome in found.outcomes] == [20]
    assert found.unfinished == 2


async def test_a_stop_ends_the_wait_for_a_slot_too() -> None:
    stop = asyncio.Event()

    async def never(_: ReceivedRequest) -> AsyncIterator[str]:
        stop.set()
        await asyncio.Event().wait()
        yield SSE_DONE

    found = await replayed(
        CompletionServer(behaviour=never), at_once(3), stop=stop, max_in_flight=1
    )
    assert (found.outcomes, found.unfinished) == ((), 3)


@pytest.mark.parametrize(
    ("behaviour", "failure", "tokens"),
    [
        (events("503 Busy", '{"error": {"message": "come back"}}'), "HTTP 503: come back", 0),
        (events("400 Bad", '{"message": "too long"}'), "HTTP 400: too long", 0),
        (events("500 Oops", "<html>"), "HTTP 500: <html>", 0),
        (
            events(token(), chunk(error={"message": "died"}), SSE_DONE),
            "error in the stream: died",
            1,
        ),
        (events(token(), token()), "the stream ended early", 2),
        (events(token(), SSE_DONE), "the stream ended early", 1),
        (events("data: {nonsense\n\n"), "not the stream of a completion", 0),
    ],
)
async def test_an_error_is_a_failed_outcome_with_its_cause(
    behaviour: Behaviour, failure: str, tokens: int
) -> None:
    found = await replayed(CompletionServer(behaviour=behaviour), at_once(2))
    assert found.failures == {failure: 2}
    for outcome in found.outcomes:
        assert not outcome.ok
        assert outcome.output_tokens == tokens
        assert math.isinf(outcome.ttft_s) == (tokens == 0)
        assert math.isfinite(outcome.e2e_s)


async def test_an_answer_past_its_deadline_ends_with_its_tokens_so_far() -> None:
    async def stuck(_: ReceivedRequest) -> AsyncIterator[str]:
        yield token()
        await asyncio.Event().wait()

    found = await replayed(CompletionServer(behaviour=stuck), at_once(1), deadline_s=0.3)
    assert found.failures == {"not finished within 0.3 s": 1}
    (outcome,) = found.outcomes
    assert (outcome.ok, outcome.output_tokens) == (False, 1)
    assert outcome.ttft_s < 0.3 <= outcome.e2e_s


async def test_a_connection_that_breaks_is_a_failure() -> None:
    async with CompletionClient(ClientOptions(url="http://127.0.0.1:1")) as client:
        question = client.encode("tiny", CompletionRequest(prompt=[1], output_tokens=1))
        answer = await client.complete(question)
    assert (answer.failure_kind, answer.failure) == (
        "connection",
        "connection: ClientConnectorError",
    )


async def test_tokens_are_counted_where_the_endpoint_does_not() -> None:
    found = await replayed(
        CompletionServer(behaviour=events(token(), token(last=True), SSE_DONE)), at_once(1)
    )
    assert (found.outcomes[0].output_tokens, found.short_answers) == (2, 0)


async def test_answers_that_are_too_short_are_counted() -> None:
    behaviour = events(token(), token(last=True), usage(2), SSE_DONE)
    found = await replayed(CompletionServer(behaviour=behaviour), at_once(2))
    assert found.short_answers == 2
    assert all(outcome.ok for outcome in found.outcomes)


async def test_the_model_is_the_one_that_is_named_or_the_first() -> None:
    models = '{"data": [{"id": "a", "max_model_len": 5}, {"id": "b", "other": 1}]}'
    async with CompletionServer(models=models).running() as server:
        for url in (server.url, server.url + "/v1/"):
            async with CompletionClient(ClientOptions(url=url)) as client:
                assert await client.get_model() == ServedModel(name="a", max_tokens=5)
                assert await client.get_model("b") == ServedModel(name="b")
                with pytest.raises(
                    EndpointUnusable, match="got 'c', which is not served; served: a, b"
                ):
                    await client.get_model("c")


@pytest.mark.parametrize("models", ["<html>", '{"data": 3}', '{"data": []}'])
async def test_an_endpoint_without_models_is_unusable(models: str) -> None:
    async with (
        CompletionServer(models=models).running() as server,
        CompletionClient(ClientOptions(url=server.url)) as client,
    ):
        with pytest.raises(EndpointUnusable):
            await client.get_model()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[oops"])
async def test_where_nothing_answers_the_error_says_so(url: str) -> None:
    try:
        async with CompletionClient(ClientOptions(url=url)) as client:
            await client.get_model()
    except (NotRunning, EndpointUnusable) as error:
        assert url in error.reason  # noqa: PT017 - either of two places may raise it
    else:
        pytest.fail("something answered")
