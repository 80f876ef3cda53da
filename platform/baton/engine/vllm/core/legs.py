"""The legs that an engine runs, and the load and transfers that its steps report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
)
from vllm.v1.metrics.stats import SchedulerStats

from baton.domain.fleet import LinkTotals, Load, StepTotals, TransferTotals
from baton.domain.handoff import Leg, LegOutput, LegTimes
from baton.engine.vllm.core.lora import EngineAdapters
from baton.engine.vllm.wire.codec import EngineCodec, source_engine_id
from baton.engine.vllm.wire.keys import (
    CONNECTOR,
    DURATIONS_KEY,
    FAILED_SOURCES_KEY,
    INVALIDATED_SOURCES_KEY,
    SOURCES_KEY,
    TRANSFERS_KEY,
)

_SMOOTHING = 0.1
"""Weight of the newest step in the moving average: about the last 20 steps count."""
_FAILURE_KEYS = ("num_failed_transfers", "num_failed_notifications", "num_failed_handshakes")
_MAX_SOURCES = 1024
"""Replicas that are remembered; beyond that, those with the oldest pulls are dropped."""
_V = TypeVar("_V")


@dataclass(slots=True)
class _LiveLeg:
    prompt_tokens: int
    uncached_prompt_tokens: int
    """Neither cached nor pulled, as far as that is known."""
    output_tokens: int = 0
    started: bool = False
    queued_at_s: float | None = None
    """By the clock of EngineCore, like the next two."""
    scheduled_at_s: float | None = None
    first_output_at_s: float = 0.0
    preemptions: int = 0
    reported_preemptions: int = 0

    def record_events(self, events: list[EngineCoreEvent]) -> None:
        """Add the scheduler's events since the last output.

        Source: vLLM 0.32, v1/core/sched/scheduler.py: QUEUED on arrival, SCHEDULED when it first
        computes (after a pull of its blocks) and after each PREEMPTED.
        """
        for event in events:
            if event.type is EngineCoreEventType.QUEUED:
                self.queued_at_s = event.timestamp
            elif event.type is EngineCoreEventType.PREEMPTED:
                self.preemptions += 1
            elif self.scheduled_at_s is None:
                self.scheduled_at_s = event.timestamp

    def times(self) -> LegTimes | None:
        """The leg's times, which are then reported; None where EngineCore keeps none."""
        if self.queued_at_s is None or self.scheduled_at_s is None:
            return None
        self.reported_preemptions = self.preemptions
        return LegTimes(
            max(0.0, self.scheduled_at_s - self.queued_at_s),
            max(0.0, self.first_output_at_s - self.scheduled_at_s),
            self.preemptions,
        )


class LiveLegs:
    """Every leg that was handed to the engine and has not ended."""

    def __init__(
        self,
        codec: EngineCodec,
        transport: Callable[[str], str],
        adapters: EngineAdapters,
        *,
        max_pulls: int | None = None,
    ) -> None:
        self._codec = codec
        self._live: dict[str, _LiveLeg] = {}
        self._meter = LoadMeter(max_pulls=max_pulls)
        self._links = PullMeter(transport)
        self._adapters = adapters

    def __contains__(self, leg_id: str) -> bool:
        return leg_id in self._live

    def add(self, leg: Leg) -> None:
        """Record that the engine gets a leg."""
        live = _LiveLeg(len(leg.prompt_token_ids), leg.uncached_prompt_tokens)
        self._live[leg.leg_id] = live
        self._meter.on_leg_submitted(live.uncached_prompt_tokens)
        self._links.on_leg_submitted(leg)

    def remove(self, leg_id: str) -> None:
        """Record that a leg has ended, or never began."""
        live = self._live.pop(leg_id, None)
        self._adapters.on_leg_ended(leg_id)
        if live is not None and not live.started:
            self._on_first_output(leg_id, live)

    def clear(self) -> None:
        """Forget all legs, after the engine closed."""
        self._live.clear()

    def on_step(self, step: EngineCoreOutputs) -> tuple[LegOutput, ...]:
        """The outputs of an engine step, for legs that still run."""
        stats = step.scheduler_stats
        if stats is not None and stats.kv_connector_stats:
            # First: an output may end the wait that identifies a transfer's source.
            self._links.on_step(_nixl_statistics(stats.kv_connector_stats))
        outputs = []
        context_tokens = 0
        for output in step.outputs:
            live = self._live.get(output.request_id)
            if live is not None:
                context_tokens += self._context_tokens(live)
                outputs.append(self._to_output(output, live, step.timestamp))
        if stats is not None:
            self._meter.on_step(stats, context_tokens=context_tokens)
        return tuple(outputs)

    def _context_tokens(self, live: _LiveLeg) -> int:
        """Tokens that a leg's output attended to; 0 for the first, which ends a prefill."""
        return live.prompt_tokens + live.output_tokens if live.started else 0

    def _to_output(self, output: EngineCoreOutput, live: _LiveLeg, at_s: float) -> LegOutput:
        times = None
        if output.events:
            live.record_events(output.events)
        if not live.started:
            live.first_output_at_s = at_s
            times = live.times()
            self._on_first_output(output.request_id, live)
        live.output_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            if live.preemptions > live.reported_preemptions:
                times = live.times()
            self.remove(output.request_id)
        return self._codec.decode_output(output, prompt_tokens=live.prompt_tokens, times=times)

    def _on_first_output(self, leg_id: str, live: _LiveLeg) -> None:
        live.started = True
        self._links.on_fetch_ended(leg_id)
        self._meter.on_leg_started(live.uncached_prompt_tokens)

    def load(self) -> Load:
        """The engine's load."""
        load = self._meter.load(live_legs=len(self._live))
        return load._replace(adapters=self._adapters.adapter_load())

    def links(self) -> tuple[LinkTotals, ...]:
        """Totals of pulls by source."""
        return self._links.totals()


