"""Addresses of a host and a port as text: the one place that makes them and takes them apart.

An IPv6 address has colons of its own, so it stands in brackets before a port: `[::1]:8000`. A host
by itself has none, in a configuration as for a socket. No other code joins the two with a colon.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
_MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """A host, without brackets, and a port."""

    host: str
    port: int


def format_address(host: str, port: int | str) -> str:
    """`host:port`, with an IPv6 host in brackets; brackets that are there already stay.

    `port` may be a word, as in `0.0.0.0:PORT` of a hint.
    """
    return f"{bracket_ipv6(host)}:{port}"


def format_endpoint(scheme: str, host: str, port: int | str) -> str:
    """`scheme://host:port`, for HTTP, ZMQ and other schemes that write addresses as URLs do."""
    return f"{scheme}://{format_address(host, port)}"


def parse_address(text: str) -> Address:
    """The host and the port in `host:port` or `[host]:port`, with or without a scheme before it.

    Raises:
        ValueError: it is neither; the text says what it is.
    """
    authority = text.partition("://")[2] if "://" in text else text
    host, colon, port = authority.rstrip("/").rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    bare_host = host[1:-1] if in_brackets else host
    if colon and ":" in bare_host and not in_brackets:
        raise ValueError(
            f"got {text!r}, expected HOST:PORT, an IPv6 address in brackets: [::1]:8000"
        )
    port_number = int(port) if port.isascii() and port.isdecimal() else -1
    is_valid_host = (
        ip_address(bare_host) is not None if in_brackets else not set(bare_host) & set("[]/@?# ")
    )
    if not colon or not bare_host or not is_valid_host or not 0 <= port_number <= _MAX_PORT:
        raise ValueError(f"got {text!r}, expected HOST:PORT, as 10.0.0.7:8000 or [::1]:8000")
    return Address(bare_host, port_number)


def parse_host_header(authority: str) -> str:
    """The host of an HTTP `Host` header, in lower case, without its port and brackets; else ""."""
    name = authority.strip().lower()
    if name.startswith("["):
        host, bracket, suffix = name[1:].partition("]")
        is_valid = (
            bracket and ip_address(host) is not None and (not suffix or suffix.startswith(":"))
        )
        return host if is_valid else ""
    return name.partition(":")[0]


def bracket_ipv6(host: str) -> str:
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
    address = _unmap_ipv4(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def is_loopback_address(address: str) -> bool:
    """Whether only this machine reaches a `host:port`; false for other texts."""
    try:
        return is_loopback(parse_address(address).host)
    except ValueError:
        return False


def is_any_address(host: str) -> bool:
    """Whether it means all addresses of a machine."""
    address = _unmap_ipv4(host)
    return address is not None and address.is_unspecified


def same_host(left_host: str, right_host: str) -> bool:
    """Whether two hosts are one address, however it is written; names are compared as they are."""
    first, second = _unmap_ipv4(left_host), _unmap_ipv4(right_host)
    if first is None or second is None:
        return left_host.lower() == right_host.lower()
    return first == second


def any_address(host: str) -> str:
    """All addresses of a machine, in the version of IP of this host; `::` are those of both."""
    return "::" if is_ipv6(host) else "0.0.0.0"  # noqa: S104 - who asks guards it


def connectable_host(host: str) -> str:
    """This machine for itself, where a server listens at `host`, or at all of its addresses.

    A server that listens at `::` listens at IPv4 addresses, too.
    """
    return "127.0.0.1" if is_any_address(host) or not host else host


def _unmap_ipv4(host: str) -> IpAddress | None:
    """The address that packets go to: an IPv4 address may be written as one of IPv6."""
    address = ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
