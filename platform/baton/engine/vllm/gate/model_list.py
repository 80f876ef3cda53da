"""The list of models in the shape of either API, and a single model by its name.

vLLM's app serves the list in OpenAI's shape, with adapters. This module takes a row out of it, or
converts it to Anthropic's shape. A model's name may have slashes, plain or escaped.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, TypeAlias

from baton.engine.vllm.gate.errors import Dialect, Problem

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

LIST_PATH = "/v1/models"
MODEL_PREFIX = f"{LIST_PATH}/"
"""A model's name follows it."""
_MAX_NAME_CHARS = 200
"""Of an unknown name in the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A model or adapter in the list; vLLM's Rust frontend has no route for a single model."""

    name: str
    root: str
    """Its path or repository."""
    parent: str | None = None
    """The base model of an adapter."""
    max_len_tokens: int | None = None


def is_model_path(path: str) -> bool:
    """Whether a path is that of one model."""
    return path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX)


class ModelList:
    """An ASGI app around an app that serves the list of models at `LIST_PATH`."""

    def __init__(self, app: App, dialect: Dialect) -> None:
        """Answer in this dialect."""
        self._app = app
        self._dialect = dialect

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve a request for the list, or for a model."""
        name = scope["path"].removeprefix(MODEL_PREFIX) if is_model_path(scope["path"]) else None
        if name is None and self._dialect is not Dialect.ANTHROPIC:
            await self._app(scope, receive, send)
            return
        list_scope = {
            **scope,
            "path": LIST_PATH,
            "raw_path": LIST_PATH.encode(),
            "query_string": b"",
        }
        messages: list[Message] = []

        async def collect(message: Message) -> None:
            messages.append(message)

        await self._app(list_scope, receive, collect)
        body = b"".join(message.get("body", b"") for message in messages[1:])
        status = int(messages[0]["status"])
        headers = [other for other in messages[0]["headers"] if other[0] != b"content-length"]
        if status == HTTPStatus.OK:
            status, body = self._answer(json.loads(body)["data"], name)
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _answer(self, rows: Sequence[Mapping[str, Any]], name: str | None) -> tuple[int, bytes]:
        if name is None:
            return HTTPStatus.OK, json.dumps(_anthropic_list(rows)).encode()
        model_row = next((row for row in rows if row["id"] == name), None)
        if model_row is None:
            problem = no_such_model(name)
            return problem.status, problem.body(self._dialect)
        document = _anthropic_model(model_row) if self._dialect is Dialect.ANTHROPIC else model_row
        return HTTPStatus.OK, json.dumps(document).encode()


def no_such_model(name: str) -> Problem:
    """The answer for a model that is not served."""
    shown = name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}..."
    return Problem(
        status=HTTPStatus.NOT_FOUND,
        message=f"The model `{shown}` does not exist; GET {LIST_PATH} lists those that do.",
        param="model",
    )


def _anthropic_list(rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """All models in one page."""
    data = [_anthropic_model(row) for row in rows]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def _anthropic_model(row: Mapping[str, Any]) -> dict[str, object]:
    created = datetime.fromtimestamp(row.get("created", 0), UTC)
    return {
        "type": "model",
        "id": row["id"],
        "display_name": row["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": row.get("max_model_len"),
    }
