"""Decode only the last tokens of a prompt before the text of its stream.

Theory of operation: the text of a token may depend on the tokens before it, so vLLM's decoder
starts with the whole prompt. It decodes that twice in the event loop when the first token arrives:
21 ms for 95,000 tokens, which delay all other streams. But decoders depend only on neighbours, the
start of a text and incomplete characters. So the last few tokens suffice if their text ends with a
complete character. Otherwise vLLM decodes the whole prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import tokenizers
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from baton.engine.vllm.patches import table
from baton.runtime.patch import replace_attributes

VllmObject: TypeAlias = Any
"""An object of vLLM, which mypy does not follow."""
_TAIL_TOKENS = 64
_MIN_PROMPT_TOKENS = 4 * _TAIL_TOKENS
"""Shorter prompts gain too little."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are not a character, or not yet."""


def install_tail_decoding(processor: VllmObject) -> None:
    """Have an output processor of vLLM decode only the tail of long prompts."""
    original = processor.add_request

    def add_request(request: VllmObject, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        is_new = request.request_id not in processor.request_states
        original(request, *args, **kwargs)
        state = processor.request_states.get(request.request_id)
        if is_new and state is not None and request.prompt_token_ids is not None:
            start_at_tail(state.detokenizer, request.prompt_token_ids)

    table.DETOKENIZER_TAIL.install(processor, add_request=add_request)


def start_at_tail(detokenizer: VllmObject, prompt_token_ids: Sequence[int]) -> None:
    """Give a new detokenizer a stream that knows only the prompt's end."""
    if len(prompt_token_ids) < _MIN_PROMPT_TOKENS:
        return
    if not isinstance(detokenizer, FastIncrementalDetokenizer):
        return  # the slow one reads only the end, and some requests want no text
    tail, skips_special = list(prompt_token_ids[-_TAIL_TOKENS:]), detokenizer.skip_special_tokens
    text = detokenizer.tokenizer.decode(tail, skip_special_tokens=skips_special)
    # Without text, the next token would start a text.
    if text and not text.endswith(_REPLACEMENT):
        stream = tokenizers.decoders.DecodeStream(ids=tail, skip_special_tokens=skips_special)
        replace_attributes(detokenizer, stream=stream)
