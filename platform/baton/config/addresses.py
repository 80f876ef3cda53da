"""What an address in a configuration means for who can reach it."""

from __future__ import annotations

import ipaddress
import re

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?")


def ip_address(text: str) -> IpAddress | None:
    """An IP address; None for anything else."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def ip_network(text: str) -> IpNetwork | None:
    """A network as `10.1.0.0/16`; None for anything else, a single address among it."""
    try:
        return ipaddress.ip_network(text) if "/" in text else None
    except ValueError:
        return None


def is_host(text: str) -> bool:
    """Whether it is an IP address, or could be the name of a host.

    The last word of a name is no number: resolvers take `10.0.0.300` for an address that is wrong.
    """
    if ip_address(text) is not None:
        return True
    labels = text.split(".")
    return all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdigit()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    address = ip_address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def is_any(host: str) -> bool:
    """Whether it means all addresses of a machine."""
    address = ip_address(host)
    return address is not None and address.is_unspecified
