"""Prompts of random words with a wanted number of tokens, as a tokenizer counts them.

Theory of operation: tokenizers of today split at spaces first, so a text costs what its words cost
one by one, plus what stands around it (a first token, a chat template). Each word of a list is
counted once, with a space in front; texts are put together from those. Whether the sum held shows
in every answer: endpoints say how many tokens a prompt had, and where that differs it is reported.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

Counter = Callable[[str], Awaitable[int | None]]
"""Tokens of a prompt with all that stands around it; None when they cannot be counted."""

_COMMON = """
    the of and to in a is that for it was on are as with his they at be this from have or by one had
    not but what all were when we there can an your which their said if do will each about how up
    out them then she many some so these would other into has more her two like him see time could
    no make than first been its who now people my made over did down only way find use may water
    long little very after words called just where most know
"""
WORDS = tuple(_COMMON.split())
"""Common ones: most vocabularies have each as one token."""


@dataclass(frozen=True, slots=True)
class WordCosts:
    """What words cost in tokens."""

    costs: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(WORDS, 1))
    around: int = 0
    """Tokens of a prompt that are in no word."""
    counted: bool = False
    """Whether a tokenizer said so; else a word is taken for a token."""


async def word_costs(count: Counter) -> WordCosts:
    """What each word costs; a token for each where nobody can count.

    Words whose cost depends on what stands before them are left out.
    """
    once, twice = await count(f" {WORDS[0]}"), await count(f" {WORDS[0]} {WORDS[0]}")
    if once is None or twice is None:
        return WordCosts()
    around = 2 * once - twice
    costs: dict[str, int] = {}
    for word in WORDS:
        alone, after = await count(f" {word}"), await count(f" {WORDS[0]} {word}")
        if alone is not None and after is not None and after - once == alone - around > 0:
            costs[word] = alone - around
    return WordCosts(costs, around, counted=True) if costs else WordCosts()


class WordMaker:
    """Makes texts."""

    def __init__(self, costs: WordCosts) -> None:
        self._around = costs.around
        self._words = sorted(costs.costs.items(), key=lambda one: (one[1], one[0]))
        self._dearest = self._words[-1][1]
        self._by_cost = {cost: word for word, cost in self._words}

    def text(self, tokens: int, name: str, *, bare: bool = False) -> str:
        """Random words, the same for the same name, that cost so many tokens.

        What stands around a prompt is counted in unless `bare`. At least one word; where no word
        costs just what is left at the end, the text is up to a word shorter.
        """
        left = tokens if bare else tokens - self._around
        rng = random.Random(name)  # noqa: S311 - made up, not secret
        words: list[str] = []
        while left >= self._dearest:
            drawn = rng.choices(self._words, k=left // self._dearest)
            words += [word for word, _ in drawn]
            left -= sum(cost for _, cost in drawn)
        while left > 0:
            cost = max((one for one in self._by_cost if one <= left), default=0)
            if not cost:
                break
            words.append(self._by_cost[cost])
            left -= cost
        return " " + " ".join(words or [self._words[0][0]])
