"""Texts have the number of tokens that they should, by tokenizers of several kinds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.bench.prompts.word_prompts import WORDS, WordCosts, WordPromptFactory, measure_word_costs

Count = Callable[[str], int]


def plain(text: str) -> int:
    """A token a word."""
    return len(text.split())


def with_template(text: str) -> int:
    """Seven tokens around each prompt."""
    return 7 + plain(text)


def by_letters(text: str) -> int:
    """Long words are several tokens."""
    return 1 + sum(-(-len(word) // 3) for word in text.split())


def dear(text: str) -> int:
    """No word is one token."""
    return sum(len(word) + 1 for word in text.split())


@pytest.mark.parametrize("count", [plain, with_template, by_letters])
@pytest.mark.parametrize("tokens", [9, 10, 57, 1024])
async def test_a_text_has_just_as_many_tokens(count: Count, tokens: int) -> None:
    async def asked(text: str) -> int:
        return count(text)

    costs = await measure_word_costs(asked)
    assert costs.is_exact
    maker = WordPromptFactory(costs)
    for name in ("a", "b"):
        assert count(maker.build_text(tokens, name)) == tokens


async def test_where_no_word_fits_a_text_is_up_to_a_word_shorter() -> None:
    async def asked(text: str) -> int:
        return dear(text)

    maker = WordPromptFactory(await measure_word_costs(asked))
    for tokens in range(20, 40):
        assert tokens - 1 <= dear(maker.build_text(tokens, "a")) <= tokens


async def test_a_word_that_costs_more_beside_others_is_left_out() -> None:
    async def moody(text: str) -> int:
        return plain(text) + ("the of" in text)

    costs = (await measure_word_costs(moody)).costs
    assert "of" not in costs
    assert "and" in costs


async def test_where_nobody_counts_a_word_is_taken_for_a_token() -> None:
    async def nobody(_: str) -> None:
        return None

    costs = await measure_word_costs(nobody)
    assert not costs.is_exact
    assert plain(WordPromptFactory(costs).build_text(33, "a")) == 33


def test_texts_are_the_same_for_the_same_name_and_others_for_another() -> None:
    maker = WordPromptFactory(WordCosts())
    assert maker.build_text(50, "a") == maker.build_text(50, "a")
    assert maker.build_text(50, "a") != maker.build_text(50, "b")
    assert maker.build_text(80, "a").startswith(maker.build_text(50, "a"))


def test_a_prompt_that_has_no_room_for_a_word_has_one() -> None:
    assert plain(WordPromptFactory(WordCosts(overhead_tokens=9)).build_text(3, "a")) == 1
    assert len(set(WORDS)) == len(WORDS)
