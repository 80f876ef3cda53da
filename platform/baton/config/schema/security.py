"""Keys of the front's security. Links between processes are always protected and need no keys."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS between clients and the front; plain text without a certificate."""

    cert_file: str | None = None
    """Certificate and chain, in PEM."""
    key_file: str | None = None
    """The certificate's private key, in PEM and without a password."""
    client_ca_file: str | None = None
    """Serve only clients with a certificate that these authorities have signed, except `/health`.
    """
    required: bool = False
    """Reject requests with a key that come from other machines in plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """Security of the front."""

    tls: TlsConfig = field(default_factory=TlsConfig)
