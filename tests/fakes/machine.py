"""What a test has to know of the machine that it runs on."""

from __future__ import annotations

import socket

import psutil
import pytest


def address_of_this_machine() -> str:
    """An address by which this machine reaches itself as another one would."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return one.address
    pytest.skip("this machine has no address but its own loopback: give it a network interface")
