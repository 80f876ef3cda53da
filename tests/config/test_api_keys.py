"""Arguments that are passed on to vLLM's API server."""

from __future__ import annotations

from collections.abc import Callable

from baton.config.derive import api_arguments
from baton.config.diff import Reload, reload_class
from tests.config.conftest import LEAST, Load

Refuse = Callable[..., tuple[str, ...]]
PARSERS = "api: {enable_auto_tool_choice: true, tool_call_parser: hermes}"
WITH = LEAST.replace("source: tiny", f"source: tiny, revision: r1, {PARSERS}")


def test_a_models_api_server_gets_its_arguments_and_revision(load: Load) -> None:
    (model,) = load(WITH).config.models.values()
    assert api_arguments(model) == {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "revision": "r1",
    }


def test_an_argument_that_has_a_key_of_its_own_is_not_passed_on(refuse: Refuse) -> None:
    (finding,) = refuse(WITH.replace("tool_call_parser: hermes", "max_model_len: 5"))
    assert finding.endswith("api.max_model_len: cannot be passed on, use 'max_len of the model'")


def test_other_arguments_of_an_api_server_take_a_restart() -> None:
    assert reload_class(("models", "m", "api", "tool_call_parser")) is Reload.RESTART
