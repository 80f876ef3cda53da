"""What UCX prints of the transports that it chooses."""

from __future__ import annotations

from pathlib import Path


def transport_choice(
    *rows: str,
    reach: str = "intra-node",
    operation: str = "remote memory read by ucp_get*(multi) into host memory from host",
) -> str:
    """A choice as UCX 1.23 prints it."""
    lines = [
        "+--------+-------------+-------------------------------------------+",
        f"| 0f0c puller {reach} cfg#1                                          |",
        f"| {operation} |",
        "+--------+-------------+-------------------------------------------+",
        "| Range  | Description |                  Config                   |",
        "+--------+-------------+-------------------------------------------+",
        *rows,
        "+--------+-------------+-------------------------------------------+",
    ]
    return "".join(f"[1795186540.498461] [vm:31443:0]   {line}\n" for line in lines)


def zero_copy(config: str, reads: str = "0..inf") -> str:
    return f"| {reads} | zero-copy   | {config:41} |"


def write_log(folder: Path, text: str, name: str = "ucx.host.17") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder
