"""An HTTP server on a Unix socket that says what reached it, in a frontend's place."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path


class _Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._respond(b"")

    def do_POST(self) -> None:
        self._respond(self.rfile.read(int(self.headers.get("content-length", "0"))))

    def _respond(self, body: bytes) -> None:
        pause_s = float(self.headers.get("x-pause-s", "0"))
        request_fields = {
            "path": self.path,
            "bytes": len(body),
            "headers": {name.lower(): value for name, value in self.headers.items()},
        }
        text = json.dumps(request_fields).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text[:1])
        self.wfile.flush()
        time.sleep(pause_s)
        self.wfile.write(text[1:])

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def echo_backend(path: Path) -> Iterator[None]:
    with _Server(str(path), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
