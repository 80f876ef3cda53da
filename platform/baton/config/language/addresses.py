"""Hosts, addresses and networks in configurations."""

from __future__ import annotations

import ipaddress
import re

from baton.domain.names.addresses import IpAddress, ip_address

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?")


def ip_network(text: str) -> IpNetwork | None:
    """A network such as `10.1.0.0/16`; None for anything else, including a single address."""
    try:
        return ipaddress.ip_network(text) if "/" in text else None
    except ValueError:
        return None


def is_host(text: str) -> bool:
    """Whether the text is an IP address or may be a host name.

    The last label of a name is not a number: resolvers read `10.0.0.300` as an invalid address.
    """
    address = ip_address(text)
    if address is not None:
        return not needs_zone(address)
    labels = text.split(".")
    return all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdigit()


def needs_zone(address: IpAddress) -> bool:
    """Whether it is invalid without the name of an interface, as in `fe80::1%eth0`."""
    return address.version == 6 and (address.is_link_local or "%" in str(address))  # noqa: PLR2004


def describe_invalid_host(text: str, expected: str) -> str:
    """The error of an invalid host or address, with the likely correction."""
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
