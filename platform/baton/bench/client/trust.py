"""Which certificates a client trusts, and why a connection to an endpoint fails."""

from __future__ import annotations

import errno
import re
import socket
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.domain.errors import NotRunning, OperatorError

UNAUTHORIZED = frozenset({401, 403})
"""Status codes of a missing or wrong API key."""
_PEM_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_EXPIRED, _NOT_YET_VALID = 10, 9
_UNKNOWN_AUTHORITY = frozenset({2, 18, 19, 20, 21, 27})
_OTHER_NAME = frozenset({62, 64})
"""Codes of OpenSSL's verification. Source: openssl-verification-options(1), X509_V_ERR."""
_PLAIN_TEXT_REASONS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")
"""OpenSSL's reasons for a peer that answers a handshake with something else."""
_SCHEME_REMEDY = "an endpoint with TLS needs https://, one without http://"


class CertificatesUnusable(OperatorError):
    """A file of trusted certificates cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsTrust:
    """Which certificates of an endpoint are accepted; picklable."""

    ca_file: Path | None = None
    """Certificates of authorities; None for those of the system."""
    endpoint_file: Path | None = None
    """The endpoint's own certificate, first in its file: only this one is accepted, for any name.
    For a deployment of this machine, whose certificate is for its public name."""
    is_insecure: bool = False
    """Accept every certificate."""

    def context(self) -> ssl.SSLContext:
        """The settings of a client.

        Raises:
            CertificatesUnusable: a file cannot be read, or holds no certificate.
        """
        file = self.endpoint_file or self.ca_file
        try:
            if self.is_insecure:
                return _context_without_checks()
            if self.endpoint_file is not None:
                return _pinned_context(self.endpoint_file)
            return ssl.create_default_context(cafile=None if file is None else str(file))
        except (OSError, ValueError) as error:
            raise CertificatesUnusable(
                f"{file}: got {error}, expected certificates", "name a PEM file with --ca-file"
            ) from error


def _context_without_checks() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _pinned_context(file: Path) -> ssl.SSLContext:
    found = _PEM_CERTIFICATE.search(file.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError("no certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # A certificate that some authority has signed is trusted by itself, without the authority.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=found.group())
    return context


def key_remedy(headers: Iterable[str]) -> str:
    """The remedy where an endpoint refuses requests with headers of these names."""
    has_key = any(name.lower() == "authorization" for name in headers)
    return f"give {'another' if has_key else 'the'} API key: --key-file FILE, or OPENAI_API_KEY"


def connection_error(error: BaseException, url: str, *, timeout_s: float) -> NotRunning:
    """The error for an operator of a connection that was not made, with its cause.

    Args:
        error: the client library's error; its causes are searched for those of Python.
        url: of the endpoint.
        timeout_s: how long the connection was waited for.
    """
    causes = list(_causes(error))[::-1]
    for cause in causes:
        if isinstance(cause, ssl.SSLError):
            return NotRunning(*_describe_tls_error(cause, url))
    for cause in causes:
        if isinstance(cause, socket.gaierror):
            reason = f"{url}: unknown host name: {cause.strerror}"
            return NotRunning(reason, "correct the host in the URL")
        if isinstance(cause, TimeoutError):
            reason = f"{url}: no connection within {timeout_s:g} s"
            return NotRunning(
                reason, f"check the address, and firewalls on the way; {_SCHEME_REMEDY}"
            )
        if _is_refusal(cause):
            reason = f"{url}: connection refused: nothing listens there"
            return NotRunning(
                reason, "start a deployment with 'baton up -c FILE', or correct the URL"
            )
    reason = f"{url}: no connection: {type(causes[0]).__name__} {causes[0]}".rstrip()
    return NotRunning(reason, f"correct the URL; {_SCHEME_REMEDY}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, outermost first: a library's error may be a kind of Python's."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_refusal(error: BaseException) -> bool:
    # For a name with several addresses, asyncio joins the errors of all to one text.
    text = f"[Errno {errno.ECONNREFUSED}]"
    return isinstance(error, ConnectionRefusedError) or (
        isinstance(error, OSError) and text in str(error)
    )


def _describe_tls_error(error: ssl.SSLError, url: str) -> tuple[str, str]:
    """The reason of a failed handshake, and the remedy."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        if any(text in str(error) for text in _PLAIN_TEXT_REASONS):
            return f"{url}: the endpoint does not use TLS", "write http:// in place of https://"
        return f"{url}: TLS: {error}", "compare the endpoint's TLS settings with this client's"
    message = error.verify_message
    match error.verify_code:
        case code if code == _EXPIRED:
            reason, remedy = "the certificate has expired", "renew it"
        case code if code == _NOT_YET_VALID:
            reason, remedy = "the certificate is not valid yet", "check the clocks"
        case code if code in _UNKNOWN_AUTHORITY:
            reason, remedy = (
                "the certificate is of an unknown authority",
                "name the authority's certificates with --ca-file FILE",
            )
        case code if code in _OTHER_NAME:
            reason, remedy = "the certificate is for another name", "use that name in the URL"
        case _:
            reason, remedy = "the certificate is not accepted", "name its authority with --ca-file"
    return f"{url}: TLS: {reason} ({message})", f"{remedy}, or skip this check with --insecure"
