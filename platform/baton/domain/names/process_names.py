"""The name of the process that asked for an engine: known to all processes of it, on every node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

OWNER_ENV_VAR: Final = "BATON_ENGINE_ASKED_BY"
"""Set in the environment of engine processes: the name of the process whose engine they are."""
_NAMESPACE: Final = Path("/proc/self/ns/pid")


def process_name() -> str:
    """Of this process, unlike that of any other: pods have ids of processes of their own."""
    return f"{os.uname().nodename}:{_NAMESPACE.stat().st_ino}:{os.getpid()}"
