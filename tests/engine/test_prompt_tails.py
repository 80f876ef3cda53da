"""Texts of streams are what they would be had the whole prompt been decoded before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytest.importorskip("vllm")

from transformers import TokenizersBackend
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor

from baton.engine.vllm.fast_path.detokenizer_tail import install_tail_decoding, start_at_tail
from tests.fakes.frontends import engine_request

Theirs: TypeAlias = Any
"""What vLLM and transformers make, which is not followed."""
WORDS = [
    "a",
    "▁a",
    "▁",
    "b",
    "▁the",
    "ü",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
]


def llama_like() -> Theirs:
    """Bytes as tokens of their own, and a text's first space taken off."""
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "a"))
    plain.add_special_tokens(["<s>", "</s>"])
    plain.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return TokenizersBackend(tokenizer_object=plain)


def metaspace() -> Theirs:
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "a"))
    plain.add_special_tokens(["<s>", "</s>"])
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return TokenizersBackend(tokenizer_object=plain)


def request(prompt: Sequence[int], *, skips: bool = True) -> Theirs:
    params = SamplingParams(
        max_tokens=8, skip_special_tokens=skips, output_kind=RequestOutputKind.DELTA
    )
    return engine_request(
        "r", external_req_id="r", prompt_token_ids=list(prompt), sampling_params=params
    )


def texts(
    tokenizer: Theirs, prompt: Sequence[int], tokens: Sequence[int], *, skips: bool
) -> Theirs:
    """What each token adds, decoded vLLM's way and from the tail."""
    asked = request(prompt, skips=skips)
    theirs = FastIncrementalDetokenizer(tokenizer, asked)
    ours = FastIncrementalDetokenizer(tokenizer, asked)
    start_at_tail(ours, prompt)
    return [[each.decode_next(token) for token in tokens] for each in (theirs, ours)]


# Long stretches of one kind are what might go wrong: nothing but bytes, or special tokens.
stretches = st.lists(
    st.tuples(st.lists(st.integers(0, 263), min_size=1, max_size=6), st.integers(1, 40)),
    min_size=1,
    max_size=12,
).map(lambda pairs: [token for some, times in pairs for token in some * times])


@pytest.mark.parametrize("kind", ["byte_level", "llama_like", "metaspace"])
@settings(deadline=None, max_examples=150)
@given(
    prompt=stretches,
    tokens=st.lists(st.integers(0, 263), min_size=1, max_size=8),
    skips=st.booleans(),
)
@example(prompt=[136, *([8] * 64)], tokens=[0], skips=False)  # bytes that are no text
def test_each_token_adds_the_same_text(
    kind: str, tiny_tokenizer: Theirs, prompt: list[int], tokens: list[int], *, skips: bool
) -> None:
    tokenizer = {"llama_like": llama_like, "metaspace": metaspace}.get(
        kind, lambda: tiny_tokenizer
    )()
    prompt = [3, *prompt, *([2] * 300), *prompt]
    # After bytes that are no text vLLM's decoder says the prompt's last ones again; ours does not.
    assume(
        not tokenizer.decode(prompt, skip_special_tokens=skips).endswith(
            "\N{REPLACEMENT CHARACTER}"
        )
    )
    theirs, ours = texts(tokenizer, prompt, tokens, skips=skips)
    assert ours == theirs


@pytest.fixture
def begun_with(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """With how many tokens each stream of texts was begun, in order."""
    begun: list[int] = []
    plain = decoders.DecodeStream

    def counted(ids: Sequence[int] = (), *, skip_special_tokens: bool = False) -> Theirs:
        begun.append(len(ids))
        return plain(ids=list(ids), skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizers.decoders, "DecodeStream", counted)
    return begun


def test_vllm_is_made_to_decode_the_end_of_a_long_prompt_only(
    tiny_tokenizer: Theirs, begun_with: list[int]
) -> None:
    processor = OutputProcessor(tiny_tokenizer, log_stats=False)
    install_tail_decoding(processor)
    prompt = tiny_tokenizer.encode("once more, " * 5000)
    processor.add_request(request(prompt), None)
    assert begun_with == [len(prompt), 64]
    assert processor.request_states["r"].prompt_token_ids == prompt


def test_a_short_prompt_is_left_alone(tiny_tokenizer: Theirs, begun_with: list[int]) -> None:
    processor = OutputProcessor(tiny_tokenizer, log_stats=False)
    install_tail_decoding(processor)
    processor.add_request(request([5] * 100), None)
    assert begun_with == [100]


def test_an_ending_that_is_no_text_is_left_to_vllm(begun_with: list[int]) -> None:
    special, half_a_character = WORDS.index("<s>"), WORDS.index("<0xE4>")
    for last in (special, half_a_character):
        tokenizer = llama_like()
        detokenizer = FastIncrementalDetokenizer(tokenizer, request([1] * 400 + [last] * 100))
        start_at_tail(detokenizer, [1] * 400 + [last] * 100)
    assert begun_with == [500, 500]


def test_a_request_without_text_gets_none() -> None:
    processor = OutputProcessor(None, log_stats=False)
    install_tail_decoding(processor)
    processor.add_request(request([5] * 5000), None)
    assert processor.has_request("r")
