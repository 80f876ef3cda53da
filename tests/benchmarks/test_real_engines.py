"""What the comparison on real engines quotes, and what it starts them with; none is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks._load import Exchange
from benchmarks._real_load import realtime_priority
from benchmarks._real_metrics import (
    POISSON,
    SEQUENTIAL,
    Comparison,
    RequestResult,
    Runs,
    better_and_worse,
    compare,
    medians,
    metric,
    overhead_percent,
    read_result,
    summarize_load,
    table,
)
from benchmarks._real_proxy import decode_body, prefill_body
from benchmarks._real_ray import llm_config
from benchmarks._real_session import in_one_session
from benchmarks._real_stacks import (
    CONTENDERS,
    PD_SCENARIO,
    Contender,
    EngineLaunch,
    launch_of,
    pulled_bytes,
    to_flags,
    vllm_server,
)
from benchmarks._statistics import StreamTimes
from benchmarks._systems import API, NotStartedError, System, load_scenario
from benchmarks.real_engines import COMPARISONS, BenchmarkPlan, EngineBenchmark, summarize
from benchmarks.rivals.programs import NotAvailableError
from benchmarks.rivals.stacks import Program

PAIR = Comparison(ours="baton_pd", theirs="vllm_proxy")


def stream(ttft_s: float, tpot_s: float = 0.01, tokens: int = 32) -> StreamTimes:
    return StreamTimes(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        max_itl_s=tpot_s,
        tokens=tokens,
        prompt_tokens=64,
        chunks=tokens,
    )


def load(*ttfts_s: float, tpot_s: float = 0.01) -> dict[str, object]:
    return summarize_load(
        [RequestResult(is_long=False, stream=stream(ttft, tpot_s)) for ttft in ttfts_s]
    )


# ------------------------------------------------------------------ one load


def test_percentiles_are_of_complete_streams_and_failures_are_counted() -> None:
    found = summarize_load(
        [
            RequestResult(is_long=False, stream=stream(0.1)),
            RequestResult(is_long=True, stream=stream(0.3)),
            RequestResult(is_long=True, stream=None, error="503"),
        ]
    )

    assert (found["requests"], found["failed"], found["problems"]) == (3, 1, ["503"])
    assert metric(found, "ttft_s", "p50") == pytest.approx(0.2)
    assert metric(found, "long", "ttft_s", "p99") == pytest.approx(0.3)
    assert metric(found, "whole_s", "p50") == pytest.approx(0.2 + 31 * 0.01)


def test_a_load_of_which_nothing_was_answered_has_no_times() -> None:
    found = summarize_load([RequestResult(is_long=False, stream=None, error="503")])

    assert found["failed"] == 1
    assert metric(found, "ttft_s", "p50") is None


def exchange(*parts: bytes, problem: str = "") -> Exchange:
    events = b"".join(b"data: " + part + b"\n\n" for part in parts)
    body = f"{len(events):x}\r\n".encode() + events + b"\r\n0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    return Exchange(send_delay_s=0.0, sent_at_s=1.0, segments=[(1.5, head + body)], error=problem)


TOKEN = b'{"choices": [{"text": "a"}]}'
USAGE = b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}'


def test_a_complete_stream_is_read() -> None:
    found = read_result(exchange(TOKEN, USAGE, b"[DONE]"), is_long=True, max_tokens=1)

    assert found.stream is not None
    assert (found.is_long, found.stream.ttft_s, found.e2e_s) == (True, 0.5, 0.5)


@pytest.mark.parametrize(
    ("came", "max_tokens", "problem"),
    [
        (exchange(problem="no end"), 1, "no end"),
        (exchange(TOKEN, b"[DONE]"), 1, "usage None"),
        (exchange(TOKEN, USAGE, b"[DONE]"), 32, "1 tokens, expected 32"),
    ],
)
def test_a_truncated_answer_is_a_failure(came: Exchange, max_tokens: int, problem: str) -> None:
    found = read_result(came, is_long=False, max_tokens=max_tokens)

    assert found.stream is None
    assert problem in found.error


# ------------------------------------------------------------------ comparing


def test_ratios_are_taken_within_a_repeat_and_visits_that_failed_are_left_out() -> None:
    runs: Runs = {
        "baton_pd": [{SEQUENTIAL: load(0.1)}, {SEQUENTIAL: load(0.4)}, {SEQUENTIAL: load(9.0)}],
        "vllm_proxy": [{SEQUENTIAL: load(0.2)}, {SEQUENTIAL: load(0.4)}, None],
    }

    found = compare(runs, PAIR, SEQUENTIAL)

    assert found["ttft_p50"] == pytest.approx({"min": 0.5, "median": 0.75, "max": 1.0})
    assert found["tpot_p99"]["median"] == pytest.approx(1.0)
    assert found["short_ttft_p50"] == found["ttft_p50"]
    assert "long_ttft_p50" not in found
    assert compare(runs, PAIR, POISSON) == {}


def test_overhead_is_in_per_cent_and_request_by_request_too() -> None:
    runs: Runs = {
        "baton_pd": [{SEQUENTIAL: load(0.11, 0.11, 5.0, tpot_s=0.0)}],
        "vllm_proxy": [{SEQUENTIAL: load(0.10, 0.10, 0.1, tpot_s=0.0)}],
    }

    found = overhead_percent(runs, PAIR, SEQUENTIAL)

    assert found["whole_each"]["median"] == pytest.approx(10.0)
    assert found["ttft_p50"]["median"] == pytest.approx(10.0)
    assert found["whole_mean"]["median"] == pytest.approx(1640.0)
    assert "tpot_p50" not in found  # nothing can be said beyond 0


def test_both_signs_are_told_and_when_repeats_do_not_agree() -> None:
    spreads = {
        "ttft_p50": {"min": 0.8, "median": 0.9, "max": 0.95},
        "ttft_p99": {"min": 0.9, "median": 1.1, "max": 1.2},
        "long_ttft_p99": {"min": 2.0, "median": 2.0, "max": 2.0},
    }

    assert better_and_worse({POISSON: spreads}) == {
        "better": ["poisson ttft_p50 0.900"],
        "worse": ["poisson ttft_p99 1.100, repeats do not agree"],
    }


def test_medians_add_failures_up() -> None:
    one = summarize_load(
        [RequestResult(is_long=False, stream=stream(0.2)), RequestResult(is_long=True, stream=None)]
    )

    found = medians({"vllm": [{SEQUENTIAL: load(0.1)}, None, {SEQUENTIAL: one}]})

    assert found["vllm"][SEQUENTIAL]["ttft_p50_s"] == pytest.approx(0.15)
    assert (found["vllm"][SEQUENTIAL]["failed"], found["vllm"][SEQUENTIAL]["requests"]) == (1, 3)


def test_cores_used_by_other_processes_are_reported() -> None:
    cores = {"api": 0.2, "engine": 1.5, "client": 0.1, "machine": 2.0, "steal": 0.3}

    found = medians({"vllm": [{SEQUENTIAL: load(0.1) | {"cores": cores}}, {SEQUENTIAL: load(0.1)}]})

    assert found["vllm"][SEQUENTIAL]["strangers_cores"] == pytest.approx(0.2)


def test_every_stack_is_compared_with_baton_and_the_summary_names_all_pairs() -> None:
    names = [contender.name for contender in CONTENDERS]
    paired = [
        name
        for pairs in COMPARISONS.values()
        for pair in pairs
        for name in (pair.ours, pair.theirs)
    ]

    assert set(paired) == set(names)
    assert len(set(names)) == len(names)
    ratios: Any = summarize({name: [] for name in names})["ratios"]
    assert [*ratios["pd"]] == [pair.name for pair in COMPARISONS["pd"]]


def test_one_that_cannot_be_had_is_told_with_its_reason(model: Path) -> None:
    def make(_engine: EngineLaunch) -> tuple[System, Any]:
        raise NotAvailableError("no package of that name")

    one = Contender(name="gone", arrangement="pd", description="", make=make)
    plan = BenchmarkPlan(
        repeats=2, requests=1, window_s=1.0, rate_per_s=1.0, capacity_fraction=0.5, seed=1
    )
    engine = EngineLaunch(
        source="tiny", arguments={"model": str(model)}, environment={}, nixl_delay_us=None
    )
    bench = EngineBenchmark(plan, engine)

    runs, failures = bench.compare([one])

    assert runs == {"gone": [None, None]}
    assert failures == {"gone": "NotAvailableError: no package of that name"}
    assert "not measured at all: NotAvailableError: no package" in table(runs, failures)


# ------------------------------------------------------------------ engines


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer, which is all that is looked at here."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    one = Tokenizer(models.WordLevel({"?": 0}, "?"))
    one.pre_tokenizer = pre_tokenizers.Whitespace()
    one.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def engine(*sets: str) -> EngineLaunch:
    return launch_of(load_scenario(PD_SCENARIO, overrides=("model.source=/somewhere/tiny", *sets)))


def test_others_get_what_baton_gives_its_own_engines() -> None:
    found = engine()

    words = to_flags(found.arguments)
    assert words[words.index("--block-size") + 1] == "32"
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str(256 << 20)
    assert "--enforce-eager" in words
    assert "--no-enable-expert-parallel" in words
    assert found.environment["OMP_NUM_THREADS"] == "1"
    assert found.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert llm_config(found.arguments)["engine_kwargs"]["block_size"] == 32


def test_engines_that_differ_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="different engines"):
        engine("pools.decode.resources.cpus=2")


def test_only_a_server_that_splits_has_a_connector() -> None:
    plain = vllm_server(engine(), port=1, is_disaggregated=False)
    split = vllm_server(engine(), port=1, is_disaggregated=True)

    assert "--kv-transfer-config" not in plain.command
    assert any("NixlConnector" in word for word in split.command)
    assert split.environment["BATON_NIXL_PROGRESS_DELAY_US"] == "1000"
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in split.environment
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in plain.environment


def test_pulled_bytes_are_read_from_metrics() -> None:
    text = (
        "# TYPE vllm:nixl_bytes_transferred histogram\n"
        'vllm:nixl_bytes_transferred_count{engine="0"} 2.0\n'
        'vllm:nixl_bytes_transferred_sum{engine="0"} 4096.0\n'
    )

    assert pulled_bytes(text) == 4096.0
    assert pulled_bytes("") is None


# ------------------------------------------------------------------ starting


def python(code: str) -> Program:
    return Program(group=API, command=(sys.executable, "-c", code))


def test_programs_in_one_session_end_together_and_it_is_told_which_was_first(
    tmp_path: Path,
) -> None:
    said = tmp_path / "said"
    tell = "import os, sys, time; os.write(1, b'%d\\n' % os.getsid(0)); "
    waits = tell + f"open({str(said)!r}, 'w'); time.sleep(60)"
    ends = tell + f"[time.sleep(0.01) for _ in iter(lambda: os.path.exists({str(said)!r}), True)]; "
    holder = in_one_session([python(waits), python(ends + "sys.exit(3)")])

    done = subprocess.run(holder.command, capture_output=True, text=True, check=False, timeout=60)

    first, second, told = done.stdout.splitlines()
    assert done.returncode == 1
    assert first == second
    assert "ended with 3" in told
    assert holder.group == API


def test_one_that_does_not_come_up_gets_a_second_chance(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.real_engines.wait_until_answering", lambda _url: None)
    ended: list[str] = []

    class Late:
        name, url = "late", ""

        def start(self) -> None:
            if not ended:
                raise NotStartedError("the port is taken")

        def process_groups(self) -> dict[str, Any]:
            return {}

        def stop(self) -> list[int]:
            ended.append(self.name)
            return []

    plan = BenchmarkPlan(
        repeats=1, requests=1, window_s=1.0, rate_per_s=1.0, capacity_fraction=0.5, seed=1
    )
    engine = EngineLaunch(
        source="tiny", arguments={"model": str(model)}, environment={}, nixl_delay_us=None
    )
    one = Contender(
        name="late", arrangement="pd", description="", make=lambda _engine: (Late(), lambda: None)
    )

    system, _ = EngineBenchmark(plan, engine)._start(one)

    assert system.name == "late"
    assert ended == ["late"]


def test_the_client_is_ordinary_again_afterwards() -> None:
    with realtime_priority() as ahead:
        assert (os.sched_getscheduler(0) == os.SCHED_RR) is ahead

    assert os.sched_getscheduler(0) == os.SCHED_OTHER


# ------------------------------------------------------------------ the proxy's protocol


def test_the_prefill_server_is_asked_for_one_token_and_to_keep_the_blocks() -> None:
    body = {"prompt": "a", "max_tokens": 32, "stream": True, "stream_options": {}}

    asked = prefill_body(body)

    assert (asked["max_tokens"], asked["stream"]) == (1, False)
    assert "stream_options" not in asked
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert body["max_tokens"] == 32


def test_the_decode_server_is_told_where_the_blocks_are() -> None:
    body = {"prompt": "a", "max_tokens": 32}

    assert decode_body(body, {"kv_transfer_params": {"remote_port": 1}}) == {
        **body,
        "kv_transfer_params": {"remote_port": 1},
    }
    assert decode_body(body, {}) == body
