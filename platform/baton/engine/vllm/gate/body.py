"""A request's body as it comes: bounded in size and time, and looked at once it is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import TYPE_CHECKING

from baton.engine.vllm.gate.errors import Problem
from baton.engine.vllm.gate.limits import FrontendLimits
from baton.engine.vllm.wire.sessions import session_in_body

if TYPE_CHECKING:
    from baton.engine.vllm.gate.gate import Exchange, Message, Receive

_DRAIN_TIMEOUT_S = 5.0
_SALT_FIELD = b'"cache_salt"'


class BoundedBody:
    """A request's body that ends the exchange when it breaks a limit."""

    def __init__(self, receive: Receive, path: str, limits: FrontendLimits) -> None:
        self.exchange: Exchange | None = None
        """Whose body it is; None until that is known."""
        self._receive = receive
        self._path = path
        self._limits = limits
        self._max_bytes = limits.max_body_bytes
        self._bytes = 0
        self._chunks: list[bytes] = []
        self._complete = False
        self._deadline_at_s = asyncio.get_running_loop().time() + limits.max_body_s

    @property
    def too_large(self) -> Problem:
        """What its client is told when it is."""
        return Problem(
            status=413, message=f"the request body is larger than {self._max_bytes} bytes"
        )

    def is_declared_too_large(self, headers: Collection[tuple[bytes, bytes]]) -> bool:
        """Whether its head says so; none of it need be read then."""
        return any(
            name == b"content-length" and value.isdigit() and int(value) > self._max_bytes
            for name, value in headers
        )

    async def receive(self) -> Message:
        """The next message of it, as ASGI has it.

        Raises:
            BodyRejected: it breaks a limit; the exchange has the problem.
        """
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_at_s):
                message = await self._receive()
        except TimeoutError as error:
            raise self._reject(self._too_slow) from error
        if message["type"] == "http.request":
            problem = self._on_body_message(message)
            if problem is not None:
                raise self._reject(problem)
        return message

    async def read_all(self) -> bytes:
        """All of it; what there is of it where its client left.

        Raises:
            BodyRejected: it breaks a limit; the exchange has the problem.
        """
        parts = []
        while not self._complete:
            message = await self.receive()
            if message["type"] != "http.request":
                break
            parts.append(message.get("body", b""))
        return b"".join(parts)

    @property
    def _too_slow(self) -> Problem:
        limit_s = self._limits.max_body_s
        message = f"the request body was not complete within {limit_s:g} s"
        return Problem(status=408, message=message, close=True)

    def _reject(self, problem: Problem) -> BodyRejected:
        if self.exchange is not None:
            # The app may turn the exception into an answer of its own, which is then replaced.
            self.exchange.problem = problem
        return BodyRejected()

    def _on_body_message(self, message: Message) -> Problem | None:
        chunk: bytes = message.get("body", b"")
        self._bytes += len(chunk)
        if self._bytes > self._max_bytes:
            return self.too_large
        self._chunks.append(chunk)
        if message.get("more_body"):
            return None
        self._complete = True
        body, self._chunks = b"".join(self._chunks), []
        if self.exchange is not None:
            self.exchange.has_cache_salt = _SALT_FIELD in body
            if self.exchange.generates and self.exchange.session is None:
                self.exchange.session = session_in_body(body)
        return self._limits.check_body(self._path, body)

    async def drain(self) -> None:
        """Read and forget at most as much again as the limit."""
        remaining_bytes = 2 * self._max_bytes
        try:
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                while remaining_bytes > 0:
                    message = await self._receive()
                    if message["type"] != "http.request" or not message.get("more_body"):
                        return
                    remaining_bytes -= len(message.get("body", b""))
        except TimeoutError:
            return


class BodyRejected(Exception):
    """Stops whoever reads the body."""
