from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from baton.simulator.outcome import Objectives, attainment
from baton.simulator.workloads.trace import TraceRequest
from benchmarks._distserve_data import poisson, sharegpt, timing
from benchmarks._fidelity_distserve import (
    EXPERIMENTS,
    crossing,
    engines,
    errors,
    gpus,
    passed_on,
    placements,
    vllm_curve,
)
from benchmarks.fidelity import data_folder

MODEL = "facebook/opt-13b"
FITTED = {
    "decoding_large_small_bs_threshold": 95,
    "prefill": [10.0, 0.1, 0.0],
    "decoding_smallbs": [20.0, 0.0, 0.0],
    "decoding_largebs": [20.0, 0.0, 0.0],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    home = tmp_path / "perf" / "distserve"
    home.mkdir(parents=True)
    profile = json.dumps({MODEL: {"1": FITTED, "2": FITTED}})
    for name in ("vllm", "distserve"):
        (home / f"profiler-a100-80g.{name}.json").write_text(profile)
    rows = [f"{MODEL},{tp},{pp},16000" for tp in (1, 2) for pp in (1, 2)]
    (home / "max_num_tokens.csv").write_text(
        "\n".join(["model,tp,pp,max_num_tokens", *rows]) + "\n"
    )
    return tmp_path


def test_a_curve_is_crossed_between_the_points_around_it() -> None:
    assert crossing({1: 95.0, 2: 85.0, 3: 95.0}, 90) == pytest.approx(1.5)
    assert crossing({1: 90.0, 2: 90.0, 4: 80.0}, 90) == pytest.approx(2.0)
    assert crossing({1: 80.0, 2: 70.0}, 90) == 1


def test_errors_are_simulated_less_measured() -> None:
    one = EXPERIMENTS[0]
    found = errors({rate: percent + 3 for rate, percent in one.measured.items()}, one)
    assert found == pytest.approx([3.0] * 8)


def test_placements_are_all_that_fit() -> None:
    found = placements(4)
    assert (2, 1, 1, 1) in found
    assert (1, 2, 2, 1) in found
    assert (2, 2, 1, 1) not in found
    assert len(found) == len(set(found)) == 9
    assert all(gpus(one) <= 4 for one in found)
    assert gpus((4, 1, 2, 2)) == 8


def test_overhead_is_added_where_it_is_asked_for(folder: Path) -> None:
    plain = timing(folder, "vllm", MODEL, tp=1, pp=1, overhead=False)
    burdened = timing(folder, "vllm", MODEL, tp=1, pp=1, overhead=True)
    assert (plain.stage_ms, plain.engine_ms, plain.engine_token_ms) == (0, 0, 0)
    assert (burdened.stage_ms, burdened.engine_ms) == (1.0, 2.0)
    assert plain.prefill == (10.0, 0.1, 0.0)


def test_a_request_alone_takes_its_prefill_and_then_its_decodes(folder: Path) -> None:
    load = [TraceRequest(0.0, 100, 11), TraceRequest(5.0, 200, 1)]
    long, short = passed_on(folder, MODEL, (1, 1, 1, 1), load)
    # 10 + 0.1 * 100 ms as fitted, 3 ms on top, 0.1 us a token.
    assert long.ttft_s == pytest.approx(0.023, abs=2e-5)
    assert long.tpot_s == pytest.approx(0.023, abs=2e-5)
    assert long.e2e_s == pytest.approx(long.ttft_s + 10 * long.tpot_s)
    assert (long.output_tokens, short.output_tokens) == (11, 1)
    assert short.ttft_s == pytest.approx(0.033, abs=3e-5)
    assert short.e2e_s == short.ttft_s


def test_engines_have_the_memory_that_was_found(folder: Path) -> None:
    prefill, decode = engines(folder, MODEL, (2, 1, 1, 2))
    assert (prefill.kv_blocks, decode.kv_blocks) == (1000, 1000)
    assert (prefill.max_batched_tokens, decode.max_batched_tokens) == (8192, 16_384)
    assert (prefill.pipeline_stages, decode.pipeline_stages) == (1, 2)


@pytest.mark.data
def test_opt_13b_is_attained_as_measured_where_it_is_not_overloaded() -> None:
    home = data_folder(None, os.environ)
    assert home is not None, "BATON_TRACES names a folder without measurements"
    one = EXPERIMENTS[0]
    few = {rate: one.measured[rate] for rate in (1.0, 2.0)}
    curve = vllm_curve(home, replace(one, measured=few))
    assert max(abs(curve[rate] - percent) for rate, percent in few.items()) < 6


@pytest.mark.data
def test_a_split_sustains_what_one_engine_does_not() -> None:
    home = data_folder(None, os.environ)
    assert home is not None, "BATON_TRACES names a folder without measurements"
    load = poisson(sharegpt, 3.0, requests=300, seed=0)
    done = passed_on(home, MODEL, (2, 1, 1, 1), load)
    assert attainment(done, Objectives(ttft_s=0.25, tpot_s=0.1)) > 0.95
