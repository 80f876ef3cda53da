"""The variables by which programs go through a proxy, in both of the ways that they are spelt."""

from __future__ import annotations

from typing import Final

PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
NO_PROXY: Final = "NO_PROXY"
PROXY_VARIABLES: Final = tuple(
    spelt for name in (*PROXIES, NO_PROXY) for spelt in (name, name.lower())
)
"""Source: urllib.request, `getproxies_environment`."""
