"""Checks of an endpoint as its clients meet it: TLS handshake, and a request for one token.

Theory of operation: everything is asked for real, each step with a deadline. A key is sent only
over plain HTTP as configured, over TLS that this machine can verify, or to this machine itself.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from baton.domain.names.addresses import is_loopback
from baton.serving.checks.result import (
    Check,
    CheckStatus,
    Finding,
    Topic,
    UnknownFact,
    last_line,
)
from baton.serving.front.certificates import (
    Certificate,
    handshake,
    pinned_context,
    presented_certificate,
    server_certificate,
)

_CONNECT_TIMEOUT_S = 3.0
REQUEST_TIMEOUT_S = 12.0
"""For one token; a prompt of one token takes milliseconds."""
TLS_TIMEOUT_S = 3 * _CONNECT_TIMEOUT_S
WARNING_S = 14 * 86_400.0
"""Time before an expiry at which the warning begins."""
CRITICAL_S = 2 * 86_400.0
_NOT_YET_VALID, _EXPIRED, _HOST_MISMATCH, _ADDRESS_MISMATCH = 9, 10, 62, 64
"""X509_V_ERR_* of a failed verification. Source: OpenSSL, x509_vfy.h."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_OK, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _TOO_MANY = 200, 401, 403, 404, 429
_UNAVAILABLE = 503
_MAX_MESSAGE_CHARS = 300
_ASKS_FOR_CERTIFICATE = "it asks clients for a certificate, and the doctor has none"
_RENEW = (
    "renew it, and replace the files of security.tls.cert_file and key_file: they are read again"
    " within seconds"
)
_KEY_REMEDY = "use a valid key: 'baton keys list' shows them, 'baton keys create' makes one"
_REMEDIES = {
    _UNAUTHORIZED: _KEY_REMEDY,
    _FORBIDDEN: _KEY_REMEDY,
    _TOO_MANY: "it is at a limit: see 'baton status' and 'baton usage'",
    _UNAVAILABLE: "see the pools below, and 'baton status'",
}
_OTHER_REMEDY = "see 'baton logs --ingress --level warning'"
_NO_KEY = "not asked, for it needs an API key: name a file with --key-file, or set OPENAI_API_KEY"
_TLS = Topic("TLS", "clients refuse a certificate that has expired or is another name's")
_REQUEST = Topic("one request", "only an answer shows that all parts work together")


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """How the doctor calls the endpoint."""

    url: str | None = None
    """As clients call it; None: the deployment's own URL on this machine."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """With the API key, if there is one."""
    ca_file: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Trusts the authorities of this machine, or those of `ca_file`.

        Raises:
            OSError: the file cannot be read, or holds no certificates.
        """
        return ssl.create_default_context(
            cafile=None if self.ca_file is None else str(self.ca_file)
        )

    @property
    def has_key(self) -> bool:
        """Whether requests carry a key."""
        return any(name.lower() == "authorization" for name in self.headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFact:
    """The result of TLS handshakes with an endpoint."""

    certificate: Certificate
    pem: str
    problem: str = ""
    """Why this machine does not trust it; empty when it does. Its times are apart."""
    is_other_name: bool = False
    """Whether the problem is the name."""
    is_out_of_time: bool = False
    """Whether the problem is that it has expired, or is not valid yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFact:
    """The answer to a request for one token."""

    status: int
    message: str = ""
    """Of an error."""
    retry_after: str | None = None
    took_s: float = 0.0


def connection_problem(error: BaseException) -> str:
    """The first cause of a failed connection, as a text."""
    cause = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    if isinstance(cause, ConnectionRefusedError):
        return "the connection is refused: nothing listens there"
    if isinstance(cause, TimeoutError) or isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    if isinstance(cause, socket.gaierror):
        return f"its name is not known: {cause.strerror}"
    if isinstance(cause, ssl.SSLError) and "CERTIFICATE_REQUIRED" in str(cause).upper():
        return _ASKS_FOR_CERTIFICATE
    if isinstance(cause, ssl.SSLError) and "WRONG_VERSION_NUMBER" in str(cause):
        return "it does not use TLS: it answers in plain HTTP"
    return last_line(f"{type(cause).__name__}: {cause}")


def probe_tls(url: str, client: Client) -> TlsFact | UnknownFact | None:
    """Shake hands with an endpoint, at most three times; None for plain HTTP."""
    parts = urlsplit(url)
    if parts.scheme != "https":
        return None
    host, port = parts.hostname or "", parts.port or _DEFAULT_PORTS["https"]
    try:
        pem = presented_certificate(host, port, timeout_s=_CONNECT_TIMEOUT_S)
        certificate = server_certificate(host, port, pem, timeout_s=_CONNECT_TIMEOUT_S)
    except OSError as error:
        return UnknownFact(f"{url}: {connection_problem(error)}")
    try:
        context = client.context()
    except OSError as error:
        return UnknownFact(f"{client.ca_file}: got {last_line(str(error))}, expected certificates")
    try:
        handshake(host, port, context, timeout_s=_CONNECT_TIMEOUT_S).close()
    except ssl.SSLCertVerificationError as error:
        return TlsFact(
            certificate=certificate,
            pem=pem,
            problem=error.verify_message,
            is_other_name=error.verify_code in {_HOST_MISMATCH, _ADDRESS_MISMATCH},
            is_out_of_time=error.verify_code in {_NOT_YET_VALID, _EXPIRED},
        )
    except OSError as error:
        return UnknownFact(f"{url}: {connection_problem(error)}")
    return TlsFact(certificate=certificate, pem=pem)


def check_tls(tls: TlsFact | UnknownFact | None, client: Client, *, now_s: float) -> Check:
    """Whether clients can trust the endpoint's certificate, and for how long."""
    if tls is None:
        return _TLS.skipped("the endpoint uses plain HTTP")
    if isinstance(tls, UnknownFact):
        return _TLS.failed(tls.reason, "see the files of security.tls, and 'baton logs --ingress'")
    starts_in_s = tls.certificate.starts_at_s - now_s
    if starts_in_s > 0:
        return _TLS.failed(
            f"the certificate is valid only in {days_text(starts_in_s)}",
            "see this machine's clock; else replace the certificate",
        )
    if (distrust := None if client.url is None else _distrust(tls, client.url)) is not None:
        return _TLS.from_findings([distrust])
    names = ", ".join(tls.certificate.names) or "no name"
    left_s = tls.certificate.expires_at_s - now_s
    return check_expiry(_TLS, "the certificate", left_s, fix=_RENEW, otherwise=f"for {names}")


def _distrust(tls: TlsFact, url: str) -> Finding | None:
    """Why clients of this URL refuse the certificate, apart from its times; None if they do not."""
    if tls.is_other_name:
        names = ", ".join(tls.certificate.names) or "no name"
        return Finding(
            f"the certificate is for {names}, not for {urlsplit(url).hostname}",
            "call it by one of these names, or replace the certificate by one for this name",
        )
    if tls.problem and not tls.is_out_of_time:
        return Finding(
            f"this machine does not trust the certificate: {tls.problem}",
            "name the certificates of its authority with --ca-file",
        )
    return None


def check_expiry(topic: Topic, subject: str, left_s: float, *, fix: str, otherwise: str) -> Check:
    """Whether something expires soon, or has: 14 days before it is a warning, 2 days a failure."""
    if left_s <= 0:
        return topic.failed(f"{subject} expired {days_text(-left_s)} ago", fix)
    found = f"{subject} expires in {days_text(left_s)}"
    if left_s < WARNING_S:
        return topic.from_findings(
            [Finding(found, fix)],
            status=CheckStatus.FAIL if left_s < CRITICAL_S else CheckStatus.WARN,
        )
    return topic.passed(f"{found}; {otherwise}")


def days_text(duration_s: float) -> str:
    """`3 d`, `5 h`, `40 s`."""
    for unit, unit_s in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if duration_s >= 2 * unit_s:
            return f"{duration_s / unit_s:.0f} {unit}"
    return f"{duration_s:.0f} s"


def probe_request(
    url: str, tls: TlsFact | UnknownFact | None, client: Client
) -> RequestFact | UnknownFact:
    """Have the first model of an endpoint make one token."""
    if isinstance(tls, UnknownFact):
        return UnknownFact("TLS does not work, see above")
    is_here = client.url is None and is_loopback(urlsplit(url).hostname or "")
    if tls is not None and tls.problem and not is_here and client.has_key:
        return UnknownFact("no key is sent to an endpoint that this machine does not trust")
    timeout = httpx.Timeout(REQUEST_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    began_at_s = time.monotonic()
    try:
        with httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=dict(client.headers),
            verify=pinned_context(tls.pem) if tls is not None and tls.problem else client.context(),
            timeout=timeout,
            trust_env=not is_here,
        ) as http:
            response = _ask_for_a_token(http)
    except httpx.HTTPError as error:
        reason = connection_problem(error)
        return UnknownFact(f"{url}: {reason}", is_late=reason != _ASKS_FOR_CERTIFICATE)
    took_s = time.monotonic() - began_at_s
    return RequestFact(
        status=response.status_code,
        message="" if response.is_success else _error_message(response),
        retry_after=response.headers.get("retry-after"),
        took_s=took_s,
    )


def _ask_for_a_token(http: httpx.Client) -> httpx.Response:
    """The answer to the request; the first error on the way to it."""
    models = http.get("/v1/models")
    if not models.is_success:
        return models
    names = [str(model["id"]) for model in models.json().get("data") or ()]
    if not names:
        return httpx.Response(_UNAVAILABLE, text="it lists no model")
    body: dict[str, object] = {"model": names[0], "max_tokens": 1}
    answer = http.post("/v1/completions", json={**body, "prompt": "1"})
    if answer.status_code != _NOT_FOUND:
        return answer
    message = {"role": "user", "content": "1"}
    return http.post("/v1/chat/completions", json={**body, "messages": [message]})


def _error_message(response: httpx.Response) -> str:
    """The message of an error, in the forms of OpenAI and Anthropic; else the text."""
    try:
        error = response.json()["error"]
        text = str(error["message"] if isinstance(error, Mapping) else error)
    except (ValueError, LookupError, TypeError):
        text = response.text
    return last_line(text)[:_MAX_MESSAGE_CHARS]


def check_request(answer: RequestFact | UnknownFact, client: Client) -> Check:
    """Whether the endpoint made a token, and else why not."""
    if isinstance(answer, UnknownFact):
        if not answer.is_late:
            return _REQUEST.skipped(answer.reason)
        return _REQUEST.failed(answer.reason, "see 'baton status', and 'baton logs --ingress'")
    if answer.status == _OK:
        return _REQUEST.passed(f"a token came after {answer.took_s:.2f} s")
    if answer.status == _UNAUTHORIZED and not client.has_key:
        return _REQUEST.skipped(_NO_KEY)
    retry = "" if answer.retry_after is None else f" (try again in {answer.retry_after} s)"
    found = f"status {answer.status}: {answer.message}{retry}"
    make_check = _REQUEST.warned if answer.status == _TOO_MANY else _REQUEST.failed
    return make_check(found, _REMEDIES.get(answer.status, _OTHER_REMEDY))
