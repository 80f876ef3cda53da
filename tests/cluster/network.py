"""Several nodes on one machine: a network namespace each, joined by a bridge of this machine's.

Each node has an address, a loopback and an interface of its own, so that programs in it cannot tell
it from a machine on a local network. Needs `ip` and the right to use it (root).
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
"""Of every node."""
_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceBytes:
    """What has gone through one node's interface so far."""

    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkNode:
    """One node."""

    name: str
    namespace: str
    address: str
    subnet: str
    """The network that all nodes have their addresses in."""

    @property
    def exec_prefix(self) -> tuple[str, ...]:
        """What to put before a command so that it runs there, as the same process."""
        return ("ip", "netns", "exec", self.namespace)

    def interface_bytes(self) -> InterfaceBytes:
        """Its interface's counters."""
        folder = f"/sys/class/net/{INTERFACE}/statistics"
        files = (f"{folder}/rx_bytes", f"{folder}/tx_bytes")
        output = _run(*self.exec_prefix, "cat", *files).split()
        return InterfaceBytes(received_bytes=int(output[0]), sent_bytes=int(output[1]))


def unavailable_reason() -> str:
    """Why networks cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no program 'ip' (iproute2)"
    return "" if Path("/proc/self/ns/net").exists() else "the kernel has no network namespaces"


@contextmanager
def network(*names: str) -> Iterator[dict[str, NetworkNode]]:
    """Nodes of these names that reach each other and this machine; gone afterwards."""
    suffix = secrets.token_hex(3)
    bridge, subnet = f"bt-{suffix}", f"10.214.{secrets.randbelow(200) + 20}"
    nodes = {
        name: NetworkNode(
            name=name,
            namespace=f"{bridge}-{name}",
            address=f"{subnet}.{number}",
            subnet=f"{subnet}.0/24",
        )
        for number, name in enumerate(names, start=1)
    }
    _run("ip", "link", "add", bridge, "type", "bridge")
    try:
        _run("ip", "addr", "add", f"{subnet}.254/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for number, node in enumerate(nodes.values()):
            _connect_node(node, bridge, f"bt{suffix}{number}")
        yield nodes
    finally:
        for node in nodes.values():
            subprocess.run(("ip", "netns", "del", node.namespace), capture_output=True, check=False)
        _run("ip", "link", "del", bridge)


def _connect_node(node: NetworkNode, bridge: str, host_interface: str) -> None:
    in_namespace = ("ip", "-n", node.namespace)
    _run("ip", "netns", "add", node.namespace)
    _run(
        "ip",
        "link",
        "add",
        host_interface,
        "type",
        "veth",
        "peer",
        INTERFACE,
        "netns",
        node.namespace,
    )
    _run("ip", "link", "set", host_interface, "master", bridge, "up")
    _run(*in_namespace, "addr", "add", f"{node.address}/24", "dev", INTERFACE)
    for interface in (INTERFACE, "lo"):
        _run(*in_namespace, "link", "set", interface, "up")


def _run(*command: str) -> str:
    process = subprocess.run(command, capture_output=True, timeout=_DEADLINE_S, check=False)
    assert process.returncode == 0, f"{' '.join(command)}: {process.stderr.decode().strip()}"
    return process.stdout.decode()
