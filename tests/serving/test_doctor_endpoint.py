"""`baton doctor` as a client of an endpoint: handshake, one token, and the cause of what fails."""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from baton.config.load import load_text
from baton.engine.vllm.gate.errors import Dialect, Problem
from baton.runtime.keys.api_keys import mint
from baton.serving import doctor_facts
from baton.serving.checks import endpoint
from baton.serving.checks.endpoint import (
    Client,
    check_request,
    check_tls,
    probe_request,
    probe_tls,
)
from baton.serving.checks.result import Check, CheckStatus, UnknownFact
from baton.serving.cluster.cluster_state import ClusterState
from baton.serving.doctor_facts import DeploymentSnapshot, gather_deployment
from baton.serving.front.certificates import CertificateExpiry
from baton.serving.front.data_path import DataPath
from baton.serving.ingress.auth import IngressAuth
from baton.serving.operator.control_socket import Answers, ControlSocket
from baton.serving.store.config_store import unix_time_s
from baton.telemetry.metrics.ingress import AccessFacts
from tests.fakes.certificates import KeyPair, make_key_pair
from tests.serving.configs import SMALL

KEY = {"Authorization": "Bearer bt_key"}
OK = Problem(status=200, message="")


def serve(problem: Problem) -> type[BaseHTTPRequestHandler]:
    """An endpoint that answers every request with this problem of the gate, or one token."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._answer({"choices": [{"text": "a"}]})

        def _answer(self, body: object) -> None:
            data = json.dumps(body).encode() if problem is OK else problem.body(Dialect.OPENAI)
            self.send_response(problem.status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_arguments: object) -> None:
            pass

    return Handler


@contextmanager
def listening(problem: Problem = OK, pair: KeyPair | None = None) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), serve(problem)) as server:
        if pair is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pair.cert, pair.key)
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        scheme = "http" if pair is None else "https"
        yield f"{scheme}://127.0.0.1:{server.server_port}"
        server.shutdown()


def tls_check(url: str, client: Client) -> Check:
    return check_tls(probe_tls(url, client), client, now_s=unix_time_s())


def request_check(url: str, client: Client) -> Check:
    return check_request(probe_request(url, probe_tls(url, client), client), client)


# ------------------------------------------------------------------------------------------- TLS


def pair_for(folder: Path, days: float) -> KeyPair:
    return make_key_pair(folder, "server", valid_for=datetime.timedelta(days=days))


@pytest.mark.parametrize(
    ("days", "verdict", "said"),
    [
        (-3, CheckStatus.FAIL, "the certificate expired 3 d ago"),
        (1.5, CheckStatus.FAIL, "the certificate expires in 36 h"),
        (10, CheckStatus.WARN, "the certificate expires in 10 d"),
        (90, CheckStatus.PASS, "the certificate expires in 90 d; for 127.0.0.1"),
    ],
)
def test_a_certificate_is_read_in_a_real_handshake(
    tmp_path: Path, days: float, verdict: CheckStatus, said: str
) -> None:
    with listening(pair=pair_for(tmp_path, days)) as url:
        found = tls_check(url, Client())
    assert (found.status, found.detail) == (verdict, said)


def test_the_public_url_must_be_a_name_of_the_certificate(tmp_path: Path) -> None:
    pair = pair_for(tmp_path, 90)
    with listening(pair=pair) as url:
        public = url.replace("127.0.0.1", "localhost")
        found = tls_check(public, Client(url=public, ca_file=pair.cert))
        assert (found.status, found.detail) == (
            CheckStatus.FAIL,
            "the certificate is for 127.0.0.1, not for localhost",
        )
        assert tls_check(url, Client(url=url, ca_file=pair.cert)).status is CheckStatus.PASS


def test_the_public_url_needs_an_authority_that_this_machine_knows(tmp_path: Path) -> None:
    with listening(pair=pair_for(tmp_path, 90)) as url:
        found = tls_check(url, Client(url=url))
        assert found.status is CheckStatus.FAIL
        assert "self-signed" in found.detail
        assert "--ca-file" in found.fix


def test_a_refused_connection_and_plain_http_are_different_errors() -> None:
    with listening() as url:
        plain = tls_check(url.replace("http:", "https:"), Client())
    assert plain.detail.endswith("it does not use TLS: it answers in plain HTTP")
    refused = tls_check("https://127.0.0.1:1", Client())
    assert refused.detail.endswith("the connection is refused: nothing listens there")
    assert tls_check("http://127.0.0.1:1", Client()).status is CheckStatus.SKIP


# --------------------------------------------------------------------------------------- request


def test_a_token_is_asked_for_also_behind_a_certificate_that_has_expired(tmp_path: Path) -> None:
    with listening(pair=pair_for(tmp_path, -3)) as url:
        found = request_check(url, Client(headers=KEY))
    assert found.status is CheckStatus.PASS
    assert found.detail.startswith("a token came after ")


def test_without_a_key_it_says_that_it_did_not_ask_and_how_it_could() -> None:
    with listening(Problem(status=401, message="expected an API key")) as url:
        found = request_check(url, Client())
    assert found.status is CheckStatus.SKIP
    assert "--key-file" in found.detail
    assert "OPENAI_API_KEY" in found.detail


@pytest.mark.parametrize(
    ("status", "message"), [(401, "this API key is expired"), (503, "no replica can decode now")]
)
def test_the_endpoints_own_reason_is_told(status: int, message: str) -> None:
    with listening(Problem(status=status, message=message)) as url:
        found = request_check(url, Client(headers=KEY))
    assert (found.status, found.detail) == (CheckStatus.FAIL, f"status {status}: {message}")
    assert found.fix


def test_an_endpoint_that_refuses_connections_is_a_failure() -> None:
    found = request_check("http://127.0.0.1:1", Client())
    assert found.status is CheckStatus.FAIL
    assert found.detail.endswith("the connection is refused: nothing listens there")


def test_no_key_is_sent_to_an_endpoint_elsewhere_that_is_not_trusted(tmp_path: Path) -> None:
    with listening(pair=pair_for(tmp_path, 90)) as url:
        found = request_check(url, Client(url=url, headers=KEY))
    assert (found.status, found.detail) == (
        CheckStatus.SKIP,
        "no key is sent to an endpoint that this machine does not trust",
    )


# -------------------------------------------------------------------------------------- deadlines


@contextmanager
def silent() -> Iterator[str]:
    """A listener that accepts connections, and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_an_endpoint_without_an_answer_costs_no_more_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "_CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(endpoint, "REQUEST_TIMEOUT_S", 0.2)
    with silent() as address:
        assert tls_check(f"https://{address}", Client()).detail.endswith("no answer in time")
        assert request_check(f"http://{address}", Client()).detail.endswith("no answer in time")


