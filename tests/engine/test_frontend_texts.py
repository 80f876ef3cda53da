"""What is said of a bad request, in words that its sender can use."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from baton.engine.vllm.gate.errors import (
    INTERNAL,
    describe_field_errors,
    problem_from_vllm,
    sanitize,
    strip_class_names,
)


class Part(BaseModel):
    text: str


class Body(BaseModel):
    messages: list[Part]
    stop: list[str] | str = ""


def why(**body: object) -> str:
    with pytest.raises(ValidationError) as refused:
        Body.model_validate(body)
    return str(refused.value)


def test_pydantics_text_becomes_a_sentence_about_fields() -> None:
    assert sanitize(why()) == "'messages' is required"
    assert sanitize(why(messages=[{"text": 5}])) == "'messages.0.text' should be a valid string"
    said = sanitize(why(messages=[], stop=5))
    assert said == "'stop' should be a valid list; 'stop' should be a valid string"
    assert sanitize(f"Invalid request: {why(messages=3)}") == "'messages' should be a valid list"


def test_other_texts_stay_as_they_are() -> None:
    for text in (
        "no such model",
        "2 validation errors",
        "it's 5 for 3\n  indented",
        "GET /v1/models lists those that do",
        "a regex: /home|/usr/",
    ):
        assert sanitize(text) == text


def test_files_of_the_server_and_addresses_are_not_told() -> None:
    for text in (
        "cannot read /home/me/models/config.json",
        'File "/var/x/vllm/a.py", line 5, in f',
        "boom in /app/baton/x.py",
        "<object at 0x7f3a>",
    ):
        said = sanitize(text)
        assert "/" not in said
        assert ".py" not in said
        assert "0x" not in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ({"loc": ("body", "messages"), "msg": "Field required"}, "'messages' is required"),
        ({"loc": ("body",), "msg": "Field required"}, "the body is required"),
        (
            {"loc": ("body", "messages", 0, "ChatParam"), "msg": "Input should be a list"},
            "'messages.0' should be a list",
        ),
        (
            {"loc": ("body", "function-wrap[f()]", "n"), "msg": "Value error, n is too large"},
            "'n': n is too large",
        ),
        (
            {"loc": ("body", 3), "type": "json_invalid", "ctx": {"error": "Expecting value"}},
            "the body is not valid JSON: expecting value",
        ),
        ("Unsupported Media Type: Only JSON", "Unsupported Media Type: Only JSON"),
        ({}, "the body: is not valid"),
    ],
)
def test_an_error_of_a_framework_names_the_field(error: object, said: str) -> None:
    assert describe_field_errors([error]) == said


def test_many_errors_are_not_all_told_and_none_twice() -> None:
    errors = [{"loc": ("body", "input", n), "msg": "Field required"} for n in range(12_000)]
    said = describe_field_errors(errors * 2)
    assert said.endswith("; and 11990 more")
    assert len(said) < 1000


def test_a_location_names_no_classes() -> None:
    assert strip_class_names("body.messages.0.ChatCompletionParam.text") == "body.messages.0.text"


def test_what_was_raised_in_a_server_is_not_told() -> None:
    body = b'{"error": {"message": "KeyError: /usr/lib/x.py", "code": 500}}'
    assert problem_from_vllm(500, body) == INTERNAL
