from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._statistics import (
    BadStreamError,
    RepeatSpread,
    Segment,
    cpu_used,
    dechunk,
    events,
    percentiles,
    quantile,
    ratios,
    read_stream,
    round_floats,
    us_per_token,
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
    assert stream.max_itl_s == 1.5
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


def test_ratios_are_taken_repeat_by_repeat() -> None:
    assert ratios([3.0, 5.0], [1.0, 2.0]) == [3.0, 2.5]
    with pytest.raises(ValueError, match="longer"):
        ratios([3.0], [1.0, 2.0])


def test_cpu_is_what_was_used_between_two_readings() -> None:
    assert cpu_used({"api": 1.0}, {"api": 3.5, "new": 0.5}) == {"api": 2.5, "new": 0.5}
    assert us_per_token(0.5, 1000) == 500.0
    with pytest.raises(ValueError, match="0 tokens"):
        us_per_token(1.0, 0)


def test_rounding_reaches_every_float() -> None:
    value = {"a": [1.23456789, (2.3456789,)], "b": "x", "c": 3}

    assert round_floats(value, 2) == {"a": [1.23, [2.35]], "b": "x", "c": 3}


def test_a_spread_names_its_ends_and_its_middle() -> None:
    assert RepeatSpread.from_values([3.0, 1.0, 2.0]) == RepeatSpread(min=1.0, median=2.0, max=3.0)
