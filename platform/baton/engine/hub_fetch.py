"""A program that downloads a model from a hub to this node, and reports progress.

Theory of operation: huggingface_hub locks each file during its download. So such programs of
several replicas divide a model's files, and wait for each other's. Progress is therefore measured
on the disk: complete files, and bytes of partial files that were written within the last minute.
The program writes it to a file every second, and its result at the end. Partial files of a killed
download are useless and never reused. The program removes its own at a signal or when its
parent dies, and those of others that are old when it starts.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple
from urllib.parse import urlsplit

ACCESS_TIMEOUT_S: Final = 3.0
"""For one answer of the hub before a start; huggingface_hub waits 10 s, and tries five times."""
_PROBED_FILE: Final = "config.json"
_DEFAULT_HUB: Final = "https://huggingface.co"
_NETWORK_REMEDY: Final = (
    "check this node's network; set HTTPS_PROXY for a proxy, HF_ENDPOINT for a mirror, or"
    " HF_HUB_OFFLINE=1 where the model is on the node"
)
_REPORT_INTERVAL_S: Final = 1.0
_ACTIVE_WRITE_S: Final = 60.0
_STALE_AFTER_S: Final = 3600.0
_INCOMPLETE_GLOB: Final = "*.incomplete"
_PR_SET_PDEATHSIG: Final = 1
_NON_WEIGHT_PATTERNS: Final = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")
"""Configuration, tokenizer, chat template and code of a model; a few megabytes."""
_WEIGHTS_INDEX: Final = "model.safetensors.index.json"
_MISTRAL_PATTERN: Final = "consolidated*.safetensors"
_PATTERNS_BY_FORMAT: Final[dict[str, tuple[str, ...]]] = {
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "mistral": (_MISTRAL_PATTERN,),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "npcache": ("*.bin",),
    "pt": ("*.pt",),
}
"""Patterns by load format; the first that matches a file counts.

Source: vLLM 0.32, model_loader/default_loader.py, `_prepare_weights`. For other formats vLLM
downloads by itself.
"""


class FetchFailure(NamedTuple):
    """Why a download failed, and a remedy."""

    reason: str
    remedy: str


class HubModel(NamedTuple):
    """A model of a hub, and how this node accesses it."""

    repository: str
    revision: str | None
    hub: str
    """Its address."""
    folder: str
    """The folder on this node."""
    token: str
    """The name of the token; empty without one."""
    offline: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """A model to download."""

    repository: str
    revision: str | None
    needs_weights: bool
    """Whether an engine reads it; an API server reads all other files."""
    load_format: str = "auto"
    folder: str | None = None
    """Folder for weights instead of the hub's own cache."""
    report_file: str = ""
    """The file for progress."""

    def to_json(self) -> str:
        """The program's argument."""
        return json.dumps(asdict(self))


