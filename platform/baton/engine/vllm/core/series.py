"""vLLM's own series (`vllm:*`) of one engine, beside baton's.

*Theory of operation.* vLLM's own logger is fed the statistics of each step, as vLLM's API server
would. Of requests, which here are legs, it is told what costs nothing for each token: how many
tokens came and went, where prompts' tokens came from, preemptions, and how legs ended. So its
histograms of requests' latencies stay empty and are left out: baton has its own of them
(`telemetry.catalogue`), of whole requests.

Telling it a step costs as much as all else that the step's tokens cost here. But most steps are
*plain*: some tokens, and gauges that the next step sets anew. Those are only counted, and told
together before the next step that is not, or when somebody looks. What is told is the same.

vLLM registers its series with the process' one registry, from which a second engine removes the
first one's. Here each engine's are taken out of it, into a registry of their own.
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

logger = logging.getLogger(__name__)
_ONE_REGISTRY = threading.Lock()


class VllmSeries(Collector):
    """Feeds vLLM's logger, and collects what it says; nothing before `begin`."""

    def __init__(self) -> None:
        self._own = CollectorRegistry()
        self._logger: PrometheusStatLogger | None = None
        self._untold = threading.Lock()
        """Held for the next two, which whoever collects in another thread tells as well."""
        self._latest: SchedulerStats | None = None
        """Of the last plain step that was not told yet."""
        self._plain_tokens: Counter[int] = Counter()
        """How many plain steps with outputs had so many tokens and were not told yet."""

    def begin(self, config: VllmConfig) -> None:
        """An engine of this configuration has started; without its series it runs as well."""
        try:
            with _ONE_REGISTRY:
                self._logger = _apart(config, self._own)
        except Exception:  # telemetry is no reason not to serve
            logger.exception("vLLM's own series are not told")

    def stepped(self, step: EngineCoreOutputs) -> None:
        """Take in one step of the engine."""
        self._telling(lambda told: self._take(step, told))

    def collect(self) -> Iterator[Family]:
        """What vLLM says, but for histograms in which there is nothing."""
        self._telling(self._tell_plain)
        return (family for family in self._own.collect() if not _is_empty(family))

    def _take(self, step: EngineCoreOutputs, told: PrometheusStatLogger) -> None:
        if _is_plain(step):
            self._latest = step.scheduler_stats
            if step.outputs:
                self._plain_tokens[sum(len(one.new_token_ids) for one in step.outputs)] += 1
            return
        self._tell_plain(told)
        told.record(step.scheduler_stats, _iteration(step.outputs))
        for output in step.outputs:
            if output.finish_reason is not None:
                told.counter_request_success[output.finish_reason][0].inc()

    def _tell_plain(self, told: PrometheusStatLogger) -> None:
        latest, self._latest = self._latest, None
        if latest is None:
            return
        told.record(latest, None)
        steps, self._plain_tokens = self._plain_tokens, Counter()
        for tokens, times in steps.items():
            told.counter_generation_tokens[0].inc(tokens * times)
            for _ in range(times):
                told.histogram_iteration_tokens[0].observe(tokens)

    def _telling(self, tell: Callable[[PrometheusStatLogger], None]) -> None:
        if self._logger is None:
            return
        try:
            with self._untold:
                tell(self._logger)
        except Exception:  # nor to stop serving
            self._logger = None
            logger.exception("vLLM's own series are told no more")


def _is_plain(step: EngineCoreOutputs) -> bool:
    """Whether nothing is to be told of it but tokens, and gauges that the next step sets anew."""
    stats = step.scheduler_stats
    if stats is None or stats.prefix_cache_stats.queries or stats.kv_cache_eviction_events:
        return False
    fetched = stats.connector_prefix_cache_stats  # there in every step of an engine with NIXL
    if (
        (fetched is not None and fetched.queries)
        or stats.spec_decoding_stats is not None
        or stats.kv_connector_stats is not None
        or stats.ec_connector_stats is not None
        or stats.perf_stats is not None
        or stats.running_lora_adapters
        or stats.waiting_lora_adapters
    ):
        return False
    return all(
        one.finish_reason is None and one.prefill_stats is None and not one.events
        for one in step.outputs
    )


def _apart(config: VllmConfig, registry: CollectorRegistry) -> PrometheusStatLogger:
    """A logger whose series are in a registry of their own."""
    known = _registered()
    made = PrometheusStatLogger(config)
    try:
        made.log_engine_initialized()
    finally:
        for collector in _registered() - known:
            REGISTRY.unregister(collector)
            registry.register(collector)
    return made


def _registered() -> set[Collector]:
    return set(REGISTRY._collector_to_names)  # noqa: SLF001 - nothing else tells them


def _iteration(outputs: list[EngineCoreOutput]) -> IterationStats | None:
    """What a step's outputs say; None for a step without any."""
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
    """Whether it is a histogram that nothing was observed in."""
    if family.type != "histogram":
        return False
    return not any(one.value for one in family.samples if one.name.endswith("_count"))
