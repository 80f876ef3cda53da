"""HAProxy's admin socket: where it is, what is asked, and what its answers say."""

from __future__ import annotations

import socket
from pathlib import Path

_QUERY_TIMEOUT_S = 2.0
_SUMMARY_ROWS = frozenset({"FRONTEND", "BACKEND"})


def admin_sockets(run_dir: Path) -> list[Path]:
    """By which the HAProxies of a deployment of this machine are told things."""
    # Serve puts a folder named by the node between our folder and the socket.
    return sorted(run_dir.glob("h/**/a.sock"))


def direct_server_is_up(stat: str) -> bool:
    """Whether HAProxy's `show stat` knows a server in use that is no backup."""
    return any(
        row["svname"] not in _SUMMARY_ROWS and row["act"] == "1" and row["status"] == "UP"
        for row in stat_rows(stat)
    )


def stat_rows(stat: str) -> list[dict[str, str]]:
    """What HAProxy's `show stat` says of each frontend, backend and server, by column."""
    header, _, rows = stat.removeprefix("# ").partition("\n")
    names = header.split(",")
    return [dict(zip(names, row.split(","), strict=False)) for row in rows.splitlines() if row]


def query_haproxy(path: Path, command: str) -> str:
    """HAProxy's answer to a command; empty while it is not there."""
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_QUERY_TIMEOUT_S)
            connection.connect(str(path))
            connection.sendall(f"{command}\n".encode())
            while chunk := connection.recv(65536):
                answer += chunk
    except OSError:
        return ""
    return answer.decode()
