"""Ids alone are those that a tokenizer gives with all that it gives besides."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool

from baton.engine.vllm.fast_path.tokenization_cache import (
    SHORT_CHARS,
    inline_if_short,
    install_fast_tokenizer,
    make_fast_encoder,
)

Theirs: TypeAlias = Any
"""What vLLM and transformers make, which is not followed."""


def made(kind: type = PreTrainedTokenizerFast, **said: Theirs) -> Theirs:
    """A tokenizer of letters that begins and ends what it is given with tokens of its own."""
    letters = {chr(number): number for number in range(32, 127)} | {"<unk>": 0, "<s>": 1, "</s>": 2}
    inner = Tokenizer(models.BPE(letters, []))
    inner.model.unk_token = "<unk>"  # noqa: S105 - a token of text
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    inner.add_special_tokens(
        [AddedToken("<s>"), AddedToken("</s>"), AddedToken("<x>", lstrip=True)]
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return kind(tokenizer_object=inner, **said)


@pytest.fixture(scope="module", params=["tiny", "letters", "letters that split special tokens"])
def tokenizer(request: pytest.FixtureRequest, tiny_tokenizer: Theirs) -> Theirs:
    if request.param == "tiny":
        return tiny_tokenizer
    return made(split_special_tokens="split" in request.param)


TEXTS = st.lists(
    st.sampled_from(("<s>", "</s>", "<x>", "<|user|>", "<|end|>", " ", "\n")) | st.text(max_size=9),
    max_size=9,
).map("".join)


@given(texts=st.lists(TEXTS, min_size=1, max_size=3), added=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_ids_are_the_tokenizers(tokenizer: Theirs, texts: list[str], added: bool) -> None:  # noqa: FBT001 - drawn
    encode = make_fast_encoder(tokenizer)
    assert encode is not None
    theirs = tokenizer(texts, add_special_tokens=added)["input_ids"]
    assert encode(texts, add_special_tokens=added) == theirs


def test_truncation_set_by_other_users_of_the_tokenizer_cuts_nothing_off() -> None:
    tokenizer = made(pad_token="</s>")  # noqa: S106 - a token of text
    tokenizer("cut", truncation=True, max_length=2, padding="max_length")
    encode = make_fast_encoder(tokenizer)
    tokenizer("cut", truncation=True, max_length=2)
    assert encode is not None
    assert encode(["a long text"]) == [tokenizer("a long text", add_special_tokens=False).input_ids]


def test_an_encoder_is_made_for_the_tokenizers_of_vllm(tiny_tokenizer: Theirs) -> None:
    cached = get_cached_tokenizer(tiny_tokenizer)
    assert make_fast_encoder(cached) is not None
    maybe_make_thread_pool(cached, 2)
    assert make_fast_encoder(cached) is not None


class Politely(PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers is not followed
    """One that looks at a text first."""

    def _encode_plus(self, text: Theirs, **wanted: Theirs) -> Theirs:
        return super()._encode_plus(text, **wanted)


class Differently(PreTrainedTokenizerFast):  # type: ignore[misc]  # transformers is not followed
    """One that is called in a way of its own."""

    def __call__(self, text: Theirs, **wanted: Theirs) -> Theirs:
        return super().__call__(text, **wanted)


class Foreign:
    """None of transformers' at all."""

    is_fast = True


def test_one_that_does_something_of_its_own_to_a_text_is_left_alone() -> None:
    assert make_fast_encoder(made(Politely)) is None
    assert make_fast_encoder(made(Differently)) is None
    assert make_fast_encoder(Foreign()) is None


def test_one_whose_ids_turn_out_to_be_others_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made()
    assert make_fast_encoder(tokenizer) is not None
    convert = tokenizer._convert_encoding

    def changed(*arguments: Theirs, **wanted: Theirs) -> Theirs:
        said, encodings = convert(*arguments, **wanted)
        said["input_ids"] = [ids[:1] for ids in said["input_ids"]]
        return said, encodings

    monkeypatch.setattr(tokenizer, "_convert_encoding", changed)
    assert make_fast_encoder(tokenizer) is None


class Renderer:
    """As much of vLLM's as is touched."""

    def __init__(self, tokenizer: Theirs) -> None:
        self.tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(1)
        self.plainly: list[str] = []

    def _tokenize_prompt(self, prompt: Theirs, _params: Theirs) -> Theirs:
        self.plainly.append(prompt["prompt"])
        return {**prompt, "prompt_token_ids": [0]}

    async def _tokenize_prompt_async(self, prompt: Theirs, params: Theirs) -> Theirs:
        return self._tokenize_prompt(prompt, params)

    def ask(self, text: str, *, offsets: bool = False, **wanted: Theirs) -> list[int]:
        asked = {"add_special_tokens": True, "truncation": True, "max_length": 100} | wanted
        params = SimpleNamespace(return_token_offsets=offsets, get_encode_kwargs=lambda: asked)
        prompt = {"prompt": text, "salt": 1}

        async def in_thread() -> Theirs:
            return await self._tokenize_prompt_async(prompt, params)

        made = asyncio.run(in_thread())
        assert made == self._tokenize_prompt(prompt, params), "as in a thread"
        assert (made["prompt"], made["salt"]) == (text, 1), "what came with it stays with it"
        ids: list[int] = made["prompt_token_ids"]
        return ids


def test_offsets_and_too_long_texts_are_left_to_vllm() -> None:
    tokenizer = made()
    renderer = Renderer(tokenizer)
    assert install_fast_tokenizer(renderer) is not None
    assert renderer.ask("a text") == tokenizer("a text").input_ids
    bare = tokenizer("a text", add_special_tokens=False).input_ids
    assert renderer.ask("a text", add_special_tokens=False) == bare
    at_any_length = renderer.ask("a text", truncation=False, max_length=None)
    assert at_any_length == tokenizer("a text").input_ids
    assert renderer.plainly == []
    renderer.ask("too long", max_length=3)
    renderer.ask("with places", offsets=True)
    assert set(renderer.plainly) == {"too long", "with places"}


async def test_only_a_long_text_is_tokenized_in_another_thread() -> None:
    here, seen = threading.get_ident(), []

    def tokenize(prompt: Theirs, more: str) -> Theirs:
        seen.append((len(prompt["prompt"]), more, threading.get_ident() == here))
        return prompt

    with ThreadPoolExecutor(1) as executor:
        called = inline_if_short(tokenize, executor)
        for length in (SHORT_CHARS, SHORT_CHARS + 1):
            assert await called({"prompt": "a" * length}, "more") == {"prompt": "a" * length}
    assert seen == [(SHORT_CHARS, "more", True), (SHORT_CHARS + 1, "more", False)]


def test_a_renderer_whose_tokenizer_is_not_for_it_stays_as_it_is() -> None:
    renderer = Renderer(Foreign())
    assert install_fast_tokenizer(renderer) is None
    assert vars(renderer).keys() == {"tokenizer", "_executor", "plainly"}
