"""The port through which decisions ask how long an engine takes."""

from __future__ import annotations

from typing import Protocol


class EngineTiming(Protocol):
    """How long one replica's engine takes for things, in seconds; pure, cheap, never negative."""

    def prefill_s(
        self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
    ) -> float:
        """Until `tokens` prompt tokens are computed, in chunks, beside `running` decodes.

        `context_tokens` is what those decodes attend to, all together. The tokens are of prompts
        of `length_tokens` each, one after the other; 0: of a single prompt.
        """
        ...

    def step_s(self, *, running: int, context_tokens: int = 0) -> float:
        """One step that decodes for `running` requests and prefills nothing."""
        ...

    def decode_request_s(self, *, context_tokens: int = 0) -> float:
        """What one more request with so much context adds to each step."""
        ...

    def host_load_s(self, blocks: int) -> float:
        """To bring blocks from the host's memory into the KV cache."""
        ...


def added_prefill_s(timing: EngineTiming, tokens: int) -> float:
    """How much later other prompts end when so many prompt tokens are computed in their steps."""
    return max(0.0, timing.prefill_s(tokens) - timing.prefill_s(1)) if tokens > 1 else 0.0


def decode_delay_s(timing: EngineTiming, tokens: int) -> float:
    """How much later streams get their tokens when so many prompt tokens are computed beside them.

    Their steps then prefill, too, which costs something however short the prompt is.
    """
    if tokens < 1:
        return 0.0
    prefill_step_s = timing.prefill_s(1, running=1) - timing.step_s(running=1)
    return max(0.0, prefill_step_s) + added_prefill_s(timing, tokens)
