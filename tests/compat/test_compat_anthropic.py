"""The anthropic SDK against a baton endpoint."""

from __future__ import annotations

import anthropic
import pytest
from anthropic.types import MessageParam

from tests.compat.endpoint import Server

# vLLM warns of its own deprecated fields in the server's thread.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

HELLO: list[MessageParam] = [{"role": "user", "content": "hello there"}]


def test_a_message_has_text_and_usage(
    anthropic_client: anthropic.Anthropic, server: Server
) -> None:
    message = anthropic_client.messages.create(model=server.model, messages=HELLO, max_tokens=8)
    (block,) = message.content
    assert block.type == "text"
    assert block.text
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 8
    assert message.usage.input_tokens > 0


def test_a_message_stream_adds_up_to_a_whole_message(
    anthropic_client: anthropic.Anthropic, server: Server
) -> None:
    with anthropic_client.messages.stream(
        model=server.model, messages=HELLO, max_tokens=8
    ) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    (block,) = message.content
    assert block.type == "text"
    assert text
    assert block.text == text
    assert message.usage.output_tokens == 8
    assert message.stop_reason == "max_tokens"


def test_counted_tokens_are_those_that_a_message_uses(
    anthropic_client: anthropic.Anthropic, server: Server
) -> None:
    counted = anthropic_client.messages.count_tokens(model=server.model, messages=HELLO)
    message = anthropic_client.messages.create(model=server.model, messages=HELLO, max_tokens=1)
    assert counted.input_tokens == message.usage.input_tokens


def test_an_unknown_model_is_not_found(anthropic_client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(model="nosuch", messages=HELLO, max_tokens=8)


def test_a_message_without_room_for_output_is_a_bad_request(
    anthropic_client: anthropic.Anthropic, server: Server
) -> None:
    with pytest.raises(anthropic.BadRequestError):
        anthropic_client.messages.create(model=server.model, messages=HELLO, max_tokens=0)
