"""What `baton doctor` looks at to see who could come in: open ports, and Ray's own door."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from baton.domain.names.addresses import format_address, is_loopback, is_loopback_address
from baton.domain.names.words import few
from baton.serving.cluster.cluster_state import ClusterState
from baton.serving.cluster.reaper import marked_processes
from baton.serving.doctor.facts import UnknownFact
from baton.serving.doctor.result import Check, Topic

_MAX_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPort:
    """A port of a deployment's process on an address that other machines may reach."""

    address: str
    port: int
    program: str


def open_ports(state: ClusterState) -> tuple[OpenPort, ...]:
    """Where processes of a deployment of this machine listen, but for loopback."""
    ports: dict[tuple[str, int], OpenPort] = {}
    for pid in sorted({state.pid, *marked_processes(state.run_dir)}):
        try:
            process = psutil.Process(pid)
            listeners = [
                net_connection
                for net_connection in process.net_connections(kind="tcp")
                if net_connection.status == psutil.CONN_LISTEN
            ]
            program = process.name()
        except psutil.Error:  # it has ended, or is not ours to look at
            continue
        for listener in listeners:
            host, port = listener.laddr
            if not is_loopback(host):
                open_port = OpenPort(address=host, port=port, program=program)
                ports.setdefault((host, port), open_port)
    return tuple(ports[key] for key in sorted(ports))


def check_open_ports(
    ports: tuple[OpenPort, ...] | UnknownFact, *, endpoint: str | None, metrics_url: str | None
) -> Check:
    """Whether others reach anything but what is meant for them."""
    topic = Topic(
        name="open ports",
        why="links and engines serve whoever belongs to the deployment, statistics and side"
        " channels whoever asks",
    )
    if isinstance(ports, UnknownFact):
        return topic.skipped(ports.why)
    expected_ports = {urlsplit(url).port for url in (endpoint, metrics_url) if url}
    unexpected = [port for port in ports if port.port not in expected_ports]
    if unexpected:
        return topic.failed(
            few(
                [
                    f"{format_address(port.address, port.port)} ({port.program})"
                    for port in unexpected
                ],
                _MAX_LISTED,
            ),
            "keep others from these ports by the firewall or a network policy; a HAProxy that was"
            " not started by baton needs 'bind 127.0.0.1:PORT' for statistics and metrics",
        )
    listing = ", ".join(f"{format_address(port.address, port.port)}" for port in ports)
    return topic.passed(f"only {listing}, as configured" if listing else "none")


def check_ray_auth(auth: str | UnknownFact, address: str) -> Check:
    """Whether Ray asks for a token: whoever it lets in runs code on every node."""
    topic = Topic(name="Ray's door", why="whoever Ray lets in runs code, and reads every key")
    if isinstance(auth, UnknownFact):
        return topic.skipped(auth.why)
    if auth == "guarded":
        return topic.passed(f"{address} asks for a token")
    if auth != "open":
        return topic.skipped(f"{address}: {auth}")
    make_check = topic.warned if is_loopback_address(address) else topic.failed
    return make_check(
        f"{address} lets in whoever reaches it",
        "start Ray with RAY_AUTH_MODE=token on every node, and give each the token's file with"
        " mode 600",
    )
