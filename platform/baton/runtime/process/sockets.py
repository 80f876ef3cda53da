"""TCP sockets that are bound to a host and a port, of whichever version of IP that host is."""

from __future__ import annotations

import socket


def resolve_bind_address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """Family and address to bind a socket to; a name is looked up (blocking), IPv4 first.

    Raises:
        OSError: there is no such host.
    """
    candidates = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)  # noqa: S104 - asked for
    family, *_, address = min(candidates, key=lambda candidate: candidate[0] is not socket.AF_INET)
    return family, address


def create_bound_socket(
    host: str, port: int, *, reuse_address: bool = True, reuse_port: bool = False
) -> socket.socket:
    """A socket at that host and port that does not listen yet; at `::` also for IPv4.

    Raises:
        OSError: there is no such address here, or the port is taken.
    """
    family, address = resolve_bind_address(host, port)
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse_address))
        if reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family is socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
