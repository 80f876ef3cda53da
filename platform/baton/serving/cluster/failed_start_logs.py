"""The logs of a failed start, and their last error."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

_MAX_FAILED_STARTS: Final = 5
_TAIL_BYTES: Final = 256 * 1024
_ERROR_LINE = re.compile(r"(?:^|\s|\.)(\w*(?:Error|Exception|Failed|Invalid)\b: .+)")
"""The last line of a stack trace."""
_NORMAL_EXIT = re.compile(r"SystemExit|KeyboardInterrupt|asyncio\.exceptions\.CancelledError")


def failures_folder() -> Path:
    """This user's folder for logs of failed starts; made when missing."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(state) / "baton" / "failed"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def archive_logs(run_dir: Path, folder: Path) -> Path | None:
    """Move the logs of a Ray session out of a folder that is about to be removed.

    Returns:
        The new folder; None if there were no logs.
    """
    logs = (run_dir / "session_latest" / "logs").resolve()
    if not logs.is_dir():
        return None
    archive = folder / run_dir.name
    shutil.rmtree(archive, ignore_errors=True)
    shutil.move(logs, archive)
    for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[
        :-_MAX_FAILED_STARTS
    ]:
        shutil.rmtree(old, ignore_errors=True)
    return archive


def last_error(logs: Path) -> str:
    """The error that the last process logged; empty for none.

    Replicas come before Ray's own processes, which report failures of replicas.
    """
    for pattern in ("serve/replica_*.log", "worker-*.err", "serve/*.log", "*.err"):
        files = [path for path in logs.glob(pattern) if path.is_file()]
        for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
            if message := _last_error_in(path):
                return message
    return ""


def _last_error_in(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # removed while its session ends
        return ""
    for line in reversed(lines):
        match = _ERROR_LINE.search(line)
        if match is not None and not _NORMAL_EXIT.search(line):
            return match[1].strip()
    return ""
