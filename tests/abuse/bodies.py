"""Bodies of requests that are almost right, and what an endpoint may say to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random

import httpx
import msgspec

from baton.bench.client.client import EventReader
from tests.abuse.fuzz import Target, mutate

Body = Mapping[str, object]
JSON = {"content-type": "application/json"}
DEADLINE_S = 30.0
_MESSAGES = [{"role": "user", "content": "hi"}]
BASES: Mapping[str, Body] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 3},
}
_PLAIN: Mapping[str, Body] = {
    **BASES,
    "/v1/messages/count_tokens": {"messages": _MESSAGES},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [300, 301]},
}
_NUMBERS = (0, 1, -1, 2, 3.5, -0.0, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**63), 10**40, 10**400)
_TEXTS = (
    "", " ", "x", "\x00", "\ud800", "\U0001f600", "a" * 5000, "{{ 7*7 }}", "{% for %}", "../../x",
    "file:///etc/passwd", "http://127.0.0.1:1/", "data:image/png;base64,AAAA", "<|im_start|>",
    "auto", "none", "required", "json_object", "text", "user", "system", "assistant", "tool",
    "max_tokens", "'; drop", "%s%n", "\r\nX: y", "(a+)+$", "[", "null", "NaN",
)  # fmt: skip
_NAMES = (
    "model", "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "n", "best_of",
    "max_output_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "stop_sequences", "logprobs", "top_logprobs", "prompt_logprobs", "logit_bias", "echo", "suffix",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "min_tokens",
    "stream", "stream_options", "user", "metadata", "store", "service_tier", "parallel_tool_calls",
    "tools", "tool_choice", "functions", "function_call", "response_format", "structured_outputs",
    "guided_json", "guided_regex", "guided_grammar", "guided_choice", "chat_template",
    "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "documents", "mm_processor_kwargs", "media_io_kwargs", "priority", "request_id", "session_id",
    "cache_salt", "kv_transfer_params", "ec_transfer_params", "kv_hints", "vllm_xargs",
    "bad_words", "allowed_token_ids", "ignore_eos", "skip_special_tokens", "truncate_prompt_tokens",
    "spaces_between_special_tokens", "include_stop_str_in_output", "return_token_ids",
    "return_tokens_as_token_ids", "prompt_embeds", "use_beam_search", "logits_processors",
    "reasoning", "reasoning_effort", "thinking", "thinking_token_budget", "include_reasoning",
    "system", "instructions", "previous_response_id", "background", "truncation", "text", "include",
    "max_tool_calls", "repetition_detection", "tokens", "audio", "modalities", "role", "content",
)  # fmt: skip


def bodies(
    url: str, model: str, *, stream: bool | None = None, headers: Mapping[str, str] | None = None
) -> Target[tuple[str, bytes]]:
    """Requests that are answered, or refused in the words of their API; streams that end well.

    Args:
        url: the endpoint's.
        model: what it serves.
        stream: whether all are streamed; None: some are.
        headers: of each request, such as a key.
    """
    client = httpx.Client(base_url=url, timeout=DEADLINE_S, headers=headers)
    bases = BASES if stream else _PLAIN

    def make(rng: Random) -> tuple[str, bytes]:
        path = rng.choice(tuple(bases))
        body: dict[str, object] = {"model": model, **bases[path]}
        for _ in range(rng.choice((1, 1, 2, 2, 3, 6))):
            body[rng.choice(_NAMES)] = _value(rng, 0)
        if stream or (stream is None and rng.random() < 0.3):
            body["stream"] = True
        data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
        return path, mutate(data, rng) if rng.random() < 0.2 else data

    def check_request(request: tuple[str, bytes]) -> str:
        path, data = request
        answer = client.post(path, content=data, headers=JSON)
        return check_answer(path, answer)

    return Target(make=make, check=check_request, timeout_s=2 * DEADLINE_S)


def check_answer(path: str, answer: httpx.Response) -> str:
    """A word for an answer as it should be.

    Raises:
        AssertionError: it is not as it should be.
    """
    kind = answer.headers.get("content-type", "")
    if answer.status_code >= 500:
        raise AssertionError(f"{answer.status_code}: {answer.text[:300]}")
    if answer.status_code >= 400:
        _check_rejection(path, answer)
        return "refused"
    if kind.startswith("text/event-stream"):
        return _check_stream(path, answer.content)
    json.loads(answer.content)
    return "answered"


def _check_rejection(path: str, answer: httpx.Response) -> None:
    error = json.loads(answer.content)["error"]
    expected_keys = {"type", "message"} if path.startswith("/v1/messages") else {"message", "code"}
    if not isinstance(error, dict) or not expected_keys <= error.keys():
        raise AssertionError(f"a refusal of another shape: {answer.text[:300]}")


def _check_stream(path: str, data: bytes) -> str:
    reader = EventReader()
    events = reader.feed(data) + reader.close()
    if not events:
        raise AssertionError("a stream without an event")
    if path == "/v1/messages":
        last = msgspec.json.decode(events[-1], type=dict)["type"]
        is_complete = last in {"message_stop", "error"}
    elif path == "/v1/responses":
        last = msgspec.json.decode(events[-1], type=dict)["type"]
        is_complete = last in {
            "response.completed",
            "response.incomplete",
            "response.failed",
            "error",
        }
    else:
        is_complete = events[-1] == b"[DONE]" or b'"error"' in events[-1]
    if not is_complete:
        raise AssertionError(f"a stream that breaks off: {events[-1][:300]!r}")
    return "streamed, with an error" if b'"error"' in events[-1] else "streamed"


def _value(rng: Random, depth: int) -> object:
    """Anything that JSON, or what Python takes for it, can say."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 6:
        empty: tuple[object, ...] = ([], {}, [[]], [None], "x" * rng.choice((1, 100, 20_000)))
        odd = (float("nan"), float("inf"), -float("inf"), _NUMBERS[-1])
        return rng.choice((_NUMBERS[:-1], _TEXTS, (None, True, False), odd, empty, _LIKELY)[kind])
    if kind == 6:
        return [_value(rng, depth + 1) for _ in range(rng.choice((1, 2, 3, 40)))]
    names = _TEXTS if kind == 7 else _NAMES
    return {rng.choice(names): _value(rng, depth + 1) for _ in range(rng.randint(1, 3))}


_SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_AUDIO = {"data": "", "format": "wav"}
_CALL = {"name": "f", "arguments": "{"}
_LIKELY: Sequence[object] = (
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://h/"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": _AUDIO}]}],
    [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": _CALL}]}],
    [{"role": "tool", "tool_call_id": "1", "content": None}],
    [_TOOL], [_TOOL] * 200, {"type": "function", "function": {"name": "f"}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
    {"type": "json_object"}, {"regex": "(a+)+$"}, {"grammar": "root ::= root"}, {"choice": []},
    {"json": _SCHEMA}, {"structural_tag": "{"}, {"include_usage": True}, {"include_usage": "x"},
    {"300": 100}, {"-1": 1e9}, {"x": 1}, ["a", "b"], [["a"]], [1, 2, 3], [[1, 2], [3]], [-1],
    {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}, [2**40],
    {"effort": "high"}, {"type": "enabled", "budget_tokens": 1}, ["file_search_call.results"],
)  # fmt: skip
