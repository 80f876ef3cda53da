"""The port through which decisions ask how long an engine takes."""

from __future__ import annotations

from typing import Protocol


class EngineTiming(Protocol):
    """Durations of one replica's engine, in seconds; pure, cheap, never negative."""

    def prefill_s(
        self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
    ) -> float:
        """Time to compute `tokens` prompt tokens, in chunks, beside `running` decodes.

        Those decodes attend to `context_tokens` in total. The tokens belong to prompts of
        `length_tokens` each, computed in order; 0 stands for a single prompt.
        """
        ...

    def step_s(self, *, running: int, context_tokens: int = 0) -> float:
        """One step that decodes for `running` requests and prefills nothing."""
        ...

    def decode_request_s(self, *, context_tokens: int = 0) -> float:
        """Time that another request with `context_tokens` adds to each step."""
        ...

    def host_load_s(self, blocks: int) -> float:
        """Time to load blocks from host memory into the KV cache."""
        ...


def added_prefill_s(timing: EngineTiming, tokens: int) -> float:
    """Delay of other prompts when their steps also compute `tokens` prompt tokens."""
    return max(0.0, timing.prefill_s(tokens) - timing.prefill_s(1)) if tokens > 1 else 0.0


def decode_delay_s(timing: EngineTiming, tokens: int) -> float:
    """Delay of streams when `tokens` prompt tokens are computed beside them.

    It includes the fixed cost of turning decode steps into prefill steps.
    """
    if tokens < 1:
        return 0.0
    prefill_step_s = timing.prefill_s(1, running=1) - timing.step_s(running=1)
    return max(0.0, prefill_step_s) + added_prefill_s(timing, tokens)
