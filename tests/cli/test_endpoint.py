"""How `bench`, `replay` and `chat` reach an endpoint, and what they say where they cannot."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.bench.client.trust import connection_error
from baton.cli.backend import Backend
from baton.cli.main import build_app
from tests.fakes.certificates import KeyPair, make_key_pair
from tests.fakes.completion_server import CompletionServer, stream_all_tokens
from tests.fakes.free_ports import free_port

LOAD = ("--requests", "3", "--rate", "300", "--warm-up", "0", "--output-tokens", "2", "-o", "json")
VERBS: Mapping[str, tuple[str, ...]] = {
    "bench": ("bench", *LOAD),
    "replay": ("replay", "--workload", "conv", "--rate", "50", "--limit", "2", "-o", "json"),
    "chat": ("chat", "hello", "--max-tokens", "2"),
}


class Deployment:
    """One that runs at a URL."""

    def __init__(self, **status: str) -> None:
        self._status = status

    def status(self, *, address: str | None) -> Mapping[str, object]:
        assert address is None
        return self._status


def run(verb: str, *options: str, deployment: Deployment | None = None) -> Result:
    """The verb, with a URL among its options or against a deployment."""
    backend = Backend(commands=lambda: deployment, environ={})  # type: ignore[arg-type,return-value]
    return CliRunner().invoke(build_app(), [*VERBS[verb], *options], obj=backend)


def at(verb: str, url: str) -> tuple[str, ...]:
    """The option that names the endpoint."""
    return (url,) if verb == "bench" else ("--url", url)


def requests_served(result: Result, server: CompletionServer) -> bool:
    """Whether the load went through, however busy this machine is."""
    return bool(server.requests) and "no request succeeded" not in result.stderr


@contextmanager
def encrypted(pair: KeyPair) -> Iterator[CompletionServer]:
    server = CompletionServer(stream_all_tokens, tls=pair.server_context())
    with server.in_thread():
        yield server


@contextmanager
def answers_anything(answer: bytes) -> Iterator[int]:
    """A port of a server that answers the first bytes of each connection so, and closes it."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join(10)


@pytest.mark.parametrize("verb", VERBS)
def test_without_a_url_the_running_deployment_is_asked_by_its_own_certificate(
    verb: str, tmp_path: Path
) -> None:
    # A deployment's certificate is for its public name, not for this machine's loopback.
    pair = make_key_pair(tmp_path, "public", address="192.0.2.7")
    with encrypted(pair) as server:
        deployment = Deployment(endpoint=server.url, certificate=str(pair.cert))
        result = run(verb, deployment=deployment)
        assert requests_served(result, server), result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_another_server_in_the_deployments_place_is_not_asked(verb: str, tmp_path: Path) -> None:
    own, other = (make_key_pair(tmp_path, name) for name in ("own", "other"))
    with encrypted(other) as server:
        deployment = Deployment(endpoint=server.url, certificate=str(own.cert))
        result = run(verb, deployment=deployment)
    assert (result.exit_code, server.requests) == (3, [])
    assert "the certificate is of an unknown authority" in result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_authorities_are_named_or_the_check_is_left_out(verb: str, tmp_path: Path) -> None:
    pair = make_key_pair(tmp_path, "own")
    with encrypted(pair) as server:
        refused = run(verb, *at(verb, server.url))
        assert refused.exit_code == 3
        assert "TLS: the certificate is of an unknown authority" in refused.stderr
        assert "next: name the authority's certificates with --ca-file FILE" in refused.stderr
        assert not server.requests
        for options in (("--ca-file", str(pair.cert)), ("--insecure",)):
            server.requests.clear()
            result = run(verb, *at(verb, server.url), *options)
            assert requests_served(result, server), result.stderr


@pytest.mark.parametrize(
    ("valid_for", "address", "why"),
    [
        (timedelta(hours=-1), "127.0.0.1", "TLS: the certificate has expired"),
        (timedelta(hours=1), "192.0.2.7", "TLS: the certificate is for another name"),
    ],
)
@pytest.mark.parametrize("verb", ["bench", "chat"])
def test_a_certificate_error_names_its_cause(
    verb: str, valid_for: timedelta, address: str, why: str, tmp_path: Path
) -> None:
    pair = make_key_pair(tmp_path, "own", address=address, valid_for=valid_for)
    with encrypted(pair) as server:
        result = run(verb, *at(verb, server.url), "--ca-file", str(pair.cert))
    assert result.exit_code == 3
    assert why in result.stderr


@pytest.mark.parametrize("verb", ["bench", "chat"])
def test_an_endpoint_without_tls_is_said_to_have_none(verb: str) -> None:
    with answers_anything(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        result = run(verb, *at(verb, f"https://127.0.0.1:{port}"))
    assert result.exit_code == 3
    assert "does not use TLS" in result.stderr
    assert "next: write http://" in result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_a_refused_connection_is_called_one(verb: str) -> None:
    result = run(verb, *at(verb, f"http://127.0.0.1:{free_port()}"))
    assert result.exit_code == 3
    assert "connection refused: nothing listens there" in result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_a_missing_key_and_a_wrong_one_have_different_remedies(verb: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-1")
    refusal = json.dumps({"error": {"message": "no such key"}})
    server = CompletionServer(models=refusal, models_status="401 Unauthorized")
    with server.in_thread():
        missing = run(verb, *at(verb, server.url))
        wrong = run(verb, *at(verb, server.url), "--key-file", str(tmp_path / "key"))
    assert missing.exit_code == wrong.exit_code == 1
    assert "status 401: no such key" in missing.stderr
    assert "next: give the API key: --key-file FILE" in missing.stderr
    assert "next: give another API key" in wrong.stderr


@pytest.mark.parametrize("verb", ["bench", "replay"])
def test_a_model_that_is_not_served_is_answered_with_those_that_are(verb: str) -> None:
    with CompletionServer().in_thread() as server:
        result = run(verb, *at(verb, server.url), "--model", "huge")
    assert result.exit_code == 1
    assert "--model: got 'huge', which is not served; served: tiny" in result.stderr


def test_a_key_file_that_is_none_is_named(tmp_path: Path) -> None:
    result = run("bench", "http://127.0.0.1:1", "--key-file", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "--key-file: " in result.stderr


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        (TimeoutError(), "no connection within 3 s"),
        (socket.gaierror(-2, "Name or service not known"), "unknown host name"),
        (OSError("Multiple exceptions: [Errno 111] a, [Errno 111] b"), "connection refused"),
        (OSError(113, "No route to host"), "No route to host"),
    ],
)
def test_the_cause_is_found_below_what_a_library_makes_of_it(cause: OSError, why: str) -> None:
    error = RuntimeError("all connection attempts failed")
    error.__cause__ = cause
    assert why in connection_error(error, "http://x", timeout_s=3.0).reason
