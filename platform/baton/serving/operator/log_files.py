"""Logs of baton's processes on this machine, from the files of their Ray session.

Theory of operation: Ray gives each process a file for stderr, and puts the actor's name on one of
its first lines. baton's events are lines of JSON or text in it (`telemetry.logs`), between lines of
vLLM and others. `LogFiles` remembers how far each file was read, looks for new files, and returns
whole lines in the order of time. It keeps no file open.
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
    r"(?P<at>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\S*) (?P<level>[A-Z]+) +(?P<text>\S.*)"
)
_EVENT = re.compile(r"(?P<event>\w+)(?P<fields>(?: \w+=.*)?)")
_FIELDS = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)')
"""Values with spaces in them are quoted as in JSON."""
_START_EVENTS = {
    "replica_started": "replica_id",
    "ingress_started": "ingress",
    "controller_started": "controller",
}
_HEAD_BYTES = 256 * 1024
"""A process logs its id within this part: engines print a lot before."""
_TAIL_BYTES = 8 * 1024 * 1024
"""The most that is read of an existing file: some 20,000 events."""
_POLL_S = 0.3
_RESERVED_FIELDS = frozenset({"at", "level", "node", "source", "event", "text"})
"""Names in a report; a field of an event with such a name is prefixed."""
LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """A selection of lines."""

    replica: str | None = None
    """The id of a replica, or the name of a pool."""
    ingress: bool = False
    controller: bool = False
    """Without replica, ingress or controller: all processes."""
    level: str = "debug"
    events: frozenset[str] = frozenset()
    """Names of events; empty for all."""
    request_id: str | None = None
    include_foreign: bool = False
    """Also lines of vLLM, Ray and others, which have no level."""
    tail_lines: int | None = 100
    """The most existing lines; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """An event, or another line."""

    timestamp: str
    """Of a line that is no event: that of the event before it, or empty."""
    level: str
    """Empty for a line that is no event."""
    event: str
    fields: Mapping[str, object]
    source: str
    text: str
    node: str = ""

    def to_dict(self) -> dict[str, object]:
        """As one plain object; a link's own `source` is its `event_source`."""
        node_fields = {"node": self.node} if self.node else {}
        if not self.event:
            return {
                "at": self.timestamp or None,
                **node_fields,
                "source": self.source,
                "text": self.text,
            }
        head = {"at": self.timestamp, "level": self.level, **node_fields}
        head |= {"source": self.source, "event": self.event}
        return head | {
            f"event_{name}" if name in _RESERVED_FIELDS else name: value
            for name, value in self.fields.items()
        }


@dataclass(slots=True)
class _LogFile:
    path: Path
    deployment: str
    """The ingress, the controller, or a pool."""
    name: str
    read_bytes: int = 0
    last_timestamp: str = ""
    in_traceback: bool = False
    partial_line: bytes = field(default=b"")


