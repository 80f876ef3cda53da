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
from baton.engine.vllm.core.links import LinkMeter, nixl_statistics
from baton.engine.vllm.core.load import LoadMeter
from baton.engine.vllm.core.lora import EngineAdapters
from baton.engine.vllm.wire.codec import EngineWire


@dataclass(slots=True)
class _LiveLeg:
    prompt_tokens: int
    to_compute: int
    """Of them, those that are neither cached nor pulled, as far as that is known."""
    output_tokens: int = 0
    started: bool = False
    queued_at_s: float | None = None
    """This and the next two are by the clock of EngineCore, for whom all of them are told."""
    scheduled_at_s: float | None = None
    first_output_at_s: float = 0.0
    preemptions: int = 0
    told_preemptions: int = 0

    def note(self, events: list[EngineCoreEvent]) -> None:
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
        self.told_preemptions = self.preemptions
        return LegTimes(
            max(0.0, self.scheduled_at_s - self.queued_at_s),
            max(0.0, self.first_output_at_s - self.scheduled_at_s),
            self.preemptions,
        )


class LiveLegs:
    """Every leg that was handed to the engine and has not ended."""

    def __init__(
        self,
        wire: EngineWire,
        transport: Callable[[str], str],
        adapters: EngineAdapters,
        *,
        max_pulls: int | None = None,
    ) -> None:
        self._wire = wire
        self._live: dict[str, _LiveLeg] = {}
        self._meter = LoadMeter(max_pulls=max_pulls)
        self._links = LinkMeter(transport)
        self._adapters = adapters

    def __contains__(self, leg_id: str) -> bool:
        return leg_id in self._live

    def add(self, leg: Leg) -> None:
        """A leg is handed to the engine."""
        live = _LiveLeg(len(leg.prompt_token_ids), leg.to_compute)
        self._live[leg.leg_id] = live
        self._meter.waiting(live.to_compute)
        self._links.expect(leg)

    def forget(self, leg_id: str) -> None:
        """A leg has ended, or never began."""
        live = self._live.pop(leg_id, None)
        self._adapters.leg_over(leg_id)
        if live is not None and not live.started:
            self._start(leg_id, live)

    def clear(self) -> None:
        """Nothing runs any more."""
        self._live.clear()

    def take(self, step: EngineCoreOutputs) -> tuple[LegOutput, ...]:
        """What one step of the engine means for the legs."""
        stats = step.scheduler_stats
        if stats is not None and stats.kv_connector_stats:
            # First: an output may end the wait that says where a transfer was from.
            self._links.stepped(nixl_statistics(stats.kv_connector_stats))
        outputs = []
        context_tokens = 0
        for output in step.outputs:
            live = self._live.get(output.request_id)
            if live is not None:
                context_tokens += self._attended(live)
                outputs.append(self._output(output, live, step.timestamp))
        if stats is not None:
            self._meter.stepped(stats, context_tokens=context_tokens)
        return tuple(outputs)

    def _attended(self, live: _LiveLeg) -> int:
        """Tokens that a leg's output was decoded from; 0 for the first, which ends a prefill."""
        return live.prompt_tokens + live.output_tokens if live.started else 0

    def _output(self, output: EngineCoreOutput, live: _LiveLeg, at_s: float) -> LegOutput:
        times = None
        if output.events:
            live.note(output.events)
        if not live.started:
            live.first_output_at_s = at_s
            times = live.times()
            self._start(output.request_id, live)
        live.output_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            if live.preemptions > live.told_preemptions:
                times = live.times()
            self.forget(output.request_id)
        return self._wire.to_output(output, prompt_tokens=live.prompt_tokens, times=times)

    def _start(self, leg_id: str, live: _LiveLeg) -> None:
        live.started = True
        self._links.arrived(leg_id)
        self._meter.started(live.to_compute)

    def load(self) -> Load:
        """The engine's load."""
        load = self._meter.load(live_legs=len(self._live))
        return load._replace(adapters=self._adapters.told())

    def links(self) -> tuple[LinkTotals, ...]:
        """What was pulled so far, by source."""
        return self._links.totals()
