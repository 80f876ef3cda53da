"""Serve's own gRPC server of a replica, which this version binds to every address."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from baton.serving.ray.grpc_port import bind_grpc_to_node


@pytest.fixture
def serves() -> Iterator[ModuleType]:
    replica = pytest.importorskip("ray.serve._private.replica")
    before = replica.add_port_to_grpc_server
    yield replica
    replica.add_port_to_grpc_server = before


class Server:
    def __init__(self) -> None:
        self.bound: list[str] = []

    def add_insecure_port(self, address: str) -> int:
        self.bound.append(address)
        return 1


@pytest.mark.parametrize(
    ("host", "wanted"), [("127.0.0.1", "127.0.0.1:0"), ("fd00::7", "[fd00::7]:0")]
)
def test_it_listens_at_the_nodes_address_alone(serves: ModuleType, host: str, wanted: str) -> None:
    server = Server()
    bind_grpc_to_node(host)
    bind_grpc_to_node(host)
    serves.add_port_to_grpc_server(server, "[::]:0")
    serves.add_port_to_grpc_server(server, "10.0.0.7:9000")
    assert server.bound == [wanted, "10.0.0.7:9000"]


def test_serve_still_binds_it_in_the_way_that_is_looked_for(serves: ModuleType) -> None:
    assert serves.__file__ is not None
    with open(serves.__file__) as source:  # noqa: PTH123 - a module's own
        assert source.read().count('add_port_to_grpc_server(self._server, "[::]:0")') == 1