class LogFiles:
    """The files of one Ray session."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _LogFile] = {}

    @property
    def sources(self) -> list[str]:
        """The names of the processes that were found."""
        return sorted(file.name for file in self._files.values())

    def read(self, query: LogQuery) -> list[LogLine]:
        """New lines of all files, in the order of time; all of them the first time."""
        self._discover()
        lines: list[LogLine] = []
        for file in self._files.values():
            if _is_selected(file, query):
                lines += [line for line in _new_lines(file) if _matches(line, query)]
        return sorted(lines, key=lambda line: line.timestamp)

    def _discover(self) -> None:
        for path in sorted(self._folder.glob("worker-*.err")):
            known = self._files.get(path)
            if known is None and (file := _identify(path)) is not None:
                self._files[path] = file
            elif known is not None and known.name.endswith(")"):
                known.name = (_identify(path) or known).name


class LineSource(Protocol):
    """A source of new lines."""

    def read(self, query: LogQuery) -> list[LogLine]:
        """New lines, in the order of time; all of them the first time."""
        ...


def follow_lines(
    files: LineSource, query: LogQuery, *, is_alive: Callable[[], bool], pause_s: float = _POLL_S
) -> Iterator[LogLine | None]:
    """Existing lines, then new lines, until the deployment has ended; None after each pause."""
    yield from last_lines(files.read(query), query)
    while True:
        was_alive = is_alive()
        lines = files.read(query)
        yield from lines
        if not was_alive:
            return
        if not lines:
            time.sleep(pause_s)
            yield None


def last_lines(lines: list[LogLine], query: LogQuery) -> list[LogLine]:
    """The newest lines, at most `query.tail_lines`."""
    return (
        lines
        if query.tail_lines is None
        else lines[len(lines) - min(query.tail_lines, len(lines)) :]
    )


def _identify(path: Path) -> _LogFile | None:
    """The process of a file; None for a process of others, or not known yet."""
    match = _FILE.fullmatch(path.name)
    if match is None:
        return None
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).decode(errors="replace")
    except OSError:
        return None
    deployment = next(
        (x.removeprefix(_ACTOR) for x in head.splitlines() if x.startswith(_ACTOR)), None
    )
    if deployment is None:
        return None
    return _LogFile(
        path=path,
        deployment=deployment,
        name=_process_name(deployment, head) or f"{deployment} (pid {match['pid']})",
    )


def _process_name(deployment: str, head: str) -> str | None:
    """The id that a process logs at its start; None before that."""
    for text in head.splitlines():
        if not any(event in text for event in _START_EVENTS):
            continue
        line = parse_line(text, "")
        if line is not None and line.event in _START_EVENTS:
            process_id = str(line.fields.get(_START_EVENTS[line.event], ""))
            return (
                f"{deployment}-{process_id}" if deployment in {INGRESS, CONTROLLER} else process_id
            )
    return None


def _is_selected(file: _LogFile, query: LogQuery) -> bool:
    deployments = [
        name for name, on in ((INGRESS, query.ingress), (CONTROLLER, query.controller)) if on
    ]
    if not deployments and query.replica is None:
        return True
    return file.deployment in deployments or query.replica in {file.name, file.deployment}


def _new_lines(file: _LogFile) -> Iterator[LogLine]:
    """Whole lines since the last read; a shorter file has replaced the old one."""
    try:
        size_bytes = file.path.stat().st_size
        if size_bytes < file.read_bytes:
            file.read_bytes, file.partial_line = 0, b""
        skip_bytes = max(file.read_bytes, size_bytes - _TAIL_BYTES)
        with file.path.open("rb") as stream:
            stream.seek(skip_bytes)
            data = stream.read(size_bytes - skip_bytes)
    except OSError:
        return
    if skip_bytes > file.read_bytes:
        data = data.partition(b"\n")[2]  # the first one is not whole
        file.partial_line = b""
    file.read_bytes = size_bytes
    *complete_lines, file.partial_line = (file.partial_line + data).split(b"\n")
    for raw in complete_lines:
        yield _line(file, raw.decode(errors="replace"))


def _line(file: _LogFile, text: str) -> LogLine:
    event_line = parse_line(text, file.name)
    if event_line is not None:
        file.last_timestamp, file.in_traceback = event_line.timestamp, False
        return event_line
    in_traceback = text.startswith("Traceback (") or (
        file.in_traceback and text.startswith((" ", "\t"))
    )
    # The last line of a traceback is not indented.
    is_part = in_traceback or (file.in_traceback and bool(text.strip()))
    file.in_traceback = in_traceback
    return LogLine(
        timestamp=file.last_timestamp,
        level="error" if is_part and file.last_timestamp else "",
        event="",
        fields={},
        source=file.name,
        text=text,
    )


def parse_line(text: str, source: str) -> LogLine | None:
    """A line as one of baton's events; None for other lines."""
    if text.startswith("{"):
        return _parse_json(text, source)
    match = _TEXT.fullmatch(text)
    if match is None:
        return None
    event = _EVENT.fullmatch(match["text"])
    return LogLine(
        timestamp=match["at"],
        level=match["level"].lower(),
        event=match["text"] if event is None else event["event"],
        fields={}
        if event is None
        else {name: _value(text) for name, text in _FIELDS.findall(event["fields"])},
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


def _parse_json(text: str, source: str) -> LogLine | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    if not isinstance(record, dict) or not {"at", "level", "event"} <= record.keys():
        return None
    fields = {name: value for name, value in record.items() if name not in {"at", "level", "event"}}
    fields.pop("logger", None)
    return LogLine(
        timestamp=str(record["at"]),
        level=str(record["level"]),
        event=str(record["event"]),
        fields=fields,
        source=source,
        text=text,
    )


def _matches(line: LogLine, query: LogQuery) -> bool:
    if not line.event:
        is_filtered = query.events or query.request_id is not None
        if line.level:  # of a traceback
            return not is_filtered
        return (
            query.include_foreign
            and not is_filtered
            and not line.text.startswith((":job_id:", ":actor_name:"))
        )
    if line.level in LEVELS and LEVELS.index(line.level) < LEVELS.index(query.level):
        return False
    if query.events and line.event not in query.events:
        return False
    return query.request_id is None or _matches_request_id(
        str(line.fields.get("request_id", "")), query
    )


def _matches_request_id(request_id: str, query: LogQuery) -> bool:
    """Whether the client's id is part of ours: `r-1` of `cmpl-r-1-0`, not of `cmpl-r-12`.

    The gate of vLLM's Rust frontend appends two words: `cmpl-r-1~20d39a8f~gold-0f` matches `r-1`,
    not `gold`.
    """
    pattern = re.escape(query.request_id or "")
    return re.match(rf"(?:[^~]*[-_])?{pattern}(?:[-_~]|$)", request_id) is not None
