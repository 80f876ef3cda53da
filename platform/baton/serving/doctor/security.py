"""What `baton doctor` looks at to see who could come in: open ports, and Ray's own door."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from baton.domain.names.addresses import address_text, is_loopback, is_loopback_address
from baton.domain.words import few
from baton.serving.cluster.cluster_state import ClusterState
from baton.serving.cluster.reaper import marked_processes
from baton.serving.doctor.facts import Unknown
from baton.serving.doctor.result import Check, Topic

_FEW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPort:
    """A port of a deployment's process on an address that other machines may reach."""

    address: str
    port: int
    program: str


def open_ports(state: ClusterState) -> tuple[OpenPort, ...]:
    """Where processes of a deployment of this machine listen, but for loopback."""
    found: dict[tuple[str, int], OpenPort] = {}
    for pid in sorted({state.pid, *marked_processes(state.run_dir)}):
        try:
            process = psutil.Process(pid)
            listening = [
                one
                for one in process.net_connections(kind="tcp")
                if one.status == psutil.CONN_LISTEN
            ]
            program = process.name()
        except psutil.Error:  # it has ended, or is not ours to look at
            continue
        for one in listening:
            host, port = one.laddr
            if not is_loopback(host):
                known = OpenPort(address=host, port=port, program=program)
                found.setdefault((host, port), known)
    return tuple(found[key] for key in sorted(found))


def check_open_ports(
    ports: tuple[OpenPort, ...] | Unknown, *, endpoint: str | None, metrics: str | None
) -> Check:
    """Whether others reach anything but what is meant for them."""
    topic = Topic(
        name="open ports",
        why="links and engines serve whoever belongs to the deployment, statistics and side"
        " channels whoever asks",
    )
    if isinstance(ports, Unknown):
        return topic.skipped(ports.why)
    meant = {urlsplit(url).port for url in (endpoint, metrics) if url}
    unmeant = [one for one in ports if one.port not in meant]
    if unmeant:
        return topic.failed(
            few(
                [f"{address_text(one.address, one.port)} ({one.program})" for one in unmeant], _FEW
            ),
            "keep others from these ports by the firewall or a network policy; a HAProxy that was"
            " not started by baton needs 'bind 127.0.0.1:PORT' for statistics and metrics",
        )
    named = ", ".join(f"{address_text(one.address, one.port)}" for one in ports)
    return topic.passed(f"only {named}, as configured" if named else "none")


def check_ray_door(door: str | Unknown, address: str) -> Check:
    """Whether Ray asks for a token: whoever it lets in runs code on every node."""
    topic = Topic(name="Ray's door", why="whoever Ray lets in runs code, and reads every key")
    if isinstance(door, Unknown):
        return topic.skipped(door.why)
    if door == "guarded":
        return topic.passed(f"{address} asks for a token")
    if door != "open":
        return topic.skipped(f"{address}: {door}")
    judge = topic.warned if is_loopback_address(address) else topic.failed
    return judge(
        f"{address} lets in whoever reaches it",
        "start Ray with RAY_AUTH_MODE=token on every node, and give each the token's file with"
        " mode 600",
    )
