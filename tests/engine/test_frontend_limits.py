"""What a body alone shows; the twin is the parser that vLLM's framework uses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from baton.engine.vllm.gate import limits as frontend_limits
from baton.engine.vllm.gate.errors import (
    INTERNAL,
    describe_field_errors,
    problem_from_vllm,
    sanitize,
    strip_class_names,
)
from baton.engine.vllm.gate.http import MAX_HEAD_BYTES, MAX_HEADERS, check_head
from baton.engine.vllm.gate.limits import DEFAULT_MAX_MESSAGES, FrontendLimits, too_many_bad_words

CHAT = "/v1/chat/completions"
PATHS = {
    CHAT: "messages",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/responses": "input",
    "/tokenize": "messages",
}
THREE = FrontendLimits(max_messages=3)


def reason(limits: FrontendLimits, path: str, body: bytes) -> str | None:
    problem = limits.check_body(path, body)
    if problem is None:
        return None
    assert problem.status == 400
    return problem.message


def conversation(count: int, key: str = "messages") -> bytes:
    return json.dumps({"model": "m", key: [{"role": "user"}] * count}).encode()


@pytest.mark.parametrize(("path", "key"), PATHS.items())
def test_more_messages_than_are_taken_are_refused(path: str, key: str) -> None:
    assert reason(THREE, path, conversation(3, key)) is None
    assert reason(THREE, path, conversation(4, key)) == f"4 {key}, at most 3 are taken"


def test_where_no_limit_is_set_there_is_one_far_above_any_conversation() -> None:
    assert reason(FrontendLimits(), CHAT, conversation(DEFAULT_MAX_MESSAGES)) is None
    assert reason(FrontendLimits(), CHAT, conversation(100_000)) is not None


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{},{},{},{}], "x": NaN}',
        b'{"messages": [{},{},{},{}], "x": -Infinity}',
        json.dumps({"messages": [{}] * 4}).encode("utf-16"),
        json.dumps({"messages": [{}] * 4}).encode("utf-32-le"),
        b'{"messages": [], "messages": [{},{},{},{}]}',
        b'\xef\xbb\xbf{"messages": [{},{},{},{}]}',
        b'{"messages":[{},{},{},{}]}',
        b'{"messages": [1, 2, "x", null]}',
        b'{"x": "\xed\xa0\x80", "messages": [{},{},{},{}]}',
    ],
)
def test_every_text_that_the_framework_reads_is_counted(body: bytes) -> None:
    assert len(json.loads(body)["messages"]) == 4
    assert reason(THREE, CHAT, body) is not None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json at all",
        b'{"messages": [{},{},{},{}',
        b'{"messages": "a long enough text"}',
        b'{"messages": {"a": 1, "b": 2, "c": 3, "d": 4}}',
        b'[{"messages": [{},{},{},{}]}]',
        b'{"input": [{},{},{},{}]}',
        b'{"x": {"messages": [{},{},{},{}]}}',
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    ],
)
def test_a_body_without_a_conversation_is_left_to_vllm(body: bytes) -> None:
    assert reason(THREE, CHAT, body) is None


def test_a_completion_has_no_messages() -> None:
    assert reason(THREE, "/v1/completions", conversation(9)) is None


@pytest.mark.parametrize("depth", [10_000, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"messages":'])
def test_a_body_that_is_nested_deeply_is_refused_without_a_stack_to_spill(
    depth: int, opening: str
) -> None:
    closing = {"[": "]", '{"messages":': "}"}[opening]
    body = ('{"messages":' + opening * depth + "1" + closing * depth + "}").encode()
    assert reason(THREE, CHAT, body) == "the body is nested too deeply"
    unread = ('{"messages":[],"x":' + opening * depth + "1" + closing * depth + "}").encode()
    assert reason(THREE, CHAT, unread) == "the body is nested too deeply"


@pytest.mark.parametrize(
    ("prompt", "refused"),
    [
        ('"abc"', False),
        ('["a", "b"]', False),
        ('[ "a", "b", "c"]', True),
        ("[[1], [2], [3]]", True),
        ("[1, 2, 3, 4, 5]", False),
        ("[]", False),
        ("null", False),
        ("{}", False),
    ],
)
def test_the_prompts_of_a_batch_are_counted_and_the_tokens_of_one_are_not(
    prompt: str, *, refused: bool
) -> None:
    limits = FrontendLimits(max_n=2)
    for more in ("", ', "x": NaN'):
        body = f'{{"prompt": {prompt}{more}}}'.encode()
        assert (reason(limits, "/v1/completions", body) is not None) == refused
        assert reason(limits, CHAT, body) is None
        assert reason(FrontendLimits(), "/v1/completions", body) is None


text = st.text(st.characters(min_codepoint=0, max_codepoint=0x10FFFF), max_size=8) | st.lists(
    st.sampled_from(["\ud83d", "\ude00", "\\", "ud800", '"', "한", "\U0001f600"]), max_size=6
).map("".join)


@settings(max_examples=100)
@given(values=st.lists(text, max_size=4), ascii_only=st.booleans())
def test_half_a_pair_is_found_exactly_where_a_string_cannot_be_encoded(
    values: list[str], *, ascii_only: bool
) -> None:
    body = json.dumps(values, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        encodable = False
    else:
        encodable = True
    assert (reason(FrontendLimits(), "/v1/completions", body) is None) == encodable


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_half_a_pair_is_found_in_other_encodings_than_utf_8(encoding: str) -> None:
    for value, fine in (("\ud83d", False), ("\U0001f600", True)):
        body = json.dumps({"x": value}, ensure_ascii=False).encode(encoding, "surrogatepass")
        assert (reason(FrontendLimits(), CHAT, body) is None) == fine


def test_a_text_that_is_clearly_short_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing is what costs: most bodies are only searched."""

    def never(_body: bytes) -> object:
        raise AssertionError("parsed")

    monkeypatch.setattr(frontend_limits, "_loads", never)
    said = [{"messages": [{"content": "한국어 \\n \\\\ é, " * 5000}]}]
    for sent in (json.dumps(said), json.dumps([*said, "\U0001f600"], ensure_ascii=False)):
        assert reason(FrontendLimits(), CHAT, sent.encode()) is None


