"""Binds the gRPC server of a replica to the node's address only.

Serve starts this server in every replica, on all addresses, and unpickles messages of all clients
with Ray's token. Serve has no setting for its address; the row `GRPC_PORT` of `couplings` names the
private call.
"""

from __future__ import annotations

from typing import Protocol

from baton.domain.names.addresses import format_address
from baton.serving.ray import couplings

_WILDCARD_ADDRESS = "[::]:0"


class _AddPort(Protocol):
    def __call__(self, server: object, address: str) -> int: ...


def bind_grpc_to_node(host: str) -> None:
    """Have the gRPC server of this replica listen at `host`, once Serve starts it. Idempotent."""
    from ray._common.tls_utils import add_port_to_grpc_server
    from ray.serve._private import replica

    bind: _AddPort = add_port_to_grpc_server
    node_bind = format_address(host, 0)

    def add_port(server: object, address: str) -> int:
        return bind(server, node_bind if address == _WILDCARD_ADDRESS else address)

    couplings.GRPC_PORT.install(replica, add_port_to_grpc_server=add_port)
