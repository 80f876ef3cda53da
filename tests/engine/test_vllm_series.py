"""vLLM's own series without an engine: apart for each, fed once a step, and harmless when wrong."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.config import VllmConfig
    from vllm.v1.engine import (
        EngineCoreEvent,
        EngineCoreEventType,
        EngineCoreOutput,
        EngineCoreOutputs,
        FinishReason,
    )
    from vllm.v1.metrics.stats import (
        IterationStats,
        PrefillStats,
        PrefixCacheStats,
        SchedulerStats,
    )
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    from baton.engine.vllm.core import series
    from baton.engine.vllm.core.series import VllmSeries

CONFIG = cast("VllmConfig", SimpleNamespace())


class StatLogger:
    """Registers series with the process, as vLLM's does, and keeps what it is told."""

    def __init__(self, _config: object) -> None:
        for collector in list(vars(REGISTRY)["_collector_to_names"]):
            if getattr(collector, "_name", "").startswith("vllm:"):
                REGISTRY.unregister(collector)  # as vLLM does with those of an earlier engine
        self.running = Gauge("vllm:num_requests_running", "Of the last step.")
        self.latency = Histogram("vllm:e2e_request_latency_seconds", "Never fed.")
        tokens = Histogram("vllm:iteration_tokens", "Of each step.", buckets=(1, 2, 4))
        self.histogram_iteration_tokens = {0: tokens}
        self.counter_generation_tokens = {0: Counter("vllm:generation_tokens", "Of all steps.")}
        success = Counter("vllm:request_success", "Ended.", ["finished_reason"])
        self.counter_request_success = {
            reason: {0: success.labels(str(reason))} for reason in FinishReason
        }
        self.seen: list[IterationStats | None] = []

    def log_engine_initialized(self) -> None:
        Gauge("vllm:cache_config_info", "Of the engine.").set(1)

    def record(self, scheduler: SchedulerStats, iteration: IterationStats | None) -> None:
        self.running.set(scheduler.num_running_reqs)
        if iteration is not None:
            self.histogram_iteration_tokens[0].observe(iteration.num_generation_tokens)
            self.counter_generation_tokens[0].inc(iteration.num_generation_tokens)
        self.seen.append(iteration)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "PrometheusStatLogger", StatLogger)


def begun() -> VllmSeries:
    made = VllmSeries()
    made.start(CONFIG)
    return made


def step(*outputs: EngineCoreOutput, running: int = 0) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        outputs=list(outputs), scheduler_stats=SchedulerStats(num_running_reqs=running)
    )


def output(
    *token_ids: int,
    prefill: PrefillStats | None = None,
    events: list[EngineCoreEvent] | None = None,
    ended: FinishReason | None = None,
) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id="r",
        new_token_ids=list(token_ids),
        prefill_stats=prefill,
        events=events,
        finish_reason=ended,
    )


def told(made: VllmSeries) -> dict[str, float]:
    return {sample.name: sample.value for family in made.collect() for sample in family.samples}


