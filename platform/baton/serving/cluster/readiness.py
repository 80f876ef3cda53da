"""Whether the front has found the ingress.

Until HAProxy's own check of the ingress has passed, it sends requests through its *backup* server,
Ray Serve's proxy in Python. The endpoint is healthy then, but slow, and connections may be cut when
HAProxy is reloaded with the ingress in its list. So a deployment is not called up before.
"""

from __future__ import annotations

import socket
from pathlib import Path

import httpx

from baton.serving.cluster.cluster_state import ClusterState
from baton.serving.front.data_path import DataPath

_ASK_S = 2.0
_OWN_S = 5.0
_NO_SERVERS = frozenset({"FRONTEND", "BACKEND"})


def own_client(url: str) -> httpx.Client:
    """A client for this machine's own endpoint, by which nothing secret may be sent.

    It does not look at certificates: they are for the name by which clients know the endpoint. Nor
    at the shell's proxies: they are for what is elsewhere.
    """
    return httpx.Client(
        base_url=url,
        timeout=_OWN_S,
        verify=False,  # noqa: S501 - see above
        trust_env=False,
    )


def front_is_direct(state: ClusterState) -> bool:
    """Whether requests go straight to an ingress replica; the classic proxy has no other way."""
    if state.data_path is not DataPath.HAPROXY:
        return True
    sockets = admin_sockets(Path(state.run_dir))
    return any(direct_server_is_up(ask_haproxy(path, "show stat")) for path in sockets)


def admin_sockets(run_dir: Path) -> list[Path]:
    """By which the HAProxies of a deployment of this machine are told things."""
    # Serve puts a folder named by the node between our folder and the socket.
    return sorted(run_dir.glob("h/**/a.sock"))


def direct_server_is_up(stat: str) -> bool:
    """Whether HAProxy's `show stat` knows a server in use that is no backup."""
    return any(
        row["svname"] not in _NO_SERVERS and row["act"] == "1" and row["status"] == "UP"
        for row in stat_rows(stat)
    )


def stat_rows(stat: str) -> list[dict[str, str]]:
    """What HAProxy's `show stat` says of each frontend, backend and server, by column."""
    header, _, rows = stat.removeprefix("# ").partition("\n")
    names = header.split(",")
    return [dict(zip(names, row.split(","), strict=False)) for row in rows.splitlines() if row]


def ask_haproxy(path: Path, command: str) -> str:
    """HAProxy's answer to a command; empty while it is not there."""
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ASK_S)
            connection.connect(str(path))
            connection.sendall(f"{command}\n".encode())
            while part := connection.recv(65536):
                answer += part
    except OSError:
        return ""
    return answer.decode()