def test_the_number_of_bad_words_is_limited() -> None:
    assert too_many_bad_words(None) is too_many_bad_words(["a"] * 128) is None
    assert too_many_bad_words(["a"] * 129) is not None


def test_answers_and_tokens_are_counted_up_to_their_limits() -> None:
    limits = FrontendLimits(max_n=2, max_tokens=100)
    assert limits.too_many_answers(2) is None
    assert limits.too_many_answers(3) is not None
    assert limits.too_many_tokens(100) is None
    assert limits.too_many_tokens(None) is None
    assert limits.too_many_tokens(101) is not None
    assert FrontendLimits().too_many_answers(10**6) is None
    assert FrontendLimits().too_many_tokens(10**6) is None


@pytest.mark.parametrize(
    ("default", "most", "given_tokens"), [(None, None, None), (7, None, 7), (7, 5, 5), (None, 5, 5)]
)
def test_a_request_without_max_tokens_gets_the_default_or_the_limit(
    default: int | None, most: int | None, given_tokens: int | None
) -> None:
    limits = FrontendLimits(default_max_tokens=default, max_tokens=most)
    assert limits.default_output_tokens == given_tokens


@pytest.mark.parametrize("name", ["max_body_bytes", "max_n", "max_tokens", "max_messages"])
def test_a_limit_of_nothing_is_a_mistake(name: str) -> None:
    nothing: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=name):
        FrontendLimits(**nothing)


# -------------------------------------------------------------------- texts of errors


class Part(BaseModel):
    text: str


class Body(BaseModel):
    messages: list[Part]
    stop: list[str] | str = ""


def text_of(**body: object) -> str:
    with pytest.raises(ValidationError) as refused:
        Body.model_validate(body)
    return str(refused.value)


def test_pydantics_text_becomes_a_sentence_about_fields() -> None:
    assert sanitize(text_of()) == "'messages' is required"
    assert sanitize(text_of(messages=[{"text": 5}])) == "'messages.0.text' should be a valid string"
    said = sanitize(text_of(messages=[], stop=5))
    assert said == "'stop' should be a valid list; 'stop' should be a valid string"
    wrong = text_of(messages=3)
    assert sanitize(f"Invalid request: {wrong}") == "'messages' should be a valid list"


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


