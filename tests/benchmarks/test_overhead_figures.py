from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.sim.settings import SimSettings
from benchmarks._figures import (
    BadStreamError,
    Segment,
    Spread,
    cpu_used,
    dechunk,
    differences,
    events,
    percentiles,
    quantile,
    ratios,
    read_stream,
    rounded,
    us_per_token,
)
from benchmarks._load import Client, Exchange, completion_body, poisson_arrivals
from benchmarks._systems import API, ENGINE, HAPROXY, OTHER, engine_settings, group_of, scenario
from benchmarks.overhead import (
    BARE,
    FEW,
    LOCAL,
    MANY,
    PD,
    SINGLE,
    Measured,
    Phase,
    arrival_rate_per_s,
    describe,
    handoff_s,
    summarize,
)


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


# ------------------------------------------------------------------ arithmetic


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_quantiles_rise_from_the_least_to_the_largest(values: list[float]) -> None:
    found = [quantile(values, q / 10) for q in range(11)]

    assert found[0] == min(values)
    assert found[-1] == max(values)
    assert all(a <= b + 1e-6 for a, b in pairwise(found))


def test_a_quantile_lies_between_its_neighbours() -> None:
    assert quantile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentiles([float(n) for n in range(101)]) == {
        "p50": 50.0,
        "p90": 90.0,
        "p99": 99.0,
        "max": 100.0,
    }


@pytest.mark.parametrize(("values", "q"), [([], 0.5), ([1.0], 1.1), ([1.0], -0.1)])
def test_a_quantile_of_nothing_is_an_error(values: list[float], q: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        quantile(values, q)


def test_what_is_added_is_compared_repeat_by_repeat() -> None:
    assert differences([3.0, 5.0], [1.0, 2.0]) == [2.0, 3.0]
    assert ratios([3.0, 5.0], [1.0, 2.0]) == [3.0, 2.5]
    with pytest.raises(ValueError, match="longer"):
        differences([3.0], [1.0, 2.0])


def test_cpu_is_what_was_used_between_two_readings() -> None:
    assert cpu_used({"api": 1.0}, {"api": 3.5, "new": 0.5}) == {"api": 2.5, "new": 0.5}
    assert us_per_token(0.5, 1000) == 500.0
    with pytest.raises(ValueError, match="0 tokens"):
        us_per_token(1.0, 0)


def test_rounding_reaches_every_float() -> None:
    value = {"a": [1.23456789, (2.3456789,)], "b": "x", "c": 3}

    assert rounded(value, 2) == {"a": [1.23, [2.35]], "b": "x", "c": 3}


def test_a_spread_names_its_ends_and_its_middle() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(min=1.0, median=2.0, max=3.0)


# ------------------------------------------------------------------ load and processes


def test_the_same_seed_draws_the_same_load() -> None:
    def draw(seed: int) -> tuple[list[float], bytes]:
        rng = random.Random(seed)
        arrivals = poisson_arrivals(rng, rate_per_s=20.0, window_s=5.0)
        return arrivals, completion_body(rng, model="m", words=200, max_tokens=4)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_arrivals_come_at_their_rate_and_within_the_window() -> None:
    arrivals = poisson_arrivals(random.Random(7), rate_per_s=50.0, window_s=100.0)

    assert arrivals == sorted(arrivals)
    assert 0 < arrivals[0] < arrivals[-1] < 100.0
    # Five standard deviations of a Poisson count with mean 5,000.
    assert abs(len(arrivals) - 5000) < 5 * 5000**0.5


def test_no_two_prompts_begin_alike() -> None:
    rng = random.Random(1)
    bodies = [completion_body(rng, model="m", words=200, max_tokens=4) for _ in range(100)]

    prompts = [json.loads(body)["prompt"] for body in bodies]
    assert len({prompt[:10] for prompt in prompts}) == 100
    assert all(len(prompt.split()) == 201 for prompt in prompts)


def test_the_arrival_rate_is_littles_law_for_the_engine_alone() -> None:
    settings = SimSettings(decode_step_s=0.009, decode_request_s=0.0, step_overhead_s=0.001)

    assert arrival_rate_per_s(settings, streams=16) == pytest.approx(16 / 0.64)


@pytest.mark.parametrize(
    ("name", "title", "group"),
    [
        ("haproxy", "/somewhere/haproxy", HAPROXY),
        ("ray::ServeRepl", "ray::ServeReplica:baton:ingress", API),
        ("ray::ServeRepl", "ray::ServeReplica:baton:mixed", ENGINE),
        ("ray::ServeRepl", "ray::ServeReplica:baton:prefill.handle_request", ENGINE),
        ("ray::ServeRepl", "ray::ServeReplica:baton:controller", OTHER),
        ("ray::ServeCont", "ray::ServeController.listen_for_change", OTHER),
        ("raylet", "/somewhere/raylet", OTHER),
        ("python", "python", OTHER),
    ],
)
def test_every_process_has_its_group(name: str, title: str, group: str) -> None:
    assert group_of(name, [title]) == group


def test_the_scenarios_compare_the_same_engines() -> None:
    local, pd = scenario("overhead-local", port=1234), scenario("overhead-pd")

    assert engine_settings(local) == engine_settings(pd)
    assert set(local.pools) == {"mixed"}
    assert set(pd.pools) == {"prefill", "decode"}
    assert local.server.port == 1234


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


def test_a_failed_request_spoils_a_phase() -> None:
    measured = Measured(
        exchanges=[Exchange(lag_s=0.0, problem="HTTP/1.1 503")],
        wall_s=1.0,
        cpu_s={},
        late_connections=0,
    )

    with pytest.raises(BadStreamError, match="503"):
        describe(measured)
