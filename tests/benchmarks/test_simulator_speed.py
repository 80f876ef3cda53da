"""The simulator's speed benchmark runs, and says what it measured and what it simulated."""

from __future__ import annotations

import gc

import pytest

from benchmarks.simulator_speed import Case, generate_conversations, measure


def test_a_small_fleet_is_measured_and_all_of_its_load_is_served() -> None:
    try:
        found = measure(Case(name="fleet", data=None, seconds=0.5, replicas=20))
    finally:
        gc.enable()
    simulated = found["simulated"]
    assert isinstance(simulated, dict)
    assert simulated["served"] == found["requests"]
    assert (found["kind"], simulated["kind"], found["replicas"]) == ("M", "S", 20)


def test_the_load_has_its_rate_and_its_lengths() -> None:
    trace = generate_conversations(60.0)
    assert len(trace) / 60 == pytest.approx(200, rel=0.05)
    prompts = sum(request.prompt_tokens for request in trace.requests) / len(trace)
    outputs = sum(request.output_tokens for request in trace.requests) / len(trace)
    assert prompts == pytest.approx(1155, rel=0.05)
    assert outputs == pytest.approx(211, rel=0.05)


def test_a_trace_that_is_not_there_is_asked_for() -> None:
    try:
        with pytest.raises(SystemExit, match="--data must name the folder"):
            measure(Case(name="mooncake", data=None, seconds=1.0))
    finally:
        gc.enable()
