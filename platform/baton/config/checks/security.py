"""What must agree about TLS."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.checks.check_context import CheckContext
from baton.config.language.tree import Finding
from baton.config.schema.security import TlsConfig

_TLS = ("security", "tls")
_FORBIDDEN_CHARACTERS = frozenset("\"'\\$#")
"""Characters that mean something else in HAProxy's configuration."""


def check_security(context: CheckContext) -> Iterator[Finding]:
    """A certificate needs its key, and a path must be one that HAProxy can be told."""
    tls = context.get(TlsConfig, *_TLS)
    if tls is None:
        return
    if (tls.cert_file is None) is not (tls.key_file is None):
        given_key, missing_key = ("key_file", "cert_file") if tls.cert_file is None else (
            "cert_file",
            "key_file",
        )  # fmt: skip
        yield context.finding(
            (*_TLS, given_key), f"given without {missing_key}, wanted both or neither"
        )
    if tls.client_ca_file is not None and tls.cert_file is None:
        message = "has no effect without cert_file: only over TLS do clients show certificates"
        yield context.finding((*_TLS, "client_ca_file"), message)
    for key in ("cert_file", "key_file", "client_ca_file"):
        path = getattr(tls, key)
        if path is not None and _FORBIDDEN_CHARACTERS & set(path):
            message = "has a quote, a backslash, '$' or '#' in it, wanted a path without"
            yield context.finding((*_TLS, key), message)