def all_samples(made: VllmSeries) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
    """Every sample, buckets and labels too; not when a series was made."""
    return {
        (sample.name, tuple(sample.labels.items()), sample.value)
        for family in made.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def seen(made: VllmSeries) -> IterationStats:
    (stats,) = cast("StatLogger", made._logger).seen
    assert stats is not None
    return stats


def test_each_engine_of_a_process_has_its_own_and_the_process_has_none() -> None:
    first, second = begun(), begun()
    first.on_step(step(running=1))
    second.on_step(step(running=2))
    assert told(first)["vllm:num_requests_running"] == 1
    assert told(second)["vllm:num_requests_running"] == 2
    assert told(first)["vllm:cache_config_info"] == 1
    assert not [name for name in vars(REGISTRY)["_names_to_collectors"] if "vllm" in name]


def test_a_step_is_told_with_its_tokens_and_where_prompts_came_from() -> None:
    made = begun()
    stats = PrefillStats()
    stats.set(num_prompt_tokens=100, num_local_cached_tokens=30, num_external_cached_tokens=20)
    made.on_step(step(output(1, 2, prefill=stats), output(3)))
    iteration = seen(made)
    assert iteration.num_generation_tokens == 3
    assert iteration.prompt_token_stats.total == 100
    assert iteration.prompt_token_stats.computed == 50
    assert iteration.prompt_token_stats.external_kv_transfer == 20


def test_preemptions_are_counted_among_other_events() -> None:
    made = begun()
    kinds = (EngineCoreEventType.QUEUED, EngineCoreEventType.PREEMPTED)
    events = [EngineCoreEvent.new_event(kind) for kind in (*kinds, EngineCoreEventType.PREEMPTED)]
    made.on_step(step(output(1, events=events), output(2)))
    assert seen(made).num_preempted_reqs == 2


def test_a_leg_that_ends_counts_by_how() -> None:
    made = begun()
    made.on_step(step(output(1, ended=FinishReason.LENGTH), output(2)))
    ends = {
        sample.labels["finished_reason"]: sample.value
        for family in made.collect()
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
    }
    assert ends == {str(reason): float(reason is FinishReason.LENGTH) for reason in FinishReason}


def test_unused_histograms_are_left_out() -> None:
    made = begun()
    made.on_step(step(output(1)))
    names = set(told(made))
    assert "vllm:iteration_tokens_count" in names
    assert "vllm:e2e_request_latency_seconds_count" not in names


def test_a_step_without_outputs_has_no_tokens_to_tell() -> None:
    made = begun()
    made.on_step(step(running=3))
    assert told(made)["vllm:num_requests_running"] == 3
    assert "vllm:iteration_tokens_count" not in told(made)
    assert cast("StatLogger", made._logger).seen == [None]


RUNNING = {"tokens": 2, "a token": 1, "nothing": 4, "an end": 3, "a prompt": 5}
STEPS: Mapping[str, Callable[[], EngineCoreOutputs]] = {
    "tokens": lambda: step(output(1), output(2, 3), running=2),
    "a token": lambda: step(output(1), running=1),
    "nothing": lambda: step(running=4),
    "an end": lambda: step(output(1, ended=FinishReason.STOP), running=3),
    "a prompt": lambda: step(output(1, prefill=PrefillStats()), running=5),
}


@given(kinds=st.lists(st.sampled_from(sorted(STEPS))), looks=st.sets(st.integers(0, 30)))
def test_repeated_scrapes_report_the_same(kinds: list[str], looks: set[int]) -> None:
    seldom, often, each = begun(), begun(), begun()
    for number, kind in enumerate(kinds):
        for made in (seldom, often, each):
            made.on_step(STEPS[kind]())
        each.collect()
        if number in looks:
            often.collect()
    assert all_samples(seldom) == all_samples(often) == all_samples(each)
    tokens = sum({"tokens": 3, "nothing": 0}.get(kind, 1) for kind in kinds)
    assert told(seldom)["vllm:generation_tokens_total"] == tokens
    running = RUNNING[kinds[-1]] if kinds else 0
    assert told(seldom)["vllm:num_requests_running"] == running


@pytest.mark.parametrize("connector", [None, PrefixCacheStats()], ids=["alone", "with NIXL"])
def test_plain_steps_are_recorded_together_at_a_scrape(
    connector: PrefixCacheStats | None,
) -> None:
    made = begun()
    plain = step(output(1), output(2), running=2)
    assert plain.scheduler_stats is not None
    plain.scheduler_stats.connector_prefix_cache_stats = connector
    for _ in range(1000):
        made.on_step(plain)
    seen_before = list(cast("StatLogger", made._logger).seen)
    figures = told(made)
    assert seen_before == []
    assert cast("StatLogger", made._logger).seen == [None]
    assert figures["vllm:iteration_tokens_count"] == 1000
    assert figures["vllm:generation_tokens_total"] == 2000


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix_cache_stats": PrefixCacheStats(queries=5, hits=3)},
        {"connector_prefix_cache_stats": PrefixCacheStats(queries=5, hits=3)},
        {"spec_decoding_stats": SpecDecodingStats.new(3)},
        {"kv_connector_stats": {"pulls": 1}},
        {"ec_connector_stats": {"pulls": 1}},
        {"running_lora_adapters": {"one": 1}},
        {"waiting_lora_adapters": {"one": 1}},
        {"kv_cache_eviction_events": [object()]},
        {"perf_stats": object()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_step_of_which_more_is_to_be_told_is_told_at_once_after_those_before_it(
    changes: dict[str, object],
) -> None:
    made = begun()
    made.on_step(step(output(1)))
    full = EngineCoreOutputs(outputs=[output(1)], scheduler_stats=SchedulerStats(**changes))
    made.on_step(full)
    before, last = cast("StatLogger", made._logger).seen
    assert before is None
    assert last is not None
    assert last.num_generation_tokens == 1


def test_an_engine_goes_on_when_its_series_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_config: object) -> None:
        raise TypeError("another version")

    monkeypatch.setattr(series, "PrometheusStatLogger", broken)
    made = begun()
    made.on_step(step(output(1)))
    assert told(made) == {}
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR
    ] == ["vLLM's own series are not exported"]


def test_an_engine_goes_on_when_a_step_cannot_be_told_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = begun()
    made.on_step(cast("EngineCoreOutputs", SimpleNamespace(scheduler_stats=None, outputs=[])))
    made.on_step(step(output(1)))
    assert told(made)["vllm:num_requests_running"] == 0, "as it was before"
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert said == ["vLLM's own series are no longer exported"]


def test_nothing_is_told_before_the_engine_has_started() -> None:
    made = VllmSeries()
    made.on_step(step(output(1)))
    assert told(made) == {}
