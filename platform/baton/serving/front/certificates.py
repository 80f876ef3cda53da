"""Follows the files of the front's certificate, and has HAProxy go on with new ones.

Theory of operation: certificates are renewed by programs that replace files, and a deployment
outlives several. One thread looks every few seconds whether a file has changed, and when it has and
certificate and key belong together, tells every HAProxy of this deployment by its admin socket.
Connections that are open stay as they are. What cannot be used is said once, and looked at again
when it changes: renewers replace two files one after the other. HAProxy that starts anew reads the
files itself.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from baton.config.schema.security import TlsConfig
from baton.serving.cluster.readiness import ask_haproxy
from baton.telemetry.logs import log_event

_LOGGER = logging.getLogger(__name__)
_POLL_S = 5.0
_END_S = 5.0
_DONE = "Success"


class CertificateWatch:
    """See the module; without a certificate it does nothing."""

    def __init__(
        self,
        tls: TlsConfig,
        name: Path,
        sockets: Callable[[], Iterable[Path]],
    ) -> None:
        """`name` is how HAProxy calls the certificate; it is told by these sockets, at any time."""
        self._files = tuple(Path(name) for name in (tls.cert_file, tls.key_file) if name)
        self._name = name
        self._sockets = sockets
        self._seen = self._state()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="baton-tls", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        if self._files:
            self._thread.start()

    def stop(self) -> None:
        """Look no more. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def look(self) -> bool:
        """Whether the files have changed since the last look; HAProxy goes by them then."""
        state = self._state()
        if state == self._seen:
            return False
        self._seen = state
        why = self._renew()
        fields: dict[str, object] = {"cert_file": str(self._files[0])}
        if why is None:
            log_event(_LOGGER, logging.INFO, "certificate_renewed", fields)
        else:
            log_event(_LOGGER, logging.WARNING, "certificate_not_renewed", fields | {"why": why})
        return True

    def _follow(self) -> None:
        while not self._ended.wait(_POLL_S):
            try:
                self.look()
            except Exception:
                # A certificate that is followed no more expires one day, and then nobody comes in.
                _LOGGER.exception("the certificate's files could not be looked at")

    def _state(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for path in self._files:
            try:
                stat = path.stat()
            except OSError:  # it is just being replaced
                found.append((0, 0, 0))
            else:
                found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return tuple(found)

    def _renew(self) -> str | None:
        """Have HAProxy go by the files as they are; why that cannot be, or None."""
        cert, key = self._files
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key, password="")  # one with a password is refused
            pem = os.linesep.join((cert.read_text(), key.read_text()))
        except (OSError, ValueError) as error:
            return str(error).partition("\n")[0]
        for path in self._sockets():
            if (why := _told(path, self._name, pem)) is not None:
                return why
        return None


def _told(path: Path, name: Path, pem: str) -> str | None:
    """What HAProxy objects to; nothing of the key is in it."""
    # An empty line would end what is sent.
    lines = "\n".join(line for line in pem.splitlines() if line.strip())
    ask_haproxy(path, f"set ssl cert {name} <<\n{lines}\n")
    answer = ask_haproxy(path, f"commit ssl cert {name}")
    if _DONE in answer:
        return None
    ask_haproxy(path, f"abort ssl cert {name}")
    return f"HAProxy: {answer.strip() or 'no answer'}"
