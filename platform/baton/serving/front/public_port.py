"""The public port of a deployment whose gates listen there themselves, side by side.

Theory of operation: HAProxies that listen at one port with SO_REUSEPORT each get a share of its new
connections from the kernel: so the ingresses of a node can all be its front, and the new one of a
replacement beside the old one. Any other process of the same user that asks for it so would get its
share as well, without a word to anybody. Therefore whoever starts a deployment holds the port: with
a socket that is bound and never listens, so that no connection comes to it. Whoever asks for the
port alone does not get it then, and the start of another deployment does ask for it alone, from the
first second on and not only once gates listen. Where nobody holds it (on a cluster of somebody
else's), and against whoever does not ask, each gate looks who listens there before it does.
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
"""The variable that tells a gate's deployment to the gates that come after it."""
_PORT_IN_USE_REMEDY = "stop whoever listens there, or set server.port"


def reserve_port(host: str, port: int) -> socket.socket:
    """Keep others off the port, but for the gates of this user, until the socket is closed.

    Raises:
        ClusterFailed: it is in use.
    """
    address = format_address(host, port)
    if not port_is_free(host, port):
        raise ClusterFailed(f"cannot listen on {address}: the port is in use", _PORT_IN_USE_REMEDY)
    try:
        # Without SO_REUSEADDR: with it, others who set it would be let in while nobody listens.
        return create_bound_socket(host, port, reuse_address=False, reuse_port=True)
    except OSError as error:
        raise ClusterFailed(
            f"cannot hold {address}: {error.strerror}; connections of a server that ended"
            " just now may be left, for a minute",
            f"try again then; or {_PORT_IN_USE_REMEDY}",
        ) from error


def open_gate_socket(host: str, port: int, deployment: str) -> socket.socket:
    """A socket at the public port for one more gate of a deployment, which is to listen there.

    Blocks for as long as it takes to look at all connections of this machine.

    Raises:
        EngineStartFailed: somebody else listens there, or the address is none of this machine's.
    """
    address = format_address(host, port)
    try:
        bound = create_bound_socket(host, port, reuse_port=True)
    except OSError as error:
        is_in_use = error.errno == errno.EADDRINUSE
        why = "the port is in use" if is_in_use else (error.strerror or str(error))
        raise EngineStartFailed(
            f"the gate cannot listen on {address}: {why}",
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
    """Processes that listen where we would, and are no gates of ours.

    Those of other users need not be seen: with them the kernel shares no port.
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
