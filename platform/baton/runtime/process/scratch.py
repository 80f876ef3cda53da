"""Folders for sockets and logs, removed at the latest with the deployment's run directory.

A process that is killed does not remove its folder; the run directory contains it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

RUN_DIR_VARIABLE = "BATON_RUN_DIR"
"""Set for all processes of a deployment that `baton up` has started."""
_SHORT_PARENT = "/tmp"  # noqa: S108 - a fresh folder of our own is made in it


def scratch_folder(prefix: str, *, short: bool = False) -> Path:
    """Make a folder that only this user can read, whose name begins with `prefix`.

    Without a run directory it is among temporary files; or in `/tmp`, where the path must be
    `short` enough for a socket.
    """
    run_dir = os.environ.get(RUN_DIR_VARIABLE, "")
    parent = (
        run_dir
        if run_dir and os.access(run_dir, os.W_OK | os.X_OK)
        else _SHORT_PARENT
        if short
        else None
    )
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
