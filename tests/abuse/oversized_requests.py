"""More than one request may ask for, by default settings, and the status that it gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx

from tests.abuse.deployed import MODEL

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
_MEGABYTE = 1 << 20
_DEPTH = 10_000
_MAX_ANSWER_CHARS = 50_000
"""Of an answer to one of these: nobody's excess is said back to him."""
_JSON = {"content-type": "application/json"}
MakeRequest = Callable[[], tuple[str, bytes]]


def text(**fields: object) -> tuple[str, bytes]:
    """A completion with something else in it."""
    return TEXT, json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1} | fields).encode()


def chat(**fields: object) -> tuple[str, bytes]:
    """A chat with something else in it."""
    return CHAT, json.dumps(
        {"model": MODEL, "messages": MESSAGES, "max_tokens": 1} | fields
    ).encode()


def with_value(request: tuple[str, bytes], value: bytes) -> tuple[str, bytes]:
    """With a last field that `json` would not write."""
    path, data = request
    return path, data[:-1] + b', "seed": ' + value + b"}"


def _image(url: str) -> list[dict[str, object]]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [part]}]


EXCESSES: tuple[tuple[str, MakeRequest, int], ...] = (
    ("a body of 5 MiB", lambda: text(prompt="x" * 5 * _MEGABYTE), 413),
    ("a prompt of 4 MB", lambda: text(prompt="x y " * 1_000_000), 400),
    ("129 answers", lambda: text(n=129), 400),
    ("16,384 answers", lambda: chat(n=16_384), 400),
    ("129 prompts", lambda: text(prompt=["x"] * 129), 400),
    ("more tokens than the context", lambda: text(max_tokens=10**9), 400),
    ("arrays 10,000 deep", lambda: with_value(chat(), b"[" * _DEPTH + b"]" * _DEPTH), 400),
    (
        "objects 10,000 deep",
        lambda: with_value(chat(), b'{"a":' * _DEPTH + b"0" + b"}" * _DEPTH),
        400,
    ),
    ("100,000 messages", lambda: chat(messages=MESSAGES * 100_000), 400),
    ("10,001 messages", lambda: chat(messages=MESSAGES * 10_001), 400),
    ("half of a surrogate pair", lambda: chat(user="\ud800"), 400),
    ("5 stop strings", lambda: chat(stop=["a"] * 5), 400),
    # Different ones: vLLM takes what is said twice once.
    ("100,000 bad words", lambda: chat(bad_words=[f"a{n}" for n in range(100_000)]), 400),
    # The front has given it another name already, and this one is not used.
    ("a request id of 100 kB", lambda: text(request_id="x" * 100_000), 200),
    ("a template of its own", lambda: chat(chat_template="{{ 1 }}"), 400),
    ("tensors", lambda: text(prompt_embeds="AAAA"), 400),
    ("media of another host", lambda: chat(messages=_image("http://127.0.0.1:1/")), 400),
    ("a number of 5,000 digits", lambda: with_value(text(), b"9" * 5000), 400),
)


def check_answer(
    client: httpx.Client, name: str, make_request: MakeRequest, expected_status: int
) -> Iterator[str]:
    """Says so when it is answered otherwise."""
    path, data = make_request()
    answer = client.post(path, content=data, headers=_JSON)
    if answer.status_code != expected_status:
        yield f"{name}: {answer.status_code}, expected {expected_status}: {answer.text[:100]}"
    if len(answer.text) > _MAX_ANSWER_CHARS:
        yield (
            f"{name}: an answer of {len(answer.text)} characters, expected at most"
            f" {_MAX_ANSWER_CHARS}"
        )


def default_output_tokens(client: httpx.Client) -> dict[str, int]:
    """How many tokens come of requests that ask for no number."""
    chat_answer = client.post(CHAT, json={"model": MODEL, "messages": MESSAGES}, timeout=120).json()
    response_answer = client.post(
        "/v1/responses", json={"model": MODEL, "input": "hi"}, timeout=120
    ).json()
    return {
        CHAT: chat_answer["usage"]["completion_tokens"],
        "/v1/responses": response_answer["usage"]["output_tokens"],
    }
