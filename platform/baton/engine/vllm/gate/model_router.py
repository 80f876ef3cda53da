"""Several models behind one gate: each request goes to the API server of the model that it names.

Theory of operation. Every model has an API server of its own (tokenizer, templates and limits are
its model's), and the gate stands before all of them. A body is read to its end, within the gate's
bounds, for the name is in it, and then handed on unread. Who names a model that nobody has is
passed to the first server, which says so in the words of the API that was used. The list of models
is every server's, one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from baton.engine.vllm.gate.errors import Problem
from baton.engine.vllm.gate.gate import AsgiApp, Message, Receive, Scope, Send, reject_request

_LIST = "/v1/models"


class ModelRouter:
    """An ASGI app over those of several models."""

    def __init__(self, apis: Mapping[str, AsgiApp]) -> None:
        """By each name that a request may give; adapters have the API of their model."""
        self._apis = dict(apis)
        self._default_api = next(iter(apis.values()))
        self._adapter_apis: dict[str, AsgiApp] = {}

    def set_adapters(self, models: Mapping[str, str]) -> None:
        """Have these adapters, by the names of their models, served besides; no others than these.

        A name that was there from the start stays what it was.
        """
        self._adapter_apis = {name: self._apis[model] for name, model in models.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI has it."""
        if scope["type"] != "http" or scope["method"] != "POST":
            if scope["type"] == "http" and scope["path"] == _LIST:
                await self._list(scope, receive, send)
            else:
                await self._default_api(scope, receive, send)
            return
        messages = await _read_body(receive)
        body = b"".join(message.get("body", b"") for message in messages)
        name = _model_of(body)
        if name is None:
            names = ", ".join(sorted({*self._apis, *self._adapter_apis}))
            await reject_request(
                scope, send, Problem(status=400, message=f"'model' is needed: {names}")
            )
            return
        api = self._apis.get(name) or self._adapter_apis.get(name, self._default_api)
        await api(scope, _replay(messages, receive), send)

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every server's models in one list; what is no list, such as an error, as it is."""
        rows: list[object] = []
        answers = [
            await _collect_response(api, scope, receive)
            for api in dict.fromkeys(self._apis.values())
        ]
        for start, body in answers:
            if start["status"] != 200:  # noqa: PLR2004 - HTTP's
                await send(start)
                await send({"type": "http.response.body", "body": body})
                return
            rows += json.loads(body)["data"]
        list_body = json.dumps({"object": "list", "data": rows}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(list_body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": list_body})


def _model_of(body: bytes) -> str | None:
    """The model that a body names; empty when it is no body that could, None when it does not."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""  # an API server says what is wrong with it
    if not isinstance(document, dict):
        return ""
    name = document.get("model")
    return name if isinstance(name, str) or name is None else ""


async def _read_body(receive: Receive) -> list[Message]:
    """A body's messages; the last may say that the client has left."""
    messages = []
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body"):
            return messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """What was received already, then whatever comes."""
    remaining = iter(messages)

    async def receive_again() -> Message:
        return next(remaining, None) or await receive()

    return receive_again


async def _collect_response(api: AsgiApp, scope: Scope, receive: Receive) -> tuple[Message, bytes]:
    """What an app answers, all of it."""
    messages: list[Message] = []

    async def collect(message: Message) -> None:
        messages.append(message)

    await api(dict(scope), receive, collect)
    return messages[0], b"".join(message.get("body", b"") for message in messages[1:])
