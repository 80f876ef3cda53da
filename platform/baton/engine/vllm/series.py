"""vLLM's own series (`vllm:*`) of one engine, beside baton's.

*Theory of operation.* vLLM's own logger is fed the statistics of each step, once a step, as vLLM's
API server would. Of requests, which here are legs, it is told what costs nothing for each token:
how many tokens came and went, where prompts' tokens came from, preemptions, and how legs ended. So
its histograms of requests' latencies stay empty and are left out: baton has its own of them
(`telemetry.catalogue`), of whole requests.

vLLM registers its series with the process' one registry, from which a second engine removes the
first one's. Here each engine's are taken out of it, into a registry of their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats

logger = logging.getLogger(__name__)
_ONE_REGISTRY = threading.Lock()


class VllmSeries(Collector):
    """Feeds vLLM's logger, and collects what it says; nothing before `begin`."""

    def __init__(self) -> None:
        self._own = CollectorRegistry()
        self._logger: PrometheusStatLogger | None = None

    def begin(self, config: VllmConfig) -> None:
        """An engine of this configuration has started; without its series it runs as well."""
        try:
            with _ONE_REGISTRY:
                self._logger = _apart(config, self._own)
        except Exception:  # telemetry is no reason not to serve
            logger.exception("vLLM's own series are not told")

    def stepped(self, step: EngineCoreOutputs) -> None:
        """Take in one step of the engine."""
        if self._logger is None:
            return
        try:
            self._logger.record(step.scheduler_stats, _iteration(step.outputs))
            for output in step.outputs:
                if output.finish_reason is not None:
                    self._logger.counter_request_success[output.finish_reason][0].inc()
        except Exception:  # nor to stop serving
            self._logger = None
            logger.exception("vLLM's own series are told no more")

    def collect(self) -> Iterator[Family]:
        """What vLLM says, but for histograms in which there is nothing."""
        return (family for family in self._own.collect() if not _is_empty(family))


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
