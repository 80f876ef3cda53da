"""Key files: read again when they change, and changed by one process at a time.

Theory of operation: the owner of `KeyFiles` calls `poll` about once a second, in a thread, since a
disk may be slow. A file whose time, size or inode changed is read again. A file that cannot be read
or has a bad line keeps its last good keys and is reported once: a mistake locks no client out.
`edit_key_file` locks a file and replaces it as a whole, so that no reader sees half of it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import IO

from baton.domain.errors import ConfigInvalid, OperatorError
from baton.runtime.keys.api_keys import ApiKey, BadKeyLine, KeyRing, parse_line

MAX_FILE_BYTES = 16 * 1024 * 1024
"""About 100,000 keys."""
_LOCK_WAIT_S = 5.0
_LOCK_RETRY_S = 0.05
_MAX_ERRORS = 20

Signature = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyNotice:
    """The result of reading a changed file."""

    path: str
    keys: int
    """Keys of the file that count now."""
    reason: str | None = None
    """Why its new content does not count."""


@dataclass(slots=True)
class _WatchedFile:
    tenants: frozenset[str]
    signature: Signature | None = None
    keys: tuple[ApiKey, ...] = ()
    reported_error: str | None = None
    has_been_read: bool = False


class KeyFiles:
    """The keys in the files of some tenants, as new as the last poll."""

    def __init__(self, files: Mapping[str, Path] | None = None) -> None:
        self._watched: dict[Path, _WatchedFile] = {}
        self._ring = KeyRing()
        self._ring_lock = threading.Lock()
        """Held while a ring is built, so that the last ring is of the last files."""
        self.watch(files or {})

    @property
    def ring(self) -> KeyRing:
        """The present keys; replaced as a whole, so any thread may read it."""
        return self._ring

    def watch(self, files: Mapping[str, Path]) -> None:
        """Watch these files from now on, by tenant; several tenants may share one.

        Keys of removed files stop counting at once; keys of new files count from the next poll on.
        """
        tenants: dict[Path, set[str]] = {}
        for tenant, path in files.items():
            tenants.setdefault(Path(path), set()).add(tenant)
        watched: dict[Path, _WatchedFile] = {}
        for path, names in tenants.items():
            previous = self._watched.get(path)
            if previous is not None and previous.tenants == names:
                watched[path] = previous
            else:
                retained_keys = (
                    tuple(key for key in previous.keys if key.tenant in names) if previous else ()
                )
                watched[path] = _WatchedFile(tenants=frozenset(names), keys=retained_keys)
        self._watched = watched  # as a whole: a poll in another thread may be walking through it
        self._rebuild_ring()

    def poll(self) -> tuple[KeyNotice, ...]:
        """Read changed files and say what came of them. Blocks on the disk."""
        watched = self._watched
        notices = [
            notice
            for path, file in watched.items()
            if (notice := self._poll_file(path, file, watched)) is not None
        ]
        if notices:
            self._rebuild_ring()
        return tuple(notices)

    def _poll_file(
        self, path: Path, file: _WatchedFile, watched: Mapping[Path, _WatchedFile]
    ) -> KeyNotice | None:
        try:
            # Taken before it is read: later writes show in the next poll.
            signature = _signature(path)
            if signature == file.signature:
                return None
            file.signature = signature
            keys = tuple(key for key in read_lines(path) if isinstance(key, ApiKey))
            _check_tenants(path, keys, file.tenants)
        except OSError as error:
            file.signature = None  # it may be readable without having changed
            reason = f"{path}: cannot be read: {error.strerror or error}"
            return _error_notice(path, file, reason)
        except ConfigInvalid as error:
            return _error_notice(path, file, str(error))
        if duplicate_id := _find_duplicate_id(path, keys, watched):
            # It may be on its way from one file to the other: looked at again next time.
            file.signature = None
            return _error_notice(path, file, f"{path}: key {duplicate_id} is in another file, too")
        is_first_read, file.has_been_read = not file.has_been_read, True
        changed = keys != file.keys or file.reported_error is not None
        file.keys, file.reported_error = keys, None
        return KeyNotice(path=str(path), keys=len(keys)) if changed or is_first_read else None

    def _rebuild_ring(self) -> None:
        with self._ring_lock:
            self._ring = KeyRing(key for file in self._watched.values() for key in file.keys)


def load_ring(files: Mapping[str, Path]) -> KeyRing:
    """The keys of files, by tenant.

    Raises:
        ConfigInvalid: files cannot be read, or have bad lines.
    """
    key_files = KeyFiles(files)
    if errors := [notice.reason for notice in key_files.poll() if notice.reason is not None]:
        raise ConfigInvalid(tuple(line for reason in errors for line in reason.splitlines()))
    return key_files.ring


def read_lines(path: Path) -> list[ApiKey | str]:
    """A key file's lines: keys, and comments and empty lines as they are.

    Raises:
        OSError: it cannot be read.
        ConfigInvalid: it has bad lines.
    """
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigInvalid((f"{path}: larger than {MAX_FILE_BYTES} bytes, revoke by removing",))
    lines: list[ApiKey | str] = []
    errors: list[str] = []
    ids: set[str] = set()
    for number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), start=1):
        try:
            key = parse_line(line)
        except BadKeyLine as error:
            errors.append(f"{path}:{number}: {error}")
            continue
        if key is None:
            lines.append(line)
        elif key.key_id in ids:
            errors.append(f"{path}:{number}: key {key.key_id} is there twice")
        else:
            ids.add(key.key_id)
            lines.append(key)
    if errors:
        raise ConfigInvalid(tuple(errors[:_MAX_ERRORS]))
    return lines


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys in a file.

    Raises:
        OperatorError: there is no such file.
        ConfigInvalid: it has bad lines.
        OSError: it cannot be read.
    """
    _check_exists(path)
    return tuple(line for line in read_lines(path) if isinstance(line, ApiKey))


