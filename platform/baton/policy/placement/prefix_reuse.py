"""How much a cached token is worth: how often it is used again before it is driven out.

In balance, as many tokens leave the caches as enter them. If a fraction h of all prompt tokens is
found cached, then for each token that is computed, and so enters a cache, h / (1 - h) are found.
"""

from __future__ import annotations

_MEMORY_TOKENS = 1_000_000.0
"""Prompts this many tokens ago weigh a third of the newest."""
_MAX_REUSES_PER_TOKEN = 4.0
"""Reached at h = 0.8. Beyond it the estimate says more of its own noise than of the caches; and
evicted blocks are the least recently used, worth less than the average."""


class PrefixReuse:
    """The fraction of prompt tokens that were cached; recent prompts weigh more."""

    __slots__ = ("_cached_tokens", "_prompt_tokens")

    def __init__(self) -> None:
        self._cached_tokens = 0.0
        self._prompt_tokens = 0.0

    def observe(self, cached_tokens: int, prompt_tokens: int) -> None:
        """Add a prompt, with its tokens that were cached where it was prefilled."""
        if not 0 <= cached_tokens <= prompt_tokens:
            return
        decay = max(0.0, 1 - prompt_tokens / _MEMORY_TOKENS)
        self._cached_tokens = decay * self._cached_tokens + cached_tokens
        self._prompt_tokens = decay * self._prompt_tokens + prompt_tokens

    @property
    def hit_fraction(self) -> float:
        """Cached tokens of all prompt tokens; 0 before the first prompt."""
        return self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0

    @property
    def reuses_per_token(self) -> float:
        """Tokens found cached for each that was computed, at most 4."""
        computed = self._prompt_tokens - self._cached_tokens
        return min(_MAX_REUSES_PER_TOKEN, self._cached_tokens / computed) if computed > 0 else 0.0
