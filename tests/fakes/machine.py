"""What a test has to know of the machine that it runs on."""

from __future__ import annotations

import socket

import psutil
import pytest


def require_ipv6() -> None:
    """Skip, with what to do, where not even this machine's own address of IPv6 can be had."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"::1 cannot be had ({error}): sysctl net.ipv6.conf.lo.disable_ipv6=0")


def ipv6_address_of_this_machine() -> str:
    """An address of IPv6 by which other machines would reach this one."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET6 and not address.address.startswith(
                ("::1", "fe80")
            ):
                return address.address
    pytest.skip("no address of IPv6 but loopback: ip -6 address add fd00::2/64 dev eth0")


def address_of_this_machine() -> str:
    """An address by which this machine reaches itself as another one would."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return address.address
    pytest.skip("this machine has no address but its own loopback: give it a network interface")
