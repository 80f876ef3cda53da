"""Texts of streams begin at the last tokens of their prompts; the others are not decoded for them.

Theory of operation: what a token adds to a text may depend on those before it, so vLLM has its
decoder begin with the prompt. That decodes all of it, twice, when the first token has come, in the
event loop: of 95,000 tokens for 21 ms, in which no other stream gets anything. But decoders only
look at neighbours, at the beginning of a text and at characters that are not complete. So the last
few tokens do, if they make text that is whole where it ends. Where they do not, vLLM's way stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import tokenizers
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from baton.engine.vllm.patches import table
from baton.runtime.patch import replace_attributes

VllmObject: TypeAlias = Any
"""What vLLM makes, which is not followed."""
_TAIL_TOKENS = 64
_MIN_PROMPT_TOKENS = 4 * _TAIL_TOKENS
"""Shorter prompts are not worth it."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are no character, or none yet."""


def install_tail_decoding(processor: VllmObject) -> None:
    """Have an output processor of vLLM's decode of long prompts only what their texts need."""
    original = processor.add_request

    def add_request(request: VllmObject, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        is_new = request.request_id not in processor.request_states
        original(request, *args, **kwargs)
        state = processor.request_states.get(request.request_id)
        if is_new and state is not None and request.prompt_token_ids is not None:
            start_at_tail(state.detokenizer, request.prompt_token_ids)

    table.DETOKENIZER_TAIL.install(processor, add_request=add_request)


def start_at_tail(detokenizer: VllmObject, prompt_token_ids: Sequence[int]) -> None:
    """Give a detokenizer that has decoded nothing yet a stream that knows the prompt's end only."""
    if len(prompt_token_ids) < _MIN_PROMPT_TOKENS:
        return
    if not isinstance(detokenizer, FastIncrementalDetokenizer):
        return  # the slow one looks at the end only, and some requests want no text
    tail, skips_special = list(prompt_token_ids[-_TAIL_TOKENS:]), detokenizer.skip_special_tokens
    text = detokenizer.tokenizer.decode(tail, skip_special_tokens=skips_special)
    # Without text, what comes next would be the beginning of one.
    if text and not text.endswith(_REPLACEMENT):
        stream = tokenizers.decoders.DecodeStream(ids=tail, skip_special_tokens=skips_special)
        replace_attributes(detokenizer, stream=stream)
