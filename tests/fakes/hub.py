"""A hub of models on this machine, as huggingface_hub and vLLM ask one, and as unkind as one is."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT_SHA = "a" * 40
"""The only commit."""
REPOSITORY = "org/small"
TOKEN = "hf_of_somebody_who_may"  # noqa: S105 - of nobody
_CHUNK_BYTES = 64 * 1024


@dataclass(kw_only=True)
class HubBehavior:
    """How the hub treats those who ask; to be changed while it runs."""

    gated: bool = False
    """Whether files are for those alone who show the token."""
    private: bool = False
    """Whether nobody else sees that there is such a model."""
    truncated_once: frozenset[str] = frozenset()
    """Files whose first download ends in the middle."""
    stalled: Mapping[str, threading.Event] = field(default_factory=dict)
    """Files that stop in the middle until something happens."""
    status: int | None = None
    """What everything is answered with."""


class Hub:
    """One repository, and who asked for what of it."""

    def __init__(self, files: Mapping[str, bytes], port: int) -> None:
        self.files = dict(files)
        self.url = f"http://127.0.0.1:{port}"
        self.behavior = HubBehavior()
        self.downloads: Counter[str] = Counter()
        """How often the content of each file was asked for."""
        self.tokens: set[str | None] = set()
        """What was shown as a token."""
        self.has_stalled = threading.Event()
        """A file has stopped in the middle."""

    def entry(self, path: str) -> dict[str, object]:
        content = self.files[path]
        fields: dict[str, object] = {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": hashlib.sha1(content, usedforsecurity=False).hexdigest(),
        }
        if path.endswith(".safetensors"):
            digest = hashlib.sha256(content).hexdigest()
            fields["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
        return fields


def folder_files(folder: Path) -> dict[str, bytes]:
    """What a hub has of a model in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@contextmanager
def serve_hub(files: Mapping[str, bytes]) -> Iterator[Hub]:
    """A hub that has these files."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(files, server.server_address[1])
    server.hub = hub  # type: ignore[attr-defined]  # for the handler
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        for event in hub.behavior.stalled.values():
            event.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        hub = self.server.hub  # type: ignore[attr-defined]  # as it was put there
        assert isinstance(hub, Hub)
        return hub

    def log_message(self, *_arguments: object) -> None:
        return

    def do_GET(self) -> None:
        try:
            self._answer()
        except OSError:  # who asked has gone
            self.close_connection = True

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self._reject_if_forbidden(unquote(urlsplit(self.path).path)):
            return
        paths = body.get("paths", [])
        self._json([self.hub.entry(path) for path in paths if path in self.hub.files])

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self._reject_if_forbidden(path):
            return
        tree, resolved = f"/api/models/{REPOSITORY}/tree/", f"/{REPOSITORY}/resolve/"
        if path.startswith(resolved):
            revision, _, name = path.removeprefix(resolved).partition("/")
            if revision not in {"main", COMMIT_SHA}:
                self._reject(404, "RevisionNotFound")
            elif name not in self.hub.files:
                self._reject(404, "EntryNotFound")
            else:
                self._file(name)
        elif path.startswith(tree):
            self._json([self.hub.entry(name) for name in self.hub.files])
        elif path in {
            f"/api/models/{REPOSITORY}{tail}"
            for tail in ("", "/revision/main", f"/revision/{COMMIT_SHA}")
        }:
            siblings = [{"rfilename": name} for name in self.hub.files]
            self._json({"id": REPOSITORY, "sha": COMMIT_SHA, "siblings": siblings, "tags": []})
        elif path.startswith(f"/api/models/{REPOSITORY}/revision/"):
            self._reject(404, "RevisionNotFound")
        else:
            self._reject(404, "RepoNotFound")

    def _reject_if_forbidden(self, path: str) -> bool:
        authorization = self.headers.get("Authorization")
        token = None if authorization is None else authorization.removeprefix("Bearer ")
        self.hub.tokens.add(token)
        behavior = self.hub.behavior
        if behavior.status is not None:
            self._reject(behavior.status, "")
        elif behavior.private and token != TOKEN:
            self._reject(401, "RepoNotFound")
        elif behavior.gated and token != TOKEN and "/resolve/" in path:
            self._reject(401 if token is None else 403, "GatedRepo")
        else:
            return False
        return True

    def _reject(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", "said by the hub")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, name: str) -> None:
        content, entry = self.hub.files[name], self.hub.entry(name)
        offset = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        lfs = entry.get("lfs")
        etag = lfs["oid"] if isinstance(lfs, dict) else entry["oid"]
        self.send_response(206 if offset else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT_SHA)
        self.send_header("Accept-Ranges", "bytes")
        if offset:
            self.send_header("Content-Range", f"bytes {offset}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - offset))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.downloads[name] += 1
        self._send_body(name, content[offset:])

    def _send_body(self, name: str, content: bytes) -> None:
        middle = len(content) // 2
        self.wfile.write(content[:middle])
        self.wfile.flush()
        behavior = self.hub.behavior
        if name in behavior.truncated_once and self.hub.downloads[name] == 1:
            self.close_connection = True
            self.connection.close()
            return
        if (event := behavior.stalled.get(name)) is not None:
            self.hub.has_stalled.set()
            event.wait()
        for offset in range(middle, len(content), _CHUNK_BYTES):
            self.wfile.write(content[offset : offset + _CHUNK_BYTES])
