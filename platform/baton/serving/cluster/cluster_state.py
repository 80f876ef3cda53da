"""State files of this user's running clusters, for the commands of other shells."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from baton.serving.front.data_path import DataPath

_START_TIME_TOLERANCE_S = 1.0
"""Two readings of a process's start time differ by rounding only."""
_START_TIME_FIELD = 18
"""Of the fields behind a process's state in /proc/PID/stat. Source: proc(5), field 22."""
_ENDED_STATES = frozenset({"Z", "X"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """How to find one running cluster."""

    name: str
    """Unique among this user's clusters; the file's name."""
    pid: int
    """The process that owns the cluster, which ends with it."""
    pid_started_at_s: float
    """Wall clock, from the kernel: for people to read."""
    address: str
    """Of Ray's control store: `host:port`."""
    namespace: str
    http_url: str
    data_path: DataPath
    run_dir: str
    session_name: str
    token_file: str
    pid_started_ticks: int | None = None
    """See `process_start_ticks`: another process may reuse the pid."""
    cert_file: str | None = None
    """The endpoint's certificate; None without TLS."""

    def is_alive(self) -> bool:
        """Whether the owner still runs."""
        if self.pid_started_ticks is not None:
            return process_start_ticks(self.pid) == self.pid_started_ticks
        try:
            started_at_s = psutil.Process(self.pid).create_time()
        except psutil.Error:
            return False
        return abs(started_at_s - self.pid_started_at_s) < _START_TIME_TOLERANCE_S


def process_start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None without the process or /proc.

    The kernel's wall time of a start moves with each step of the clock: a live owner would look
    dead.
    """
    try:
        stat_line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Behind the program's name, which may hold anything: the third field and those that follow.
    state, *fields = stat_line.rpartition(")")[2].split()
    return None if state in _ENDED_STATES else int(fields[_START_TIME_FIELD])


def state_folder() -> Path:
    """This user's folder for state files, mode 0700; made when missing.

    Raises:
        PermissionError: the folder in the shared temp directory belongs to another user.
    """
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    if runtime_dir and os.access(runtime_dir, os.W_OK):
        folder = Path(runtime_dir) / "baton"
    else:
        folder = Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise PermissionError(
            f"{folder} belongs to another user; set XDG_RUNTIME_DIR to a folder of your own"
        )
    return folder


def write_state(state: ClusterState, folder: Path) -> Path:
    """Publish a state atomically; readable by its owner only."""
    path = folder / f"{state.name}.json"
    temp_path = path.with_suffix(".draft")
    with os.fdopen(os.open(temp_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(state), file, indent=1)
    temp_path.replace(path)
    return path


def remove_state(name: str, folder: Path) -> None:
    """Remove a state file; does nothing if there is none."""
    (folder / f"{name}.json").unlink(missing_ok=True)


def running_clusters(folder: Path) -> tuple[ClusterState, ...]:
    """The clusters with a live owner, oldest first; removes files of dead owners."""
    clusters = []
    for path in folder.glob("*.json"):
        state = _read_state(path)
        if state is None or not state.is_alive():
            path.unlink(missing_ok=True)
        else:
            clusters.append(state)
    return tuple(sorted(clusters, key=lambda state: state.pid_started_at_s))


def _read_state(path: Path) -> ClusterState | None:
    try:
        fields = json.loads(path.read_text())
        return ClusterState(**(fields | {"data_path": DataPath(fields["data_path"])}))
    except (OSError, ValueError, TypeError, KeyError):
        return None
