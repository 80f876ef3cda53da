"""Arguments that are passed on to vLLM's API server."""

from __future__ import annotations

import pytest

from baton.config.derive.options import api_arguments
from baton.config.diff import Reload, reload_class
from tests.config.conftest import MINIMAL_CONFIG, Load, Refuse

PARSERS = "api: {enable_auto_tool_choice: true, tool_call_parser: hermes}"
WITH = MINIMAL_CONFIG.replace("source: tiny", f"source: tiny, revision: r1, {PARSERS}")


def test_a_models_api_server_gets_its_arguments_and_revision(load: Load) -> None:
    (model,) = load(WITH).config.models.values()
    assert api_arguments(model) == {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "revision": "r1",
    }


def test_an_argument_that_has_a_key_of_its_own_is_not_passed_on(load_invalid: Refuse) -> None:
    (finding,) = load_invalid(WITH.replace(PARSERS, "api: {max_model_len: 5}"))
    assert finding.endswith("api.max_model_len: cannot be passed on, use 'max_len of the model'")


def api(text: str) -> str:
    return MINIMAL_CONFIG.replace("source: tiny", f"source: tiny, api: {text}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{uvicorn_log_level: debug}", "api.uvicorn_log_level: cannot be had here: vLLM's HTTP"),
        ("{middlewares: [a.b]}", "did you mean 'middleware'?"),
        ("{tensor_parallel_size: 2}", "arguments of engines belong in engine.extra"),
        ("{enable_tokenizer_info_endpoint: true}", "its route is not opened"),
        ("{mm_processor_cache_gb: 4}", "baton keeps it at 0"),
        ("{root_path: /llm}", "have the proxy take the prefix off"),
        ("{sse_keep_alive_interval: -1}", "got -1, expected a whole number of seconds"),
        ("{sse_keep_alive_interval: 15s}", "expected a whole number of seconds"),
        ("{sse_keep_alive_interval: true}", "got true, expected a whole number of seconds"),
        ("{enable_auto_tool_choice: true}", "does nothing without 'tool_call_parser'"),
        ("{enable_log_outputs: true}", "does nothing without 'enable_log_requests'"),
        ("{allow_credentials: true}", "does nothing without 'allowed_origins'"),
        ("{tool_strict_level: strictest}", "expected one of auto, function, parameter"),
        ("{middleware: [5]}", "expected an import path or a list of them"),
    ],
)
def test_an_argument_that_would_do_nothing_here_is_refused_by_its_name(
    load_invalid: Refuse, text: str, said: str
) -> None:
    (finding,) = load_invalid(api(text))
    assert said in finding


@pytest.mark.parametrize(
    "text",
    [
        "{sse_keep_alive_interval: 15}",
        "{middleware: a.b}",
        "{middleware: [a.b, c.d]}",
        "{allowed_origins: ['*'], allow_credentials: false}",
        "{default_chat_template_kwargs: {enable_thinking: false}}",
        "{chat_template: null}",
    ],
)
def test_an_argument_that_works_here_is_taken(load: Load, text: str) -> None:
    assert load(api(text)).config.models


def test_models_that_share_a_front_say_the_same_of_browsers(
    load_invalid: Refuse, load: Load
) -> None:
    one = "{source: tiny, max_len: 64, api: {allowed_origins: ['https://a']}}"
    other = one.replace("https://a", "https://b")
    pools = "pools: {x: {role: mixed, model: a}, y: {role: mixed, model: b}}\n"
    two = "version: 1\nmodels: {a: %s, b: %s}\n" + pools
    (finding,) = load_invalid(two % (one, other))
    assert "answered by one front for all models" in finding
    assert load(two % (one, one)).config.models


def test_other_arguments_of_an_api_server_take_a_restart() -> None:
    assert reload_class(("models", "m", "api", "tool_call_parser")) is Reload.RESTART
