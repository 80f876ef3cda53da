"""The legs that an engine runs, and what its steps say of them and of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
)

from baton.domain.fleet import LinkTotals, Load
from baton.domain.handoff import Leg, LegOutput, LegTimes
from baton.engine.vllm.core.links import PullMeter, nixl_statistics
from baton.engine.vllm.core.load import LoadMeter
from baton.engine.vllm.core.lora import EngineAdapters
from baton.engine.vllm.wire.codec import EngineCodec


@dataclass(slots=True)
class _LiveLeg:
    prompt_tokens: int
    uncached_prompt_tokens: int
    """Of them, those that are neither cached nor pulled, as far as that is known."""
    output_tokens: int = 0
    started: bool = False
    queued_at_s: float | None = None
    """This and the next two are by the clock of EngineCore, for whom all of them are told."""
    scheduled_at_s: float | None = None
    first_output_at_s: float = 0.0
    preemptions: int = 0
    reported_preemptions: int = 0

    def record_events(self, events: list[EngineCoreEvent]) -> None:
        """Take in what the scheduler did with it since its last output.

        Source: vLLM 0.32, v1/core/sched/scheduler.py: QUEUED when it was added, SCHEDULED when it
        first computes (a pull of its blocks comes before that) and after each PREEMPTED.
        """
        for event in events:
            if event.type is EngineCoreEventType.QUEUED:
                self.queued_at_s = event.timestamp
            elif event.type is EngineCoreEventType.PREEMPTED:
                self.preemptions += 1
            elif self.scheduled_at_s is None:
                self.scheduled_at_s = event.timestamp

    def times(self) -> LegTimes | None:
        """What is to be told of its time; None where EngineCore keeps none."""
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
        """A leg is handed to the engine."""
        live = _LiveLeg(len(leg.prompt_token_ids), leg.uncached_prompt_tokens)
        self._live[leg.leg_id] = live
        self._meter.on_leg_submitted(live.uncached_prompt_tokens)
        self._links.on_leg_submitted(leg)

    def remove(self, leg_id: str) -> None:
        """A leg has ended, or never began."""
        live = self._live.pop(leg_id, None)
        self._adapters.on_leg_ended(leg_id)
        if live is not None and not live.started:
            self._on_first_output(leg_id, live)

    def clear(self) -> None:
        """Nothing runs any more."""
        self._live.clear()

    def on_step(self, step: EngineCoreOutputs) -> tuple[LegOutput, ...]:
        """What one step of the engine means for the legs."""
        stats = step.scheduler_stats
        if stats is not None and stats.kv_connector_stats:
            # First: an output may end the wait that says where a transfer was from.
            self._links.on_step(nixl_statistics(stats.kv_connector_stats))
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
        """Tokens that a leg's output was decoded from; 0 for the first, which ends a prefill."""
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
        """What was pulled so far, by source."""
        return self._links.totals()
