"""Where Ray Serve's own gRPC server of a replica listens: at the node's address, and no other.

Serve starts one in every replica, on all addresses, and unpickles what comes there from whoever has
Ray's token. Serve has no setting for its address. The row `GRPC_PORT` of `couplings` says how Serve
binds it.
"""

from __future__ import annotations

from typing import Protocol

from baton.domain.names.addresses import format_address
from baton.serving.ray import couplings

_WILDCARD_ADDRESS = "[::]:0"


class _AddPort(Protocol):
    def __call__(self, server: object, address: str) -> int: ...


def bind_grpc_to_node(host: str) -> None:
    """Have the server listen at `host` that Serve starts here once this replica is made.

    Idempotent.
    """
    from ray._common.tls_utils import add_port_to_grpc_server
    from ray.serve._private import replica

    bind: _AddPort = add_port_to_grpc_server
    node_bind = format_address(host, 0)

    def add_port(server: object, address: str) -> int:
        return bind(server, node_bind if address == _WILDCARD_ADDRESS else address)

    couplings.GRPC_PORT.install(replica, add_port_to_grpc_server=add_port)
