"""What vLLM's Rust frontend is told, and what is refused because it would pass over it."""

from __future__ import annotations

import json

import pytest

from baton.domain.errors import EngineStartFailed
from baton.engine.vllm.frontend.rust_arguments import (
    SUPPORTED_ROUTES,
    build_rust_arguments,
    unsupported_settings,
)
from baton.engine.vllm.frontend.settings import FrontendSettings, RequestCapabilities
from baton.engine.vllm.gate.limits import FrontendLimits


def settings(**changes: object) -> FrontendSettings:
    fields: dict[str, object] = {
        "model": "/models/m",
        "served_model_name": "m",
        "routes": tuple(sorted(SUPPORTED_ROUTES)),
    }
    return FrontendSettings(**(fields | changes))  # type: ignore[arg-type]  # tests know the names


def told(**changes: object) -> dict[str, object]:
    document: dict[str, object] = json.loads(
        build_rust_arguments(settings(**changes), max_len_tokens=512)
    )
    return document


def test_the_model_its_name_and_its_context_are_told() -> None:
    found = told()
    assert (found["model"], found["model_tag"]) == ("/models/m", "/models/m")
    assert (found["served_model_name"], found["max_model_len"]) == (["m"], 512)


def test_media_are_closed_whatever_is_configured() -> None:
    assert told()["language_model_only"] is True
    assert told(extra={"stream-interval": 4})["language_model_only"] is True


def test_raw_arguments_lose_their_dashes_and_never_replace_ours() -> None:
    found = told(extra={"tool-call-parser": "hermes", "stream_interval": 4})
    assert (found["tool_call_parser"], found["stream_interval"]) == ("hermes", 4)


def test_adapters_are_told_with_their_paths() -> None:
    found = told(adapters={"ada": "/adapters/ada"})
    assert found["enable_lora"] is True
    assert found["lora_modules"] == [{"name": "ada", "path": "/adapters/ada"}]
    assert "lora_modules" not in told()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"routes": ("chat", "messages", "responses")}, "has no messages, responses"),
        ({"limits": FrontendLimits(max_messages=8)}, "admission.max_messages"),
        (
            {"capabilities": RequestCapabilities(media_domains=("a.example",))},
            "server.allow.media_domains",
        ),
        ({"capabilities": RequestCapabilities(prompt_embeds=True)}, "server.allow.prompt_embeds"),
        ({"extra": {"api-key": "k", "host": "h"}}, "pass over api_key, host"),
    ],
)
def test_what_cannot_be_had_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(EngineStartFailed, match=said):
        told(**changes)


def test_all_that_cannot_be_had_is_said_at_once() -> None:
    problems = unsupported_settings(routes=("responses",), max_messages=8, prompt_embeds=True)
    assert list(problems) == [
        "server.routes",
        "admission.max_messages",
        "server.allow.prompt_embeds",
    ]
