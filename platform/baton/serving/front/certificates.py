"""Reads certificates, and installs renewed certificates in running HAProxies.

Theory of operation: one thread polls the files. When certificate and key have changed and match, it
installs them through the admin socket of every HAProxy of this deployment; open connections stay.
It reports unusable files once, and tries again after the next change, since renewers replace two
files one after the other. A HAProxy that starts reads the files itself.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from baton.config.schema.security import TlsConfig
from baton.serving.front.haproxy_admin import query_haproxy
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_POLL_S = 5.0
_JOIN_TIMEOUT_S = 5.0
_SUCCESS_TEXT = "Success"
_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME, which `ssl` does not name. Source: OpenSSL, x509_vfy.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The content of a server's certificate; times are in seconds since 1970."""

    starts_at_s: float
    expires_at_s: float
    names: tuple[str, ...] = ()
    """The hosts and addresses that it is for."""


def pinned_context(pem: str) -> ssl.SSLContext:
    """A client's context that accepts this certificate alone, without a check of names or times."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=pem)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    return context


def presented_certificate(host: str, port: int, *, timeout_s: float) -> str:
    """The certificate that a server presents, in PEM; nothing about it is verified.

    Raises:
        OSError: no connection, or no handshake (`ssl.SSLError`) within the timeout of each.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with handshake(host, port, context, timeout_s=timeout_s) as connection:
        return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"")


def handshake(host: str, port: int, context: ssl.SSLContext, *, timeout_s: float) -> ssl.SSLSocket:
    """A TLS connection; raises as `presented_certificate`, also for a failed verification."""
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        return context.wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise


def server_certificate(host: str, port: int, pem: str, *, timeout_s: float) -> Certificate:
    """The content of a server's certificate `pem`; raises as `presented_certificate`."""
    with handshake(host, port, pinned_context(pem), timeout_s=timeout_s) as connection:
        return _certificate(connection.getpeercert() or {})


def certificate_in(cert_file: str, key_file: str) -> Certificate:
    """The content of the certificate in a file, by a handshake within this process.

    Raises:
        OSError: the files cannot be read, or are no certificate and its key.
        ValueError: the key has a password.
    """
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(cert_file, key_file, password="")
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = pinned_context(Path(cert_file).read_text()).wrap_bio(to_client, to_server)
    while True:
        try:
            client.do_handshake()
        except ssl.SSLWantReadError:
            _answer_handshake(server)
        else:
            return _certificate(client.getpeercert() or {})


def _answer_handshake(server: ssl.SSLObject) -> None:
    try:
        server.do_handshake()
    except ssl.SSLWantReadError:
        return


def _certificate(fields: object) -> Certificate:
    assert isinstance(fields, dict), "a verified certificate has fields"
    return Certificate(
        starts_at_s=ssl.cert_time_to_seconds(fields["notBefore"]),
        expires_at_s=ssl.cert_time_to_seconds(fields["notAfter"]),
        names=tuple(value for _kind, value in fields.get("subjectAltName", ())),
    )


class CertificateExpiry:
    """When the certificate of a configuration expires; its files are read when they change."""

    def __init__(self) -> None:
        self._signature: tuple[object, ...] = ()
        self.expires_at_s: float | None = None
        """In seconds since 1970; None without a certificate that can be read here."""

    def poll(self, tls: TlsConfig) -> None:
        """Read changed files. Blocks on the disk."""
        files = tuple(Path(name) for name in (tls.cert_file, tls.key_file) if name)
        signature = (files, _file_stats(files))
        if signature == self._signature:
            return
        self._signature, self.expires_at_s = signature, None
        if tls.cert_file is None or tls.key_file is None:
            return
        try:
            self.expires_at_s = certificate_in(tls.cert_file, tls.key_file).expires_at_s
        except (OSError, ValueError) as error:
            # An ingress may run on a node without these files: HAProxy reads them on the head.
            fields = {"cert_file": tls.cert_file, "reason": str(error).partition("\n")[0]}
            log_event(_LOGGER, logging.INFO, "certificate_not_read", fields)


class CertificateWatch:
    """See the module; without a certificate it does nothing."""

    def __init__(
        self,
        tls: TlsConfig,
        name: Path,
        sockets: Callable[[], Iterable[Path]],
    ) -> None:
        """`name` is HAProxy's name of the certificate; `sockets` lists its admin sockets."""
        self._files = tuple(Path(name) for name in (tls.cert_file, tls.key_file) if name)
        self._certificate_name = name
        self._sockets = sockets
        self._last_stats = _file_stats(self._files)
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._poll_loop, name="baton-tls", daemon=True)

    def start(self) -> None:
        """Begin to poll."""
        if self._files:
            self._thread.start()

    def stop(self) -> None:
        """Stop polling. Idempotent."""
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    def poll(self) -> bool:
        """Whether the files have changed since the last poll; installs them if so."""
        stats = _file_stats(self._files)
        if stats == self._last_stats:
            return False
        self._last_stats = stats
        reason = self._reload_certificate()
        fields: dict[str, object] = {"cert_file": str(self._files[0])}
        if reason is None:
            log_event(_LOGGER, logging.INFO, "certificate_renewed", fields)
        else:
            log_event(
                _LOGGER, logging.WARNING, "certificate_not_renewed", fields | {"reason": reason}
            )
        return True

    def _poll_loop(self) -> None:
        while not self._stop_event.wait(_POLL_S):
            try:
                self.poll()
            except Exception:
                # Without this thread the certificate expires one day, and clients are refused.
                _LOGGER.exception("the certificate's files could not be looked at")

    def _reload_certificate(self) -> str | None:
        """Install the files; the reason why that failed, or None."""
        cert, key = self._files
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key, password="")  # refuses a key with a password
            pem = os.linesep.join((cert.read_text(), key.read_text()))
        except (OSError, ValueError) as error:
            return str(error).partition("\n")[0]
        for path in self._sockets():
            if (reason := _install_certificate(path, self._certificate_name, pem)) is not None:
                return reason
        return None


def _file_stats(files: Iterable[Path]) -> tuple[tuple[int, int, int], ...]:
    stats = []
    for path in files:
        try:
            stat = path.stat()
        except OSError:  # it is just being replaced
            stats.append((0, 0, 0))
        else:
            stats.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(stats)


def _install_certificate(path: Path, name: Path, pem: str) -> str | None:
    """HAProxy's objection, without parts of the key; None for none."""
    # An empty line would end the payload.
    lines = "\n".join(line for line in pem.splitlines() if line.strip())
    query_haproxy(path, f"set ssl cert {name} <<\n{lines}\n")
    answer = query_haproxy(path, f"commit ssl cert {name}")
    if _SUCCESS_TEXT in answer:
        return None
    query_haproxy(path, f"abort ssl cert {name}")
    return f"HAProxy: {answer.strip() or 'no answer'}"