def test_a_deployment_that_hangs_everywhere_is_told_within_the_deadlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner, its endpoint and Ray's store accept connections, and answer nothing."""
    deadlines = ("_QUERY_TIMEOUT_S", "_CLUSTER_TIMEOUT_S", "_HTTP_TIMEOUT_S", "_REQUEST_TIMEOUT_S")
    for name in (*deadlines, "_FRONT_TIMEOUT_S"):
        monkeypatch.setattr(doctor_facts, name, 1.0)
    hangs = threading.Event()

    def query(*_question: object) -> Answers:
        hangs.wait(60)
        return Answers(values=[])

    control = ControlSocket(tmp_path, query=query, load_note=lambda _name: None)
    with silent() as store, silent() as front:
        state = ClusterState(
            name="baton-x",
            pid=1,
            pid_started_at_s=0.0,
            address=store,
            namespace="baton",
            http_url=f"http://{front}",
            data_path=DataPath.SERVE_HAPROXY,
            run_dir=str(tmp_path),
            session_name="session",
            token_file=str(tmp_path / "token"),
        )
        state = replace(state, pid_started_ticks=doctor_process_ticks())
        began_at_s = time.monotonic()
        snapshot = gather_deployment(state, store, client=Client())
        took_s = time.monotonic() - began_at_s
    hangs.set()
    control.close()
    assert isinstance(snapshot, DeploymentSnapshot)
    assert isinstance(snapshot.status, UnknownFact)
    assert isinstance(snapshot.versions_by_node, UnknownFact)
    assert isinstance(snapshot.front.request, UnknownFact)
    assert took_s < 30


def doctor_process_ticks() -> int | None:
    from baton.serving.cluster.cluster_state import process_start_ticks

    return process_start_ticks(1)


def test_an_ingress_reports_expiries_and_rejected_callers(tmp_path: Path) -> None:
    pair, keys = pair_for(tmp_path, 5), tmp_path / "acme.keys"
    now = datetime.datetime.now(datetime.UTC)
    key, token = mint("acme", now=now, expires_at=now + datetime.timedelta(days=1))
    keys.write_text(key.format_line() + "\n")
    tls = f"{{cert_file: {pair.cert}, key_file: {pair.key}}}"
    config = load_text(
        f"{SMALL}\ntenants: {{acme: {{keys_file: {keys}}}}}\nsecurity: {{tls: {tls}}}\n"
    )

    async def ask() -> AccessFacts:
        auth = IngressAuth(config)
        await auth.start()
        try:
            access = auth.access(config)
            access.identify_caller([(b"x-api-key", token.encode())])
            access.identify_caller([(b"x-api-key", b"bt_other_1")])
            return auth.facts()
        finally:
            await auth.close()

    facts = asyncio.run(ask())
    day_s = 86_400.0
    assert facts.tls_expires_s is not None
    assert 4 * day_s < facts.tls_expires_s <= 5 * day_s
    assert facts.keys["acme"].valid == 1
    assert facts.unauthorized == {"unknown": 1}


def test_the_expiry_of_a_certificate_follows_its_files(tmp_path: Path) -> None:
    expiry, pair = CertificateExpiry(), pair_for(tmp_path, 5)
    expiry.poll(pair.tls())
    first_s = expiry.expires_at_s
    pair_for(tmp_path, 90)
    expiry.poll(pair.tls())
    assert first_s is not None
    assert expiry.expires_at_s is not None
    assert expiry.expires_at_s > first_s
    pair.key.unlink()
    expiry.poll(pair.tls())
    assert expiry.expires_at_s is None