class ProgressFile:
    """A file with the progress of a download, replaced atomically."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def write(self, **fields: object) -> None:
        """Replace the content."""
        new_file = self._file.with_suffix(".new")
        new_file.write_text(json.dumps(fields))
        new_file.replace(self._file)


def fetch(request: FetchRequest, progress: ProgressFile) -> FetchFailure | None:
    """Download the model; returns the failure, if any."""
    from huggingface_hub import constants, get_token

    cache = Path(request.folder or constants.HF_HUB_CACHE).expanduser()
    hub_model = HubModel(
        repository=request.repository,
        revision=request.revision,
        hub=_without_credentials(constants.ENDPOINT),
        folder=str(cache),
        token=_token_name(os.environ) if get_token() else "",
        offline=constants.HF_HUB_OFFLINE,
    )
    try:
        return _fetch(request, hub_model, cache, progress)
    except Exception as error:  # noqa: BLE001 - a boundary: the hub's client raises many types
        return explain_failure(error, hub_model)


def access_failure(
    repository: str,
    revision: str | None,
    environ: Mapping[str, str],
    *,
    folder: Path | None = None,
) -> FetchFailure | None:
    """Why a start would not get a model from the hub; None if it would, or has it already.

    One request for the headers of one file; blocks for `ACCESS_TIMEOUT_S` at most, unless names
    take longer to resolve. `folder` is the node's cache instead of the hub's own.
    """
    from huggingface_hub import (
        constants,
        get_hf_file_metadata,
        get_token,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import EntryNotFoundError

    endpoint = (environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    cache = folder or Path(constants.HF_HUB_CACHE).expanduser()
    token = get_token()
    hub_model = HubModel(
        repository=repository,
        revision=revision,
        hub=_without_credentials(endpoint),
        folder=str(cache),
        token=_token_name(environ) if token else "",
        offline=False,
    )
    url = hf_hub_url(repository, _PROBED_FILE, revision=revision, endpoint=endpoint)
    try:
        get_hf_file_metadata(url, token=token, timeout=ACCESS_TIMEOUT_S, endpoint=endpoint)
    except EntryNotFoundError:
        return None  # the model is there, without this file
    except Exception as error:  # noqa: BLE001 - a boundary: the hub's client raises many types
        failure = _hub_failure(error, hub_model)
        is_refused = failure is not None and _status(error) in {401, 403, 404}
        cached = try_to_load_from_cache(
            repository, _PROBED_FILE, cache_dir=cache, revision=revision
        )
        if isinstance(cached, str) and not is_refused:
            return None
        return failure or _network_failure(error, hub_model)
    return None


def no_answer_failure(repository: str, environ: Mapping[str, str], reason: str) -> FetchFailure:
    """The failure of an `access_failure` that has not ended in time."""
    hub = _without_credentials(environ.get("HF_ENDPOINT") or _DEFAULT_HUB)
    return FetchFailure(
        f"{hub} cannot be reached for model {repository}: {reason}", _NETWORK_REMEDY
    )


def _token_name(environ: Mapping[str, str]) -> str:
    """The name of the token in use."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if environ.get(name):
            return name
    return "the token of 'hf auth login'"


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
        snapshot = download(request.revision, list(_NON_WEIGHT_PATTERNS))
    except IncompleteSnapshotError as error:  # the hub cannot be reached, and not all may be needed
        snapshot = Path(error.snapshot_path)
    if not request.needs_weights:
        return None
    commit = snapshot.name
    try:
        tree = get_cached_repo_tree(request.repository, revision=commit, cache_dir=cache)
    except CachedRepoTreeNotFoundError:
        return None  # an old download without its tree: the engine reads the files that exist
    sizes = {file.path: file.size for file in tree}
    needed = weight_files(sizes, request.load_format, _read_indexed_files(snapshot))
    sizes = {name: size for name, size in sizes.items() if name in needed}
    blobs = snapshot.parents[1] / "blobs"
    _remove_stale(blobs)
    total_bytes = sum(sizes.values())
    missing_bytes = total_bytes - downloaded_bytes(snapshot, blobs, sizes)
    if missing_bytes > (free_bytes := shutil.disk_usage(cache).free):
        return _disk_full_failure(
            hub_model, f"it needs {_gb(missing_bytes)} more, {_gb(free_bytes)} are free"
        )

    def report_progress() -> None:
        progress.write(done=downloaded_bytes(snapshot, blobs, sizes), total=total_bytes)

    with _PeriodicTask(_REPORT_INTERVAL_S, report_progress):
        download(commit, sorted(needed))
    return None


def downloaded_bytes(snapshot: Path, blobs: Path, sizes: Mapping[str, int]) -> int:
    """Bytes of these files on the disk, complete or partial."""
    complete_bytes = sum(size for name, size in sizes.items() if (snapshot / name).exists())
    partial_bytes = 0
    for partial_file in blobs.glob(_INCOMPLETE_GLOB):
        try:
            status = partial_file.stat()
        except OSError:  # it has just become complete
            continue
        if _wall_s() - status.st_mtime < _ACTIVE_WRITE_S:
            partial_bytes += min(status.st_size, status.st_blocks * 512)
    return min(complete_bytes + partial_bytes, sum(sizes.values()))


def _without_credentials(address: str) -> str:
    """A hub's address without credentials of a mirror, for logs."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _read_indexed_files(snapshot: Path) -> frozenset[str]:
    try:
        return frozenset(json.loads((snapshot / _WEIGHTS_INDEX).read_text())["weight_map"].values())
    except FileNotFoundError:
        return frozenset()


def _remove_stale(blobs: Path) -> None:
    for partial_file in blobs.glob(_INCOMPLETE_GLOB):
        try:
            if _wall_s() - partial_file.stat().st_mtime > _STALE_AFTER_S:
                partial_file.unlink()
        except OSError:  # another process removes it
            continue


def _wall_s() -> float:
    """The clock of files' times."""
    return datetime.now(UTC).timestamp()


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


class _PeriodicTask:
    """Runs an action in a thread at once, and then periodically while a block runs."""

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
    """Remove partial files of this process, and exit."""
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            open_file = descriptor.readlink()
            if open_file.match(_INCOMPLETE_GLOB):
                open_file.unlink()
        except OSError:  # it was closed meanwhile
            continue
    os._exit(128 + signal.SIGTERM)


def main(arguments: list[str]) -> None:
    """Carry out the request in the only argument."""
    request = FetchRequest(**json.loads(arguments[0]))
    signal.signal(signal.SIGTERM, exit_cleanly)
    # It was tied to its parent by a signal that leaves no time to clean up.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    progress = ProgressFile(Path(request.report_file))
    failure = fetch(request, progress)
    progress.write(ended=True, trouble=None if failure is None else list(failure))


def weight_files(
    files: Collection[str], load_format: str, indexed_files: Collection[str]
) -> frozenset[str]:
    """The files with the weights that vLLM reads.

    Args:
        files: of the repository.
        load_format: as vLLM names it.
        indexed_files: in the index of the weights; empty without one.
    """
    if load_format == "auto":
        has_mistral_files = any(
            fnmatch(PurePosixPath(file).name, _MISTRAL_PATTERN) for file in files
        )
        load_format = "mistral" if has_mistral_files else "hf"
    patterns = _PATTERNS_BY_FORMAT.get(load_format, ())
    if indexed_files and "*.safetensors" in patterns:
        return frozenset(indexed_files)
    for pattern in patterns:
        if matching := frozenset(file for file in files if fnmatch(file, pattern)):
            return matching
    return frozenset()


