"""The public port of a deployment whose gates listen there, side by side.

Theory of operation: HAProxies that listen at one port with SO_REUSEPORT each get a share of its new
connections from the kernel. So all ingresses of a node can listen there, and a replacement beside
the old one. Any other process of the same user with SO_REUSEPORT would get a share, too. Therefore
the owner of the deployment holds the port with a bound socket that never listens and so gets no
connection. A process that wants the port alone then fails to bind, as does the start of another
deployment. Against other processes, and on existing clusters where no socket holds the port, each
gate checks the listeners before it listens.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

import psutil

from baton.domain.errors import ClusterFailed, EngineStartFailed
from baton.domain.names.addresses import format_address, is_any_address, same_host
from baton.runtime.process.sockets import create_bound_socket
from baton.serving.front.data_path import port_is_free

DEPLOYMENT_VARIABLE = "BATON_GATE_OF"
"""The variable with which gates recognize gates of their deployment."""
_PORT_IN_USE_REMEDY = "stop the program that listens there, or set server.port"


def reserve_port(host: str, port: int) -> socket.socket:
    """Keep the port for gates of this user until the socket is closed.

    Raises:
        ClusterFailed: it is in use.
    """
    address = format_address(host, port)
    if not port_is_free(host, port):
        raise ClusterFailed(f"cannot listen on {address}: the port is in use", _PORT_IN_USE_REMEDY)
    try:
        # With SO_REUSEADDR, other processes that set it could bind while no gate listens.
        return create_bound_socket(host, port, reuse_address=False, reuse_port=True)
    except OSError as error:
        raise ClusterFailed(
            f"cannot hold {address}: {error.strerror}; connections of a server that ended"
            " just now may be left, for a minute",
            f"try again then; or {_PORT_IN_USE_REMEDY}",
        ) from error


def open_gate_socket(host: str, port: int, deployment: str) -> socket.socket:
    """A socket at the public port for one more gate of a deployment.

    Blocks while it reads all connections of this machine.

    Raises:
        EngineStartFailed: another program listens there, or the address is not of this machine.
    """
    address = format_address(host, port)
    try:
        bound = create_bound_socket(host, port, reuse_port=True)
    except OSError as error:
        is_in_use = error.errno == errno.EADDRINUSE
        reason = "the port is in use" if is_in_use else (error.strerror or str(error))
        raise EngineStartFailed(
            f"the gate cannot listen on {address}: {reason}",
            _PORT_IN_USE_REMEDY if is_in_use else "set server.host to an address of this machine",
        ) from error
    for listener in _foreign_listeners(bound.getsockname(), deployment):
        bound.close()
        raise EngineStartFailed(
            f"the gate cannot share {address} with {listener}, which is no gate of this"
            " deployment and would get some of its clients",
            _PORT_IN_USE_REMEDY,
        )
    return bound


def _foreign_listeners(own_address: tuple[object, ...], deployment: str) -> Iterator[str]:
    """Processes that listen there and are no gates of this deployment.

    Processes of other users do not matter: the kernel shares no port with them.
    """
    host, port, *_ = own_address
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status != psutil.CONN_LISTEN or not connection.laddr or not connection.pid:
            continue
        listen_host, listen_port = connection.laddr
        if listen_port != port or not (
            same_host(listen_host, str(host))
            or is_any_address(listen_host)
            or is_any_address(str(host))
        ):
            continue
        with contextlib.suppress(psutil.Error):  # it has ended since
            process = psutil.Process(connection.pid)
            if process.environ().get(DEPLOYMENT_VARIABLE) != deployment:
                yield f"{process.name()} (pid {process.pid})"
