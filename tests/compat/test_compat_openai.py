"""The openai SDK against a baton endpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.compat.endpoint import Server

# vLLM warns of its own deprecated fields in the server's thread.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello there"}]


def test_the_model_is_listed_under_its_served_name(client: openai.OpenAI, server: Server) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == [server.model, *server.adapters]


def test_chat_answers_with_text_and_usage(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(model=server.model, messages=HELLO, max_tokens=8)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_a_chat_stream_says_the_same_text_and_ends_with_usage(
    client: openai.OpenAI, server: Server
) -> None:
    whole = client.chat.completions.create(
        model=server.model, messages=HELLO, max_tokens=12, temperature=0
    )
    stream = client.chat.completions.create(
        model=server.model,
        messages=HELLO,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_a_completion_with_n_has_n_choices(client: openai.OpenAI, server: Server) -> None:
    answer = client.completions.create(model=server.model, prompt="one two", n=3, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.text for choice in answer.choices)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_several_prompts_in_one_completion_are_answered_in_order(
    client: openai.OpenAI, server: Server
) -> None:
    prompts = ["alpha", "beta gamma"]
    together = client.completions.create(
        model=server.model, prompt=prompts, max_tokens=4, temperature=0
    )
    apart = [
        client.completions.create(model=server.model, prompt=p, max_tokens=4, temperature=0)
        for p in prompts
    ]
    assert [c.text for c in together.choices] == [a.choices[0].text for a in apart]


def test_a_completion_ends_before_a_stop_string(client: openai.OpenAI, server: Server) -> None:
    def complete(stop: str | None) -> openai.types.CompletionChoice:
        return client.completions.create(
            model=server.model, prompt="stop here", max_tokens=24, temperature=0, stop=stop
        ).choices[0]

    text = complete(None).text
    stop = text[len(text) // 2 :][:3]
    stopped = complete(stop)
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]


def test_a_seed_makes_a_sample_repeatable(client: openai.OpenAI, server: Server) -> None:
    texts = {
        client.completions.create(
            model=server.model, prompt="dice", max_tokens=8, temperature=1, seed=7
        )
        .choices[0]
        .text
        for _ in range(2)
    }
    assert len(texts) == 1


def test_logprobs_come_with_every_token(
    client: openai.OpenAI, server: Server, require_capability: Callable[[str], None]
) -> None:
    require_capability("logprobs")
    answer = client.chat.completions.create(
        model=server.model, messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)


def test_a_json_schema_is_obeyed(
    client: openai.OpenAI, server: Server, require_capability: Callable[[str], None]
) -> None:
    require_capability("json_schema")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=server.model,
        messages=HELLO,
        max_tokens=64,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "digit", "schema": schema, "strict": True},
        },
    )
    # A model with random weights may fill its tokens with the white space that JSON allows, so the
    # answer may be cut; what there is must be the beginning of an answer that obeys.
    squeezed = "".join((answer.choices[0].message.content or "").split())
    assert re.fullmatch(r'\{("(n("(:(\d\}?)?)?)?)?)?', squeezed), squeezed
    if answer.choices[0].finish_reason == "stop":
        assert 0 <= json.loads(squeezed)["n"] <= 9


def test_a_response_has_output_text(client: openai.OpenAI, server: Server) -> None:
    response = client.responses.create(model=server.model, input="hello", max_output_tokens=6)
    assert response.output_text
    assert response.status == "incomplete"
    assert response.usage is not None
    assert response.usage.output_tokens == 6


def test_a_response_stream_is_created_then_deltas_then_completed(
    client: openai.OpenAI, server: Server
) -> None:
    events = list(
        client.responses.create(model=server.model, input="hello", max_output_tokens=6, stream=True)
    )
    assert events[0].type == "response.created"
    # It ends at its limit, which is "completed" to vLLM 0.32, and to 0.33 what it is.
    assert events[-1].type in {"response.completed", "response.incomplete"}
    assert events[-1].response.status == "incomplete"
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nosuch"):
        client.chat.completions.create(model="nosuch", messages=HELLO)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_a_bad_request(
    client: openai.OpenAI, server: Server, *, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=str(server.max_len_tokens)):
        client.completions.create(
            model=server.model,
            prompt=[5] * (server.max_len_tokens + 1),
            max_tokens=4,
            stream=stream,
        )


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_max_tokens_below_one_is_a_bad_request(
    client: openai.OpenAI, server: Server, max_tokens: int
) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=server.model, messages=HELLO, max_tokens=max_tokens)
