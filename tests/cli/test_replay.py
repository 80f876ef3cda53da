"""`baton replay`: what it sends, what it says, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.cli.invoked import run_baton
from tests.fakes.completion_server import CompletionServer, ReceivedRequest

LINE = '{{"at_s": {at}, "input_length": 40, "output_length": 3, "hash_ids": [{first}]}}\n'


def replay(*arguments: str) -> Result:
    return run_baton("replay", *arguments)


def report_of(*arguments: str) -> dict[str, Any]:
    result = replay(*arguments, "-o", "json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty requests, a hundred a second, by `at_s`: in a `timestamp`, the unit were not clear."""
    file = tmp_path / "trace.jsonl"
    lines = (LINE.format(at=number / 100, first=number // 2) for number in range(20))
    file.write_text("".join(lines))
    return file


def test_a_trace_is_sent_and_measured(server: CompletionServer, trace: Path) -> None:
    report = report_of(str(trace), "--url", server.url, "--slo-ttft", "30s", "--slo-tpot", "9s")
    assert report["provenance"]["evidence"] == "measured"
    assert report["provenance"]["model"] == "tiny"
    assert report["objectives"] == {"ttft_s": 30.0, "tpot_s": 9.0, "e2e_s": None, "target": 0.9}
    (run,) = report["results"]
    assert (run["requests"], run["failed"], run["attainment"]) == (20, 0, 1.0)
    assert len(server.requests) == 20
    prompts = [tuple(request.body["prompt"]) for request in server.requests]
    assert len({prompt[:40] for prompt in prompts}) == 10


def test_a_table_is_for_people_and_a_page_is_written(
    server: CompletionServer, trace: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    result = replay(str(trace), "--url", server.url, "--report", str(page), "--gpus", "2")
    assert result.exit_code == 0, result.stderr
    assert "measured" in result.stdout
    assert "TTFT" in result.stdout
    assert "<html" in page.read_text()


def test_a_trace_is_limited_scaled_and_sped_up(server: CompletionServer, trace: Path) -> None:
    def sent(*options: str) -> int:
        server.requests.clear()
        report_of(str(trace), "--url", server.url, *options)
        return len(server.requests)

    assert sent("--limit", "7") == 7
    assert sent("--duration", "100ms") == 10
    assert sent("--speed", "10", "--duration", "10ms") == 10
    assert 30 <= sent("--rate", "200") <= 42


def test_a_workload_needs_no_file(server: CompletionServer) -> None:
    options = ("--workload", "sharegpt", "--rate", "200", "--limit", "5", "--seed", "3")
    report = report_of("--url", server.url, *options)
    assert report["results"][0]["requests"] == 5
    assert len(server.requests) == 5


def test_lengths_alone_arrive_at_the_rate(server: CompletionServer, tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens\n5,2\n6,2\n")
    assert replay(str(file), "--url", server.url).exit_code == 1
    assert report_of(str(file), "--url", server.url, "--rate", "50")["results"][0]["requests"] == 2


def test_failures_are_shown_and_when_nothing_succeeds_the_status_says_so(
    server: CompletionServer, trace: Path
) -> None:
    async def busy(_: ReceivedRequest) -> AsyncIterator[str]:
        yield "503 Busy"
        yield '{"error": {"message": "come back later"}}'

    server.behaviour = busy
    result = replay(str(trace), "--url", server.url, "-o", "json")
    assert result.exit_code == 1
    assert "no request succeeded: HTTP 503: come back later" in result.stderr
    assert json.loads(result.stdout)["tables"][0]["rows"] == [["HTTP 503: come back later", "20"]]


def test_necessary_caveats_are_in_the_notes(server: CompletionServer, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        '{"at_s": 0, "input_length": 2000, "output_length": 3, "session_id": "s"}',
        "oops",
        '{"at_s": 0, "input_length": 5, "output_length": 3000}',
    ]
    file.write_text("\n".join(lines))
    report = report_of(str(file), "--url", server.url, "--skip-bad", "--speed", "2")
    notes = "\n".join(report["notes"])
    for said in ("1 prompt was cut", "1 request was left out", "1 line of", "squeezed 2", "own"):
        assert said in notes


def test_a_header_is_sent_and_its_value_is_never_shown(
    server: CompletionServer, trace: Path
) -> None:
    headers = ("--header", "Authorization: Bearer sk-one", "--header", 'X-Key: it\'s "sk-two"')
    report = report_of(str(trace), "--url", server.url, "--limit", "2", *headers)
    assert server.requests[0].headers["authorization"].lower() == "bearer sk-one"
    assert server.requests[0].headers["x-key"] == 'it\'s "sk-two"'
    assert "--header 'Authorization: ...' --header 'X-Key: ...'" in report["provenance"]["command"]
    assert "sk-" not in json.dumps(report)


def test_the_first_part_of_a_trace_counts_from_its_first_arrival(
    server: CompletionServer, tmp_path: Path
) -> None:
    file = tmp_path / "piece.jsonl"
    line = '{{"at_s": {at}, "input_length": 40, "output_length": 3}}\n'
    file.write_text("".join(line.format(at=3600 + number / 100) for number in range(20)))
    report_of(str(file), "--url", server.url, "--duration", "95ms")
    assert len(server.requests) == 10
    server.requests.clear()
    report_of(str(file), "--url", server.url, "--speed", "2", "--duration", "48ms")
    assert len(server.requests) == 10


def test_where_nothing_runs_the_status_says_so(trace: Path) -> None:
    result = replay(str(trace), "--url", "http://127.0.0.1:1")
    assert result.exit_code == 3
    assert "http://127.0.0.1:1: connection refused" in result.stderr
    assert "next: " in result.stderr


def test_a_bad_line_is_named(server: CompletionServer, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(LINE.format(at=0, first=1) + '{"timestamp": 1}\n')
    result = replay(str(file), "--url", server.url)
    assert result.exit_code == 1
    assert f"{file}, line 2: input_length is missing" in result.stderr
    assert not server.requests


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one of TRACE and --workload"),
        (("t.jsonl", "--workload", "conv"), "give one of TRACE and --workload"),
        (("t.jsonl", "--rate", "1", "--speed", "2"), "give one of --rate and --speed"),
        (("t.jsonl", "--rate", "0"), "expected more than 0"),
        (("t.jsonl", "--deadline", "soon"), "expected a duration"),
        (("t.jsonl", "--header", "nothing"), "expected NAME:VALUE"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: tuple[str, ...], said: str) -> None:
    result = replay(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())
