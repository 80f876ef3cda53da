"""Runs with known figures, for tests of reports."""

from __future__ import annotations

from baton.bench.report import Evidence, FleetSample, RunResult, Study
from baton.simulator.outcome import Objectives, Outcome

NEVER = float("inf")
OBJECTIVES = Objectives(ttft_s=0.5, tpot_s=0.05)


def outcome(
    arrived_at_s: float = 0.0,
    *,
    ttft_s: float = 0.1,
    tpot_s: float = 0.01,
    prompt_tokens: int = 100,
    cached_tokens: int = 0,
    output_tokens: int = 11,
) -> Outcome:
    """A request that finished."""
    return Outcome(
        arrived_at_s=arrived_at_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=ttft_s + tpot_s * (output_tokens - 1),
        ok=True,
        max_itl_s=2 * tpot_s,
    )


def failure(at_s: float = 0.0, *, after_s: float = 3.0) -> Outcome:
    """A request that was given up without a token."""
    return Outcome(
        arrived_at_s=at_s,
        prompt_tokens=100,
        cached_tokens=0,
        output_tokens=0,
        ttft_s=NEVER,
        tpot_s=0.0,
        e2e_s=after_s,
        ok=False,
    )


def result(
    *outcomes: Outcome, name: str = "predicted", devices: float = 2, rate: float | None = None
) -> RunResult:
    """A run of these."""
    return RunResult(name=name, outcomes=outcomes, devices=devices, offered_per_s=rate)


def steady_result(
    name: str = "predicted", *, rate: float = 10.0, late_fraction: float = 0.0, requests: int = 100
) -> RunResult:
    """A request every 1 / `rate` s, of which the share `late_fraction` misses its TTFT."""
    misses = round(late_fraction * requests)
    return RunResult(
        name=name,
        outcomes=[
            outcome(number / rate, ttft_s=0.9 if number < misses else 0.1 + number / 1000)
            for number in range(requests)
        ],
        devices=2,
        offered_per_s=rate,
        samples=tuple(
            FleetSample(at_s=at_s, replicas={"prefill": 1, "decode": 1}, queued=0, running=3)
            for at_s in (0.0, requests / rate)
        ),
        event_counts={"handoffs": 7},
    )


def study(*results: RunResult, objectives: Objectives = OBJECTIVES, **changes: object) -> Study:
    """A study of these runs."""
    defaults: dict[str, object] = {
        "title": "four <engines>",
        "evidence": Evidence.SIMULATED,
        "command": "baton simulate -c a.yaml --trace 'b & c.jsonl'",
        "facts": {"seed": "7"},
        "objectives": objectives,
        "results": results,
    }
    return Study(**(defaults | changes))  # type: ignore[arg-type]  # tests name them right