@dataclass(slots=True)
class KeyDocument:
    """A key file under change."""

    path: Path
    lines: list[ApiKey | str] = field(default_factory=list)

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """The keys, in order."""
        return tuple(line for line in self.lines if isinstance(line, ApiKey))

    def key(self, key_id: str) -> ApiKey:
        """The key of that id.

        Raises:
            OperatorError: there is none.
        """
        for key in self.keys:
            if key.key_id == key_id:
                return key
        raise OperatorError(
            f"there is no key {key_id!r} in {self.path}",
            f"see 'baton keys list --file {self.path}'",
        )

    def add(self, key: ApiKey) -> None:
        """Append a key.

        Raises:
            OperatorError: its id is taken.
        """
        if any(other.key_id == key.key_id for other in self.keys):
            raise OperatorError(f"there is a key {key.key_id!r} already", "try again")
        self.lines.append(key)

    def revoke(self, key_id: str, now: datetime) -> ApiKey:
        """Revoke a key; a revoked key stays as it is.

        Raises:
            OperatorError: there is none of that id.
        """
        key = self.key(key_id)
        return key if key.revoked_at is not None else self._replace(replace(key, revoked_at=now))

    def expire(self, key_id: str, expires_at: datetime) -> ApiKey:
        """Let a key expire then; an earlier expiry stays.

        Raises:
            OperatorError: there is none of that id.
        """
        key = self.key(key_id)
        if key.expires_at is not None and key.expires_at <= expires_at:
            return key
        return self._replace(replace(key, expires_at=expires_at))

    def _replace(self, key: ApiKey) -> ApiKey:
        for index, line in enumerate(self.lines):
            if isinstance(line, ApiKey) and line.key_id == key.key_id:
                self.lines[index] = key
        return key


@contextmanager
def edit_key_file(path: Path, *, create: bool = False) -> Iterator[KeyDocument]:
    """Change a key file under a lock; it is written only without an error.

    Raises:
        OperatorError: there is no such file, or another process holds it.
        ConfigInvalid: it has bad lines.
        OSError: it cannot be read or written.
    """
    # A link stays a link: its target is replaced.
    path = path.resolve()
    if create:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    else:
        _check_exists(path)
    with path.with_name(path.name + ".lock").open("a") as lock:
        _lock(lock, path)
        document = KeyDocument(path, read_lines(path) if path.exists() else [])
        original_lines = list(document.lines)
        yield document
        if document.lines != original_lines:
            _write(document)


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise OperatorError(
            f"there is no key file {path}", "make its first key with 'baton keys create'"
        )


def _lock(lock: IO[str], path: Path) -> None:
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= deadline_s:
                raise OperatorError(
                    f"another process is changing {path}", "try again when that has ended"
                ) from error
            time.sleep(_LOCK_RETRY_S)
        else:
            return


def _write(document: KeyDocument) -> None:
    text = "".join(
        f"{line.format_line() if isinstance(line, ApiKey) else line}\n" for line in document.lines
    )
    folder = document.path.parent
    # Made with mode 0600.
    handle, name = tempfile.mkstemp(prefix=f".{document.path.name}.", dir=folder)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(document.path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _signature(path: Path) -> Signature:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _check_tenants(path: Path, keys: tuple[ApiKey, ...], tenants: frozenset[str]) -> None:
    errors = tuple(
        f"{path}: key {key.key_id} is of tenant {key.tenant!r}, expected {_join_names(tenants)}"
        for key in keys
        if key.tenant not in tenants
    )
    if errors:
        raise ConfigInvalid(errors[:_MAX_ERRORS])


def _find_duplicate_id(
    path: Path, keys: tuple[ApiKey, ...], watched: Mapping[Path, _WatchedFile]
) -> str | None:
    key_ids = {key.key_id for key in keys}
    for other, file in watched.items():
        if other != path:
            for key in file.keys:
                if key.key_id in key_ids:
                    return key.key_id
    return None


def _error_notice(path: Path, file: _WatchedFile, reason: str) -> KeyNotice | None:
    if reason == file.reported_error:
        return None
    file.reported_error = reason
    return KeyNotice(path=str(path), keys=len(file.keys), reason=reason)


def _join_names(names: frozenset[str]) -> str:
    return " or ".join(repr(name) for name in sorted(names))
