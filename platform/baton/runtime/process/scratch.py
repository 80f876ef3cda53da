"""Folders for sockets and logs that nothing outlives.

The maker of a folder removes it, but a process that is killed removes nothing. So they are made in
the run directory of the deployment, if it is known, and go with it at the latest.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

RUN_DIR_VARIABLE = "BATON_RUN_DIR"
"""Set for all processes of a deployment that `baton up` has started; `serving.reaper` says more."""
_SHORT_PARENT = "/tmp"  # noqa: S108 - a fresh folder of our own is made in it


def scratch_folder(prefix: str, *, short: bool = False) -> Path:
    """Make a folder of this user alone, whose name begins with `prefix`.

    Without a run directory it is where temporary files are; or, where its path must be `short`
    enough for a socket in it, in `/tmp`. Its mode keeps out other users.
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