class LoadMeter:
    """Sums the statistics of steps.

    Pulling requests are those that the scheduler defers: they wait for KV blocks, or for their turn
    to pull; `max_pulls` of them count as pulling and the rest as queued. Queued is every other live
    leg that the scheduler does not run. `queued_tokens` are prompt tokens to compute of legs
    without output, without tokens that they pull or that are expected to be cached. vLLM does not
    report the progress of a chunked prefill, so all of them count until the first token.

    Every step that computed tokens is in the step totals. A step's time is how long vLLM waited for
    its result. With asynchronous scheduling, this leaves out the preparation that a busy engine
    hides.
    """

    def __init__(self, *, max_pulls: int | None = None) -> None:
        self._max_pulls = max_pulls
        self._queued_tokens = 0
        self._running_requests = 0
        self._pulling_requests = 0
        self._kv_used_fraction = 0.0
        self._step_s = 0.0
        self._transfers = TransferTotals()
        self._steps = StepTotals()

    def on_leg_submitted(self, prompt_tokens: int) -> None:
        """Count a leg that the engine gets."""
        self._queued_tokens += prompt_tokens

    def on_leg_started(self, prompt_tokens: int) -> None:
        """Count a leg with its first output, or its end without any."""
        self._queued_tokens -= prompt_tokens

    def on_step(self, stats: SchedulerStats, *, context_tokens: int = 0) -> None:
        """Add a step; its decoding requests attended to `context_tokens` tokens."""
        self._running_requests = stats.num_running_reqs
        self._pulling_requests = stats.num_skipped_waiting_reqs
        if self._max_pulls is not None:
            self._pulling_requests = min(self._pulling_requests, self._max_pulls)
        self._kv_used_fraction = stats.kv_cache_usage
        details = stats.iteration_details
        if details is not None and not details.is_dummy:
            step_s = details.elapsed_ms / 1000
            has_average = self._step_s > 0
            self._step_s += (step_s - self._step_s) * (_SMOOTHING if has_average else 1)
            self._steps = StepTotals(
                steps=self._steps.steps + 1,
                busy_s=self._steps.busy_s + step_s,
                prefill_tokens=self._steps.prefill_tokens + details.num_ctx_tokens,
                decode_tokens=self._steps.decode_tokens + details.num_generation_requests,
                context_tokens=self._steps.context_tokens + context_tokens,
                prefill_steps=self._steps.prefill_steps + (details.num_ctx_tokens > 0),
                decode_steps=self._steps.decode_steps + (details.num_generation_requests > 0),
            )
        if stats.kv_connector_stats:
            nixl = _nixl_statistics(stats.kv_connector_stats)
            self._transfers = _add_transfers(self._transfers, nixl)

    def load(self, *, live_legs: int) -> Load:
        """The load now. `live_legs` bounds counts from the last step."""
        running = min(self._running_requests, live_legs)
        pulling = min(self._pulling_requests, live_legs - running)
        return Load(
            queued_requests=live_legs - running - pulling,
            pulling_requests=pulling,
            running_requests=running,
            queued_tokens=self._queued_tokens,
            kv_used_fraction=self._kv_used_fraction,
            step_s=self._step_s,
            transfers=self._transfers,
            steps=self._steps,
        )


