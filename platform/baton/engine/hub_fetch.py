"""A program that brings a model of a hub to this node, and says how far it is.

Theory of operation. Downloads are huggingface_hub's: each file is locked while it is fetched, so
that programs like this one of several replicas divide the files of a model among them, and wait for
what another one fetches. So how far a model is, is seen on the disk, whoever fetched it: files that
are there, and what of others was written within the last minute. It is written to a file every
second, and so is how it ended. Files that a download left half when it was killed are of no use to
anybody, and have names that nobody looks for: they are removed when this program is told to end, or
its parent dies, and such as are old when one begins.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from baton.engine.hub_files import (
    NON_WEIGHT_PATTERNS,
    WEIGHTS_INDEX,
    FetchFailure,
    HubModel,
    disk_full_failure,
    explain_failure,
    weight_files,
)

_REPORT_INTERVAL_S: Final = 1.0
_ACTIVE_WRITE_S: Final = 60.0
_STALE_AFTER_S: Final = 3600.0
_INCOMPLETE_GLOB: Final = "*.incomplete"
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """What to fetch."""

    repository: str
    revision: str | None
    needs_weights: bool
    """Whether an engine is to read it; an API server reads everything else."""
    load_format: str = "auto"
    folder: str | None = None
    """Where weights are to be kept instead of in the hub's own cache."""
    report_file: str = ""
    """The file that says how far it is."""

    def to_json(self) -> str:
        """As the program is given it."""
        return json.dumps(asdict(self))


class ProgressFile:
    """Says how far a download is, in a file that is never half written."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, **fields: object) -> None:
        """Replace what was said."""
        new_file = self._file.with_suffix(".new")
        new_file.write_text(json.dumps(fields))
        new_file.replace(self._file)


def fetch(request: FetchRequest, progress: ProgressFile) -> FetchFailure | None:
    """Bring the model here; returns why it did not come, or None."""
    from huggingface_hub import constants, get_token

    cache = Path(request.folder or constants.HF_HUB_CACHE).expanduser()
    hub_model = HubModel(
        repository=request.repository,
        revision=request.revision,
        hub=_without_credentials(constants.ENDPOINT),
        folder=str(cache),
        has_token=get_token() is not None,
        offline=constants.HF_HUB_OFFLINE,
    )
    try:
        return _fetch(request, hub_model, cache, progress)
    except Exception as error:  # noqa: BLE001 - a boundary: whatever the hub's client raises
        return explain_failure(error, hub_model)


def _fetch(
    request: FetchRequest, hub_model: HubModel, cache: Path, progress: ProgressFile
) -> FetchFailure | None:
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, IncompleteSnapshotError

    def download(revision: str | None, files: list[str]) -> Path:
        return Path(
            snapshot_download(
                request.repository,
                revision=revision,
                cache_dir=cache,
                allow_patterns=files,
                local_files_only=hub_model.offline,
                library_name="baton",
            )
        )

    try:
        snapshot = download(request.revision, list(NON_WEIGHT_PATTERNS))
    except IncompleteSnapshotError as error:  # no hub can be asked, and not all may be needed
        snapshot = Path(error.snapshot_path)
    if not request.needs_weights:
        return None
    commit = snapshot.name
    try:
        tree = get_cached_repo_tree(request.repository, revision=commit, cache_dir=cache)
    except CachedRepoTreeNotFoundError:
        return None  # fetched long ago, and nobody can be asked: the engine sees what is there
    sizes = {file.path: file.size for file in tree}
    needed = weight_files(sizes, request.load_format, _read_indexed_files(snapshot))
    sizes = {name: size for name, size in sizes.items() if name in needed}
    blobs = snapshot.parents[1] / "blobs"
    _remove_stale(blobs)
    total_bytes = sum(sizes.values())
    missing_bytes = total_bytes - downloaded_bytes(snapshot, blobs, sizes)
    if missing_bytes > (free_bytes := shutil.disk_usage(cache).free):
        return disk_full_failure(
            hub_model, f"it needs {_gb(missing_bytes)} more, {_gb(free_bytes)} are free"
        )

    def report_progress() -> None:
        progress.write(done=downloaded_bytes(snapshot, blobs, sizes), total=total_bytes)

    with _PeriodicTask(_REPORT_INTERVAL_S, report_progress):
        download(commit, sorted(needed))
    return None


def downloaded_bytes(snapshot: Path, blobs: Path, sizes: Mapping[str, int]) -> int:
    """How much of these files is on the disk, whole or on its way."""
    complete_bytes = sum(size for name, size in sizes.items() if (snapshot / name).exists())
    partial_bytes = 0
    for partial_file in blobs.glob(_INCOMPLETE_GLOB):
        try:
            status = partial_file.stat()
        except OSError:  # it has just become whole
            continue
        if _wall_s() - status.st_mtime < _ACTIVE_WRITE_S:
            partial_bytes += min(status.st_size, status.st_blocks * 512)
    return min(complete_bytes + partial_bytes, sum(sizes.values()))


def _without_credentials(address: str) -> str:
    """The address of a hub without what a mirror may ask for: it goes into logs."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _read_indexed_files(snapshot: Path) -> frozenset[str]:
    try:
        return frozenset(json.loads((snapshot / WEIGHTS_INDEX).read_text())["weight_map"].values())
    except FileNotFoundError:
        return frozenset()


def _remove_stale(blobs: Path) -> None:
    for partial_file in blobs.glob(_INCOMPLETE_GLOB):
        try:
            if _wall_s() - partial_file.stat().st_mtime > _STALE_AFTER_S:
                partial_file.unlink()
        except OSError:  # another one removes it
            continue


def _wall_s() -> float:
    """As files have it."""
    return datetime.now(UTC).timestamp()


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


class _PeriodicTask:
    """Does something at once and every so often while a block runs, in a thread."""

    def __init__(self, period_s: float, action: Callable[[], None]) -> None:
        self._period_s = period_s
        self._action = action
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._action()
            if self._stopped.wait(self._period_s):
                return


def exit_cleanly(_number: int, _frame: object) -> None:
    """Remove what this process has half written, and end."""
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            open_file = descriptor.readlink()
            if open_file.match(_INCOMPLETE_GLOB):
                open_file.unlink()
        except OSError:  # it was closed meanwhile
            continue
    os._exit(128 + signal.SIGTERM)


def main(arguments: list[str]) -> None:
    """Do what the order in the only argument says."""
    request = FetchRequest(**json.loads(arguments[0]))
    signal.signal(signal.SIGTERM, exit_cleanly)
    # It was tied to its parent by a signal that leaves no time to clean up.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    progress = ProgressFile(Path(request.report_file))
    failure = fetch(request, progress)
    progress.write(ended=True, trouble=None if failure is None else list(failure))


if __name__ == "__main__":
    main(sys.argv[1:])
