"""The device-seconds of a request: weighed by fairness before it runs, billed after.

A prompt takes the time of its uncached tokens alone, so a tenant with cached prompts pays less. A
stream takes its part of each decode step that it is in: of a step of 20 ms with 40 streams, half a
millisecond. Both times the devices of the replica.
"""

from __future__ import annotations

from baton.domain.fleet import StepTotals
from baton.perf.timing import EngineTiming


def prefill_device_s(
    timing: EngineTiming, uncached_tokens: float, *, devices: float = 1.0
) -> float:
    """Device-seconds to compute this number of prompt tokens."""
    return timing.prefill_s(round(max(0.0, uncached_tokens))) * devices


def decode_device_s(
    timing: EngineTiming,
    output_tokens: float,
    *,
    running: float,
    context_tokens: float = 0.0,
    devices: float = 1.0,
) -> float:
    """Device-seconds to generate this number of tokens beside others, `running` streams in all.

    `context_tokens` is what all of them attend to, together.
    """
    streams = max(1.0, running)
    step_s = timing.step_s(running=round(streams), context_tokens=round(max(0.0, context_tokens)))
    return max(0.0, output_tokens) * step_s / streams * devices


def mean_decode_batch(before: StepTotals, after: StepTotals) -> tuple[float, float] | None:
    """How many streams an average decode step had between two reports, and their context tokens.

    None when there was no such step, or the engine has started again in between.
    """
    steps = after.decode_steps - before.decode_steps
    tokens = after.decode_tokens - before.decode_tokens
    context_tokens = after.context_tokens - before.context_tokens
    if steps <= 0 or tokens <= 0 or context_tokens < 0:
        return None
    return tokens / steps, context_tokens / steps
