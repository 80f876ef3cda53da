"""Access to servers for operators: the token, and the host names of a loopback server."""

from __future__ import annotations

import asyncio
import binascii
import hmac
import logging
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from baton.domain.names.addresses import is_loopback, parse_host_header, same_host
from baton.serving.http.side_server import AsgiApp, Receive, Scope, Send
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_MAX_TOKEN_BYTES = 4096
_GROUP_OTHER_BITS = 0o077
_READ_TIMEOUT_S = 5.0
_CHALLENGE = (b"www-authenticate", b'Basic realm="baton", charset="UTF-8"')
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_WRONG_HOST = b"ask by a name of this machine, as localhost; from elsewhere it takes a token\n"


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
    """An ASGI app that passes requests with the token to `app`."""

    def __init__(
        self,
        app: AsgiApp,
        read_token: Callable[[], str] | None,
        *,
        open_paths: Collection[str] = (),
    ) -> None:
        """`open_paths` need no token, and no path does without `read_token`.

        `read_token` may block, and may raise OSError or ValueError, which rejects all requests.
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
            await _respond(send, 503, b"the token file cannot be read\n", _CHALLENGE)
            return
        self._error_logged = False
        if _has_token(scope["headers"], expected.encode()):
            await self._app(scope, receive, send)
        else:
            text = b"expected the token, as bearer token or as a password\n"
            await _respond(send, 401, text, _CHALLENGE)

    def _log_error(self, error: OSError | ValueError) -> None:
        if not self._error_logged:
            self._error_logged = True
            log_event(
                _LOGGER, logging.WARNING, "token_not_read", {"reason": str(error) or repr(error)}
            )


def _has_token(headers: Iterable[tuple[bytes, bytes]], expected: bytes) -> bool:
    """Whether there is exactly one credential and it is the token; compares in constant time."""
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


async def _respond(
    send: Send, status: int, text: bytes, *extra_headers: tuple[bytes, bytes]
) -> None:
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(text)).encode()),
        *extra_headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def restrict_hosts(app: AsgiApp, host: str) -> AsgiApp:
    """The app of a server at `host`; a loopback server answers to this machine's names only.

    A page in a browser on this machine could let a name of its own lead here, and would then read
    the answers (DNS rebinding). It cannot choose the name in the Host header.
    """
    if not is_loopback(host):
        return app
    allowed_names = (*_LOOPBACK_NAMES, host)

    def is_allowed(scope: Scope) -> bool:
        name = _requested_host(scope["headers"])
        return any(same_host(name, allowed) for allowed in allowed_names)

    async def restricted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_allowed(scope):
            await app(scope, receive, send)
        else:
            await _respond(send, 403, _WRONG_HOST)

    return restricted


def _requested_host(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The name in the Host header, without its port; "" unless there is exactly one."""
    hosts = [value for key, value in headers if key.lower() == b"host"]
    return parse_host_header(str(hosts[0], "latin-1")) if len(hosts) == 1 else ""
