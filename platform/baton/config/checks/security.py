"""What must agree about TLS."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.checks.check_context import Seen
from baton.config.language.tree import Finding
from baton.config.schema.security import TlsConfig

_TLS = ("security", "tls")
_UNFIT = frozenset("\"'\\$#")
"""Characters that mean something else in HAProxy's configuration."""


def check_security(seen: Seen) -> Iterator[Finding]:
    """A certificate needs its key, and a path must be one that HAProxy can be told."""
    tls = seen.get(TlsConfig, *_TLS)
    if tls is None:
        return
    if (tls.cert_file is None) is not (tls.key_file is None):
        lone, other = ("key_file", "cert_file") if tls.cert_file is None else (
            "cert_file",
            "key_file",
        )  # fmt: skip
        yield seen.wrong((*_TLS, lone), f"given without {other}, wanted both or neither")
    if tls.client_ca_file is not None and tls.cert_file is None:
        what = "has no effect without cert_file: only over TLS do clients show certificates"
        yield seen.wrong((*_TLS, "client_ca_file"), what)
    for key in ("cert_file", "key_file", "client_ca_file"):
        path = getattr(tls, key)
        if path is not None and _UNFIT & set(path):
            what = "has a quote, a backslash, '$' or '#' in it, wanted a path without"
            yield seen.wrong((*_TLS, key), what)
