"""What baton's processes on this machine have logged, read from the files of their Ray session.

Theory of operation: Ray gives each process a file for what it writes to stderr, and puts the name
of the actor on one of its first lines. baton's own events are lines of JSON or of text in it
(`telemetry.logs`), between what vLLM and others print. `LogFiles` remembers how far each file was
read, finds new files by looking again, and hands out lines in the order of their time. Whole lines
only: half a line is read again when the rest is there. Nothing is held open.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from baton.serving.shared.names import APP, CONTROLLER, INGRESS

_ACTOR = f":actor_name:ServeReplica:{APP}:"
_FILE = re.compile(r"worker-[0-9a-f]+-[0-9a-f]+-(?P<pid>\d+)\.err")
_TEXT = re.compile(
    r"(?P<at>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\S*) (?P<level>[A-Z]+) +(?P<said>\S.*)"
)
_SAID = re.compile(r"(?P<event>\w+)(?P<fields>(?: \w+=.*)?)")
"""An event and its fields; whatever else is logged is a sentence."""
_FIELDS = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)')
"""Values with spaces in them are quoted as in JSON."""
_STARTED = {
    "replica_started": "replica_id",
    "ingress_started": "ingress",
    "controller_started": "controller",
}
_HEAD_BYTES = 256 * 1024
"""Where a process says who it is: engines print a lot before."""
_TAIL_BYTES = 8 * 1024 * 1024
"""What is read at most of a file that was written before: some 20,000 events."""
_POLL_S = 0.3
_OURS = frozenset({"at", "level", "node", "source", "event", "text"})
"""Names in a report that a field of the event's own does not take."""
LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOrder:
    """Which lines somebody wants."""

    replica: str | None = None
    """Of the replica with this id, or of the replicas of this pool."""
    ingress: bool = False
    controller: bool = False
    """With neither of the three: of all."""
    level: str = "debug"
    """Events from this level on."""
    events: frozenset[str] = frozenset()
    """Only these; empty for all."""
    request_id: str | None = None
    """Only events about this request."""
    others: bool = False
    """Also what vLLM, Ray and others print, which has no level."""
    last: int | None = 100
    """At most so many of those that are there already; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One event, or one line that somebody else printed."""

    at: str
    """Of an event; of another line, that of the event before it, or empty."""
    level: str
    """Empty for a line that is no event."""
    event: str
    fields: Mapping[str, object]
    source: str
    text: str
    """As it stands in the file."""
    node: str = ""
    """Where it was read, if on a cluster of several nodes."""

    def report(self) -> dict[str, object]:
        """As one plain object; a link's own `source` is its `event_source`."""
        where = {"node": self.node} if self.node else {}
        if not self.event:
            return {"at": self.at or None, **where, "source": self.source, "text": self.text}
        head = {"at": self.at, "level": self.level, **where}
        head |= {"source": self.source, "event": self.event}
        return head | {
            f"event_{name}" if name in _OURS else name: value for name, value in self.fields.items()
        }


@dataclass(slots=True)
class _File:
    path: Path
    part: str
    """The deployment: ingress, controller, or a pool."""
    name: str
    read_bytes: int = 0
    at: str = ""
    """Of the last event."""
    traced: bool = False
    """The last line belongs to a traceback of the last event."""
    rest: bytes = field(default=b"")


class LogFiles:
    """The files of one Ray session; `read` gives what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _File] = {}

    @property
    def sources(self) -> list[str]:
        """The processes that were found, by name."""
        return sorted(one.name for one in self._files.values())

    def read(self, order: LogOrder) -> list[LogLine]:
        """New lines of all files, in the order of their time; all of them the first time."""
        self._look()
        lines: list[LogLine] = []
        for file in self._files.values():
            if _meant(file, order):
                lines += [line for line in _new_lines(file) if _wanted(line, order)]
        return sorted(lines, key=lambda line: line.at)

    def _look(self) -> None:
        """Find files that are new, and names that were not known yet."""
        for path in sorted(self._folder.glob("worker-*.err")):
            known = self._files.get(path)
            if known is None and (found := _introduced(path)) is not None:
                self._files[path] = found
            elif known is not None and known.name.endswith(")"):
                known.name = (_introduced(path) or known).name


class Lines(Protocol):
    """Where new lines come from."""

    def read(self, order: LogOrder) -> list[LogLine]:
        """New lines, in the order of their time; all of them the first time."""
        ...


def followed(
    files: Lines, order: LogOrder, *, alive: Callable[[], bool], pause_s: float = _POLL_S
) -> Iterator[LogLine | None]:
    """What is there, then what comes, until the deployment has ended; None for nothing new.

    The pauses are this function's: each None comes after one.
    """
    yield from last_lines(files.read(order), order)
    while True:
        goes_on = alive()
        lines = files.read(order)
        yield from lines
        if not goes_on:
            return
        if not lines:
            time.sleep(pause_s)
            yield None


def printed(files: Lines, order: LogOrder) -> Iterator[LogLine]:
    """What is there."""
    yield from last_lines(files.read(order), order)


def last_lines(lines: list[LogLine], order: LogOrder) -> list[LogLine]:
    """The newest, as many as somebody wants."""
    return lines if order.last is None else lines[len(lines) - min(order.last, len(lines)) :]


def _introduced(path: Path) -> _File | None:
    """Whose file it is; None when it is none of baton's, or does not say yet."""
    named = _FILE.fullmatch(path.name)
    if named is None:
        return None
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode(errors="replace")
    except OSError:
        return None
    part = next((x.removeprefix(_ACTOR) for x in head.splitlines() if x.startswith(_ACTOR)), None)
    if part is None:
        return None
    return _File(path=path, part=part, name=_name(part, head) or f"{part} (pid {named['pid']})")


