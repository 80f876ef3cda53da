"""The variables by which programs go through a proxy, in both of the ways that they are spelt."""

from __future__ import annotations

from typing import Final

PROXY_URL_VARIABLES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
NO_PROXY_VARIABLE: Final = "NO_PROXY"
PROXY_VARIABLES: Final = tuple(
    spelt for name in (*PROXY_URL_VARIABLES, NO_PROXY_VARIABLE) for spelt in (name, name.lower())
)
"""Source: urllib.request, `getproxies_environment`."""
