from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.simulator.engine.settings import SimSettings
from benchmarks._figures import (
    BadStreamError,
    Segment,
    dechunk,
    events,
    read_stream,
)
from benchmarks._load import Client, Exchange
from benchmarks._report import (
    BARE,
    FEW,
    LOCAL,
    MANY,
    PD,
    SINGLE,
    Measured,
    Phase,
    describe,
    handoff_s,
    summarize,
)
from benchmarks._systems import API, ENGINE, HAPROXY, OTHER


def chunked(*bodies: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in bodies) + b"0\r\n\r\n"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token(text: str = "x") -> bytes:
    return event({"choices": [{"text": text}], "usage": None})


def usage(tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}})


DONE = b"data: [DONE]\n\n"


# ------------------------------------------------------------------ streams


@given(
    bodies=st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    cuts=st.lists(st.integers(min_value=1, max_value=30), min_size=1, max_size=40),
)
def test_chunks_come_out_as_they_went_in_however_the_bytes_were_cut(
    bodies: list[bytes], cuts: list[int]
) -> None:
    data = chunked(*bodies)
    segments: list[Segment] = []
    while data:
        size = cuts[len(segments) % len(cuts)]
        segments.append((float(len(segments)), data[:size]))
        data = data[size:]

    found = list(dechunk(segments))

    assert [body for _, body in found] == bodies
    times_s = [at_s for at_s, _ in found]
    assert times_s == sorted(times_s)


def test_a_chunk_has_arrived_when_its_last_byte_has() -> None:
    data = chunked(b"abcdef", b"gh")
    first_end = data.index(b"f") + 1
    segments = [(1.0, data[: first_end - 1]), (2.0, data[first_end - 1 : first_end])]
    segments.append((3.0, data[first_end:]))

    assert list(dechunk(segments)) == [(2.0, b"abcdef"), (3.0, b"gh")]


@pytest.mark.parametrize("data", [b"", b"5\r\nabc", b"zz\r\nabc\r\n", b"3\r\nabc\r\n"])
def test_half_a_body_is_an_error(data: bytes) -> None:
    with pytest.raises(BadStreamError):
        list(dechunk([(0.0, data)]))


def test_an_event_that_spans_chunks_is_timed_by_its_end() -> None:
    whole = token("a")

    found = list(events([(1.0, whole[:10]), (2.0, whole[10:] + token("b"))]))

    assert [at_s for at_s, _ in found] == [2.0, 2.0]
    assert [json.loads(data)["choices"][0]["text"] for _, data in found] == ["a", "b"]


def stream_segments(times_s: Sequence[float], tokens: int) -> list[Segment]:
    segments: list[Segment] = [
        (at_s, b"%x\r\n%s\r\n" % (len(token()), token())) for at_s in times_s
    ]
    segments.append((times_s[-1] + 1.0, chunked(usage(tokens), DONE)))
    return segments


def test_a_stream_is_measured_from_first_to_last_token_and_not_to_the_usage_event() -> None:
    stream = read_stream(9.0, stream_segments([10.0, 10.5, 12.0], tokens=3))

    assert stream.ttft_s == 1.0
    assert stream.tpot_s == 1.0
    assert stream.gap_max_s == 1.5
    assert (stream.tokens, stream.prompt_tokens, stream.chunks) == (3, 9, 3)


def test_tokens_that_came_in_one_event_are_counted_by_the_server() -> None:
    stream = read_stream(0.0, stream_segments([1.0, 3.0], tokens=5))

    assert stream.tpot_s == 0.5
    assert (stream.tokens, stream.chunks) == (5, 2)


@pytest.mark.parametrize(
    "bodies",
    [
        (token(), DONE),
        (token(), usage(1)),
        (usage(0), DONE),
        (event({"error": {"message": "no"}}), DONE),
        (b"data: {\n\n", DONE),
    ],
    ids=["no usage", "no end", "no token", "an error", "no JSON"],
)
def test_a_stream_that_is_not_complete_is_an_error(bodies: tuple[bytes, ...]) -> None:
    with pytest.raises(BadStreamError):
        read_stream(0.0, [(1.0, chunked(*bodies))])


async def answers(pieces: Sequence[bytes], requests: Sequence[bytes]) -> list[Exchange]:
    """What the client makes of a server that answers every request with these pieces."""

    closed: list[asyncio.Event] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closed.append(asyncio.Event())
        own = closed[-1]
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])
            own.set()

    async with asyncio.timeout(10), await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await client.open(1)
        exchanges = await client.one_by_one(requests)
        assert client.late_connections == sum(1 for e in exchanges[:-1] if e.problem)
        client.close()
        for one in closed:
            await one.wait()
    return exchanges


async def test_the_client_finds_the_end_of_answers_that_come_byte_by_byte() -> None:
    body = chunked(token(), token(), usage(2), DONE)
    response = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body
    pieces = [response[:15], *(response[at : at + 1] for at in range(15, len(response)))]

    exchanges = await answers(pieces, [b"{}", b"{}"])

    for exchange in exchanges:
        assert exchange.problem == ""
        assert b"".join(part for _, part in exchange.body()) == body
        assert read_stream(exchange.sent_at_s, exchange.body()).tokens == 2


