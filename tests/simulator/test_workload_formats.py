"""Traces as files: told apart, read, written, and what is said of a bad line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import accumulate
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.domain.errors import TraceInvalid
from baton.simulator.workloads import csv_traces as azure
from baton.simulator.workloads import lengths, mooncake, rate_series
from baton.simulator.workloads.arrivals import TimeUnit
from baton.simulator.workloads.formats import (
    ReadOptions,
    TraceFormat,
    detect_format,
    read_trace,
)
from baton.simulator.workloads.lengths import Lengths
from baton.simulator.workloads.rate_series import TraceLimits
from baton.simulator.workloads.time_units import date_ns
from baton.simulator.workloads.trace import Trace, TraceRequest

AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n",
    "2023-11-16 18:17:03.9799600,4808,10\r\n",
    "2023-11-16 18:17:04.0319600,3180,8\r\n",
]
MOONCAKE = [
    '{"timestamp": 27000, "input_length": 955, "output_length": 52, "hash_ids": [46, 47]}\n'
]
LOG = [
    '{"request_id": "b-0", "input_toks": 7, "output_toks": 5, "arrival_time": 1777142838.25}\n',
    '{"request_id": "b-1", "input_toks": 9, "output_toks": 3, "arrival_time": 1777142838.75}\n',
]
LENGTHS = ["num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n", "18,243,261,13.5\n"]
RATES = [
    "t_s,req_per_s,active_clients,mean_input_tokens,mean_output_tokens\n",
    "0,4.0,55,100,20\n",
    "600,0.0,0,,\n",
    "1200,8.0,54,300,40\n",
]


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (AZURE, TraceFormat.AZURE),
        (MOONCAKE, TraceFormat.MOONCAKE),
        (LOG, TraceFormat.VLLM_LOG),
        (LENGTHS, TraceFormat.LENGTHS),
        (RATES, TraceFormat.RATE_SERIES),
        (["arrived_at,num_prefill_tokens,num_decode_tokens"], TraceFormat.AZURE),
        (["Timestamp,Model,Request tokens,Response tokens,Total tokens"], TraceFormat.AZURE),
        (['\ufeff"TIMESTAMP","ContextTokens","GeneratedTokens"'], TraceFormat.AZURE),
        (['{"input_toks": 12, '], TraceFormat.VLLM_LOG),
        (["{oops"], TraceFormat.MOONCAKE),
    ],
)
def test_a_format_is_told_by_the_first_line(lines: list[str], wanted: TraceFormat) -> None:
    assert detect_format(lines[0], "f") is wanted


@pytest.mark.parametrize("lines", [["a,b,c\n", "1,2,3\n"], ['{"prompt": "hello"}\n'], ["\n"], []])
def test_an_unknown_format_is_refused_with_the_known_ones(lines: list[str]) -> None:
    with pytest.raises(
        TraceInvalid, match=r"expected JSON lines|no known format has the fields prompt"
    ):
        read_trace("f", lines)


def test_an_azure_trace_begins_with_its_first_arrival_to_the_tenth_of_a_microsecond() -> None:
    trace = read_trace("conv", AZURE)
    assert trace.requests == (TraceRequest(0.0, 4808, 10), TraceRequest(0.052, 3180, 8))


@pytest.mark.parametrize(
    ("date", "seconds"),
    [
        ("1970-01-02 00:00:01.5", 86401.5),
        ("2024-03-01 00:00:00", 1709251200),
        ("2024-02-29 23:59:59.25+00:00", 1709251199.25),
        ("2024-03-01T01:30:00+01:30", 1709251200),
        ("2024-02-29 19:00:00-05:00", 1709251200),
        ("2024-03-01 00:00:00Z", 1709251200),
        ("2016-12-31 23:59:60", 1483228800),
    ],
)
def test_a_date_counts_from_1970(date: str, seconds: float) -> None:
    assert date_ns(date) == int(seconds * 4) * 250_000_000


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("2023-11-16 18:17:05,12", "2 cells, expected 3"),
        ("2023-11-16 18:17:05,1,2,3", "4 cells, expected 3"),
        ("2023-13-16 18:17:05,12,1", "month"),
        ("2023-11-16 24:17:05,12,1", "no such day, hour"),
        ("2023-11-16 12:17:61,12,1", "no such day, hour, minute or second"),
        ("2023-11-16 12:60:00,12,1", "no such day, hour, minute or second"),
        ("2023-02-31 12:00:00,12,1", "no such day"),
        ("2023-11-00 12:00:00,12,1", "no such day"),
        ("yesterday,12,1", "expected a date"),
        ("2023-11-16 18:17:05,0,1", "contexttokens is '0'"),
        ("2023-11-16 18:17:05,12.5,1", "contexttokens is '12.5'"),
        ("2023-11-16 18:17:05,12,-1", "generatedtokens is '-1'"),
        ("2023-11-16 18:17:05,12,nan", "generatedtokens is 'nan'"),
        ("2023-11-16 18:17:05,12,1e99", "generatedtokens is '1e99'"),
        ("2023-11-16 18:17:05,,1", "contexttokens is ''"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_fault_and_can_be_skipped(row: str, what: str) -> None:
    lines = [*AZURE, "\n", row + "\n"]
    with pytest.raises(TraceInvalid) as found:
        read_trace("conv.csv", lines)
    assert (found.value.name, found.value.line) == ("conv.csv", 5)
    assert what in found.value.problem
    kept = read_trace("conv.csv", lines, ReadOptions(ignore_invalid=True))
    assert (len(kept), kept.skipped_lines) == (2, 1)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("[1]", "got list"),
        ('{"timestamp": 1, "output_length": 3}', "input_length is missing"),
        ('{"timestamp": NaN, "input_length": 2, "output_length": 3}', "timestamp is nan"),
        ('{"input_length": 2, "output_length": 3}', "timestamp is missing"),
        ('{"input_length": 2, "output_length": 3, "delay": 9}', "open loop"),
        ('{"at_s": -1, "input_length": 2, "output_length": 3}', "at_s is -1"),
        ('{"timestamp": 1, "input_length": true, "output_length": 3}', "input_length is True"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": ["a"]}', "hash_ids"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": 4}', "hash_ids"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3, "session_id": []}', "session_id"),
    ],
)
def test_a_bad_json_line_is_named_too(line: str, what: str) -> None:
    with pytest.raises(TraceInvalid, match="line 2") as found:
        read_trace("t.jsonl", [*MOONCAKE, line])
    assert what in found.value.problem
    assert (
        read_trace("t.jsonl", [*MOONCAKE, line], ReadOptions(ignore_invalid=True)).skipped_lines
        == 1
    )


@pytest.mark.parametrize("lines", [MOONCAKE, LOG, AZURE, RATES])
def test_a_mark_of_the_byte_order_loses_no_line(lines: list[str]) -> None:
    marked = ["\ufeff" + lines[0], *lines[1:]]
    assert read_trace("f", marked) == read_trace("f", lines)


def test_a_trace_of_nothing_but_bad_lines_is_refused_even_when_they_may_be_skipped() -> None:
    with pytest.raises(TraceInvalid, match="holds no requests; skipped 1 line"):
        read_trace("t", ["{oops"], ReadOptions(ignore_invalid=True))


def test_requests_are_sorted_by_arrival_and_those_at_one_time_keep_their_order() -> None:
    rows = [f"{at},{prompt},1" for at, prompt in ((5, 1), (2, 2), (5, 3), (2, 4), (9, 5))]
    trace = azure.read(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows], "t")
    assert [request.prompt_tokens for request in trace.requests] == [2, 4, 1, 3, 5]
    assert trace.reordered_lines == 2


def test_a_request_without_output_counts_as_one_token() -> None:
    trace = azure.read(["arrived_at,num_prefill_tokens,num_decode_tokens", "0,7,0"], "t")
    assert trace.requests[0].output_tokens == 1


def test_a_vllm_log_gives_arrivals_and_lengths() -> None:
    assert read_trace("log", LOG).requests == (TraceRequest(0.0, 7, 5), TraceRequest(0.5, 9, 3))


def test_lengths_alone_need_a_rate() -> None:
    assert lengths.read(LENGTHS, "l") == ((Lengths(18, 243),), 0)
    with pytest.raises(TraceInvalid, match="give a rate"):
        read_trace("l", LENGTHS)
    many = read_trace("l", [LENGTHS[0], *LENGTHS[1:] * 4000], ReadOptions(rate_per_s=20.0))
    assert len(many) == 4000
    assert many.rate_per_s == pytest.approx(20.0, rel=0.06)


def test_a_series_of_rates_becomes_arrivals_with_its_rates_and_mean_lengths() -> None:
    trace = read_trace("r", RATES)
    by_window = [
        [request for request in trace.requests if start <= request.at_s < start + 600]
        for start in (0, 600, 1200)
    ]
    assert sum(map(len, by_window)) == len(trace)
    assert [len(item) for item in by_window] == pytest.approx([2400, 0, 4800], rel=0.07)
    for requests, prompt, output in ((by_window[0], 100, 20), (by_window[2], 300, 40)):
        mean_prompt = sum(request.prompt_tokens for request in requests) / len(requests)
        mean_output = sum(request.output_tokens for request in requests) / len(requests)
        assert (mean_prompt, mean_output) == pytest.approx((prompt, output), rel=0.1)


def test_a_series_of_rates_is_scaled_to_the_mean_that_is_asked_for() -> None:
    assert len(read_trace("r", RATES, ReadOptions(rate_per_s=1.0))) == pytest.approx(1800, rel=0.1)


def test_windows_count_as_long_as_they_are() -> None:
    rows = ["0,9,1,10,10", "100,1,1,10,10", "1000,0,0,,"]  # 900 and 900 in 1,500 s, the last 500
    windows, _ = rate_series.read([RATES[0], *rows], "r")
    assert rate_series.duration_s(windows) == 1500
    assert rate_series.mean_rate_per_s(windows) == pytest.approx(1.2)


def test_windows_that_all_begin_at_one_time_are_refused() -> None:
    with pytest.raises(TraceInvalid, match="all 2 windows begin at 5 s") as found:
        read_trace("r", [RATES[0], "5,1,1,10,10", "5,1,1,10,10"])
    assert found.value.name == "r"
    assert len(rate_series.read([RATES[0], "5,1,1,10,10"], "r")[0]) == 1


def test_a_series_in_which_nothing_arrives_cannot_be_scaled() -> None:
    nothing = [RATES[0], "0,0,0,,", "60,0,0,,"]
    assert len(read_trace("r", nothing)) == 0
    with pytest.raises(TraceInvalid, match="every window asks for 0 requests") as found:
        read_trace("r", nothing, ReadOptions(rate_per_s=5.0))
    assert found.value.name == "r"


def test_a_series_beyond_memory_names_the_rate_that_fits() -> None:
    with pytest.raises(TraceInvalid, match="scale it with a rate below"):
        read_trace("r", [RATES[0], "0,100000,1,10,10", "600,1,1,10,10"])


@pytest.mark.parametrize(
    ("limits", "requests"),
    [
        (TraceLimits(requests=100), (100, 100)),
        (TraceLimits(duration_s=10.0), (1, 120)),
        (TraceLimits(duration_s=10.0, requests=3), (3, 3)),
        (TraceLimits(thinned_to=1000), (850, 1150)),
    ],
)
def test_of_two_weeks_only_what_is_needed_is_made(
    limits: TraceLimits, requests: tuple[int, int]
) -> None:
    fortnight = [RATES[0], *(f"{600 * number},8,1,10,10" for number in range(2016))]
    fortnight[1] = "0,0,0,,"
    began_s = process_time()
    trace = read_trace("r", fortnight, ReadOptions(limits=limits))
    assert process_time() - began_s < 5  # all 9.7 million take a minute, and do not fit
    assert requests[0] <= len(trace) <= requests[1]
    assert trace.requests[0].at_s >= 600
    if limits.thinned_to is not None:
        assert trace.span_s == pytest.approx(2015 * 600, rel=0.05)


def test_the_part_of_a_series_that_is_made_is_the_same_as_of_the_whole() -> None:
    whole = read_trace("r", RATES)
    assert (
        read_trace("r", RATES, ReadOptions(limits=TraceLimits(requests=50))).requests
        == (whole.requests[:50])
    )


# ------------------------------------------------------------------ units of time

GAPS_S = (0.1, 0.7, 0.3, 1.4, 0.05, 0.9, 0.2, 0.35)
"""Of about two requests a second."""
UNITS = {TimeUnit.SECONDS: 1, TimeUnit.MILLISECONDS: 1e3, TimeUnit.MICROSECONDS: 1e6}
UNITS[TimeUnit.NANOSECONDS] = 1e9


def timed(kind: str, times: Iterable[float | str]) -> list[str]:
    """A file of that kind with these times."""
    texts = [json.dumps(time) for time in times]
    match kind:
        case "mooncake":
            pattern = '{{"timestamp": {}, "input_length": 9, "output_length": 3}}'
        case "log":
            pattern = '{{"arrival_time": {}, "input_toks": 9, "output_toks": 3}}'
        case "azure":
            pattern = "{},9,3"
            return [AZURE[0], *(pattern.format(text) for text in texts)]
        case _:
            pattern = "{},9,3"
            heads = {
                "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens",
                "burstgpt": "Timestamp,Request tokens,Response tokens",
                "splitwise": "arrival_timestamp,prompt_size,token_size",
            }
            return [heads[kind], *(pattern.format(text) for text in texts)]
    return [pattern.format(text) for text in texts]


KINDS = ("mooncake", "log", "azure", "vidur", "burstgpt", "splitwise")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", list(TimeUnit))
@pytest.mark.parametrize("since", [0.0, 1_777_142_838.0])
def test_the_unit_of_times_is_that_of_the_data(kind: str, unit: TimeUnit, since: float) -> None:
    times_s = list(accumulate(GAPS_S, initial=since))
    lines = timed(kind, (round(at_s * UNITS[unit], 3) for at_s in times_s))
    trace = read_trace("t", lines)
    assert [request.at_s for request in trace.requests] == pytest.approx(
        [at_s - since for at_s in times_s], abs=0.002
    )
    assert trace.times.startswith(f"{unit.name.lower()}: ")
    if kind == "mooncake" and unit is TimeUnit.SECONDS and not since:
        assert trace.times == (
            "seconds: in milliseconds, as this format has them, they would be 2e+03 requests/s"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_dates_are_dates_in_every_format(kind: str) -> None:
    lines = timed(kind, ["2023-11-16T18:17:03.5Z", "2023-11-16 18:17:04"])
    trace = read_trace("t", lines)
    assert [request.at_s for request in trace.requests] == [0.0, 0.5]
    assert trace.times == ""
    with pytest.raises(TraceInvalid, match="has dates, and --time-unit is given"):
        read_trace("t", lines, ReadOptions(time_unit=TimeUnit.SECONDS))


@pytest.mark.parametrize("per_s", [0.02, 100.0, 500.0])
def test_times_that_may_be_of_two_units_are_refused_until_one_is_named(per_s: float) -> None:
    lines = timed("mooncake", [number * 1000 / per_s for number in range(20)])
    with pytest.raises(TraceInvalid, match="the unit of timestamp is not clear") as refused:
        read_trace("t", lines)
    assert f"{per_s:.3g}/s in milliseconds" in refused.value.problem
    for unit, factor in ((TimeUnit.MILLISECONDS, 1), (TimeUnit.SECONDS, 1e-3)):
        trace = read_trace("t", lines, ReadOptions(time_unit=unit))
        assert trace.rate_per_s == pytest.approx(per_s * factor)
        assert trace.times == f"{unit.name.lower()}: as --time-unit says"


@pytest.mark.parametrize(
    ("times", "what"),
    [
        ([1_777_142_838, 1_777_142_839_500], "several units: seconds as request 1"),
        ([0, "2023-11-16 18:17:03"], "expected a number"),
        (["2023-11-16 18:17:03", 5], "expected a date"),
        ([5, -1], "timestamp is -1, expected at least 0"),
        ([5, 1e300], "is not clear"),
    ],
)
def test_times_of_several_kinds_are_refused(times: list[float | str], what: str) -> None:
    with pytest.raises(TraceInvalid, match=what):
        read_trace("t", timed("mooncake", times))


def test_one_request_needs_no_unit() -> None:
    for kind in KINDS:
        assert [request.at_s for request in read_trace("t", timed(kind, [77])).requests] == [0.0]


@pytest.mark.parametrize(
    "line",
    [
        '{"at_s": 3, "input_length": 9, "output_length": 3}',
        '{"arrival_time_ns": 3, "input_toks": 9, "output_toks": 3}',
        RATES[0] + RATES[1],
        LENGTHS[0] + LENGTHS[1],
    ],
)
def test_a_unit_is_refused_where_the_format_has_its_own(line: str) -> None:
    options = ReadOptions(time_unit=TimeUnit.SECONDS, rate_per_s=1.0)
    with pytest.raises(TraceInvalid, match="--time-unit is given"):
        read_trace("t", line.splitlines(keepends=True), options)


def test_times_in_two_fields_are_refused() -> None:
    mixed = [
        '{"arrival_time_ns": 3, "input_toks": 9, "output_toks": 3}',
        '{"arrival_time": 3, "input_toks": 9, "output_toks": 3}',
    ]
    with pytest.raises(TraceInvalid, match="some lines have arrival_time, others"):
        read_trace("t", mixed)
    mixed = [MOONCAKE[0], '{"at_s": 3, "input_length": 9, "output_length": 3}']
    with pytest.raises(TraceInvalid, match="some lines have at_s, others a timestamp"):
        read_trace("t", mixed)


def ticking(*ticks_ms: int) -> list[str]:
    return [
        json.dumps({"timestamp": tick, "input_length": number + 1, "output_length": 1})
        for number, tick in enumerate(ticks_ms)
    ]


def test_ticks_are_spread_evenly_and_keep_the_order_of_the_file() -> None:
    ticks = [3000 * (number // 50) - (number // 50 % 2) for number in range(2000)]
    trace = read_trace("m", ticking(*ticks))
    assert [request.prompt_tokens for request in trace.requests] == list(range(1, 2001))
    assert trace.reordered_lines == 0
    inside = [
        request.at_s - tick / 1000 for request, tick in zip(trace.requests, ticks, strict=True)
    ]
    assert all(0 <= value < 3.002 for value in inside)
    assert sum(inside) / len(inside) == pytest.approx(1.5, abs=0.1)
    quarter = sum(value < 0.75 for value in inside) / len(inside)
    assert quarter == pytest.approx(0.25, abs=0.04)


def test_spreading_is_the_same_for_the_same_seed_only() -> None:
    lines = ticking(0, 0, 0, 0, 3000, 3000, 3000, 3000)
    assert read_trace("m", lines) == read_trace("m", lines)
    assert read_trace("m", lines, ReadOptions(seed=1)) != read_trace("m", lines)


def test_spreading_over_more_than_a_tick_still_keeps_the_order_of_the_file() -> None:
    trace = mooncake.read(ticking(*(1000 * (number // 9) for number in range(90))), "m", spread_s=3)
    assert [request.prompt_tokens for request in trace.requests] == list(range(1, 91))
    assert max(request.at_s for request in trace.requests) > 10


def test_times_that_do_not_tick_are_left_alone() -> None:
    sparse = mooncake.read(ticking(7000, 10000, 13000, 13000), "m")
    assert [request.at_s for request in sparse.requests] == [0, 3, 6, 6]
    told = mooncake.read(ticking(0, 0, 0, 0, 3000, 3000), "m", spread_s=0)
    assert [request.at_s for request in told.requests] == [0, 0, 0, 0, 3, 3]
    fine = mooncake.read(ticking(0, 0, 0, 0, 10, 10), "m", time_unit=TimeUnit.MILLISECONDS)
    assert fine.requests[-1].at_s == 0.01


@pytest.mark.parametrize("size", [16, 64, 512])
@pytest.mark.parametrize("full_only", [False, True])
def test_the_size_of_blocks_is_found_in_the_lengths(size: int, *, full_only: bool) -> None:
    lines = []
    for prompt in range(600, 4000, 37):
        blocks = prompt // size if full_only else -(-prompt // size)
        ids = list(range(blocks))
        lines.append(
            json.dumps(
                {"timestamp": 0, "input_length": prompt, "output_length": 1, "hash_ids": ids}
            )
        )
    assert read_trace("m", lines).block_tokens == size


def test_blocks_of_no_known_size_are_refused() -> None:
    line = '{"timestamp": 0, "input_length": 900, "output_length": 1, "hash_ids": [1, 2, 3, 4, 5]}'
    with pytest.raises(TraceInvalid, match="block_tokens"):
        read_trace("m", [line])


def test_lines_that_say_different_sizes_of_blocks_are_refused() -> None:
    lines = [
        f'{{"at_s": 0, "input_length": 9, "output_length": 1, "block_tokens": {size}}}'
        for size in (16, 32)
    ]
    with pytest.raises(TraceInvalid, match=r"different block_tokens: \[16, 32\]"):
        read_trace("m", lines)


def test_ids_that_name_only_a_beginning_of_each_prompt_are_of_mooncakes_blocks() -> None:
    line = '{"timestamp": 0, "input_length": 7000, "output_length": 1, "hash_ids": [1, 2, 3]}'
    assert read_trace("m", [line]).block_tokens == 512


REQUESTS = st.builds(
    TraceRequest,
    st.floats(0, 1e9, allow_nan=False),
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.lists(st.integers(-(2**60), 2**60), max_size=5).map(tuple),
    st.none() | st.text(),
    st.none() | st.text(),
    st.text(min_size=1),
)


@given(st.lists(REQUESTS, min_size=1, max_size=8), st.sampled_from((7, 16, 512)))
def test_a_written_trace_is_read_back_exactly(requests: list[TraceRequest], size: int) -> None:
    requests.sort(key=lambda request: request.at_s)
    block_tokens = size if any(request.block_ids for request in requests) else 512
    trace = Trace(name="t", requests=tuple(requests), block_tokens=block_tokens)
    assert read_trace("t", list(mooncake.write(trace))) == trace


def test_readers_of_mooncake_files_find_all_they_need_in_a_written_trace() -> None:
    trace = Trace(name="t", requests=(TraceRequest(1.2345, 700, 9, (4, 5)),))
    (line,) = mooncake.write(trace)
    assert json.loads(line) == {
        "timestamp": 1234,
        "at_s": 1.2345,
        "input_length": 700,
        "output_length": 9,
        "hash_ids": [4, 5],
        "block_tokens": 512,
    }


@given(st.lists(st.text(max_size=40), max_size=6))
def test_every_file_is_read_or_refused_as_a_bad_trace(lines: list[str]) -> None:
    for head in ([], [AZURE[0]], MOONCAKE, LOG, LENGTHS, RATES):
        try:
            trace = read_trace("f", [*head, *lines], ReadOptions(rate_per_s=1.0))
        except TraceInvalid as refused:
            assert refused.name == "f"  # noqa: PT017 - either way is right
        else:
            assert trace.skipped_lines == 0
