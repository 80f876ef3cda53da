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
from baton.domain.names.addresses import address_text, is_any, same_host
from baton.runtime.process.sockets import bound_socket
from baton.serving.front.data_path import port_is_free

MARK = "BATON_GATE_OF"
"""The variable that tells a gate's deployment to the gates that come after it."""
_ELSEWHERE = "stop whoever listens there, or set server.port"


def hold_port(host: str, port: int) -> socket.socket:
    """Keep others off the port, but for the gates of this user, until the socket is closed.

    Raises:
        ClusterFailed: it is in use.
    """
    where = address_text(host, port)
    if not port_is_free(host, port):
        raise ClusterFailed(f"cannot listen on {where}: the port is in use", _ELSEWHERE)
    try:
        # Without SO_REUSEADDR: with it, others who set it would be let in while nobody listens.
        return bound_socket(host, port, reuse_address=False, reuse_port=True)
    except OSError as error:
        raise ClusterFailed(
            f"cannot hold {where}: {error.strerror}; connections of a server that ended"
            " just now may be left, for a minute",
            f"try again then; or {_ELSEWHERE}",
        ) from error


def gate_socket(host: str, port: int, deployment: str) -> socket.socket:
    """A socket at the public port for one more gate of a deployment, which is to listen there.

    Blocks for as long as it takes to look at all connections of this machine.

    Raises:
        EngineStartFailed: somebody else listens there, or the address is none of this machine's.
    """
    where = address_text(host, port)
    try:
        opened = bound_socket(host, port, reuse_port=True)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "the port is in use" if taken else (error.strerror or str(error))
        raise EngineStartFailed(
            f"the gate cannot listen on {where}: {why}",
            _ELSEWHERE if taken else "set server.host to an address of this machine",
        ) from error
    for stranger in _strangers(opened.getsockname(), deployment):
        opened.close()
        raise EngineStartFailed(
            f"the gate cannot share {where} with {stranger}, which is no gate of this"
            " deployment and would get some of its clients",
            _ELSEWHERE,
        )
    return opened


def _strangers(ours: tuple[object, ...], deployment: str) -> Iterator[str]:
    """Processes that listen where we would, and are no gates of ours.

    Those of other users need not be seen: with them the kernel shares no port.
    """
    host, port, *_ = ours
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status != psutil.CONN_LISTEN or not connection.laddr or not connection.pid:
            continue
        where, at = connection.laddr
        if at != port or not (same_host(where, str(host)) or is_any(where) or is_any(str(host))):
            continue
        with contextlib.suppress(psutil.Error):  # it has ended since
            process = psutil.Process(connection.pid)
            if process.environ().get(MARK) != deployment:
                yield f"{process.name()} (pid {process.pid})"
