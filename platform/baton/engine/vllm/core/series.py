"""vLLM's own series (`vllm:*`) of an engine, beside baton's.

Theory of operation: vLLM's logger gets the statistics of each step, as from vLLM's API server. Of
requests, which here are legs, it gets only data that is free per token: token counts, sources of
prompt tokens, preemptions, and ends. Its histograms of request latencies stay empty and are left
out; baton has its own (`telemetry.catalogue`), of whole requests.

A call of the logger costs as much as all other work for a step's tokens. But most steps are
*plain*: tokens, and gauges that the next step overwrites. Those are counted, and recorded together
before the next step that is not plain, or when a scrape comes. The series are the same.

vLLM registers its series in the process' global registry, where a second engine replaces the first
engine's. So each engine's series move into a registry of their own.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from baton.engine.vllm.patches import table

logger = logging.getLogger(__name__)
_REGISTRY_LOCK = threading.Lock()


class VllmSeries(Collector):
    """Feeds vLLM's logger and collects its series; none before `start`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._logger: PrometheusStatLogger | None = None
        self._pending_lock = threading.Lock()
        """Guards the next two; a scrape in another thread also flushes them."""
        self._pending_stats: SchedulerStats | None = None
        """Of the last plain step that is not recorded yet."""
        self._pending_token_counts: Counter[int] = Counter()
        """Plain steps with outputs that are not recorded yet, by number of tokens."""

    def start(self, config: VllmConfig) -> None:
        """Make the logger of an engine; a failure leaves the engine without series."""
        try:
            with _REGISTRY_LOCK:
                self._logger = _make_isolated_logger(config, self._registry)
        except Exception:  # telemetry must not stop the engine
            logger.exception("vLLM's own series are not exported")

    def on_step(self, step: EngineCoreOutputs) -> None:
        """Record an engine step."""
        self._with_logger(lambda stat_logger: self._record_step(step, stat_logger))

    def collect(self) -> Iterator[Family]:
        """VLLM's series, without empty histograms."""
        self._with_logger(self._flush_pending)
        return (family for family in self._registry.collect() if not _is_empty(family))

    def _record_step(self, step: EngineCoreOutputs, stat_logger: PrometheusStatLogger) -> None:
        if _is_plain(step):
            self._pending_stats = step.scheduler_stats
            if step.outputs:
                self._pending_token_counts[
                    sum(len(output.new_token_ids) for output in step.outputs)
                ] += 1
            return
        self._flush_pending(stat_logger)
        stat_logger.record(step.scheduler_stats, _iteration_stats(step.outputs))
        for output in step.outputs:
            if output.finish_reason is not None:
                stat_logger.counter_request_success[output.finish_reason][0].inc()

    def _flush_pending(self, stat_logger: PrometheusStatLogger) -> None:
        latest, self._pending_stats = self._pending_stats, None
        if latest is None:
            return
        stat_logger.record(latest, None)
        steps, self._pending_token_counts = self._pending_token_counts, Counter()
        for tokens, step_count in steps.items():
            stat_logger.counter_generation_tokens[0].inc(tokens * step_count)
            for _ in range(step_count):
                stat_logger.histogram_iteration_tokens[0].observe(tokens)

    def _with_logger(self, action: Callable[[PrometheusStatLogger], None]) -> None:
        if self._logger is None:
            return
        try:
            with self._pending_lock:
                action(self._logger)
        except Exception:  # telemetry must not stop the engine
            self._logger = None
            logger.exception("vLLM's own series are no longer exported")


def _is_plain(step: EngineCoreOutputs) -> bool:
    """Whether a step has only tokens, and gauges that the next step overwrites."""
    stats = step.scheduler_stats
    if stats is None or stats.prefix_cache_stats.queries or stats.kv_cache_eviction_events:
        return False
    connector_stats = stats.connector_prefix_cache_stats  # in every step of an engine with NIXL
    if (
        (connector_stats is not None and connector_stats.queries)
        or stats.spec_decoding_stats is not None
        or stats.kv_connector_stats is not None
        or stats.ec_connector_stats is not None
        or stats.perf_stats is not None
        or stats.running_lora_adapters
        or stats.waiting_lora_adapters
    ):
        return False
    return all(
        output.finish_reason is None and output.prefill_stats is None and not output.events
        for output in step.outputs
    )


def _make_isolated_logger(config: VllmConfig, registry: CollectorRegistry) -> PrometheusStatLogger:
    """A logger with its series in a registry of its own."""
    table.METRICS_REGISTRY.fits()
    collectors_before = _registered_collectors()
    stat_logger = PrometheusStatLogger(config)
    try:
        stat_logger.log_engine_initialized()
    finally:
        for collector in _registered_collectors() - collectors_before:
            REGISTRY.unregister(collector)
            registry.register(collector)
    return stat_logger


def _registered_collectors() -> set[Collector]:
    return set(REGISTRY._collector_to_names)  # noqa: SLF001 - nothing else tells them


def _iteration_stats(outputs: list[EngineCoreOutput]) -> IterationStats | None:
    """The statistics of a step's outputs; None without outputs."""
    if not outputs:
        return None
    stats = IterationStats()
    for output in outputs:
        stats.num_generation_tokens += len(output.new_token_ids)
        if output.prefill_stats is not None:  # once for each request
            stats.prompt_token_stats.update_from_output(output.prefill_stats)
        if output.events:
            stats.num_preempted_reqs += sum(
                event.type is EngineCoreEventType.PREEMPTED for event in output.events
            )
    return stats


def _is_empty(family: Family) -> bool:
    """Whether a histogram has no observations."""
    if family.type != "histogram":
        return False
    return not any(sample.value for sample in family.samples if sample.name.endswith("_count"))
