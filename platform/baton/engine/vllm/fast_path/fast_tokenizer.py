"""Prompts become token ids without being told where in the text each came from.

A tokenizer of transformers asks the program under it (`tokenizers`, in Rust) for ids together with
their places in the text, their types and a mask. vLLM looks at the ids alone, mostly; without the
rest they take two thirds of the time, and a long prompt has its first token so much sooner.

Whether ids alone are the same is tried on each tokenizer before it is believed, and one that does
something of its own to a text is left to vLLM; so is whoever wants places, and what is too long,
for the end at which it is cut off is the tokenizer's to say.

A short text is tokenized where it is asked for. On its way to a thread and back it waits for the
lock of Python, beside many streams for longer than its tokens take, and makes them wait as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeAlias

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend
from vllm.utils.async_utils import make_async

from baton.engine.vllm.patches import table

VllmObject: TypeAlias = Any
"""What vLLM and transformers make, which is not followed."""
SAMPLES = (
    "hello world",
    " leading",
    "trailing ",
    "\n\nlines\n",
    "  ",
    "Über",
    "1 2",
    "\u4f60",
    "",
)
"""What tokenizers are known to treat in their own way, at the ends of a text above all."""
SHORT_CHARS = 4096
"""Prose of so many keeps the event loop for about a millisecond; what is in no vocabulary, for some
more."""
_MAX_SAMPLE_WORDS = 16
_VLLM_MODULE_PREFIX = "vllm.tokenizers."
"""They hold copies of a tokenizer, or remember its vocabulary; what it does stays as it was."""


class FastEncoder:
    """Token ids of texts, as a tokenizer of transformers gives them. Thread-safe."""

    def __init__(self, tokenizer: VllmObject) -> None:
        """Take a copy of a tokenizer's program, which nobody else sets anything of."""
        rust_tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        rust_tokenizer.no_truncation()
        rust_tokenizer.no_padding()
        rust_tokenizer.encode_special_tokens = bool(tokenizer.split_special_tokens)
        self._encode = rust_tokenizer.encode_batch_fast

    def __call__(self, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """The ids of each of some texts."""
        encoded = self._encode(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encoded]


def make_fast_encoder(tokenizer: VllmObject) -> FastEncoder | None:
    """One that gives the ids that this tokenizer gives; None: that is not sure."""
    if not isinstance(tokenizer, TokenizersBackend) or not _is_plain(type(tokenizer)):
        return None
    try:
        encode = FastEncoder(tokenizer)
    except Exception:  # noqa: BLE001 - with parts in Python it has no text, says tokenizers' Rust
        return None
    words = sorted(token.content for token in tokenizer.added_tokens_decoder.values())
    samples = [*SAMPLES, *(f"a{word}b {word}" for word in words[:_MAX_SAMPLE_WORDS])]
    samples.append("".join(samples))
    for add_special in (False, True):
        expected: Iterable[Sequence[int]] = tokenizer(samples, add_special_tokens=add_special)[
            "input_ids"
        ]
        if encode(samples, add_special_tokens=add_special) != [list(ids) for ids in expected]:
            return None
    return encode


def _is_plain(tokenizer_class: type) -> bool:
    """Whether texts reach the program as they are: by no method but transformers' own."""
    classes = [
        cls for cls in tokenizer_class.__mro__ if not cls.__module__.startswith(_VLLM_MODULE_PREFIX)
    ]

    def defining_class(method: str) -> type | None:
        return next((class_ for class_ in classes if method in vars(class_)), None)

    call_owner, encode_owner = defining_class("__call__"), defining_class("_encode_plus")
    return call_owner is PreTrainedTokenizerBase and encode_owner is TokenizersBackend


def install_fast_tokenizer(renderer: VllmObject) -> FastEncoder | None:
    """Have a renderer of vLLM's do so; None: its tokenizer is not one for it."""
    encode = make_fast_encoder(renderer.tokenizer)
    if encode is None:
        return None
    original, executor = renderer._tokenize_prompt, renderer._executor  # noqa: SLF001

    def tokenize(prompt: VllmObject, params: VllmObject) -> VllmObject:
        options = params.get_encode_kwargs()
        if params.return_token_offsets:
            return original(prompt, params)
        (ids,) = encode([prompt["prompt"]], add_special_tokens=options["add_special_tokens"])
        if options["truncation"] and len(ids) > options["max_length"]:
            return original(prompt, params)
        return {**prompt, "prompt_token_ids": ids}

    is_installed = table.TOKENIZER.install(
        renderer,
        _tokenize_prompt=tokenize,
        _tokenize_prompt_async=inline_if_short(tokenize, executor),
    )
    return encode if is_installed else None


def inline_if_short(
    tokenize: Callable[..., VllmObject], executor: Executor
) -> Callable[..., Awaitable[VllmObject]]:
    """Call a function of a prompt and more in the executor, or at once where its text is short."""
    in_thread = make_async(tokenize, executor)

    async def tokenize_async(prompt: VllmObject, *args: VllmObject) -> VllmObject:
        if len(prompt["prompt"]) <= SHORT_CHARS:
            return tokenize(prompt, *args)
        return await in_thread(prompt, *args)

    return tokenize_async
