"""What vLLM's scheduler says of a leg's time, told with its first output and its last."""

from __future__ import annotations

import warnings

import pytest

from baton.domain.handoff import LegOutput, LegTimes
from baton.runtime.known_adapters import KnownAdapters
from tests.fakes.scripted_engine import make_leg

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM deprecate each other's parts on import
    from vllm.v1.engine import (
        EngineCoreEvent,
        EngineCoreEventType,
        EngineCoreOutput,
        EngineCoreOutputs,
    )
    from vllm.v1.engine import FinishReason as EngineFinishReason

    from baton.engine.vllm.core.legs import LiveLegs
    from baton.engine.vllm.core.lora import EngineAdapters
    from baton.engine.vllm.wire.codec import EngineCodec

QUEUED, SCHEDULED, PREEMPTED = EngineCoreEventType


def live_leg() -> LiveLegs:
    legs = LiveLegs(EngineCodec(), lambda _source_id: "", EngineAdapters(KnownAdapters(), slots=1))
    legs.add(make_leg("a", request_id="r", max_tokens=9))
    return legs


def step(
    legs: LiveLegs,
    at_s: float,
    *events: tuple[EngineCoreEventType, float],
    finish: EngineFinishReason | None = None,
) -> LegOutput:
    noted = [EngineCoreEvent(kind, timestamp) for kind, timestamp in events]
    output = EngineCoreOutput("a", [7], finish_reason=finish, events=noted or None)
    (told,) = legs.on_step(EngineCoreOutputs(outputs=[output], timestamp=at_s))
    return told


def test_a_leg_waits_until_it_is_scheduled_and_then_computes_until_its_first_output() -> None:
    legs = live_leg()
    first = step(legs, 12.0, (QUEUED, 10.0), (SCHEDULED, 11.5))
    assert first.times == LegTimes(1.5, 0.5)
    assert step(legs, 13.0).times is None
    assert step(legs, 14.0, finish=EngineFinishReason.LENGTH).times is None


def test_a_leg_that_was_put_back_before_its_first_output_was_scheduled_once() -> None:
    events = ((QUEUED, 10.0), (SCHEDULED, 11.0), (PREEMPTED, 11.5), (SCHEDULED, 13.0))
    assert step(live_leg(), 14.0, *events).times == LegTimes(1.0, 3.0, 1)


def test_a_leg_that_was_put_back_later_says_so_with_its_last_output() -> None:
    legs = live_leg()
    step(legs, 12.0, (QUEUED, 10.0), (SCHEDULED, 11.0))
    assert step(legs, 20.0, (PREEMPTED, 13.0), (SCHEDULED, 19.0)).times is None
    last = step(legs, 21.0, finish=EngineFinishReason.STOP)
    assert last.times == LegTimes(1.0, 1.0, 1)


def test_a_leg_that_ends_with_its_first_output_says_its_times_once() -> None:
    events = ((QUEUED, 10.0), (SCHEDULED, 11.0))
    only = step(live_leg(), 12.0, *events, finish=EngineFinishReason.LENGTH)
    assert only.times == LegTimes(1.0, 1.0)


def test_an_engine_that_notes_no_events_says_nothing() -> None:
    assert step(live_leg(), 12.0, finish=EngineFinishReason.LENGTH).times is None


def test_a_leg_that_fails_before_it_was_scheduled_says_nothing() -> None:
    assert step(live_leg(), 12.0, (QUEUED, 10.0), finish=EngineFinishReason.ERROR).times is None
