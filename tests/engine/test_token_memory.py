"""Tokens of messages that were seen before are those that the tokenizer would give again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.engine.vllm.fast_path.tokenization_cache import (
    TokenizationCache,
    find_boundaries,
    install_tokenization_cache,
    make_encoder,
)

Theirs: TypeAlias = Any
"""What vLLM and transformers make, which is not followed."""
WORDS = ("<s>", "<|user|>", "<|end|>", "<|assistant|>", "<|us", "|>", " ", "\n", "def run(self):")


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: Theirs) -> Theirs:
    return tiny_tokenizer


class Counting:
    """Encodes, and keeps what it was asked for."""

    def __init__(self, tokenizer: Theirs) -> None:
        self._encode = make_encoder(tokenizer)
        self.asked: list[str] = []

    def __call__(self, texts: list[str]) -> Iterable[Sequence[int]]:
        self.asked += texts
        return self._encode(texts)


def memory_for(tokenizer: Theirs, **settings: int) -> TokenizationCache:
    cuts = find_boundaries(tokenizer)
    assert cuts is not None
    return TokenizationCache(cuts, **settings)


def plain(tokenizer: Theirs, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


texts = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=12)), max_size=12).map("".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(prompts=st.lists(texts, min_size=1, max_size=4), capacity=st.sampled_from([0, 2000, 10**6]))
def test_a_text_has_the_same_tokens_with_and_without_memory(
    tokenizer: Theirs, prompts: list[str], capacity: int
) -> None:
    memory = memory_for(tokenizer, capacity_bytes=capacity)
    for text in (*prompts, *prompts):
        assert memory.tokenize(text, make_encoder(tokenizer), scope=None) == plain(tokenizer, text)
        assert 0 <= memory.cached_bytes <= capacity


def chat(tokenizer: Theirs, *said: str) -> str:
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": words}
        for number, words in enumerate(said)
    ]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def test_a_follow_up_turn_tokenizes_only_what_is_new(tokenizer: Theirs) -> None:
    memory, counting = memory_for(tokenizer), Counting(tokenizer)
    memory.tokenize(chat(tokenizer, "Who was it?"), counting, scope=None)
    counting.asked.clear()
    memory.tokenize(chat(tokenizer, "Who was it?", "It was I.", "Why?"), counting, scope=None)
    assert counting.asked == ["<|assistant|>It was I.", "<|user|>Why?"]


def test_a_text_of_one_scope_is_tokenized_again_for_another(tokenizer: Theirs) -> None:
    memory, counting = memory_for(tokenizer), Counting(tokenizer)
    asked = []
    for scope in (None, "acme", "beta", "acme"):
        counting.asked.clear()
        memory.tokenize("<|user|>secret", counting, scope=scope)
        asked.append(bool(counting.asked))
    assert asked == [True, True, True, False]


def test_the_least_recently_used_entry_makes_room(tokenizer: Theirs) -> None:
    one_bytes = 300
    memory, counting = memory_for(tokenizer, capacity_bytes=10 * one_bytes), Counting(tokenizer)
    for number in range(20):
        memory.tokenize(f"<|user|>{number}", counting, scope=None)
        memory.tokenize("<|user|>again and again", counting, scope=None)
    counting.asked.clear()
    for text in ("<|user|>again and again", "<|user|>19", "<|user|>0"):
        memory.tokenize(text, counting, scope=None)
    assert counting.asked == ["<|user|>0"]


def test_one_piece_does_not_push_out_all_others(tokenizer: Theirs) -> None:
    memory, counting = memory_for(tokenizer, capacity_bytes=10_000), Counting(tokenizer)
    memory.tokenize("<|user|>small", counting, scope=None)
    memory.tokenize("<|user|>" + "large " * 2000, counting, scope=None)
    counting.asked.clear()
    memory.tokenize("<|user|>small", counting, scope=None)
    assert counting.asked == []


def made_of(splits: Theirs = None, *, words: Sequence[Theirs]) -> Theirs:
    """A tokenizer of single letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(number): number for number in range(32, 127)} | {"\u2581": 0, "<unk>": 1}
    inner = Tokenizer(models.BPE(letters, [], unk_token="<unk>"))  # noqa: S106 - a token of text
    inner.pre_tokenizer = splits or pre_tokenizers.Split("never", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(list(words))
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def added(content: str, **flags: bool) -> Theirs:
    from tokenizers import AddedToken

    return AddedToken(content, **{"normalized": False, "special": True, **flags})


class Counted:
    """A tokenizer to which a word is its place in the text."""

    is_fast = True
    added_tokens_decoder: Mapping[int, Theirs]

    def __init__(self) -> None:
        self.added_tokens_decoder = {97: added("<|x|>")}

    def __call__(self, texts: list[str], **_wanted: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(range(len(text))) for text in texts]}


