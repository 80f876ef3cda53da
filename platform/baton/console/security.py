"""The rules for every answer of the console: read-only, and closed to other pages."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
    )
)
"""Nothing from elsewhere, nothing inline; and no string ever becomes markup."""
SECURITY_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
_OTHER_SITES = frozenset({"cross-site", "same-site"})


class SecurityMiddleware:
    """ASGI middleware: adds the headers, and lets nothing but GET through.

    Another site's page in the same browser may link here, and nothing else: it could not read
    anything, but it could take viewers' places.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 405 or 403, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        app = rejection(scope) or self._app
        await app(scope, receive, send_with_headers)


def rejection(scope: Scope) -> ASGIApp | None:
    """The answer to a rejected request; None for an accepted request."""
    if scope["method"] != "GET":
        return PlainTextResponse("the console only reads: GET\n", 405, headers={"allow": "GET"})
    headers = Headers(scope=scope)
    is_link = headers.get("sec-fetch-mode") == "navigate"
    if headers.get("sec-fetch-site") in _OTHER_SITES and not is_link:
        return PlainTextResponse("not for other sites' pages\n", 403)
    return None
