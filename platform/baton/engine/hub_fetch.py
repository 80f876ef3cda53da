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
    BESIDE_WEIGHTS,
    INDEX,
    Asked,
    Trouble,
    no_room,
    trouble,
    weight_files,
)

_EVERY_S: Final = 1.0
_LIVE_S: Final = 60.0
_OLD_S: Final = 3600.0
_HALF: Final = "*.incomplete"
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to fetch."""

    repository: str
    revision: str | None
    weights: bool
    """Whether an engine is to read it; an API server reads everything else."""
    load_format: str = "auto"
    folder: str | None = None
    """Where weights are to be kept instead of in the hub's own cache."""
    report: str = ""
    """The file that says how far it is."""

    def text(self) -> str:
        """As the program is given it."""
        return json.dumps(asdict(self))


class Said:
    """Says how far a download is, in a file that is never half written."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, **fields: object) -> None:
        """Replace what was said."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(fields))
        fresh.replace(self._file)


def fetch(order: Order, said: Said) -> Trouble | None:
    """Bring the model here; returns why it did not come, or None."""
    from huggingface_hub import constants, get_token

    cache = Path(order.folder or constants.HF_HUB_CACHE).expanduser()
    asked = Asked(
        repository=order.repository,
        revision=order.revision,
        hub=_shown(constants.ENDPOINT),
        folder=str(cache),
        has_token=get_token() is not None,
        offline=constants.HF_HUB_OFFLINE,
    )
    try:
        return _fetch(order, asked, cache, said)
    except Exception as error:  # noqa: BLE001 - a boundary: whatever the hub's client raises
        return trouble(error, asked)


def _fetch(order: Order, asked: Asked, cache: Path, said: Said) -> Trouble | None:
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, IncompleteSnapshotError

    def bring(revision: str | None, files: list[str]) -> Path:
        return Path(
            snapshot_download(
                order.repository,
                revision=revision,
                cache_dir=cache,
                allow_patterns=files,
                local_files_only=asked.offline,
                library_name="baton",
            )
        )

    try:
        snapshot = bring(order.revision, list(BESIDE_WEIGHTS))
    except IncompleteSnapshotError as error:  # no hub can be asked, and not all may be needed
        snapshot = Path(error.snapshot_path)
    if not order.weights:
        return None
    commit = snapshot.name
    try:
        tree = get_cached_repo_tree(order.repository, revision=commit, cache_dir=cache)
    except CachedRepoTreeNotFoundError:
        return None  # fetched long ago, and nobody can be asked: the engine sees what is there
    sizes = {file.path: file.size for file in tree}
    wanted = weight_files(sizes, order.load_format, _indexed(snapshot))
    sizes = {name: size for name, size in sizes.items() if name in wanted}
    blobs = snapshot.parents[1] / "blobs"
    _remove_old(blobs)
    total_bytes = sum(sizes.values())
    lacking_bytes = total_bytes - here_bytes(snapshot, blobs, sizes)
    if lacking_bytes > (free_bytes := shutil.disk_usage(cache).free):
        return no_room(asked, f"it needs {_gb(lacking_bytes)} more, {_gb(free_bytes)} are free")

    def look() -> None:
        said.write(done=here_bytes(snapshot, blobs, sizes), total=total_bytes)

    with _Every(_EVERY_S, look):
        bring(commit, sorted(wanted))
    return None


def here_bytes(snapshot: Path, blobs: Path, sizes: Mapping[str, int]) -> int:
    """How much of these files is on the disk, whole or on its way."""
    whole = sum(size for name, size in sizes.items() if (snapshot / name).exists())
    coming = 0
    for half in blobs.glob(_HALF):
        try:
            found = half.stat()
        except OSError:  # it has just become whole
            continue
        if _wall_s() - found.st_mtime < _LIVE_S:
            coming += min(found.st_size, found.st_blocks * 512)
    return min(whole + coming, sum(sizes.values()))


def _shown(address: str) -> str:
    """The address of a hub without what a mirror may ask for: it goes into logs."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _indexed(snapshot: Path) -> frozenset[str]:
    try:
        return frozenset(json.loads((snapshot / INDEX).read_text())["weight_map"].values())
    except FileNotFoundError:
        return frozenset()


def _remove_old(blobs: Path) -> None:
    for half in blobs.glob(_HALF):
        try:
            if _wall_s() - half.stat().st_mtime > _OLD_S:
                half.unlink()
        except OSError:  # another one removes it
            continue


def _wall_s() -> float:
    """As files have it."""
    return datetime.now(UTC).timestamp()


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


class _Every:
    """Does something at once and every so often while a block runs, in a thread."""

    def __init__(self, period_s: float, act: Callable[[], None]) -> None:
        self._period_s = period_s
        self._act = act
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._act()
            if self._over.wait(self._period_s):
                return


def end_cleanly(_number: int, _frame: object) -> None:
    """Remove what this process has half written, and end."""
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            open_file = descriptor.readlink()
            if open_file.match(_HALF):
                open_file.unlink()
        except OSError:  # it was closed meanwhile
            continue
    os._exit(128 + signal.SIGTERM)


def main(arguments: list[str]) -> None:
    """Do what the order in the only argument says."""
    order = Order(**json.loads(arguments[0]))
    signal.signal(signal.SIGTERM, end_cleanly)
    # It was tied to its parent by a signal that leaves no time to clean up.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    said = Said(Path(order.report))
    found = fetch(order, said)
    said.write(ended=True, trouble=None if found is None else list(found))


if __name__ == "__main__":
    main(sys.argv[1:])
