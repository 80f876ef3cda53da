"""What a quick chunk writes is what vLLM's model of it writes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    UsageInfo,
)
from vllm.entrypoints.openai.chat_completion import protocol as chat_protocol
from vllm.entrypoints.openai.chat_completion import serving as chat
from vllm.entrypoints.openai.completion import protocol as completion_protocol
from vllm.entrypoints.openai.completion import serving as completions
from vllm.entrypoints.serve.utils import tool_calls_utils

from baton.engine.vllm.fast_path.fast_chunks import FastChunk, install_fast_chunks, make_fast_class

Maker = Any  # a model of vLLM's, or what stands for it

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=3)
LOGPROB = st.floats(max_value=0.0, allow_nan=False, allow_infinity=False)
FINISH = st.none() | st.sampled_from(["stop", "length", "tool_calls"])
STOP = st.none() | st.integers(0, 9) | TEXT
USAGE = st.builds(
    UsageInfo,
    prompt_tokens=st.integers(0, 9),
    completion_tokens=st.integers(0, 9),
    total_tokens=st.integers(0, 9),
)
HEAD = {"id": TEXT, "created": st.integers(0, 2**40), "model": TEXT}
LATER = st.fixed_dictionaries({}, optional={"system_fingerprint": TEXT, "usage": USAGE})
"""What handlers set of a chunk that is made."""

COMPLETION_LOGPROBS = st.none() | st.builds(
    completion_protocol.CompletionLogProbs,
    text_offset=IDS,
    token_logprobs=st.lists(st.none() | LOGPROB, max_size=2),
    tokens=st.lists(TEXT, max_size=2),
)
CHAT_LOGPROBS = st.none() | st.builds(
    chat_protocol.ChatCompletionLogProbs,
    content=st.lists(
        st.builds(
            chat_protocol.ChatCompletionLogProbsContent, token=TEXT, logprob=LOGPROB, bytes=IDS
        ),
        max_size=2,
    ),
)
TOOL_CALLS = st.lists(
    st.builds(
        DeltaToolCall,
        index=st.integers(0, 3),
        function=st.none() | st.builds(DeltaFunctionCall, name=TEXT, arguments=TEXT),
    ),
    max_size=2,
)
DELTA = st.builds(DeltaMessage, content=st.none() | TEXT) | st.builds(
    lambda said: DeltaMessage(**said),
    st.fixed_dictionaries(
        {}, optional={"role": TEXT, "content": TEXT, "reasoning": TEXT, "tool_calls": TOOL_CALLS}
    ),
)
COMPLETION_CHOICE = st.fixed_dictionaries(
    {"index": st.integers(0, 3), "text": TEXT},
    optional={
        "logprobs": COMPLETION_LOGPROBS,
        "finish_reason": FINISH,
        "stop_reason": STOP,
        "prompt_token_ids": st.none() | IDS,
        "token_ids": st.none() | IDS,
    },
)
CHAT_CHOICE = st.fixed_dictionaries(
    {"index": st.integers(0, 3), "delta": DELTA},
    optional={
        "logprobs": CHAT_LOGPROBS,
        "finish_reason": FINISH,
        "stop_reason": STOP,
        "token_ids": st.none() | IDS,
    },
)
KINDS = {
    "completion": (
        completion_protocol.CompletionStreamResponse,
        completion_protocol.CompletionResponseStreamChoice,
        st.fixed_dictionaries(HEAD, optional={"object": st.just("text_completion")}),
        st.lists(COMPLETION_CHOICE, max_size=2),
    ),
    "chat": (
        chat_protocol.ChatCompletionStreamResponse,
        chat_protocol.ChatCompletionResponseStreamChoice,
        st.fixed_dictionaries(
            HEAD,
            optional={
                "object": st.just("chat.completion.chunk"),
                "prompt_token_ids": st.none() | IDS,
                "prompt_text": st.none() | TEXT,
            },
        ),
        st.lists(CHAT_CHOICE, max_size=2),
    ),
}


def written(response: Maker, choice: Maker, said: Any, **how: bool) -> str:  # noqa: ANN401 - drawn
    head, choices, later = said
    chunk = response(**head, choices=[choice(**other) for other in choices])
    for name, value in later.items():
        setattr(chunk, name, value)
    return str(chunk.model_dump_json(**how))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), none_left_out=st.booleans())
def test_it_writes_what_vllms_model_writes(
    kind: str,
    data: st.DataObject,
    none_left_out: bool,  # noqa: FBT001 - drawn
) -> None:
    response, choice, heads, choices = KINDS[kind]
    said = data.draw(st.tuples(heads, choices, LATER))
    how = {"exclude_unset": True, "exclude_none": none_left_out}
    theirs = written(response, choice, said, **how)
    assert written(make_fast_class(response), make_fast_class(choice), said, **how) == theirs


def test_default_fields_are_written_where_requested() -> None:
    response, choice, _, _ = KINDS["completion"]
    head = {"id": "a", "created": 1, "model": "m"}
    said = (head, [{"index": 0, "text": "t"}], {"system_fingerprint": "f"})
    theirs = written(response, choice, said, exclude_unset=False)
    assert '"finish_reason":null' in theirs
    assert (
        written(make_fast_class(response), make_fast_class(choice), said, exclude_unset=False)
        == theirs
    )


def test_values_without_json_are_refused() -> None:
    response, *_ = KINDS["completion"]
    with pytest.raises(TypeError, match="a chunk holds a object, expected what JSON has"):
        make_fast_class(response)(choices=[object()]).model_dump_json(exclude_unset=True)


@pytest.fixture
def quick_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (completions, "CompletionStreamResponse"),
        (completions, "CompletionResponseStreamChoice"),
        (chat, "ChatCompletionStreamResponse"),
        (chat, "ChatCompletionResponseStreamChoice"),
        (tool_calls_utils, "ChatCompletionResponseStreamChoice"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    install_fast_chunks()
    install_fast_chunks()  # as the second model of a deployment does


@pytest.mark.usefixtures("quick_handlers")
def test_handlers_make_quick_chunks_and_models_of_the_same_name_stay_theirs() -> None:
    made = chat.ChatCompletionStreamResponse(id="a", choices=[])
    assert isinstance(made, FastChunk)
    assert made.vllm_model is chat_protocol.ChatCompletionStreamResponse
    assert (
        completions.CompletionStreamResponse.vllm_model.__module__ == completion_protocol.__name__
    )


@pytest.mark.usefixtures("quick_handlers")
@pytest.mark.parametrize("made_by", [chat, chat_protocol])
def test_one_tool_call_is_left_of_several_where_no_others_are_wanted(made_by: Any) -> None:  # noqa: ANN401 - a module
    calls = [DeltaToolCall(index=index) for index in range(2)]
    choice = made_by.ChatCompletionResponseStreamChoice(
        index=0, delta=DeltaMessage(tool_calls=calls)
    )
    request = chat_protocol.ChatCompletionRequest(messages=[], parallel_tool_calls=False)
    kept = tool_calls_utils.maybe_filter_parallel_tool_calls(choice, request)
    assert [call.index for call in kept.delta.tool_calls] == [0]
