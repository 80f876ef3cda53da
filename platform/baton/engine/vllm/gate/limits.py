"""Limits of a request, checked before it costs work.

Theory of operation: checks that need only a body run when its last byte is there, before vLLM
parses it. Parsing is the expensive part: 100,000 messages keep vLLM's handlers, and with them every
stream of the frontend, busy for seconds. A body that is too short to break a limit is not examined.
Values that vLLM must compute first, such as the number of answers, are checked on admission.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from baton.engine.vllm.gate.errors import Problem

DEFAULT_MAX_MESSAGES = 10_000
"""vLLM takes 0.6 s for 10,000 on one of its routes, growing faster than linear (6.3 s for
100,000); conversations have tens.
"""

MAX_NAME_CHARS = 256
"""Of a request: logs, records and every frame of its tokens carry it."""

MAX_BAD_WORDS = 128
"""The limit of vLLM's own second runner."""

# `{},` is the shortest message.
_MIN_MESSAGE_BYTES = 3
_MESSAGE_KEYS: Mapping[str, str] = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/responses": "input",
    "/tokenize": "messages",
}
_BATCH_PATH = "/v1/completions"
# Whole pairs match, too: a pattern that tells them apart takes longer than to read all of the body.
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_RAW_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendLimits:
    """Limits of a request; None where only the model limits it."""

    max_body_bytes: int = 4 * 1024 * 1024
    max_body_s: float = 60.0
    """From a request's head to the last byte of its body."""
    max_n: int | None = None
    """Answers to one prompt, and prompts of one batch."""
    max_tokens: int | None = None
    """Output tokens that a request may ask for."""
    default_max_tokens: int | None = None
    """Output tokens of a request without a limit; None: `max_tokens`, or all of the context."""
    max_messages: int | None = None
    """None: `DEFAULT_MAX_MESSAGES`."""
    logprobs: bool = True
    """Whether engines return log probabilities. Simulated engines do not, and vLLM's handlers fail
    without them.
    """

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_n", "max_tokens", "default_max_tokens", "max_messages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"frontend limits: {name} is {value}, expected at least 1")

    @property
    def default_output_tokens(self) -> int | None:
        """Output tokens of a request without a limit; None: up to the model's context."""
        bounds = [n for n in (self.default_max_tokens, self.max_tokens) if n is not None]
        return min(bounds, default=None)

    def too_many_answers(self, n: int) -> Problem | None:
        """The error for `n` answers, if that is too many."""
        if self.max_n is None or n <= self.max_n:
            return None
        return _bad_request(f"asked for {n} answers, at most {self.max_n} per request are given")

    def too_many_tokens(self, max_tokens: int | None) -> Problem | None:
        """The error for `max_tokens` output tokens, if that is too many."""
        if self.max_tokens is None or max_tokens is None or max_tokens <= self.max_tokens:
            return None
        return _bad_request(
            f"asked for {max_tokens} output tokens, at most {self.max_tokens} are given"
        )

    def no_logprobs(self, *requested: object) -> Problem | None:
        """Why log probabilities are refused; `requested` is None where a request wants none."""
        if self.logprobs or all(value is None for value in requested):
            return None
        return _bad_request(
            "log probabilities were asked for, and the engines here are simulated: none"
        )

    def check_body(self, path: str, body: bytes) -> Problem | None:
        """Why a request's complete body is refused; None leaves it to vLLM."""
        try:
            return (
                self._too_many_messages(path, body)
                or self._too_many_prompts(path, body)
                or _text_problem(body)
            )
        except RecursionError:
            return _bad_request("the body is nested too deeply")

    def _too_many_messages(self, path: str, body: bytes) -> Problem | None:
        limit = DEFAULT_MAX_MESSAGES if self.max_messages is None else self.max_messages
        key = _MESSAGE_KEYS.get(path)
        if key is None or len(body) < _MIN_MESSAGE_BYTES * limit:
            return None
        count = len(_items(body, key))
        if count <= limit:
            return None
        return _bad_request(f"{count} {key}, at most {limit} are taken")

    def _too_many_prompts(self, path: str, body: bytes) -> Problem | None:
        """Each prompt of a batch gets an answer; vLLM checks only the answers per prompt."""
        if self.max_n is None or path != _BATCH_PATH:
            return None
        prompts = _items(body, "prompt")
        return self.too_many_answers(len(prompts)) if _is_batch(prompts) else None


def bad_request_id(request_id: str) -> Problem | None:
    """Why a request id is invalid; a client may send one in its body, too."""
    if len(request_id) > MAX_NAME_CHARS:
        return _bad_request(f"the request id is longer than {MAX_NAME_CHARS} characters")
    return None if request_id.isprintable() else _bad_request("the request id is not printable")


def too_many_bad_words(bad_words: Sequence[str] | None) -> Problem | None:
    """The error for too many bad words: an engine looks for each at each step."""
    if bad_words is None or len(bad_words) <= MAX_BAD_WORDS:
        return None
    return _bad_request(f"{len(bad_words)} bad words, at most {MAX_BAD_WORDS} are kept out")


class _BodyFields(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw(b"null")
    input: msgspec.Raw = msgspec.Raw(b"null")
    prompt: msgspec.Raw = msgspec.Raw(b"null")


_FIELDS_DECODER = msgspec.json.Decoder(_BodyFields)
_ITEMS_DECODER = msgspec.json.Decoder(list[msgspec.Raw])


def _items(body: bytes, key: str) -> Sequence[object]:
    """The list at `key`, of raw JSON or of decoded values; empty without one."""
    try:
        raw: msgspec.Raw = getattr(_FIELDS_DECODER.decode(body), key)
        return _ITEMS_DECODER.decode(raw)
    except msgspec.ValidationError:
        return ()
    except (msgspec.DecodeError, UnicodeDecodeError):
        # vLLM's framework reads more than JSON: NaN, UTF-16.
        document = _loads(body)
        items = document.get(key) if isinstance(document, dict) else None
        return items if isinstance(items, list) else ()


def _is_batch(prompts: Sequence[object]) -> bool:
    """Whether a list contains prompts, rather than the token ids of a prompt."""
    match prompts:
        case [msgspec.Raw() as first, *_]:
            return bytes(first)[:1] in {b'"', b"["}
        case [str() | list(), *_]:
            return True
        case _:
            return False


def _text_problem(body: bytes) -> Problem | None:
    """Why a string cannot be sent on: it has half of a surrogate pair."""
    if not _may_have_lone_surrogate(body):
        return None
    try:
        json.dumps(_loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return _bad_request(
            "a string in the body is not valid Unicode: it has half of a surrogate pair"
        )
    return None


def _may_have_lone_surrogate(body: bytes) -> bool:
    if b"\0" in body[:4] or body.startswith(_BYTE_ORDER_MARKS):
        return True  # not UTF-8: the patterns say nothing
    # Searching a byte is many times faster than matching a pattern.
    escaped = b"\\" in body and _ESCAPED_SURROGATE.search(body) is not None
    return escaped or (b"\xed" in body and _RAW_SURROGATE.search(body) is not None)


def _loads(body: bytes) -> object:
    """The body as vLLM's framework reads it; None where that refuses it."""
    try:
        document: object = json.loads(body)
    except ValueError:
        return None
    return document


def _bad_request(message: str) -> Problem:
    return Problem(status=400, message=message)
