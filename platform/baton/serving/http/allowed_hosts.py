"""Which names a server answers to that only this machine reaches.

A page in a browser on this machine may have a name of its own lead here, and would then be allowed
to read what is answered (DNS rebinding). It cannot choose the name in the Host header.
"""

from __future__ import annotations

from baton.domain.names.addresses import is_loopback, parse_host_header, same_host
from baton.serving.http.side_server import AsgiApp, Receive, Scope, Send

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def restrict_hosts(app: AsgiApp, host: str) -> AsgiApp:
    """An app that is served at `host`: where that is this machine's alone, only by its names."""
    return _AllowedHostsMiddleware(app, host) if is_loopback(host) else app


class _AllowedHostsMiddleware:
    """Answers only who calls this server by a name of this machine."""

    def __init__(self, app: AsgiApp, host: str) -> None:
        self._app = app
        self._allowed_names = (*_LOOPBACK_NAMES, host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_allowed(self._requested_host(scope)):
            await _reject(send)
        else:
            await self._app(scope, receive, send)

    def _is_allowed(self, name: str) -> bool:
        return any(same_host(name, allowed) for allowed in self._allowed_names)

    def _requested_host(self, scope: Scope) -> str:
        """The name in the Host header, without its port; "" unless there is exactly one."""
        hosts = [value for key, value in scope["headers"] if key.lower() == b"host"]
        if len(hosts) != 1:
            return ""
        return parse_host_header(str(hosts[0], "latin-1"))


async def _reject(send: Send) -> None:
    text = b"ask by a name of this machine, as localhost; from elsewhere it takes a token\n"
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(text)).encode()),
    ]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": text})
