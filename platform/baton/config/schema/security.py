"""The keys that say how the front is guarded. Links between processes always are, without any."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """How clients reach the front; without a certificate in clear."""

    cert_file: str | None = None
    """Certificate and chain, in PEM."""
    key_file: str | None = None
    """The certificate's private key, in PEM and without a password."""
    client_ca_file: str | None = None
    """Serve those only whose certificate these authorities have signed; `/health` is for all."""
    required: bool = False
    """Refuse requests with a key that come from other machines in clear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """How the front is guarded."""

    tls: TlsConfig = field(default_factory=TlsConfig)
