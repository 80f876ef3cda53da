"""The token that metrics and the console ask for: where it is kept, and who has it."""

from __future__ import annotations

import asyncio
import binascii
import hmac
import logging
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from baton.serving.http.side_server import AsgiApp, Receive, Scope, Send
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_MAX_TOKEN_BYTES = 4096
_GROUP_OTHER_BITS = 0o077
_READ_TIMEOUT_S = 5.0


class TokenFile:
    """The token in a file; read again when the file has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = ""
        self._signature: tuple[int, int, int] | None = None

    def __call__(self) -> str:
        """The token. Blocks on the disk.

        Raises:
            OSError: the file cannot be read.
            ValueError: there is no token in it.
        """
        file_stat = self._path.stat()
        signature = file_stat.st_ino, file_stat.st_mtime_ns, file_stat.st_size
        if signature != self._signature:
            with self._path.open("rb") as file:
                token = file.read(_MAX_TOKEN_BYTES).decode().strip()
            if not token:
                raise ValueError(f"token file {self._path} is empty, expected a token")
            if file_stat.st_mode & _GROUP_OTHER_BITS:
                fields = {"path": str(self._path), "remedy": f"chmod 600 {self._path}"}
                log_event(_LOGGER, logging.WARNING, "token_file_readable_by_others", fields)
            self._token, self._signature = token, signature
        return self._token


class TokenAuthMiddleware:
    """An ASGI app that lets those through to `app` who have the token."""

    def __init__(
        self,
        app: AsgiApp,
        read_token: Callable[[], str] | None,
        *,
        open_paths: Collection[str] = (),
    ) -> None:
        """Nobody is asked at `open_paths`, and nobody at all where there is no `read_token`.

        `read_token` may block, and may raise OSError or ValueError: then nobody is let in.
        """
        self._token = read_token
        self._app = app
        self._open_paths = frozenset(open_paths)
        self._error_logged = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, as ASGI has it."""
        read_token = self._token
        if scope["type"] != "http" or read_token is None or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                expected = await asyncio.to_thread(read_token)
        except (OSError, ValueError) as error:
            self._log_error(error)
            await _respond(send, 503, b"the token file cannot be read\n")
            return
        self._error_logged = False
        if _has_token(scope["headers"], expected.encode()):
            await self._app(scope, receive, send)
        else:
            await _respond(send, 401, b"expected the token, as bearer token or as a password\n")

    def _log_error(self, error: OSError | ValueError) -> None:
        if not self._error_logged:
            self._error_logged = True
            log_event(
                _LOGGER, logging.WARNING, "token_not_read", {"why": str(error) or repr(error)}
            )


def _has_token(headers: Iterable[tuple[bytes, bytes]], expected: bytes) -> bool:
    """Whether one of the credentials is the token; takes as long however much of it is right."""
    credentials = [value for name, value in headers if name.lower() == b"authorization"]
    return len(credentials) == 1 and hmac.compare_digest(_credential(credentials[0]), expected)


def _credential(authorization: bytes) -> bytes:
    scheme, _, credential = authorization.strip().partition(b" ")
    match scheme.lower():
        case b"bearer":
            return credential.strip()
        case b"basic":
            try:
                return b64decode(credential, validate=True).partition(b":")[2]
            except binascii.Error:
                return b""
        case _:
            return b""


async def _respond(send: Send, status: int, text: bytes) -> None:
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(text)).encode()),
        (b"www-authenticate", b'Basic realm="baton", charset="UTF-8"'),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