async def test_a_refusal_is_a_problem_and_costs_the_connection() -> None:
    refusal = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"

    exchanges = await answers([refusal], [b"{}", b"{}"])

    assert [exchange.problem[:12] for exchange in exchanges] == ["HTTP/1.1 503"] * 2


# ------------------------------------------------------------------ the summary


def phase(ttft_s: float, **cpu: float) -> Phase:
    times = {"p50": ttft_s, "p90": ttft_s, "p99": 2 * ttft_s, "max": 3 * ttft_s}
    return {
        "ttft_s": times,
        "tpot_s": times,
        "gap_max_s": times,
        "prompt_tokens_mean": 160.0,
        "tokens_per_s": 100.0,
        "requests_per_s": 2.0,
        "wall_s": 10.0,
        "failed": 1,
        "strangers_cores": 0.25,
        "cpu_us_per_token": cpu,
        "cpu_s": cpu,
    }


def runs_of(system: str, ttft_s: Sequence[float]) -> list[dict[str, Phase]]:
    cpu = {API: 60.0, ENGINE: 20.0}
    if system != BARE:
        cpu = {API: 80.0, HAPROXY: 10.0, ENGINE: 25.0, OTHER: 30.0}
    return [{name: phase(one, **cpu) for name in (SINGLE, FEW, MANY)} for one in ttft_s]


def test_the_summary_compares_repeats_and_quotes_the_median() -> None:
    runs = {
        BARE: runs_of(BARE, [0.010, 0.020, 0.030]),
        LOCAL: runs_of(LOCAL, [0.012, 0.021, 0.034]),
        PD: runs_of(PD, [0.110, 0.120, 0.130]),
    }

    found = summarize(runs, SimSettings())

    assert found["added_ttft_local_p50_s"] == pytest.approx(0.002)
    assert found["added_ttft_local_p99_s"] == pytest.approx(0.004)
    assert found["cpu_per_token_us_bare"] == 60.0
    assert found["cpu_per_token_us_baton"] == 90.0
    assert found["cpu_per_token_ratio"] == 1.5
    assert found["ray_other_cores"] == 3.0
    assert found["strangers_cores"] == 0.25
    assert found["failed_requests_baton_pd"] == 3.0
    spread = found["spread"]
    assert isinstance(spread, dict)
    assert spread["added_ttft_local_p50_s"] == pytest.approx(
        {"min": 0.001, "median": 0.002, "max": 0.004}
    )


def test_what_the_simulated_handoff_takes_is_taken_off_and_named() -> None:
    settings = SimSettings()
    runs = {BARE: runs_of(BARE, [0.01]), LOCAL: runs_of(LOCAL, [0.01]), PD: runs_of(PD, [0.11])}

    found = summarize(runs, settings)

    handoff = handoff_s(settings, prompt_tokens=160.0)
    # Ten blocks of 16 tokens move, then one request decodes one token.
    assert handoff["transfer_s"] == settings.transfer_s(10 * settings.kv_block_bytes)
    excluded_s = handoff["transfer_s"] + handoff["first_decode_step_s"]
    assert found["added_ttft_pd_raw_p50_s"] == pytest.approx(0.1)
    assert found["added_ttft_pd_p50_s"] == pytest.approx(0.1 - excluded_s)
    assert found["pd_excluded"] == pytest.approx(handoff | {"excluded_s": excluded_s})


def exchange(*times_s: float) -> Exchange:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    (at_s, first), *rest = stream_segments(times_s, tokens=len(times_s))
    return Exchange(lag_s=0.001, sent_at_s=1.0, segments=[(at_s, head + first), *rest])


def test_a_phase_says_what_every_group_and_every_stranger_used() -> None:
    measured = Measured(
        exchanges=[exchange(2.0, 3.0), exchange(1.5, 2.0)],
        wall_s=4.0,
        cpu_s={API: 0.4, ENGINE: 0.2, "client": 0.1, "machine": 2.7, "steal": 1.0},
        late_connections=1,
    )

    found = describe(measured)

    assert found["tokens"] == 4
    assert found["tokens_per_s"] == 1.0
    assert found["ttft_s"] == {"p50": 0.75, "p90": 0.95, "p99": 0.995, "max": 1.0}
    assert found["cpu_us_per_token"] == {API: 100_000.0, ENGINE: 50_000.0}
    assert found["strangers_cores"] == pytest.approx(0.5)
    assert found["stolen_cores"] == 0.25
    assert found["chunks_per_token"] == 1.0


def test_a_failed_request_is_counted_and_many_spoil_a_phase() -> None:
    def phase_with(good: int) -> Phase:
        failed = Exchange(lag_s=0.0, problem="HTTP/1.1 503")
        return describe(
            Measured(
                exchanges=[failed, *(exchange(2.0, 3.0) for _ in range(good))],
                wall_s=1.0,
                cpu_s={"machine": 0.0, "steal": 0.0},
                late_connections=0,
            )
        )

    found = phase_with(good=99)
    assert (found["requests"], found["failed"]) == (99, 1)
    assert found["problems"] == ["HTTP/1.1 503 (after 0 bytes of the response)"]
    with pytest.raises(BadStreamError, match="1 of 99 requests failed"):
        phase_with(good=98)
