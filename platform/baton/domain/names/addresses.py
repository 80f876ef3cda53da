"""Addresses of a host and a port as text: the one place that makes them and takes them apart.

An IPv6 address has colons of its own, so it stands in brackets before a port: `[::1]:8000`. A host
by itself has none, in a configuration as for a socket. Nobody else may join the two with a colon.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_LAST_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """A host, without brackets, and a port."""

    host: str
    port: int


def address_text(host: str, port: int | str) -> str:
    """`host:port`, with an IPv6 host in brackets; brackets that are there already stay.

    `port` may be a word, as in `0.0.0.0:PORT` of a hint.
    """
    return f"{bracketed(host)}:{port}"


def endpoint(scheme: str, host: str, port: int | str) -> str:
    """`scheme://host:port`, for HTTP, ZMQ and what else writes addresses as URLs do."""
    return f"{scheme}://{address_text(host, port)}"


def parse_address(text: str) -> Address:
    """The host and the port in `host:port` or `[host]:port`, with or without a scheme before it.

    Raises:
        ValueError: it is neither; the text says what it is.
    """
    rest = text.partition("://")[2] if "://" in text else text
    host, colon, port = rest.rstrip("/").rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if in_brackets else host
    if colon and ":" in bare and not in_brackets:
        raise ValueError(f"got {text!r}, wanted HOST:PORT, an IPv6 address in brackets: [::1]:8000")
    number = int(port) if port.isascii() and port.isdecimal() else -1
    sound = ip_address(bare) is not None if in_brackets else not set(bare) & set("[]/@?# ")
    if not colon or not bare or not sound or not 0 <= number <= _LAST_PORT:
        raise ValueError(f"got {text!r}, wanted HOST:PORT, as 10.0.0.7:8000 or [::1]:8000")
    return Address(bare, number)


def host_in(authority: str) -> str:
    """The host of an HTTP `Host` header, in lower case, without its port and brackets; else ""."""
    name = authority.strip().lower()
    if name.startswith("["):
        host, bracket, rest = name[1:].partition("]")
        sound = bracket and ip_address(host) is not None and (not rest or rest.startswith(":"))
        return host if sound else ""
    return name.partition(":")[0]


def bracketed(host: str) -> str:
    """A host as it stands before a port, and in URLs."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def ip_address(text: str) -> IpAddress | None:
    """An IP address; None for anything else."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def is_ipv6(host: str) -> bool:
    """Whether a socket for this host is one of IPv6; a name is none by itself."""
    return isinstance(ip_address(host), ipaddress.IPv6Address)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    address = _reached(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def is_loopback_address(address: str) -> bool:
    """Whether only this machine reaches a `host:port`; of what is none, that is not known."""
    try:
        return is_loopback(parse_address(address).host)
    except ValueError:
        return False


def is_any(host: str) -> bool:
    """Whether it means all addresses of a machine."""
    address = _reached(host)
    return address is not None and address.is_unspecified


def same_host(one: str, other: str) -> bool:
    """Whether two hosts are one address, however it is written; names are compared as they are."""
    first, second = _reached(one), _reached(other)
    if first is None or second is None:
        return one.lower() == other.lower()
    return first == second


def everywhere(host: str) -> str:
    """All addresses of a machine, in the version of IP of this host; `::` are those of both."""
    return "::" if is_ipv6(host) else "0.0.0.0"  # noqa: S104 - who asks guards it


def loopback(host: str) -> str:
    """This machine for itself, where a server listens at `host`, or at all of its addresses.

    A server that listens at `::` listens at IPv4 addresses, too.
    """
    return "127.0.0.1" if is_any(host) or not host else host


def _reached(host: str) -> IpAddress | None:
    """The address that packets go to: an IPv4 address may be written as one of IPv6."""
    address = ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
