"""Prompts of random words with a given number of tokens.

*Theory of operation.* Tokenizers split at spaces first, so a text costs the sum of its words, plus
an overhead (a first token, a chat template). Each word of a list is counted once, with a space in
front. Endpoints report the tokens of each prompt; differences from the requested number are
reported.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

TokenCounter = Callable[[str], Awaitable[int | None]]
"""Tokens of a prompt with its overhead; None if unknown."""

_COMMON_WORDS = """
    the of and to in a is that for it was on are as with his they at be this from have or by one had
    not but what all were when we there can an your which their said if do will each about how up
    out them then she many some so these would other into has more her two like him see time could
    no make than first been its who now people my made over did down only way find use may water
    long little very after words called just where most know
"""
WORDS = tuple(_COMMON_WORDS.split())
"""Common words: most vocabularies have a token for each."""


@dataclass(frozen=True, slots=True)
class WordCosts:
    """Tokens of words."""

    costs: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(WORDS, 1))
    overhead_tokens: int = 0
    is_exact: bool = False
    """Whether a tokenizer counted them; else each word counts as a token."""


async def measure_word_costs(count: TokenCounter) -> WordCosts:
    """The cost of each word; one token for each if `count` cannot tell.

    Words whose cost depends on the word before them are left out.
    """
    single_cost, double_cost = await count(f" {WORDS[0]}"), await count(f" {WORDS[0]} {WORDS[0]}")
    if single_cost is None or double_cost is None:
        return WordCosts()
    overhead_tokens = 2 * single_cost - double_cost
    costs: dict[str, int] = {}
    for word in WORDS:
        cost_alone, cost_after_word = await count(f" {word}"), await count(f" {WORDS[0]} {word}")
        if (
            cost_alone is not None
            and cost_after_word is not None
            and cost_after_word - single_cost == cost_alone - overhead_tokens > 0
        ):
            costs[word] = cost_alone - overhead_tokens
    return WordCosts(costs, overhead_tokens, is_exact=True) if costs else WordCosts()


class WordPromptFactory:
    """Makes texts."""

    def __init__(self, costs: WordCosts) -> None:
        self._overhead_tokens = costs.overhead_tokens
        self._words = sorted(
            costs.costs.items(), key=lambda word_cost: (word_cost[1], word_cost[0])
        )
        self._max_cost = self._words[-1][1]
        self._by_cost = {cost: word for word, cost in self._words}

    def build_text(self, tokens: int, name: str, *, without_overhead: bool = False) -> str:
        """Random words of `tokens` tokens, equal for equal names.

        The overhead is included unless `without_overhead`. The text has at least one word. Without
        a word of the remaining cost, it is up to a word shorter.
        """
        remaining_tokens = tokens if without_overhead else tokens - self._overhead_tokens
        rng = random.Random(name)  # noqa: S311 - made up, not secret
        words: list[str] = []
        while remaining_tokens >= self._max_cost:
            chosen = rng.choices(self._words, k=remaining_tokens // self._max_cost)
            words += [word for word, _ in chosen]
            remaining_tokens -= sum(cost for _, cost in chosen)
        while remaining_tokens > 0:
            cost = max((value for value in self._by_cost if value <= remaining_tokens), default=0)
            if not cost:
                break
            words.append(self._by_cost[cost])
            remaining_tokens -= cost
        return " " + " ".join(words or [self._words[0][0]])
