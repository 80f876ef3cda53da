"""A timing that was computed beforehand, times what engines turn out to take in comparison.

*Theory of operation.* A model from hardware and model shape has the form of a step right (what
grows with the square of a prompt, where memory rather than arithmetic is the limit) and may be off
as a whole: another kernel, a slower clock. So one factor is learned for a pool, busy seconds as
reported by busy seconds as predicted, both as sums that fade: by 1/128 a report. It starts from 1
with the weight of a second's work, and is kept between a quarter and four: beyond that the model is
of something else, and a placement by it would be no better for being scaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from baton.domain.fleet import StepTotals
from baton.perf.steps.step_costs import StepCosts
from baton.perf.timing import EngineTiming

_MEMORY_REPORTS = 128.0
_PRIOR_BUSY_S = 1.0
_MIN_FACTOR, _MAX_FACTOR = 0.25, 4.0
_CACHE_SIZE = 4096
"""Answers to each question."""
_PROBE_TOKENS = 1024
"""Costs per token are read off between so many tokens and twice as many."""


class CachedTiming:
    """An `EngineTiming` that does not ask another twice for the same, as far as it remembers.

    Placement asks for each candidate, and much of what it asks depends on the request alone. Of
    prompts beside decodes that is not so: one in a hundred such questions comes twice.
    """

    def __init__(self, model: EngineTiming) -> None:
        cache = lru_cache(maxsize=_CACHE_SIZE)
        self._prefill_s = cache(
            lambda tokens, running, length_tokens: model.prefill_s(
                tokens, running=running, length_tokens=length_tokens
            )
        )
        self._step_s = cache(
            lambda running, context_tokens: model.step_s(
                running=running, context_tokens=context_tokens
            )
        )
        self._request_s = cache(
            lambda context_tokens: model.decode_request_s(context_tokens=context_tokens)
        )
        self._model = model

    def prefill_s(
        self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
    ) -> float:
        """As the model says."""
        if not context_tokens:
            return self._prefill_s(tokens, running, length_tokens)
        return self._model.prefill_s(
            tokens, running=running, context_tokens=context_tokens, length_tokens=length_tokens
        )

    def step_s(self, *, running: int, context_tokens: int = 0) -> float:
        """As the model says."""
        return self._step_s(running, context_tokens)

    def decode_request_s(self, *, context_tokens: int = 0) -> float:
        """As the model says."""
        return self._request_s(context_tokens)

    def host_load_s(self, blocks: int) -> float:
        """As the model says."""
        return self._model.host_load_s(blocks)


@dataclass(frozen=True, slots=True)
class CorrectedTiming:
    """An `EngineTiming`, all of whose answers are another's times `factor`."""

    model: EngineTiming
    factor: float = 1.0

    def prefill_s(
        self, tokens: int, *, running: int = 0, context_tokens: int = 0, length_tokens: int = 0
    ) -> float:
        """As the model says, corrected."""
        model_s = self.model.prefill_s(
            tokens, running=running, context_tokens=context_tokens, length_tokens=length_tokens
        )
        return self.factor * model_s

    def step_s(self, *, running: int, context_tokens: int = 0) -> float:
        """As the model says, corrected."""
        return self.factor * self.model.step_s(running=running, context_tokens=context_tokens)

    def decode_request_s(self, *, context_tokens: int = 0) -> float:
        """As the model says, corrected."""
        return self.factor * self.model.decode_request_s(context_tokens=context_tokens)

    def host_load_s(self, blocks: int) -> float:
        """As the model says: that is the host's doing, not the engine's."""
        return self.model.host_load_s(blocks)

    def costs(self) -> StepCosts:
        """About what a linear model would have for coefficients, for operators to look at."""
        alone_s = self.step_s(running=1)
        request_s = self.decode_request_s()
        short_s, long_s = (self.prefill_s(n * _PROBE_TOKENS) for n in (1, 2))
        token_s = (long_s - short_s) / _PROBE_TOKENS
        context_s = self.decode_request_s(context_tokens=_PROBE_TOKENS) - request_s
        return StepCosts(
            decode_step_s=max(0.0, alone_s - request_s),
            prefill_step_s=max(0.0, short_s - _PROBE_TOKENS * token_s),
            prefill_token_s=token_s,
            decode_request_s=request_s,
            context_token_s=context_s / _PROBE_TOKENS,
        )


class CorrectionFactor:
    """Learns the factor of one pool."""

    def __init__(self) -> None:
        self._actual_s = self._predicted_s = _PRIOR_BUSY_S
        self.factor = 1.0
        """Actual seconds for each predicted one."""
        self.reports = 0
        self.error = 0.0
        """Mean of |actual - predicted| / actual of a report, recent ones weighing more."""

    def observe(self, actual_s: float, predicted_s: float) -> bool:
        """Take in a report; False, and nothing is learned, when it means nothing."""
        if not (0 < actual_s < float("inf") and 0 < predicted_s < float("inf")):
            return False
        self.reports += 1
        relative_error = abs(actual_s - self.factor * predicted_s) / actual_s
        self.error += (relative_error - self.error) / min(self.reports, _MEMORY_REPORTS)
        decay = 1.0 - 1.0 / _MEMORY_REPORTS
        self._actual_s = decay * self._actual_s + actual_s
        self._predicted_s = decay * self._predicted_s + predicted_s
        self.factor = min(_MAX_FACTOR, max(_MIN_FACTOR, self._actual_s / self._predicted_s))
        return True


def predicted_busy_s(model: EngineTiming, totals: StepTotals) -> float:
    """What a model says that these steps take, had they all been alike.

    Steps that both prefill and decode are as many as the two counts exceed the steps by.
    """
    mixed_steps = max(0, totals.prefill_steps + totals.decode_steps - totals.steps)
    running = round(totals.decode_tokens / totals.decode_steps) if totals.decode_steps else 0
    context = round(totals.context_tokens / totals.decode_steps) if totals.decode_steps else 0
    total_s = 0.0
    if decodes := totals.decode_steps - mixed_steps:
        total_s += decodes * model.step_s(running=running, context_tokens=context)
    if totals.prefill_steps:
        chunk = max(1, round(totals.prefill_tokens / totals.prefill_steps))
        total_s += (totals.prefill_steps - mixed_steps) * model.prefill_s(chunk)
        if mixed_steps:
            total_s += mixed_steps * model.prefill_s(chunk, running=running, context_tokens=context)
    return total_s
