"""The list of models in the shape of either API, and one model of it by its name.

vLLM's app has the list alone, in OpenAI's shape, and there it stays: whatever is served, adapters
included, is in it. Here one row is taken out of it, or the whole is told as Anthropic tells it.
A name may have slashes, plain or escaped: nothing of it is a path.
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
"""What is behind it is a model's name."""
_MAX_NAME_CHARS = 200
"""Of a name that nobody has, in the answer that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A model or adapter in the list of models; vLLM's Rust frontend has no route for one."""

    name: str
    root: str
    """Where it is kept."""
    parent: str | None = None
    """The model that an adapter is over."""
    max_len_tokens: int | None = None


def is_model_path(path: str) -> bool:
    """Whether a path is that of one model."""
    return path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX)


class ModelList:
    """An ASGI app over one that has the list of models at `LIST_PATH`."""

    def __init__(self, app: App, dialect: Dialect) -> None:
        """Answers are in this dialect."""
        self._app = app
        self._dialect = dialect

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request for the list, or for one model."""
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
    """What a client is told that asks for a model that is not served."""
    shown = name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}..."
    return Problem(
        status=HTTPStatus.NOT_FOUND,
        message=f"The model `{shown}` does not exist; GET {LIST_PATH} lists those that do.",
        param="model",
    )


def _anthropic_list(rows: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """All of them in one page."""
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
