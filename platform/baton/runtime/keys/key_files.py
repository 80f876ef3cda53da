"""Key files: read again when they change, and changed by one process at a time.

Theory of operation: `KeyFiles` keeps a ring of the keys in some files. Whoever owns it calls `poll`
about once a second, in a thread, since a file may be on a slow disk; a file whose time, size or
inode changed is read again. One that cannot be read or has a bad line leaves its last good keys in
place, and that is said once. Revoking a key therefore takes effect within a poll, and a mistake in
a file locks nobody out. `editing` is how files change: under a lock, and replaced as a whole, so
that a reader never sees half a file.
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
_FIRST_LINES = 20

Signature = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyNotice:
    """What became of a file that changed."""

    path: str
    keys: int
    """That count from it now."""
    why: str | None = None
    """Why its new content does not count; None when it does."""


@dataclass(slots=True)
class _Watched:
    tenants: frozenset[str]
    signature: Signature | None = None
    keys: tuple[ApiKey, ...] = ()
    said: str | None = None
    is_read: bool = False


class KeyFiles:
    """The keys in the files of some tenants, as new as the last poll."""

    def __init__(self, files: Mapping[str, Path] | None = None) -> None:
        self._watched: dict[Path, _Watched] = {}
        self._ring = KeyRing()
        self._joining = threading.Lock()
        """Held while a ring is made: whoever makes the last one has seen the last files."""
        self.watch(files or {})

    @property
    def ring(self) -> KeyRing:
        """The keys that count now; replaced as a whole, so it may be read from any thread."""
        return self._ring

    def watch(self, files: Mapping[str, Path]) -> None:
        """Watch these files from now on, by tenant; several tenants may share one.

        Keys of files that are no longer among them stop counting at once, new ones count from the
        next poll on.
        """
        tenants: dict[Path, set[str]] = {}
        for tenant, path in files.items():
            tenants.setdefault(Path(path), set()).add(tenant)
        watched: dict[Path, _Watched] = {}
        for path, names in tenants.items():
            before = self._watched.get(path)
            if before is not None and before.tenants == names:
                watched[path] = before
            else:
                kept = tuple(key for key in before.keys if key.tenant in names) if before else ()
                watched[path] = _Watched(tenants=frozenset(names), keys=kept)
        self._watched = watched  # as a whole: a poll in another thread may be walking through it
        self._join()

    def poll(self) -> tuple[KeyNotice, ...]:
        """Read what has changed; says what became of each file that did. Blocks on the disk."""
        watched = self._watched
        notices = [
            notice
            for path, file in watched.items()
            if (notice := self._look_at(path, file, watched)) is not None
        ]
        if notices:
            self._join()
        return tuple(notices)

    def _look_at(
        self, path: Path, file: _Watched, watched: Mapping[Path, _Watched]
    ) -> KeyNotice | None:
        try:
            # Taken before it is read: what is written meanwhile shows in the next poll.
            signature = _signature(path)
            if signature == file.signature:
                return None
            file.signature = signature
            keys = tuple(key for key in read_keys(path) if isinstance(key, ApiKey))
            _check_tenants(path, keys, file.tenants)
        except OSError as error:
            file.signature = None  # it may be readable without having changed
            why = f"{path}: cannot be read: {error.strerror or error}"
            return _complaint(path, file, why)
        except ConfigInvalid as error:
            return _complaint(path, file, str(error))
        if taken := _taken_elsewhere(path, keys, watched):
            # It may be on its way from one file to the other: looked at again next time.
            file.signature = None
            return _complaint(path, file, f"{path}: key {taken} is in another file, too")
        first, file.is_read = not file.is_read, True
        changed = keys != file.keys or file.said is not None
        file.keys, file.said = keys, None
        return KeyNotice(path=str(path), keys=len(keys)) if changed or first else None

    def _join(self) -> None:
        with self._joining:
            self._ring = KeyRing(key for file in self._watched.values() for key in file.keys)


def load_ring(files: Mapping[str, Path]) -> KeyRing:
    """The keys of files, by tenant.

    Raises:
        ConfigInvalid: a file cannot be read, or has a bad line; names them all.
    """
    watched = KeyFiles(files)
    if bad := [notice.why for notice in watched.poll() if notice.why is not None]:
        raise ConfigInvalid(tuple(line for why in bad for line in why.splitlines()))
    return watched.ring


def read_keys(path: Path) -> list[ApiKey | str]:
    """A key file's lines: keys, and comments and empty lines as they are.

    Raises:
        OSError: it cannot be read.
        ConfigInvalid: it has bad lines; names them all.
    """
    with path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigInvalid((f"{path}: larger than {MAX_FILE_BYTES} bytes, revoke by removing",))
    found: list[ApiKey | str] = []
    bad: list[str] = []
    ids: set[str] = set()
    for number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), start=1):
        try:
            key = parse_line(line)
        except BadKeyLine as error:
            bad.append(f"{path}:{number}: {error}")
            continue
        if key is None:
            found.append(line)
        elif key.key_id in ids:
            bad.append(f"{path}:{number}: key {key.key_id} is there twice")
        else:
            ids.add(key.key_id)
            found.append(key)
    if bad:
        raise ConfigInvalid(tuple(bad[:_FIRST_LINES]))
    return found


def keys_of(path: Path) -> tuple[ApiKey, ...]:
    """The keys in a file.

    Raises:
        OperatorError: there is no such file.
        ConfigInvalid: it has bad lines.
        OSError: it cannot be read.
    """
    _check_exists(path)
    return tuple(line for line in read_keys(path) if isinstance(line, ApiKey))


@dataclass(slots=True)
class KeyDocument:
    """A key file under change."""

    path: Path
    lines: list[ApiKey | str] = field(default_factory=list)

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """Its keys, in order."""
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
        """Have a key count no more; one that is revoked already stays as it is.

        Raises:
            OperatorError: there is none of that id.
        """
        key = self.key(key_id)
        return key if key.revoked_at is not None else self._put(replace(key, revoked_at=now))

    def expire(self, key_id: str, at: datetime) -> ApiKey:
        """Have a key count until then, or as long as it does if that is shorter.

        Raises:
            OperatorError: there is none of that id.
        """
        key = self.key(key_id)
        if key.expires_at is not None and key.expires_at <= at:
            return key
        return self._put(replace(key, expires_at=at))

    def _put(self, key: ApiKey) -> ApiKey:
        for at, line in enumerate(self.lines):
            if isinstance(line, ApiKey) and line.key_id == key.key_id:
                self.lines[at] = key
        return key


@contextmanager
def editing(path: Path, *, create: bool = False) -> Iterator[KeyDocument]:
    """Change a key file: nobody else does meanwhile, and it is written only when nothing fails.

    Raises:
        OperatorError: there is no such file, or somebody else holds it.
        ConfigInvalid: it has bad lines.
        OSError: it cannot be read or written.
    """
    # A link stays a link: what it points to is replaced.
    path = path.resolve()
    if create:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    else:
        _check_exists(path)
    with path.with_name(path.name + ".lock").open("a") as lock:
        _lock(lock, path)
        document = KeyDocument(path, read_keys(path) if path.exists() else [])
        before = list(document.lines)
        yield document
        if document.lines != before:
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
                    f"somebody else is changing {path}", "try again when that has ended"
                ) from error
            time.sleep(_LOCK_RETRY_S)
        else:
            return


def _write(document: KeyDocument) -> None:
    text = "".join(
        f"{line.line() if isinstance(line, ApiKey) else line}\n" for line in document.lines
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
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _check_tenants(path: Path, keys: tuple[ApiKey, ...], tenants: frozenset[str]) -> None:
    bad = tuple(
        f"{path}: key {key.key_id} is of tenant {key.tenant!r}, wanted {_words(tenants)}"
        for key in keys
        if key.tenant not in tenants
    )
    if bad:
        raise ConfigInvalid(bad[:_FIRST_LINES])


def _taken_elsewhere(
    path: Path, keys: tuple[ApiKey, ...], watched: Mapping[Path, _Watched]
) -> str | None:
    mine = {key.key_id for key in keys}
    for other, file in watched.items():
        if other != path:
            for key in file.keys:
                if key.key_id in mine:
                    return key.key_id
    return None


def _complaint(path: Path, file: _Watched, why: str) -> KeyNotice | None:
    if why == file.said:
        return None
    file.said = why
    return KeyNotice(path=str(path), keys=len(file.keys), why=why)


def _words(names: frozenset[str]) -> str:
    return " or ".join(repr(name) for name in sorted(names))
