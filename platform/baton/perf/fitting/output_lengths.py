"""How many tokens a request will generate, learned from those that have ended."""

from __future__ import annotations

_PRIOR_FRACTION = 0.5
"""Of `max_tokens`, before anything was seen: clients allow for more than they expect."""
_PRIOR_MAX_TOKENS = 512.0
"""... but a limit of a hundred thousand says nothing. Source: means of 200 to 500 output tokens in
published chat traces (BurstGPT, Azure LLM inference 2023)."""
_PRIOR_REQUESTS = 4
_MIN_REQUESTS = 20
"""By then five in six of what counts was seen."""
_MEMORY_REQUESTS = 200


class OutputLengths:
    """A moving average for each class of `max_tokens`; a class is a power of two.

    The prior counts as four requests, and after two hundred the oldest fade.
    """

    def __init__(self) -> None:
        self._mean_and_count: dict[int, tuple[float, int]] = {}

    def observe(self, tokens: int, max_tokens: int) -> None:
        """A request that was allowed `max_tokens` ended by itself after `tokens`."""
        if tokens < 0 or max_tokens < 1:
            return
        mean, count = self._statistics(max_tokens)
        weight = 1.0 / min(count + 1, _MEMORY_REQUESTS)
        new_mean = mean + (min(tokens, max_tokens) - mean) * weight
        self._mean_and_count[max_tokens.bit_length()] = (new_mean, count + 1)

    def expected(self, max_tokens: int) -> float:
        """The mean to expect: at least one token, at most `max_tokens`."""
        mean, _ = self._statistics(max_tokens)
        return max(1.0, min(mean, max_tokens))

    def is_known(self, max_tokens: int) -> bool:
        """Whether what to expect was seen, rather than assumed."""
        return self._statistics(max_tokens)[1] >= _PRIOR_REQUESTS + _MIN_REQUESTS

    def _statistics(self, max_tokens: int) -> tuple[float, int]:
        entry = self._mean_and_count.get(max_tokens.bit_length())
        if entry is not None:
            return entry
        return min(max_tokens * _PRIOR_FRACTION, _PRIOR_MAX_TOKENS), _PRIOR_REQUESTS
