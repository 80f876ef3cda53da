"""HAProxy's admin socket: its path, commands and answers."""

from __future__ import annotations

import socket
from pathlib import Path

_QUERY_TIMEOUT_S = 2.0
_SUMMARY_ROWS = frozenset({"FRONTEND", "BACKEND"})


def admin_sockets(run_dir: Path) -> list[Path]:
    """The admin sockets of the HAProxies of a local deployment."""
    # Serve puts a folder named by the node between our folder and the socket.
    return sorted(run_dir.glob("h/**/a.sock"))


def direct_server_is_up(stat: str) -> bool:
    """Whether `show stat` lists an active server that is up and no backup."""
    return any(
        row["svname"] not in _SUMMARY_ROWS and row["act"] == "1" and row["status"] == "UP"
        for row in stat_rows(stat)
    )


def stat_rows(stat: str) -> list[dict[str, str]]:
    """The rows of `show stat` for each frontend, backend and server, by column."""
    header, _, rows = stat.removeprefix("# ").partition("\n")
    names = header.split(",")
    return [dict(zip(names, row.split(","), strict=False)) for row in rows.splitlines() if row]


def query_haproxy(path: Path, command: str) -> str:
    """HAProxy's answer to a command; empty if it does not answer."""
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
