"""Tool and reasoning parsers, switched on by arguments of the API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.domain.commands import Delivery
from baton.domain.request import FinishReason
from baton.engine.vllm.frontend.settings import FrontendSettings
from baton.runtime.ports import Frontend
from tests.compat.echo_fleet import EchoFleet
from tests.compat.endpoint import MODEL, ServerThread, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    # vLLM warns of its own deprecated fields in the server's thread.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
THOUGHT = "Here is my thought process: it is cold there. Here is my response:"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class ScriptedFleet(EchoFleet):
    """Says to everybody what it was told to say."""

    says: tuple[int, ...] = ()

    def _step(self, frontend: Frontend) -> None:
        for request_id in list(self._streams):
            del self._streams[request_id]
            frontend.deliver([Delivery(request_id, self.says, FinishReason.STOP)])


@pytest.fixture(scope="module")
def scripted(model_dir: Path) -> Iterator[tuple[ServerThread, ScriptedFleet]]:
    fleet = ScriptedFleet()
    settings = FrontendSettings(
        model=str(model_dir),
        served_model_name=MODEL,
        extra={
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
            "reasoning_parser": "granite",
        },
    )
    with serve(settings, fleet) as thread:
        yield thread, fleet


def answer(
    scripted: tuple[ServerThread, ScriptedFleet], model_dir: Path, says: str, **body: object
) -> dict[str, Any]:
    """The message of a chat in which the fleet says something."""
    from transformers import AutoTokenizer

    thread, fleet = scripted
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    fleet.says = (*tokenizer.encode(says), tokenizer.eos_token_id)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **body}
    told = httpx.post(f"{thread.base_url}/v1/chat/completions", json=asked, timeout=60)
    assert told.status_code == 200, told.text
    message: dict[str, Any] = told.json()["choices"][0]["message"]
    return message


def test_a_tool_call_is_parsed_from_the_models_output(
    scripted: tuple[ServerThread, ScriptedFleet], model_dir: Path
) -> None:
    message = answer(scripted, model_dir, CALL, tools=[WEATHER], tool_choice="auto")
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert not message["content"]


def test_reasoning_is_separated_from_the_answer(
    scripted: tuple[ServerThread, ScriptedFleet], model_dir: Path
) -> None:
    message = answer(scripted, model_dir, f"{THOUGHT} take a coat")
    assert message["content"].strip() == "take a coat"
    assert message["reasoning"].strip() == "it is cold there."
