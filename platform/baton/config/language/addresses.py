"""What may stand for a host, an address or a network in a configuration."""

from __future__ import annotations

import ipaddress
import re

from baton.domain.names.addresses import IpAddress, ip_address

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?")


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
    address = ip_address(text)
    if address is not None:
        return not needs_zone(address)
    labels = text.split(".")
    return all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdigit()


def needs_zone(address: IpAddress) -> bool:
    """Whether it means nothing without the name of an interface, as `fe80::1%eth0` has one."""
    return address.version == 6 and (address.is_link_local or "%" in str(address))  # noqa: PLR2004


def describe_invalid_host(text: str, expected: str) -> str:
    """Why a text is no host or address as is wanted, with what is usually meant by it."""
    unbracketed = text[1:-1]
    if text == f"[{unbracketed}]" and ip_address(unbracketed) is not None:
        return f"got {text!r}, expected it without brackets: {unbracketed!r}"
    network = ip_network(text)
    address = ip_address(text) if network is None else network.network_address
    if address is not None and needs_zone(address):
        return (
            f"got {text!r}, a link-local address: expected a global or a unique local one"
            " (fd00::/8), for each machine has its own names for the zones of link-local ones"
        )
    return f"got {text!r}, expected {expected}"