def test_errors_of_a_server_are_not_shown_to_clients() -> None:
    body = b'{"error": {"message": "KeyError: /usr/lib/x.py", "code": 500}}'
    assert problem_from_vllm(500, body) == INTERNAL


# -------------------------------------------------------------------- heads of requests


Headers = list[tuple[bytes, bytes]]
HOST = (b"host", b"front.example:8000")


def refusal_of(headers: Headers, *, version: str = "1.1") -> str | None:
    problem = check_head({"headers": headers, "http_version": version})
    if problem is None:
        return None
    assert problem.status in {400, 431, 505}
    assert (b"connection", b"close") in problem.headers()
    return problem.message


@pytest.mark.parametrize(
    "host", [b"a", b"a.b-c_d", b"127.0.0.1", b"127.0.0.1:8000", b"[::1]", b"[fe80::1]:80", b" a "]
)
def test_one_host_is_right(host: bytes) -> None:
    assert refusal_of([(b"Host", host)]) is None


@pytest.mark.parametrize(
    "host",
    [b"", b"a b", b"a,b", b"a/b", b"u@a", b"a:", b"a:b", b"a:123456", b"\xff", b"[::1", b"a\x00"],
)
def test_a_request_without_a_host_is_refused(host: bytes) -> None:
    assert refusal_of([(b"host", host)]) is not None


def test_a_host_is_named_once() -> None:
    assert refusal_of([HOST, (b"HOST", HOST[1])]) == "2 Host header fields, expected one"
    assert refusal_of([HOST, (b"host", b"other")]) is not None
    assert refusal_of([]) == "no Host header field, expected one"
    assert refusal_of([], version="1.0") is None
    assert refusal_of([HOST, HOST], version="1.0") is not None


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ([(b"content-length", b"0")], None),
        ([(b"content-length", b"17")], None),
        ([(b"transfer-encoding", b"chunked")], None),
        ([(b"Transfer-Encoding", b"Chunked")], None),
        ([(b"content-length", b"5"), (b"transfer-encoding", b"chunked")], "both Content-Length"),
        ([(b"Content-Length", b"5"), (b"content-length", b"5")], "2 Content-Length"),
        ([(b"content-length", b"5"), (b"content-length", b"6")], "2 Content-Length"),
        *(
            ([(b"content-length", value)], "no number")
            for value in (b"", b"+5", b"-5", b"5, 5", b"0x5", b"5 5", b"1e3", b"\xb2", b"9" * 19)
        ),
        *(
            ([(b"transfer-encoding", value)], "not 'chunked'")
            for value in (
                b"identity",
                b"gzip, chunked",
                b"chunked, chunked",
                b"xchunked",
                b"",
                b"\xff",
            )
        ),
        ([(b"transfer-encoding", b"chunked")] * 2, "not 'chunked'"),
    ],
)
def test_where_a_body_ends_is_said_in_one_way(headers: Headers, refused: str | None) -> None:
    said = refusal_of([HOST, *headers])
    assert said is None if refused is None else refused in (said or "")


@pytest.mark.parametrize("version", ["0.9", "2.0", "9.9", ""])
def test_an_unknown_http_version_is_refused(version: str) -> None:
    assert refusal_of([HOST], version=version) is not None
    assert refusal_of([HOST], version="1.0") is refusal_of([HOST], version="2") is None


@pytest.mark.parametrize("value", [b"a\x00b", b"a\nb", b"a\rb", b"\x1b[31m", b"\x7f"])
def test_no_header_has_a_control_character(value: bytes) -> None:
    assert refusal_of([HOST, (b"x-any", value)]) == "a header field has a control character in it"
    assert refusal_of([HOST, (b"x-any", b"a\tb \xc3\xa9")]) is None


def test_a_head_has_a_size() -> None:
    room = MAX_HEAD_BYTES - len(HOST[0] + HOST[1]) - 1
    assert refusal_of([HOST, (b"x", b"v" * room)]) is None
    assert refusal_of([HOST, (b"x", b"v" * (room + 1))]) is not None
    assert refusal_of([HOST] + [(b"x", b"")] * (MAX_HEADERS - 1)) is None
    assert refusal_of([HOST] + [(b"x", b"")] * MAX_HEADERS) is not None