def test_a_tokenizer_whose_pieces_are_not_independent_is_left_alone() -> None:
    assert find_boundaries(Counted()) is None
    assert find_boundaries(made_of(words=[added("<|x|>")])) is not None


def test_one_that_begins_texts_in_its_own_way_does_so_before_the_first_cut_alone() -> None:
    from tokenizers import pre_tokenizers

    tokenizer = made_of(pre_tokenizers.Metaspace(prepend_scheme="first"), words=[added("<|x|>")])
    memory = memory_for(tokenizer)
    for text in ("a<|x|>a", "<|x|>a<|x|>a", "<|x|>a", "a a"):
        assert memory.tokenize(text, make_encoder(tokenizer), scope=None) == plain(tokenizer, text)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_neither_is_one_is_trusted_whose_tokens_take_of_their_neighbours(flag: str) -> None:
    assert find_boundaries(made_of(words=[added("<|x|>", **{flag: True})])) is None


def test_of_two_tokens_that_begin_alike_the_longer_is_one() -> None:
    tokenizer = made_of(words=[added("<a>"), added("<a><b>"), added("<b>")])
    counting = Counting(tokenizer)
    memory = memory_for(tokenizer)
    text = "x<a><b>y<b>z<a>"
    assert memory.tokenize(text, counting, scope=None) == plain(tokenizer, text)
    assert counting.asked == ["x", "<a><b>y", "<b>z", "<a>"]


def test_a_tokenizer_without_tokens_of_its_own_is_left_alone() -> None:
    assert find_boundaries(made_of(words=[])) is None
    assert find_boundaries(SimpleNamespace()) is None


# ------------------------------------------------------------------------------------- in vLLM


class Renderer:
    """As much of vLLM's as the memory touches."""

    def __init__(self, tokenizer: Theirs) -> None:
        self.tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(1)
        self.plainly: list[str] = []

    def _tokenize_prompt(self, prompt: Theirs, _params: Theirs) -> Theirs:
        self.plainly.append(prompt["prompt"])
        return {**prompt, "prompt_token_ids": plain(self.tokenizer, prompt["prompt"])}

    def ask(self, text: str, **wanted: Theirs) -> list[int]:
        asked = {"add_special_tokens": False, "truncation": True, "max_length": 100} | wanted
        params = SimpleNamespace(return_token_offsets=False, get_encode_kwargs=lambda: asked)
        made = asyncio.run(self._tokenize_prompt_async({"prompt": text}, params))
        ids: list[int] = made["prompt_token_ids"]
        return ids

    async def _tokenize_prompt_async(self, prompt: Theirs, params: Theirs) -> Theirs:
        return self._tokenize_prompt(prompt, params)


def test_vllm_tokenizes_itself_what_is_not_a_rendered_chat(tokenizer: Theirs) -> None:
    renderer = Renderer(tokenizer)
    memory = install_tokenization_cache(renderer, lambda: None)
    assert memory is not None
    assert renderer.ask("<|user|>hi") == plain(tokenizer, "<|user|>hi")
    assert renderer.plainly == []
    assert memory.cached_bytes > 0
    renderer.ask("a completion", add_special_tokens=True)
    renderer.ask("one <|end|> too long", max_length=2)
    assert renderer.plainly == ["a completion", "one <|end|> too long"]


def test_a_request_with_a_salt_leaves_nothing_in_memory(tokenizer: Theirs) -> None:
    renderer = Renderer(tokenizer)
    memory = install_tokenization_cache(renderer, lambda: False)
    assert memory is not None
    assert renderer.ask("<|user|>hi") == plain(tokenizer, "<|user|>hi")
    assert memory.cached_bytes == 0
