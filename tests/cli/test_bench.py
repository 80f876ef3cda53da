"""`baton bench`: what it sends, what it says, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.cli.invoked import run_baton
from tests.fakes.completion_server import (
    SSE_DONE,
    CompletionServer,
    ReceivedRequest,
    chunk,
    stream_all_tokens,
)

QUICK = ("--requests", "20", "--rate", "400", "--warm-up", "0", "--output-tokens", "3")


def bench(*arguments: str, environ: dict[str, str] | None = None) -> Result:
    return run_baton("bench", *arguments, environ=environ)


def report_of(*arguments: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """The document, whether or not this busy machine kept up."""
    result = bench(*arguments, "-o", "json", environ=environ)
    assert result.exit_code == 0 or "not valid" in result.stderr, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_load_is_sent_and_measured(server: CompletionServer) -> None:
    told = report_of(server.url, *QUICK, "--slo", "ttft=30s,tpot=9s", "--seed", "5")
    (run,) = told["runs"]
    assert (run["requests"], run["failed"], run["attainment"]) == (20, 0, 1.0)
    assert len(server.requests) == 20
    assert {len(request.body["prompt"]) for request in server.requests} == {512}
    assert {request.body["max_tokens"] for request in server.requests} == {3}
    assert told["provenance"]["model"] == "tiny"
    assert told["provenance"]["seed"] == 5
    assert "--seed 5" in told["provenance"]["command"]
    assert run["output_tokens"] == 60


def test_the_same_seed_sends_the_very_same_requests(server: CompletionServer) -> None:
    def sent(seed: str) -> list[list[int]]:
        server.requests.clear()
        report_of(server.url, *QUICK, "--prompt-tokens", "5:90", "--seed", seed)
        return sorted(request.body["prompt"] for request in server.requests)

    first = sent("1")
    assert sent("1") == first
    assert sent("2") != first
    assert len({len(item) for item in first}) > 5


def test_a_sweep_has_a_run_for_each_rate_and_repeat(server: CompletionServer) -> None:
    options = (*QUICK, "--rate", "300,200", "--repeats", "2", "--warm-up", "4")
    told = report_of(server.url, *options)
    assert [item["level"] for item in told["levels"]] == ["200/s", "300/s"]
    assert [(item["rate_per_s"], item["repeat"]) for item in told["runs"]] == [
        *((200, 0), (200, 1), (300, 0), (300, 1)),
    ]
    assert {item["warm_up_requests"] for item in told["runs"]} == {4}
    assert len({tuple(request.body["prompt"]) for request in server.requests}) == 4 * 24


def test_a_closed_loop_needs_no_rate(server: CompletionServer) -> None:
    options = ("--concurrency", "2,4", "--requests", "12", "--output-tokens", "2")
    told = report_of(server.url, *options)
    assert [item["level"] for item in told["levels"]] == ["2 streams", "4 streams"]
    assert [item["requests"] for item in told["runs"]] == [12, 12]


def test_the_knee_of_an_endpoint_that_always_keeps_up_is_not_claimed(
    server: CompletionServer,
) -> None:
    options = ("--find-knee", "--slo", "ttft=60s", "--rate", "4000", "--requests", "4")
    told = report_of(server.url, *options, "--output-tokens", "1", "--warm-up", "0")
    assert told["knee"]["is_bracketed"] is False
    assert "not bracketed" in told["knee"]["description"]
    assert told["knee"]["probes"][0]["rate_per_s"] == 4000


def test_a_chat_is_asked_in_words_that_the_endpoint_counted(server: CompletionServer) -> None:
    async def behave(asked: ReceivedRequest) -> AsyncIterator[str]:
        if "max_tokens" not in asked.body:
            said = asked.body["messages"][0]["content"]
            yield "200 OK"
            yield json.dumps({"count": len(said.split()) + 9})
            return
        yield chunk(choices=[{"delta": {"content": "yes"}, "finish_reason": "length"}])
        yield SSE_DONE

    server.behaviour = behave
    told = report_of(
        server.url, *QUICK, "--api", "chat", "--prompt-tokens", "30", "--turns", "2", "--think", "0"
    )
    asked = [request.body for request in server.requests if "max_tokens" in request.body]
    first = [entry for entry in asked if len(entry["messages"]) == 1]
    assert (len(asked), len(first)) == (20, 10)
    assert {len(entry["messages"][0]["content"].split()) for entry in first} == {21}
    assert told["load"]["turns"] == "2, 0 s between"
    assert not any("No tokenizer could count" in note for note in told["notes"])


def test_the_report_says_that_tokens_were_not_counted(server: CompletionServer) -> None:
    async def behave(asked: ReceivedRequest) -> AsyncIterator[str]:
        if "max_tokens" not in asked.body:
            yield "404 Not Found"
            yield "{}"
            return
        async for event in stream_all_tokens(asked):
            yield event

    server.behaviour = behave
    told = report_of(server.url, *QUICK, "--prompts", "words", "--prompt-tokens", "30")
    assert any("No tokenizer could count tokens" in note for note in told["notes"])


def test_a_dataset_is_asked(server: CompletionServer, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = ({"prompt": f"prompt {number}", "output_tokens": 2} for number in range(8))
    file.write_text("\n".join(map(json.dumps, lines)))
    told = report_of(
        server.url, "--dataset", str(file), "--requests", "10", "--rate", "300", "--warm-up", "0"
    )
    assert {request.body["prompt"] for request in server.requests} == {
        f"prompt {n}" for n in range(8)
    }
    assert {request.body["max_tokens"] for request in server.requests} == {2}
    assert told["load"]["requests from"] == str(file)


def test_a_dataset_without_lengths_needs_a_tokenizer(
    server: CompletionServer, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n')
    result = bench(server.url, "--dataset", str(file))
    assert result.exit_code == 1
    assert "next: give --output-tokens, or a --tokenizer" in result.stderr
    report_of(server.url, "--dataset", str(file), *QUICK)
    assert server.requests[-1].body["max_tokens"] == 3


def test_a_trace_is_sent_at_its_own_times_or_at_a_rate(
    server: CompletionServer, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{{"at_s": {at}, "input_length": {tokens}, "output_length": 2}}\n'
    file.write_text("".join(line.format(at=n / 100, tokens=20 + n) for n in range(20)))
    told = report_of(server.url, "--trace", str(file), "--warm-up", "5")
    assert (told["runs"][0]["requests"], told["runs"][0]["warm_up_requests"]) == (15, 5)
    assert told["runs"][0]["level"] == "as recorded"
    # Who is sent 10 ms after another may be read before it, on a busy machine.
    assert sorted(len(request.body["prompt"]) for request in server.requests) == list(range(20, 40))
    told = report_of(
        server.url, "--trace", str(file), "--rate", "200,400", "--requests", "10", "--warm-up", "0"
    )
    assert [item["level"] for item in told["levels"]] == ["200/s", "400/s"]
    assert [item["requests"] for item in told["runs"]] == [10, 10]


def test_the_first_part_of_a_trace_counts_from_its_first_arrival(
    server: CompletionServer, tmp_path: Path
) -> None:
    file = tmp_path / "piece.jsonl"
    line = '{{"at_s": {at}, "input_length": 20, "output_length": 2}}\n'
    file.write_text("".join(line.format(at=3600 + n / 100) for n in range(20)))
    told = report_of(server.url, "--trace", str(file), "--duration", "95ms", "--warm-up", "0")
    assert told["runs"][0]["requests"] == 10


def test_a_closed_loop_over_a_trace_keeps_what_its_prompts_share(
    server: CompletionServer, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{{"at_s": {at}, "input_length": 600, "output_length": 2, "hash_ids": [7, {at}]}}\n'
    file.write_text("".join(line.format(at=n) for n in range(100, 104)))
    closed = ("--concurrency", "1", "--requests", "4", "--warm-up", "0")
    report_of(server.url, "--trace", str(file), *closed)
    prompts = [tuple(request.body["prompt"]) for request in server.requests]
    assert {len(prompt) for prompt in prompts} == {600}
    assert len({prompt[:512] for prompt in prompts}) == 1
    assert len(set(prompts)) == 4


def test_a_workload_needs_no_file(server: CompletionServer) -> None:
    options = ("--workload", "sharegpt", "--rate", "300", "--requests", "6", "--warm-up", "2")
    assert report_of(server.url, *options)["runs"][0]["requests"] == 6


def test_classes_are_requested_and_evaluated_separately(server: CompletionServer) -> None:
    told = report_of(
        *(server.url, *QUICK, "--class", "fast=1", "--class", "batch=1"),
        *("--slo", "fast:ttft=1us", "--slo", "batch:ttft=60s"),
    )
    asked = {request.headers["x-slo-class"] for request in server.requests}
    assert asked == {"fast", "batch"}
    rows = {item["slo_class"]: item["attainment"] for item in told["runs"][0]["classes"]}
    assert rows == {"fast": 0.0, "batch": 1.0}


def test_a_key_is_sent_and_never_shown(server: CompletionServer, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-file\n")
    for options, environ, wanted in (
        ((), {"OPENAI_API_KEY": "sk-environ"}, "sk-environ"),
        (("--key-file", str(file)), {"OPENAI_API_KEY": "sk-environ"}, "sk-file"),
        (("--header", "Authorization: Bearer sk-header"), {}, "sk-header"),
    ):
        told = json.dumps(report_of(server.url, *QUICK, *options, environ=environ))
        assert server.requests[-1].headers["authorization"].lower() == f"bearer {wanted}"
        assert wanted not in told


def test_a_header_whose_value_holds_a_quote_is_not_shown_either(server: CompletionServer) -> None:
    told = report_of(server.url, *QUICK, "--header", "X-Key: it's-secret")
    assert server.requests[-1].headers["x-key"] == "it's-secret"
    assert "--header 'X-Key: ...'" in told["provenance"]["command"]
    assert "s-secret" not in json.dumps(told)


def test_files_are_written(server: CompletionServer, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "report"
    result = bench(server.url, *QUICK, "--slo", "ttft=60s", "--report", str(folder))
    assert "TTFT p99.9" in result.stdout
    told = json.loads((folder / "bench.json").read_text())
    assert told["runs"][0]["requests"] == 20
    assert "<html" in (folder / "bench.html").read_text()
    assert len((folder / "requests.jsonl").read_text().splitlines()) == 20


def test_ctrl_c_ends_it_with_the_results_so_far(server: CompletionServer) -> None:
    stuck = asyncio.Event()

    async def first_ones(asked: ReceivedRequest) -> AsyncIterator[str]:
        if len(server.requests) > 3:
            os.kill(os.getpid(), signal.SIGINT)
            await stuck.wait()
        async for event in stream_all_tokens(asked):
            yield event

    server.behaviour = first_ones
    options = ("--concurrency", "1", "--requests", "50", "--warm-up", "0", "--output-tokens", "2")
    result = bench(server.url, *options, "--repeats", "3", "-o", "json")
    assert result.exit_code == 130
    told = json.loads(result.stdout)
    assert told["partial"]
    assert [(item["requests"], item["unfinished"]) for item in told["runs"]] == [(3, 1)]
    assert "partial: stopped before its end" in result.stderr


def test_when_nothing_succeeds_the_status_says_so(server: CompletionServer) -> None:
    async def busy(_: ReceivedRequest) -> AsyncIterator[str]:
        yield "503 Busy"
        yield '{"error": {"message": "come back later"}}'

    server.behaviour = busy
    result = bench(server.url, *QUICK, "-o", "json")
    assert result.exit_code == 1
    assert "no request succeeded: HTTP 503: come back later" in result.stderr
    assert "next: " in result.stderr
    assert json.loads(result.stdout)["runs"][0]["failure_kinds"] == {"http 503": 20}


def test_a_client_that_was_the_bottleneck_is_said_and_is_a_failure(
    server: CompletionServer,
) -> None:
    async def busy_for_5_ms(asked: ReceivedRequest) -> AsyncIterator[str]:
        await asyncio.sleep(0.005)
        async for event in stream_all_tokens(asked):
            yield event

    server.behaviour = busy_for_5_ms  # one at a time they are late, however fast the machine is
    options = ("--rate", "2000", "--requests", "100", "--output-tokens", "1", "--warm-up", "0")
    result = bench(server.url, *options, "--max-in-flight", "1", "-o", "json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert not told["valid"]
    late = [
        reason for reason in told["why_invalid"] if "more than 20 ms after they were due" in reason
    ]
    assert len(late) == 1
    assert "not valid: 2000/s, run 1: the client sent" in result.stderr
    assert "next: give more --clients" in result.stderr


def test_where_nothing_runs_the_status_says_so() -> None:
    result = bench("http://127.0.0.1:1")
    assert result.exit_code == 3
    assert "http://127.0.0.1:1: connection refused" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rate", "fast"), "expected numbers such as 1,2,4"),
        (("--rate", "0"), "expected more than 0"),
        (("--concurrency", "1.5"), "expected a whole number"),
        (("--rate", "1", "--concurrency", "2"), "give one of --rate and --concurrency"),
        (("--trace", "a", "--workload", "conv"), "give one of --trace, --workload and --dataset"),
        (("--workload", "conv"), "--workload needs --rate"),
        (("--find-knee",), "--find-knee needs objectives"),
        (("--find-knee", "--slo", "ttft=1s", "--rate", "1,2"), "begins at one rate"),
        (("--turns", "2"), "only a chat has turns"),
        (("--api", "chat", "--prompts", "tokens"), "a chat takes words"),
        (("--api", "grpc"), "expected one of completions, chat"),
        (("--arrivals", "often"), "expected one of constant, poisson, gamma"),
        (("--prompt-tokens", "9:3"), "expected a number of tokens such as 512"),
        (("--shared-prefix", "1024"), "longer than the shortest prompt"),
        (("--shared-prefix", "many"), "expected tokens and a count"),
        (("--class", "=3"), "expected a name and a weight"),
        (("--requests", "3", "--duration", "3s"), "give one of --requests and --duration"),
        (("--slo", "speed=1s"), "expected one of ttft, tpot, e2e"),
        (("--slo", "ttft=soon"), "expected a duration"),
        (("--header", "nothing"), "expected NAME:VALUE"),
        (("--warm-up", "bit"), "expected a duration"),
        (("--clients", "9", "--max-in-flight", "3"), "fewer requests at a time"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: tuple[str, ...], said: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())
