"""A gate that is the front itself: a real HAProxy at a public port, and an echo behind it."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from baton.config.schema.security import TlsConfig
from baton.domain.errors import EngineStartFailed
from baton.serving.front.certificates import CertificateWatch
from baton.serving.front.data_path import find_haproxy
from baton.serving.front.gate_config import GateSettings, PublicListener, render_gate_config
from baton.serving.front.gate_maps import state_entries
from baton.serving.front.gate_process import GateProcess
from baton.serving.front.haproxy_hardening import certificate_path, gate_guard_fields
from baton.serving.front.public_port import DEPLOYMENT_VARIABLE, open_gate_socket, reserve_port
from tests.fakes.certificates import make_key_pair, serial_at
from tests.fakes.echo_backend import echo_backend
from tests.fakes.machine import address_of_this_machine

HAPROXY = find_haproxy(os.environ)
CHAT = "/v1/chat/completions"
DEPLOYMENT = "session_1/baton"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - to be reached

pytestmark = pytest.mark.skipif(HAPROXY is None, reason="no executable haproxy was found")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicGate:
    """A gate at a public port."""

    gate: GateProcess
    folder: Path
    port: int
    asked: int
    """The port at which Ray Serve asks for the replica."""

    def url(self, path: str, *, scheme: str = "http", host: str = "127.0.0.1") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def pids(self) -> set[int]:
        """Who listens at the public port, as a next gate sees it."""
        return {
            net_connection.pid
            for net_connection in psutil.net_connections(kind="tcp")
            if net_connection.status == psutil.CONN_LISTEN
            and net_connection.laddr[1:] == (self.port,)
            and net_connection.pid
        }


@asynccontextmanager
async def public_gate(
    folder: Path, tls: TlsConfig | None = None, *, port: int = 0, name: str = "one"
) -> AsyncIterator[PublicGate]:
    """A gate that lets everybody in, as an ingress starts it."""
    assert HAPROXY is not None
    own = folder / name
    own.mkdir(mode=0o700)
    guard = gate_guard_fields(own, HAPROXY, host=EVERYWHERE, tls=tls or TlsConfig())
    with (
        open_gate_socket(EVERYWHERE, port, DEPLOYMENT) as public,
        socket.create_server(("127.0.0.1", 0)) as asked,
        echo_backend(own / "http"),
    ):
        settings = GateSettings(
            bind=f"fd@{public.fileno()}",
            frontend_socket=own / "http",
            folder=own,
            routes=("chat", "models", "health"),
            max_body_bytes=300_000,
            public_listener=PublicListener(probe_bind=f"fd@{asked.fileno()}", guard=guard),
        )
        gate = GateProcess(HAPROXY, settings)
        await gate.set_state(state_entries(healthy=True, anonymous="h-nobody", keys=False))
        descriptors = [public.fileno(), asked.fileno()]
        await gate.start(listeners=descriptors, environment={DEPLOYMENT_VARIABLE: DEPLOYMENT})
        ports = [listening_socket.getsockname()[1] for listening_socket in (public, asked)]
        public.close()  # as the ingress does: the listener is the gate's alone
        try:
            yield PublicGate(gate=gate, folder=own, port=ports[0], asked=ports[1])
        finally:
            await gate.close()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20, trust_env=False) as made:
        yield made


async def test_the_configuration_holds_from_the_first_connection_on(
    folder: Path, client: httpx.AsyncClient
) -> None:
    async with public_gate(folder) as made:
        answer = await client.post(made.url(CHAT), content=b"{}")
        assert answer.json()["headers"]["x-request-id"].endswith("~h-nobody~")
        assert (await client.get(made.url("/health"))).status_code == 200


async def test_where_serve_asks_for_its_replica_nothing_else_is_to_be_had(
    folder: Path, client: httpx.AsyncClient
) -> None:
    async with public_gate(folder) as made:
        base = f"http://127.0.0.1:{made.asked}"
        assert (await client.get(f"{base}/-/healthz")).text == "success"
        for path in ("/health", "/v1/models", CHAT):
            assert (await client.post(f"{base}{path}", content=b"{}")).status_code == 404


async def test_gates_of_a_deployment_share_the_port_and_one_that_drains_gets_no_more(
    folder: Path,
) -> None:
    async with public_gate(folder) as old, public_gate(folder, port=old.port, name="two") as new:
        assert len(old.pids()) == 2
        slow = asyncio.create_task(_post(old, ("x-pause-s", "2")))
        held = [await _in_flight(old), await _in_flight(new)]
        while not any(held):
            held = [await _in_flight(old), await _in_flight(new)]
        drained, other = (old, new) if held[0] else (new, old)
        draining = asyncio.create_task(drained.gate.drain())
        while len(await _listeners(old)) == 2:
            pass
        for _ in range(20):  # each by a connection of its own
            assert (await _post(other)).status_code == 200
        assert not draining.done()
        assert (await slow).status_code == 200
        await asyncio.wait_for(draining, 20)


async def _post(made: PublicGate, *headers: tuple[str, str]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20, trust_env=False) as one:
        return await one.post(made.url(CHAT), content=b"{}", headers=list(headers))


async def _listeners(made: PublicGate) -> set[int]:
    await asyncio.sleep(0.01)
    return made.pids()


async def _in_flight(made: PublicGate) -> int:
    await asyncio.sleep(0.01)
    return await made.gate._in_flight_requests()


async def test_a_gate_is_known_to_the_next_one_of_its_deployment_and_to_no_other(
    folder: Path,
) -> None:
    async with public_gate(folder) as made:
        with open_gate_socket(EVERYWHERE, made.port, DEPLOYMENT):
            pass
        (pid,) = made.pids()
        with pytest.raises(EngineStartFailed, match=rf"haproxy \(pid {pid}\)"):
            open_gate_socket(EVERYWHERE, made.port, "session_2/baton")


async def test_the_process_that_started_the_deployment_may_hold_the_port(
    folder: Path, client: httpx.AsyncClient
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with reserve_port(EVERYWHERE, port):
        async with public_gate(folder, port=port) as made:
            for _ in range(5):
                assert (await client.get(made.url("/health"))).status_code == 200


# ---------------------------------------------------------------- the guard


async def test_clients_come_by_tls_and_not_in_clear(folder: Path) -> None:
    pair = make_key_pair(folder, "server")
    async with public_gate(folder, pair.tls()) as made:
        trusted = pair.client_context()
        async with httpx.AsyncClient(verify=trusted, trust_env=False) as client:
            url = made.url(CHAT, scheme="https")
            answer = await client.post(url, headers={"x-forwarded-proto": "http"})
            assert answer.json()["headers"]["x-forwarded-proto"] == "https"
            with pytest.raises(httpx.TransportError):
                await client.get(made.url("/health"))


async def test_clients_without_the_wanted_certificate_are_refused_but_for_health(
    folder: Path,
) -> None:
    pair, known, other = (make_key_pair(folder, name) for name in ("server", "client", "other"))
    async with public_gate(folder, pair.tls(client_ca_file=str(known.cert))) as made:
        url, health = (made.url(path, scheme="https") for path in (CHAT, "/health"))
        shown, unknown = pair.client_context(), pair.client_context()
        shown.load_cert_chain(known.cert, known.key)
        unknown.load_cert_chain(other.cert, other.key)
        assert await _status(url, pair.client_context()) == 403
        assert await _status(health, pair.client_context()) == 200
        assert await _status(url, shown) == 200
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            await _status(health, unknown)


async def _status(url: str, trusted: ssl.SSLContext) -> int:
    async with httpx.AsyncClient(verify=trusted, trust_env=False) as client:
        method = "POST" if url.endswith(CHAT) else "GET"
        return (await client.request(method, url, content=b"{}")).status_code


async def test_keys_from_other_machines_are_not_taken_in_clear(
    folder: Path, client: httpx.AsyncClient
) -> None:
    there = address_of_this_machine()
    async with public_gate(folder, TlsConfig(required=True)) as made:
        for key in ({"authorization": "Bearer sk-baton-x"}, {"x-api-key": "sk-baton-x"}):
            assert (await client.post(made.url(CHAT), headers=key)).status_code == 200
            refused = await client.post(made.url(CHAT, host=there), headers=key)
            assert refused.status_code == 403
            assert "https" in refused.json()["error"]["message"]
        assert (await client.post(made.url(CHAT, host=there))).status_code == 200


async def test_a_renewed_certificate_is_shown_without_a_restart(folder: Path) -> None:
    pair, renewed = make_key_pair(folder, "server"), make_key_pair(folder, "renewed")
    async with public_gate(folder, pair.tls()) as made:
        own = made.folder
        watch = CertificateWatch(pair.tls(), certificate_path(own), lambda: [own / "gate.sock"])
        before = await asyncio.to_thread(serial_at, made.port)
        renewed.cert.replace(pair.cert)
        renewed.key.replace(pair.key)
        assert await asyncio.to_thread(watch.poll)
        assert await asyncio.to_thread(serial_at, made.port) != before


def test_a_port_without_tls_has_no_certificate_options(folder: Path) -> None:
    text = render_gate_config(_settings(folder))
    assert "bind fd@5\n" in text
    assert "ssl" not in text


# ---------------------------------------------------------------- what a client may do


def _settings(folder: Path) -> GateSettings:
    guard = gate_guard_fields(folder, "haproxy", host=EVERYWHERE, tls=TlsConfig())
    return GateSettings(
        bind="fd@5",
        frontend_socket=folder / "http",
        folder=folder,
        routes=("chat", "health"),
        max_body_bytes=1000,
        public_listener=PublicListener(probe_bind="fd@6", guard=guard),
    )


async def test_a_rejected_request_is_answered_before_its_body_has_come(folder: Path) -> None:
    async with public_gate(folder) as made:
        await made.gate.set_state({})
        assert b" 401 " in await _first_line(made, within_s=5)


async def test_a_body_that_does_not_come_is_not_waited_for_any_longer_than_a_head(
    folder: Path,
) -> None:
    async with public_gate(folder) as made:
        assert b" 408 " in await _first_line(made, within_s=20)


async def _first_line(made: PublicGate, *, within_s: float) -> bytes:
    """Of the answer to a request of whose body half has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\nab".encode())
    try:
        return await asyncio.wait_for(reader.readline(), within_s)
    finally:
        writer.close()
