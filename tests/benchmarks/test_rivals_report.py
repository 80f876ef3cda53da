"""What the comparison with rivals quotes, from runs that are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from baton.simulator.engine.settings import SimSettings
from benchmarks._systems import System
from benchmarks.rivals.__main__ import compare
from benchmarks.rivals.contender import Contender, LaunchSite
from benchmarks.rivals.contenders import CONTENDERS
from benchmarks.rivals.load import GeneratorResult, LoadError
from benchmarks.rivals.measurement import load_metrics
from benchmarks.rivals.programs import NotAvailableError
from benchmarks.rivals.report import RATIOS, Runs, headline, medians, table


def run(tokens_per_core_s: float = 1000.0, ttft_s: float = 0.01) -> dict[str, Any]:
    return {
        "requests_per_s": 1.0,
        "tokens_per_s": 64.0,
        "cpu_ms_per_request": 2.0,
        "cpu_us_per_token": 1e6 / tokens_per_core_s,
        "tokens_per_core_s": tokens_per_core_s,
        "ttft_s": {"p50": ttft_s, "p99": 2 * ttft_s},
        "gap_max_s": {"p50": 0.01, "max": 0.02},
        "rss_mib": {"api": 100.0, "haproxy": 20.0, "engine": 500.0},
    }


def test_ratios_are_taken_within_a_repeat_and_missing_ones_are_left_out() -> None:
    runs: Runs = {
        "baton_rust": [{"64x512": run(3000)}, {"64x512": run(4000)}, {"64x512": run(9000)}],
        "dynamo_fast": [{"64x512": run(1000)}, {"64x512": run(4000)}, None],
    }

    found = headline(runs, SimSettings())

    assert found["rust_over_dynamo_fast_tokens_per_core"] == 2.0
    spread = found["spread"]
    assert isinstance(spread, dict)
    assert spread["rust_over_dynamo_fast_tokens_per_core"] == {
        "min": 1.0,
        "median": 2.0,
        "max": 3.0,
    }
    assert found["python_over_vllm_tokens_per_core"] is None


def test_overhead_on_the_first_token_is_the_time_beyond_vllm_alone() -> None:
    runs = {"vllm": [{"1x512": run(ttft_s=0.01)}], "baton_python": [{"1x512": run(ttft_s=0.012)}]}

    found = headline(runs, SimSettings())

    assert found["added_ttft_local_s"] == pytest.approx(0.002)
    assert found["added_ttft_pd_s"] is None


def test_memory_is_that_of_processes_between_client_and_engine() -> None:
    found = medians({"vllm": [{"1x512": run()}, None]})

    assert found["vllm"]["1x512"]["rss_mib"] == 120.0


def test_every_stack_has_one_name_and_ratios_name_existing_stacks() -> None:
    names = [contender.name for contender in CONTENDERS]

    assert len(set(names)) == len(names)
    assert {name for pair in RATIOS.values() for name in pair} <= set(names)


def test_one_that_cannot_be_had_is_told_with_its_reason() -> None:
    def make(_site: LaunchSite) -> System:
        raise NotAvailableError("no package of that name")

    one = Contender(name="gone", description="", engine="", make=make)

    runs, absent = compare([one], [], 2, site=None, bodies=None)  # type: ignore[arg-type]

    assert absent == {"gone": "NotAvailableError: no package of that name"}
    assert "not measured: NotAvailableError: no package" in table(runs, absent)


def loaded(*, failed: int = 0, problems: Sequence[str] = ()) -> GeneratorResult:
    values: dict[str, Any] = {
        "wall_s": 2.0,
        "own_cpu_s": 0.1,
        "failed": failed,
        "problems": [*problems],
        "ttft_s": [0.1, 0.3],
        "gap_max_s": [0.01, 0.02],
        "took_s": [1.0, 1.0],
        "events": [10, 30],
        "tokens": [10, -1],
    }
    return GeneratorResult(**values)


def test_only_what_stands_between_client_and_engine_is_counted() -> None:
    cpu_s = {"api": 0.3, "haproxy": 0.1, "engine": 5.0, "other": 1.0}

    found = load_metrics(loaded(), cpu_s | {"client": 0.0, "machine": 8.5, "steal": 0.0})

    assert found["tokens"] == 40  # where the server does not count, events are counted
    assert found["tokens_per_core_s"] == pytest.approx(100.0)
    assert found["cpu_ms_per_request"] == pytest.approx(200.0)
    assert found["strangers_cores"] == pytest.approx(1.0)


def test_a_benchmark_of_failures_compares_nothing() -> None:
    with pytest.raises(LoadError, match="1 requests failed"):
        load_metrics(loaded(failed=1, problems=["503"]), {"machine": 1.0, "client": 0.0})
