"""Installs renewed certificates in running HAProxies.

Theory of operation: one thread polls the files. When certificate and key have changed and match, it
installs them through the admin socket of every HAProxy of this deployment; open connections stay.
It reports unusable files once, and tries again after the next change, since renewers replace two
files one after the other. A HAProxy that starts reads the files itself.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from baton.config.schema.security import TlsConfig
from baton.serving.front.haproxy_admin import query_haproxy
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_POLL_S = 5.0
_JOIN_TIMEOUT_S = 5.0
_SUCCESS_TEXT = "Success"


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
        self._last_stats = self._file_stats()
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
        stats = self._file_stats()
        if stats == self._last_stats:
            return False
        self._last_stats = stats
        why = self._reload_certificate()
        fields: dict[str, object] = {"cert_file": str(self._files[0])}
        if why is None:
            log_event(_LOGGER, logging.INFO, "certificate_renewed", fields)
        else:
            log_event(_LOGGER, logging.WARNING, "certificate_not_renewed", fields | {"reason": why})
        return True

    def _poll_loop(self) -> None:
        while not self._stop_event.wait(_POLL_S):
            try:
                self.poll()
            except Exception:
                # Without this thread the certificate expires one day, and clients are refused.
                _LOGGER.exception("the certificate's files could not be looked at")

    def _file_stats(self) -> tuple[tuple[int, int, int], ...]:
        stats = []
        for path in self._files:
            try:
                stat = path.stat()
            except OSError:  # it is just being replaced
                stats.append((0, 0, 0))
            else:
                stats.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return tuple(stats)

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
            if (why := _install_certificate(path, self._certificate_name, pem)) is not None:
                return why
        return None


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
