"""Requests that a verb is given: named workloads as long as asked, and files that are none."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from baton.cli.traces import (
    RequestArgs,
    TraceUnusable,
    load_trace,
    make_workload,
    requested_traces,
)
from baton.simulator.workloads.arrivals import TimeUnit, UserLoad
from baton.simulator.workloads.formats import ReadOptions


@pytest.mark.parametrize("name", ["chat", "conv", "agents"])
def test_a_workload_has_as_many_requests_as_are_asked_for(name: str) -> None:
    for seed in range(5):
        assert len(make_workload(name, rate_per_s=4, max_requests=40, seed=seed)) == 40


def test_that_is_so_however_rarely_arrivals_happen_to_come() -> None:
    made = [
        make_workload("code-bursty", rate_per_s=1, max_requests=30, seed=seed)
        for seed in (1, 8, 10)
    ]
    assert {len(trace) for trace in made} == {30}


def test_conversations_come_at_the_rate_that_was_asked_for_from_the_beginning() -> None:
    seconds, rate_per_s = 60.0, 20.0
    made = make_workload("chat", rate_per_s=rate_per_s, duration_s=seconds)
    assert made.requests[0].at_s < 1
    assert made.requests[-1].at_s < seconds
    for start_s in (0.0, 20.0, 40.0):
        arrived = sum(start_s <= request.at_s < start_s + 20 for request in made.requests)
        assert arrived / 20 == pytest.approx(rate_per_s, rel=0.2)


def test_users_begin_conversations_and_take_over_none() -> None:
    """Of conversations under way at a moment, most are long, and none is at its first prompt."""
    load = UserLoad(users=100, think_s=10.0)
    (trace,) = requested_traces(RequestArgs(workload="chat", users=load, duration_s=300.0))
    first_prompts: dict[str | int | None, int] = {}
    for request in trace.requests:
        first_prompts.setdefault(request.session_id, request.prompt_tokens)
    first = list(first_prompts.values())[:100]
    assert sum(prompt < 1024 for prompt in first) > 50


def test_a_workload_ends_where_either_limit_is_reached() -> None:
    assert len(make_workload("conv", rate_per_s=10, duration_s=60, max_requests=7)) == 7
    few = make_workload("conv", rate_per_s=10, duration_s=1, max_requests=1000)
    assert 0 < len(few) < 40
    with pytest.raises(TraceUnusable, match="needs an end"):
        make_workload("conv", rate_per_s=10)


def test_more_requests_than_fit_memory_are_refused_before_they_are_made() -> None:
    with pytest.raises(TraceUnusable, match=r"1e\+09/s for 10 s are 1e\+10 requests") as caught:
        make_workload("chat", rate_per_s=1e9, duration_s=10)
    assert "--rate" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    ("text", "said", "remedy"),
    [
        ("", "is empty", "another file"),
        ("\n\n", "begins with 2 blank lines", "another file"),
        (
            "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n8,2,10,4\n",
            "give a rate",
            "--rate",
        ),
        ("poems,and,prose\n1,2,3\n", "line 1: no known format", "one of these formats"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "line 2", "--skip-bad"),
    ],
)
def test_a_file_that_is_no_trace_has_its_own_remedy(
    tmp_path: Path, text: str, said: str, remedy: str
) -> None:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceUnusable) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)
    assert remedy in (caught.value.remedy or "")


CSV = "arrived_at,num_prefill_tokens,num_decode_tokens\r\n0,9,3\r\n0.5,8,2\r\n"


def test_a_compressed_file_is_read_as_the_file_itself(tmp_path: Path) -> None:
    plain, packed = tmp_path / "t.csv", tmp_path / "t.csv.gz"
    plain.write_bytes(CSV.encode())
    packed.write_bytes(gzip.compress(CSV.encode()))
    assert load_trace(packed).requests == load_trace(plain).requests
    assert len(load_trace(plain)) == 2


@pytest.mark.parametrize("kept", [8, 40])
def test_half_a_compressed_file_is_refused(tmp_path: Path, kept: int) -> None:
    packed = tmp_path / "t.csv.gz"
    packed.write_bytes(gzip.compress(CSV.encode())[:kept])
    with pytest.raises(TraceUnusable, match="is no whole gzip file"):
        load_trace(packed)


def test_an_unclear_unit_names_the_option_that_says_it(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(CSV.replace("0.5", "0.01"))
    with pytest.raises(TraceUnusable, match="the unit of arrived_at is not clear") as caught:
        load_trace(path)
    assert caught.value.remedy == "give --time-unit: s, ms, us or ns"
    seconds = ReadOptions(time_unit=TimeUnit.SECONDS)
    assert load_trace(path, seconds).rate_per_s == pytest.approx(100)
