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
from baton.serving.data_path import bind_address, port_is_free

MARK = "BATON_GATE_OF"
"""The variable that tells a gate's deployment to the gates that come after it."""
_EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared, not bound
_ELSEWHERE = "stop whoever listens there, or set server.port"


def hold_port(host: str, port: int) -> socket.socket:
    """Keep others off the port, but for the gates of this user, until the socket is closed.

    Raises:
        ClusterFailed: it is in use.
    """
    if not port_is_free(host, port):
        raise ClusterFailed(f"cannot listen on {host}:{port}: the port is in use", _ELSEWHERE)
    try:
        # Without SO_REUSEADDR: with it, others who set it would be let in while nobody listens.
        return _bound(host, port, reuse_address=False)
    except OSError as error:
        raise ClusterFailed(
            f"cannot hold {host}:{port}: {error.strerror}; connections of a server that ended"
            " just now may be left, for a minute",
            f"try again then; or {_ELSEWHERE}",
        ) from error


def gate_socket(host: str, port: int, deployment: str) -> socket.socket:
    """A socket at the public port for one more gate of a deployment, which is to listen there.

    Blocks for as long as it takes to look at all connections of this machine.

    Raises:
        EngineStartFailed: somebody else listens there, or the address is none of this machine's.
    """
    try:
        opened = _bound(host, port, reuse_address=True)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "the port is in use" if taken else (error.strerror or str(error))
        raise EngineStartFailed(
            f"the gate cannot listen on {host}:{port}: {why}",
            _ELSEWHERE if taken else "set server.host to an address of this machine",
        ) from error
    for stranger in _strangers(opened.getsockname(), deployment):
        opened.close()
        raise EngineStartFailed(
            f"the gate cannot share {host}:{port} with {stranger}, which is no gate of this"
            " deployment and would get some of its clients",
            _ELSEWHERE,
        )
    return opened


def _bound(host: str, port: int, *, reuse_address: bool) -> socket.socket:
    family, address = bind_address(host, port)
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse_address))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _strangers(ours: tuple[object, ...], deployment: str) -> Iterator[str]:
    """Processes that listen where we would, and are no gates of ours.

    Those of other users need not be seen: with them the kernel shares no port.
    """
    host, port, *_ = ours
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status != psutil.CONN_LISTEN or not connection.laddr or not connection.pid:
            continue
        where, at = connection.laddr
        if at != port or not (where == host or _EVERYWHERE & {where, host}):
            continue
        with contextlib.suppress(psutil.Error):  # it has ended since
            process = psutil.Process(connection.pid)
            if process.environ().get(MARK) != deployment:
                yield f"{process.name()} (pid {process.pid})"
