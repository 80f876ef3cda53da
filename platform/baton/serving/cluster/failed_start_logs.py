"""What a start that failed leaves behind: the logs of its processes, and what they say of it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

_MOST_KEPT: Final = 5
"""Failed starts; older ones make room."""
_TAIL_BYTES: Final = 256 * 1024
_TELLING = re.compile(r"(?:^|\s|\.)(\w*(?:Error|Exception|Failed|Invalid)\b: .+)")
"""The last line of a stack trace."""
_OWN_END = re.compile(r"SystemExit|KeyboardInterrupt|asyncio\.exceptions\.CancelledError")


def failures_folder() -> Path:
    """Where logs of failed starts are kept for this user; made when missing."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(state) / "baton" / "failed"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def keep_logs(run_dir: Path, folder: Path) -> Path | None:
    """Move the logs of a Ray session out of a folder that is about to be removed.

    Args:
        run_dir: Of a cluster that has ended.
        folder: Where logs of failed starts are kept.

    Returns:
        Where they are now; None where there were none.
    """
    logs = (run_dir / "session_latest" / "logs").resolve()
    if not logs.is_dir():
        return None
    kept = folder / run_dir.name
    shutil.rmtree(kept, ignore_errors=True)
    shutil.move(logs, kept)
    for old in sorted(folder.iterdir(), key=lambda one: one.stat().st_mtime)[:-_MOST_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return kept


def last_error(logs: Path) -> str:
    """What the process that wrote last of an error said of it; empty where none did.

    Replicas come before Ray's own processes, which complain of what replicas do to them.
    """
    for pattern in ("serve/replica_*.log", "worker-*.err", "serve/*.log", "*.err"):
        files = [path for path in logs.glob(pattern) if path.is_file()]
        for path in sorted(files, key=lambda one: one.stat().st_mtime, reverse=True):
            if said := _last_in(path):
                return said
    return ""


def _last_in(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # it went while its session ends: another one may say it
        return ""
    for line in reversed(lines):
        found = _TELLING.search(line)
        if found is not None and not _OWN_END.search(line):
            return found[1].strip()
    return ""
