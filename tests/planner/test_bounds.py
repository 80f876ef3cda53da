"""Objectives that nothing can meet: whose requests they are held to."""

from __future__ import annotations

from baton.planner.plan import unreachable_objectives
from baton.planner.problem import SloClass
from baton.planner.result import UnreachableObjective
from baton.planner.shapes.space import Duty
from baton.simulator.outcome import Objectives
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.planner.shapes import question, shapes, with_classes

MIXED = Trace(
    name="mixed",
    requests=tuple(
        TraceRequest(n / 2, 200, 100, slo_class="chat")
        if n % 2
        else TraceRequest(n / 2, 60_000, 100, slo_class="batch")
        for n in range(40)
    ),
)


def held(name: str | None, **limits: float) -> SloClass:
    return SloClass(name=name, objectives=Objectives(**limits))


def bounds(*classes: SloClass) -> tuple[UnreachableObjective, ...]:
    """A prompt token takes 50 us, 60,000 of them 3 s; a step at least 8 ms."""
    fitting = shapes().shapes_by_duty
    asked = with_classes(question(MIXED), *classes)
    return unreachable_objectives(asked, fitting[Duty.PREFILL], fitting[Duty.DECODE])


def test_a_class_of_short_prompts_is_not_held_to_the_long_ones_of_another() -> None:
    assert not bounds(held("chat", ttft_s=0.5), held("batch", ttft_s=60.0))


def test_a_class_of_long_prompts_is_held_to_them() -> None:
    (bound,) = bounds(held("chat", ttft_s=0.5), held("batch", ttft_s=1.0))

    assert bound.limit_s == 1.0
    assert "a prompt of 60000 tokens" in bound.operation


def test_a_class_of_short_contexts_is_not_held_to_the_long_ones_of_another() -> None:
    # attending to the 30,000 tokens of everybody's mean takes 0.6 ms more
    assert not bounds(held("chat", tpot_s=0.0084), held("batch", tpot_s=1.0))
    assert bounds(held("chat", tpot_s=1.0), held("batch", tpot_s=0.0084))


def test_a_class_that_no_request_is_of_bounds_nothing() -> None:
    both = held("chat", ttft_s=60.0), held("batch", ttft_s=60.0)

    assert not bounds(*both, held("nobody", ttft_s=1e-6, tpot_s=1e-6))
    assert not bounds(*both, held(None, ttft_s=1e-6, tpot_s=1e-6))