def _add_transfers(totals: TransferTotals, statistics: Mapping[str, Any]) -> TransferTotals:
    """`totals` plus a step's NIXL statistics: lists with one entry per occurrence."""

    def entries(name: str) -> Sequence[float]:
        values: Sequence[float] = statistics.get(name) or ()
        return values

    return TransferTotals(
        pulls=totals.pulls + len(entries("bytes_transferred")),
        moved_bytes=totals.moved_bytes + int(sum(entries("bytes_transferred"))),
        busy_s=totals.busy_s + sum(entries("transfer_duration")),
        failures=totals.failures + sum(len(entries(name)) for name in _FAILURE_KEYS),
        expired_leases=totals.expired_leases + len(entries("num_kv_expired_reqs")),
        invalidated_pulls=totals.invalidated_pulls + len(entries(INVALIDATED_SOURCES_KEY)),
    )


class PullMeter:
    """Sums by source the transfers that steps report.

    Exact with baton's connector, which names the source engine of every entry; the legs' KV handles
    name its replica. With another connector an entry counts if all waiting legs wait for one
    source. Other entries are in no link, but still in the replica's `TransferTotals`.
    """

    def __init__(self, transport: Callable[[str], str] = lambda _source_id: "") -> None:
        """Take a function for the transport from a replica; empty means unknown."""
        self._transport = transport
        self._replicas: dict[str, str] = {}
        self._awaited_sources: dict[str, str | None] = {}
        self._totals: dict[str, LinkTotals] = {}

    def on_leg_submitted(self, leg: Leg) -> None:
        """Record a leg that the engine gets; it may have to pull."""
        if leg.kv_handle is None:
            return
        if leg.source_id is not None:
            _put_newest(self._replicas, source_engine_id(leg.kv_handle), leg.source_id)
        self._awaited_sources[leg.leg_id] = leg.source_id

    def on_fetch_ended(self, leg_id: str) -> None:
        """Record that a leg no longer waits: it produced output, or ended."""
        self._awaited_sources.pop(leg_id, None)

    def on_step(self, statistics: Mapping[str, Any]) -> None:
        """Add a step's statistics of the NIXL connector."""
        transferred = _entries(statistics, TRANSFERS_KEY)
        durations_s = _entries(statistics, DURATIONS_KEY)
        sources = self._replicas_of_entries(statistics, SOURCES_KEY, expected=len(transferred))
        for source_id, moved_bytes, busy_s in zip(sources, transferred, durations_s, strict=False):
            self._add(
                source_id,
                LinkTotals(source_id="", pulls=1, moved_bytes=int(moved_bytes), busy_s=busy_s),
            )
        failures = sum(len(_entries(statistics, key)) for key in _FAILURE_KEYS)
        for source_id in self._replicas_of_entries(
            statistics, FAILED_SOURCES_KEY, expected=failures
        ):
            self._add(source_id, LinkTotals("", failures=1))

    def _replicas_of_entries(
        self, statistics: Mapping[str, Any], key: str, *, expected: int
    ) -> Sequence[str | None]:
        """The replica of each entry; None where it is unknown."""
        engine_ids: Sequence[str] | None = statistics.get(key)
        if engine_ids is not None and (key == FAILED_SOURCES_KEY or len(engine_ids) == expected):
            return [self._replicas.get(engine_id) for engine_id in engine_ids]
        awaited = set(self._awaited_sources.values())
        return [awaited.pop() if len(awaited) == 1 else None] * expected

    def _add(self, source_id: str | None, increment: LinkTotals) -> None:
        if source_id is None:
            return
        total = self._totals.get(source_id, LinkTotals(source_id))
        summed = LinkTotals(
            source_id=source_id,
            pulls=total.pulls + increment.pulls,
            moved_bytes=total.moved_bytes + increment.moved_bytes,
            busy_s=total.busy_s + increment.busy_s,
            failures=total.failures + increment.failures,
        )
        _put_newest(self._totals, source_id, summed)

    def totals(self) -> tuple[LinkTotals, ...]:
        """Totals of pulls by source."""
        return tuple(
            total._replace(transport=self._transport(source_id))
            for source_id, total in self._totals.items()
        )


def _nixl_statistics(statistics: Mapping[str, Any]) -> Mapping[str, Any]:
    """The NIXL connector's statistics, also where it is one of several connectors."""
    nixl: Mapping[str, Any] = statistics.get(CONNECTOR, statistics)
    return nixl


def _entries(statistics: Mapping[str, Any], key: str) -> Sequence[float]:
    entries: Sequence[float] = statistics.get(key) or ()
    return entries


def _put_newest(table: dict[str, _V], key: str, value: _V) -> None:
    table.pop(key, None)
    table[key] = value
    while len(table) > _MAX_SOURCES:
        del table[next(iter(table))]
