"""The list of arguments for API servers, held against those of the vLLM that is installed."""

from __future__ import annotations

import dataclasses
import json
import warnings
from argparse import Action
from pathlib import Path

import pytest

from baton.config.derive.api_arguments import (
    ALLOWED_ARGUMENTS,
    CONFIG_KEYS,
    MIN_VLLM_VERSIONS,
    REJECTED_ARGUMENTS,
    ArgumentType,
    problem_with,
)
from baton.domain.errors import EngineStartFailed
from baton.engine.vllm.frontend.rust_arguments import SUPPORTED_ARGUMENTS
from baton.engine.vllm.frontend.settings import CORS_ARGUMENTS, FrontendSettings
from baton.serving.versions import is_before

with warnings.catch_warnings():
    # The vendors' modules warn while they are imported.
    warnings.simplefilter("ignore")
    import vllm
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from baton.engine.vllm.cli_args import FrontendArgs, make_arg_parser
    from baton.engine.vllm.frontend.llm import parse_server_args

FRONTENDS = {field.name for field in dataclasses.fields(FrontendArgs)}
LATER = {name for name, since in MIN_VLLM_VERSIONS.items() if is_before(vllm.__version__, since)}
OF_THE_COMMAND = {"headless", "api_server_count", "config", "grpc", "model_tag"}


def actions() -> dict[str, Action]:
    parser = make_arg_parser(FlexibleArgumentParser())
    return {action.dest: action for action in parser._actions}


def test_every_argument_of_vllms_api_server_is_passed_on_has_a_key_or_is_refused() -> None:
    listed = [*ALLOWED_ARGUMENTS, *CONFIG_KEYS, *REJECTED_ARGUMENTS]
    assert len(listed) == len(set(listed)), "one answer to each"
    assert sorted((FRONTENDS | OF_THE_COMMAND) - set(listed)) == []


def test_a_listed_argument_is_one_of_vllm_or_of_a_later_version() -> None:
    assert sorted(
        {*ALLOWED_ARGUMENTS, *CONFIG_KEYS, *REJECTED_ARGUMENTS} - set(actions())
    ) == sorted(LATER)


def test_arguments_of_engines_are_refused_with_the_place_for_them() -> None:
    engines = set(actions()) - {*ALLOWED_ARGUMENTS, *CONFIG_KEYS, *REJECTED_ARGUMENTS, "help"}
    assert len(engines) > 150
    for name in engines:
        assert "engine.extra" in (problem_with(name, "x") or ""), name


def test_every_refusal_says_what_to_do() -> None:
    for name in {*CONFIG_KEYS, *REJECTED_ARGUMENTS}:
        assert len((problem_with(name, "x") or "").split()) > 4, name


def test_the_rust_frontend_heeds_nothing_that_is_refused_here() -> None:
    assert sorted(SUPPORTED_ARGUMENTS - set(ALLOWED_ARGUMENTS) - {"revision"}) == []


def test_browsers_are_answered_by_the_arguments_that_models_must_share() -> None:
    from baton.config.derive import api_arguments

    assert set(CORS_ARGUMENTS) == set(api_arguments.CORS_ARGUMENTS)


def sample(name: str, argument: ArgumentType) -> object:
    """A value that an argument takes."""
    special: dict[str, object] = {
        "structured_outputs_config": {"backend": "auto"},
        "reasoning_config": {},
        "limit_mm_per_prompt": {"image": 1},
        "tool_call_parser": "hermes",
        "reasoning_parser": "deepseek_r1",
        "dtype": "float32",
        "middleware": ["a.b", "c.d"],
        "tool_parser_plugin": "",
        "reasoning_parser_plugin": "",
    }
    if name in special:
        return special[name]
    if argument.choices:
        return argument.choices[-1]
    kind = argument.types[0]
    if kind is bool:
        return True
    if kind is int:
        return 1
    return {} if kind not in {str, list} else ["x", "y"] if kind is list else "x"


@pytest.mark.parametrize("name", sorted(set(ALLOWED_ARGUMENTS) - set(CORS_ARGUMENTS) - LATER))
def test_every_argument_that_is_passed_on_is_understood_by_vllm(name: str) -> None:
    value = sample(name, ALLOWED_ARGUMENTS[name])
    assert problem_with(name, value) is None
    settings = FrontendSettings(model="m", served_model_name="m", extra={name: value})
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(settings.argv(max_len_tokens=9))
    got = getattr(args, name)
    if dataclasses.is_dataclass(got):
        return  # it has parsed the mapping
    assert got == value


@pytest.mark.parametrize("name", sorted(ALLOWED_ARGUMENTS))
def test_a_value_of_another_type_is_refused(name: str) -> None:
    argument = ALLOWED_ARGUMENTS[name]
    wrong: object = 5 if int not in argument.types else "five"
    told = problem_with(name, wrong) or ""
    assert told.startswith("got ")
    assert argument.expected in told


def test_the_choices_are_vllms() -> None:
    known = actions()
    for name, argument in ALLOWED_ARGUMENTS.items():
        if argument.choices:
            choices = known[name].choices
            assert set(argument.choices) == (
                {"cmd3", "cmd4"} if choices is None else set(map(str, choices)) - {"None"}
            ), name


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"enable_auto_tool_choice": True}, "tool-call-parser"),
        ({"enable_auto_tool_choice": True, "tool_call_parser": "nope"}, "no tool_call_parser"),
        ({"reasoning_parser": "nope"}, "no reasoning_parser 'nope'"),
        ({"enable_log_outputs": True}, "enable-log-requests"),
        ({"chat_template": "/no/such/template.jinja"}, "template"),
    ],
)
def test_contradicting_arguments_end_the_start_with_a_reason(
    extra: dict[str, object], said: str
) -> None:
    argv = FrontendSettings(model="m", served_model_name="m", extra=extra).argv(max_len_tokens=9)
    with pytest.raises(EngineStartFailed, match=said):
        parse_server_args(argv)


PLUGIN = """
from vllm.tool_parsers import ToolParser, ToolParserManager

@ToolParserManager.register_module("own_tools")
class Own(ToolParser):
    pass
"""


def test_a_parser_of_ones_own_is_loaded_from_its_plugin(tmp_path: Path) -> None:
    plugin = tmp_path / "own_tools.py"
    plugin.write_text(PLUGIN)
    extra = {
        "tool_parser_plugin": str(plugin),
        "tool_call_parser": "own_tools",
        "enable_auto_tool_choice": True,
    }
    argv = FrontendSettings(model="m", served_model_name="m", extra=extra).argv(max_len_tokens=9)
    assert parse_server_args(argv).tool_call_parser == "own_tools"


def test_browser_permissions_are_no_argument_of_the_app_behind() -> None:
    extra = {"allowed_origins": ["https://a.example"], "allow_credentials": True}
    settings = FrontendSettings(model="m", served_model_name="m", extra=extra)
    assert not [
        word for word in settings.argv(max_len_tokens=9) if "allow" in word and "origin" in word
    ]
    assert settings.cors_options == {
        "allow_origins": ["https://a.example"],
        "allow_credentials": True,
        "allow_methods": ["*"],
        "allow_headers": ["*"],
    }
    assert json.dumps(FrontendSettings(model="m", served_model_name="m").cors_options) == "{}"