def _name(part: str, head: str) -> str | None:
    """What a process calls itself, once it has said so."""
    for text in head.splitlines():
        if not any(event in text for event in _STARTED):
            continue
        line = parsed(text, "")
        if line is not None and line.event in _STARTED:
            said = str(line.fields.get(_STARTED[line.event], ""))
            return f"{part}-{said}" if part in {INGRESS, CONTROLLER} else said
    return None


def _meant(file: _File, order: LogOrder) -> bool:
    chosen = [name for name, on in ((INGRESS, order.ingress), (CONTROLLER, order.controller)) if on]
    if not chosen and order.replica is None:
        return True
    return file.part in chosen or order.replica in {file.name, file.part}


def _new_lines(file: _File) -> Iterator[LogLine]:
    """Whole lines since the last time; the file may have been replaced by a shorter one."""
    try:
        size_bytes = file.path.stat().st_size
        if size_bytes < file.read_bytes:
            file.read_bytes, file.rest = 0, b""
        skip_bytes = max(file.read_bytes, size_bytes - _TAIL_BYTES)
        with file.path.open("rb") as opened:
            opened.seek(skip_bytes)
            read = opened.read(size_bytes - skip_bytes)
    except OSError:
        return
    if skip_bytes > file.read_bytes:
        read = read.partition(b"\n")[2]  # the first one is not whole
        file.rest = b""
    file.read_bytes = size_bytes
    *whole, file.rest = (file.rest + read).split(b"\n")
    for raw in whole:
        yield _line(file, raw.decode(errors="replace"))


def _line(file: _File, text: str) -> LogLine:
    found = parsed(text, file.name)
    if found is not None:
        file.at, file.traced = found.at, False
        return found
    traced = text.startswith("Traceback (") or (file.traced and text.startswith((" ", "\t")))
    # The last line of a traceback stands at the margin again.
    is_part = traced or (file.traced and bool(text.strip()))
    file.traced = traced
    return LogLine(
        at=file.at,
        level="error" if is_part and file.at else "",
        event="",
        fields={},
        source=file.name,
        text=text,
    )


def parsed(text: str, source: str) -> LogLine | None:
    """A line as one of baton's events; None when it is none."""
    if text.startswith("{"):
        return _parsed_json(text, source)
    match = _TEXT.fullmatch(text)
    if match is None:
        return None
    said = _SAID.fullmatch(match["said"])
    return LogLine(
        at=match["at"],
        level=match["level"].lower(),
        event=match["said"] if said is None else said["event"],
        fields={}
        if said is None
        else {name: _value(text) for name, text in _FIELDS.findall(said["fields"])},
        source=source,
        text=text,
    )


def _value(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        return text


def _parsed_json(text: str, source: str) -> LogLine | None:
    try:
        told = json.loads(text)
    except ValueError:
        return None
    if not isinstance(told, dict) or not {"at", "level", "event"} <= told.keys():
        return None
    fields = {name: value for name, value in told.items() if name not in {"at", "level", "event"}}
    fields.pop("logger", None)
    return LogLine(
        at=str(told["at"]),
        level=str(told["level"]),
        event=str(told["event"]),
        fields=fields,
        source=source,
        text=text,
    )


def _wanted(line: LogLine, order: LogOrder) -> bool:
    if not line.event:
        narrow = order.events or order.request_id is not None
        if line.level:  # of a traceback
            return not narrow
        return (
            order.others and not narrow and not line.text.startswith((":job_id:", ":actor_name:"))
        )
    if line.level in LEVELS and LEVELS.index(line.level) < LEVELS.index(order.level):
        return False
    if order.events and line.event not in order.events:
        return False
    return order.request_id is None or _is_named(str(line.fields.get("request_id", "")), order)


def _is_named(request_id: str, order: LogOrder) -> bool:
    """Whether a client's name for it is part of ours: `r-1` of `cmpl-r-1-0`, not of `cmpl-r-12`.

    The gate of vLLM's Rust frontend puts two words of its own behind a name:
    `cmpl-r-1~20d39a8f~gold-0f` is called `r-1`, and not `gold`.
    """
    named = re.escape(order.request_id or "")
    return re.match(rf"(?:[^~]*[-_])?{named}(?:[-_~]|$)", request_id) is not None
