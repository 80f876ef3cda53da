"""The public port that gates share with each other, and with nobody else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.domain.errors import ClusterFailed, EngineStartFailed
from baton.runtime.process.sockets import resolve_bind_address
from baton.serving.front.data_path import port_is_free
from baton.serving.front.public_port import DEPLOYMENT_VARIABLE, open_gate_socket, reserve_port

HOST = "127.0.0.1"
OURS = "session_1/baton"
LISTEN = """
import socket, sys
made = socket.socket()
made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
made.bind((sys.argv[1], int(sys.argv[2])))
made.listen()
print("listens", flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="gates share ports on Linux"
)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        found: int = probe.getsockname()[1]
        return found


@contextmanager
def listening(host: str, port: int, *, mark: str | None = None) -> Iterator[int]:
    """Another process that listens and lets others share; its id."""
    marked = {} if mark is None else {DEPLOYMENT_VARIABLE: mark}
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, host, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **marked},
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"listens\n"
        yield other.pid


def test_a_held_port_cannot_be_had_alone(port: int) -> None:
    with reserve_port(HOST, port):
        assert not port_is_free(HOST, port)
        with pytest.raises(ClusterFailed, match=f"{HOST}:{port}: the port is in use"):
            reserve_port(HOST, port)
    assert port_is_free(HOST, port)


def test_a_used_port_is_not_held_though_it_could_be_shared(port: int) -> None:
    with (
        listening(HOST, port),
        pytest.raises(ClusterFailed, match=f"{HOST}:{port}: the port is in use"),
    ):
        reserve_port(HOST, port)


def test_gates_share_a_held_port_and_its_holder_gets_no_client(port: int) -> None:
    with (
        reserve_port(HOST, port),
        open_gate_socket(HOST, port, OURS) as one,
        open_gate_socket(HOST, port, OURS) as other,
    ):
        for gate in (one, other):
            gate.settimeout(0.01)
            gate.listen()
        for _ in range(20):
            with socket.create_connection((HOST, port), 5):
                pass
        assert accepted(one) + accepted(other) == 20


def accepted(gate: socket.socket) -> int:
    count = 0
    while True:
        try:
            gate.accept()[0].close()
        except TimeoutError:
            return count
        count += 1


def test_a_gate_shares_with_gates_of_its_deployment(port: int) -> None:
    with listening(HOST, port, mark=OURS), open_gate_socket(HOST, port, OURS) as gate:
        assert gate.getsockname() == (HOST, port)


@pytest.mark.parametrize("mark", [None, "session_2/baton"])
def test_a_gate_shares_with_no_other_program_and_names_itself(port: int, mark: str | None) -> None:
    with (
        listening(HOST, port, mark=mark) as other,
        pytest.raises(EngineStartFailed, match=rf"share {HOST}:{port} with .* \(pid {other}\)"),
    ):
        open_gate_socket(HOST, port, OURS)


def test_a_listener_at_another_address_takes_no_clients(port: int) -> None:
    with listening("127.0.0.2", port), open_gate_socket(HOST, port, OURS):
        pass
    with (
        listening("127.0.0.2", port),
        pytest.raises(EngineStartFailed, match="share"),
    ):
        open_gate_socket("0.0.0.0", port, OURS)  # noqa: S104 - what is refused


def test_a_port_that_is_had_alone_is_said_to_be_in_use(port: int) -> None:
    with (
        socket.create_server((HOST, port)),
        pytest.raises(EngineStartFailed, match=f"{HOST}:{port}: the port is in use"),
    ):
        open_gate_socket(HOST, port, OURS)


def test_an_address_of_another_machine_is_said_to_be_one(port: int) -> None:
    with pytest.raises(EngineStartFailed, match=r"192\.0\.2\.1") as error:
        open_gate_socket("192.0.2.1", port, OURS)
    assert "set server.host to an address of this machine" in str(error.value)


def test_a_name_is_looked_up_and_its_older_address_taken(port: int) -> None:
    assert resolve_bind_address("localhost", port) == (socket.AF_INET, (HOST, port))


@pytest.mark.parametrize("host", ["::1", "::"])
def test_addresses_of_the_newer_protocol_can_be_held_and_shared(port: int, host: str) -> None:
    if not socket.has_ipv6 or not port_is_free("::1", port):
        pytest.skip("this machine has no IPv6: enable it on the loopback interface")
    with reserve_port(host, port), open_gate_socket(host, port, OURS) as gate:
        gate.listen()
        with socket.create_connection(("::1", port), 5):
            pass
        if host == "::":
            with socket.create_connection((HOST, port), 5):
                pass