def explain_failure(error: BaseException, hub_model: HubModel) -> FetchFailure:
    """An exception of huggingface_hub, explained to the operator."""
    return (
        _disk_failure(error, hub_model)
        or _hub_failure(error, hub_model)
        or _network_failure(error, hub_model)
    )


def _disk_failure(error: BaseException, hub_model: HubModel) -> FetchFailure | None:
    number = error.errno if isinstance(error, OSError) else None
    if number in {errno.ENOSPC, errno.EDQUOT}:
        return _disk_full_failure(hub_model, "the disk is full")
    if number in {errno.EACCES, errno.EROFS, errno.EPERM}:
        return FetchFailure(
            f"models cannot be kept in {hub_model.folder}: {os.strerror(number)}",
            "let baton's user write there, or set cluster.model_cache.path to another folder",
        )
    if hub_model.offline:
        return FetchFailure(
            f"model {hub_model.repository} is not in {hub_model.folder}, and HF_HUB_OFFLINE is set",
            "fetch it there with 'hf download', or remove HF_HUB_OFFLINE",
        )
    return None


def _hub_failure(error: BaseException, hub_model: HubModel) -> FetchFailure | None:
    """The failure that the hub has answered with, if it has answered."""
    class_names, status = _class_names(error), _status(error)
    if "GatedRepoError" in class_names:
        return _gated_failure(hub_model, status)
    if "RevisionNotFoundError" in class_names:
        return FetchFailure(
            f"model {hub_model.repository} has no revision {hub_model.revision!r} on"
            f" {hub_model.hub}",
            "correct models.*.revision",
        )
    if "RepositoryNotFoundError" in class_names or status in {401, 403, 404}:
        return _not_visible_failure(hub_model, status)
    if status is None:
        return None
    is_rate_limited = status == 429  # noqa: PLR2004 - too many requests
    return FetchFailure(
        f"{hub_model.hub} answered {status} for model {hub_model.repository}",
        "wait some minutes, or set HF_TOKEN: accounts may ask more often"
        if is_rate_limited
        else "try again later, or set HF_ENDPOINT to a mirror",
    )


def _network_failure(error: BaseException, hub_model: HubModel) -> FetchFailure:
    if "TransportError" in _class_names(error):
        return _network_error(_first_line(error), hub_model)
    return FetchFailure(
        f"model {hub_model.repository} does not come from {hub_model.hub}: {_first_line(error)}",
        "try again; what has come is kept",
    )


def _network_error(reason: str, hub_model: HubModel) -> FetchFailure:
    """The hub cannot be reached."""
    return FetchFailure(
        f"{hub_model.hub} cannot be reached for model {hub_model.repository}: {reason}",
        _NETWORK_REMEDY,
    )


def _disk_full_failure(hub_model: HubModel, reason: str) -> FetchFailure:
    """A model does not fit on the disk."""
    return FetchFailure(
        f"no room for model {hub_model.repository} in {hub_model.folder}: {reason}",
        "free disk there, or set cluster.model_cache.path to a folder with more",
    )


def _gated_failure(hub_model: HubModel, status: int | None) -> FetchFailure:
    page = f"{hub_model.hub}/{hub_model.repository}"
    account = (
        f"with the account of {hub_model.token}, and let the token read gated models"
        if hub_model.token
        else "and set HF_TOKEN to a token of that account"
    )
    return FetchFailure(
        f"model {hub_model.repository} is gated: {hub_model.hub} answered {status}",
        f"accept its licence at {page} {account}",
    )


def _not_visible_failure(hub_model: HubModel, status: int | None) -> FetchFailure:
    token = (
        f"see whether {hub_model.token} is valid and may read it"
        if hub_model.token
        else "set HF_TOKEN where it is private"
    )
    return FetchFailure(
        f"{hub_model.hub} shows no model {hub_model.repository}: it answered {status}",
        f"correct the spelling of its name (models.*.source), or {token}",
    )


def _class_names(error: BaseException) -> frozenset[str]:
    """The names of an exception's classes and of its causes' classes.

    Names, because huggingface_hub changed the library of its HTTP client with all its errors.
    """
    return frozenset(
        kind.__name__ for exception in _chain(error) for kind in type(exception).__mro__
    )


def _status(error: BaseException) -> int | None:
    for exception in _chain(error):
        status = getattr(getattr(exception, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _chain(error: BaseException) -> Sequence[BaseException]:
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__
    return causes


def _first_line(error: BaseException) -> str:
    """The first line of the root cause."""
    root_cause = _chain(error)[-1]
    text = str(root_cause).strip().partition("\n")[0]
    return f"{type(root_cause).__name__}: {text}" if text else type(root_cause).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
