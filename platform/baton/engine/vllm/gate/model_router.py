"""Several models behind one gate: each request goes to the API server of its model.

Theory of operation: every model has an API server of its own (tokenizer, templates, limits).
The router reads a body to its end, within the gate's bounds, for the model's name, and passes it on
unparsed. For an unknown model the first server answers with an error in the shape of the API.
The list of models joins the lists of all servers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from baton.engine.vllm.gate.errors import Problem
from baton.engine.vllm.gate.gate import AsgiApp, Message, Receive, Scope, Send, reject_request

_LIST = "/v1/models"


class ModelRouter:
    """An ASGI app in front of the apps of several models."""

    def __init__(self, apis: Mapping[str, AsgiApp]) -> None:
        """Route by these names; adapters use the API of their model."""
        self._apis = dict(apis)
        self._default_api = next(iter(apis.values()))
        self._adapter_apis: dict[str, AsgiApp] = {}

    def set_adapters(self, models: Mapping[str, str]) -> None:
        """Replace the adapters, by the names of their models; models win over equal names."""
        self._adapter_apis = {name: self._apis[model] for name, model in models.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
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
        """Join the servers' lists; pass on the first answer that is an error."""
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
    """The model that a body names; None without one, empty for an invalid body."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""  # an API server reports the error
    if not isinstance(document, dict):
        return ""
    name = document.get("model")
    return name if isinstance(name, str) or name is None else ""


async def _read_body(receive: Receive) -> list[Message]:
    """A body's messages; the last may be a disconnect."""
    messages = []
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request" or not message.get("more_body"):
            return messages


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """The messages read so far, then those that follow."""
    remaining = iter(messages)

    async def receive_again() -> Message:
        return next(remaining, None) or await receive()

    return receive_again


async def _collect_response(api: AsgiApp, scope: Scope, receive: Receive) -> tuple[Message, bytes]:
    """An app's whole response."""
    messages: list[Message] = []

    async def collect(message: Message) -> None:
        messages.append(message)

    await api(dict(scope), receive, collect)
    return messages[0], b"".join(message.get("body", b"") for message in messages[1:])
