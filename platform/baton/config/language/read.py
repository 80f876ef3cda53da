"""YAML text to a tree with positions.

Theory of operation: ruamel's parser yields events with marks; a recursive descent builds the tree
from them, so that neither deep nesting nor a fan of aliases can cost more than the bounds below.
ruamel's own composer keeps no place of an alias and has no bound on depth.
Only YAML 1.2's core types exist: `yes`, `1_000` and dates are text. What cannot be parsed at all
raises `Unreadable` with one finding; everything else that is wrong is collected.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, StringMark, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    NodeEvent,
    ScalarEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from baton.config.language.tree import (
    Entry,
    FileOrigin,
    Finding,
    Listing,
    Node,
    Origin,
    Path,
    Scalar,
    Section,
)

MAX_FILE_BYTES = 256 * 1024
MAX_VALUES = 10_000
MAX_DEPTH = 32

_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = frozenset({"true", "True", "TRUE", "false", "False", "FALSE"})


class Unreadable(Exception):
    """The text is no YAML document that could be looked at any further."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding


def read_file(file: FilePath, findings: list[Finding]) -> Node:
    """The tree of one file; what is wrong with single keys is added to `findings`.

    Raises:
        Unreadable: no such file, not text, not YAML, too large.
    """
    start = FileOrigin(str(file), 1, 1)
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        why = (error.strerror or type(error).__name__).lower()
        raise Unreadable(Finding(start, (), f"cannot be read: {why}")) from error
    if len(raw) > MAX_FILE_BYTES:
        what = f"too large: more than {MAX_FILE_BYTES} bytes, wanted a configuration file"
        raise Unreadable(Finding(start, (), what))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text: byte {error.start} cannot be decoded"
        raise Unreadable(Finding(start, (), what)) from error
    return read_text(text, start, findings)


def read_text(text: str, start: Origin, findings: list[Finding]) -> Node:
    """The tree of one YAML document.

    Args:
        text: the document.
        start: where the text is from; positions are kept only for files.
        findings: what is wrong with single keys is added here.

    Raises:
        Unreadable: it is not one YAML document within the bounds.
    """
    builder = _Builder(start, findings)
    try:
        return builder.document(YAML(typ="safe", pure=True).parse(io.StringIO(text)))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        origin = start if mark is None else builder.at(mark)
        raise Unreadable(Finding(origin, (), _problem(error))) from error
    except ReaderError as error:
        origin = _nth_character(start, text, error.position)
        what = f"character U+{ord(text[error.position]):04X} is not allowed in YAML"
        raise Unreadable(Finding(origin, (), what)) from error
    except (YAMLError, ValueError) as error:
        raise Unreadable(Finding(start, (), f"not YAML: {error}")) from error


def _problem(error: MarkedYAMLError) -> str:
    problem = str(error.problem or error)
    if r"'\t'" in problem:
        return "not YAML: a tab where only spaces are allowed, indent with spaces"
    return f"not YAML: {error.context}, {problem}" if error.context else f"not YAML: {problem}"


def _nth_character(start: Origin, text: str, position: int) -> Origin:
    if not isinstance(start, FileOrigin):
        return start
    line = text.count("\n", 0, position)
    return FileOrigin(start.file, line + 1, position - (text.rfind("\n", 0, position) + 1) + 1)


def resolve(text: str) -> str | int | float | bool | None:
    """The value of a plain scalar by YAML 1.2's core schema, decimal numbers only."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


class _Builder:
    """Builds one document's tree, counting what it builds."""

    def __init__(self, start: Origin, findings: list[Finding]) -> None:
        self._start = start
        self._findings = findings
        self._anchors: dict[str, tuple[Node, int] | None] = {}
        """What stands at each anchor and how many values that is; None while it is read."""
        self._values = 0

    def at(self, mark: StringMark) -> Origin:
        if not isinstance(self._start, FileOrigin):
            return self._start
        return FileOrigin(self._start.file, mark.line + 1, mark.column + 1)

    def document(self, events: Iterator[Event]) -> Node:
        root: Node | None = None
        for event in events:
            if isinstance(event, DocumentStartEvent) and root is not None:
                self._stop(self.at(event.start_mark), "a second document, wanted only one")
            if isinstance(event, NodeEvent):
                root = self._node(event, events, ())
        return root if root is not None else Scalar(None, self._start, "")

    def _stop(self, origin: Origin, what: str, path: Path = ()) -> NoReturn:
        raise Unreadable(Finding(origin, path, what))

    def _node(self, event: NodeEvent, events: Iterator[Event], path: Path) -> Node:
        origin = self.at(event.start_mark)
        before = self._values
        self._count(1, origin)
        if len(path) > MAX_DEPTH:
            self._stop(origin, f"nested more than {MAX_DEPTH} deep")
        if isinstance(event, AliasEvent):
            return self._alias(event.anchor, origin, path)
        if event.anchor:
            self._anchors[event.anchor] = None
        if isinstance(event, ScalarEvent):
            node: Node = _scalar(event, origin)
        elif isinstance(event, SequenceStartEvent):
            node = self._listing(events, origin, path)
        else:
            node = self._section(events, origin, path)
        if tag := _tag(event):
            self._findings.append(Finding(origin, path, f"tag {tag} is not allowed, remove it"))
        if event.anchor:
            self._anchors[event.anchor] = node, self._values - before
        return node

    def _count(self, values: int, origin: Origin) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            self._stop(origin, f"more than {MAX_VALUES} values (aliases count as what they repeat)")

    def _alias(self, anchor: str, origin: Origin, path: Path) -> Node:
        if anchor not in self._anchors:
            self._stop(origin, f"alias *{anchor} has no anchor before it", path)
        anchored = self._anchors[anchor]
        if anchored is None:
            self._stop(origin, f"alias *{anchor} contains itself", path)
        node, values = anchored
        self._count(values, origin)
        return node

    def _listing(self, events: Iterator[Event], origin: Origin, path: Path) -> Listing:
        items: list[Node] = []
        while isinstance(event := next(events), NodeEvent):
            items.append(self._node(event, events, (*path, str(len(items)))))
        return Listing(tuple(items), origin)

    def _section(self, events: Iterator[Event], origin: Origin, path: Path) -> Section:
        entries: dict[str, Entry] = {}
        while isinstance(event := next(events), NodeEvent):
            key_origin = self.at(event.start_mark)
            if not isinstance(event, ScalarEvent):
                self._stop(key_origin, "a key that is no plain text, wanted a name", path)
            key, value_event = str(event.value), next(events)
            assert isinstance(value_event, NodeEvent), "the parser puts a node after each key"
            node = self._node(value_event, events, (*path, key))
            if isinstance(node, Scalar) and not node.text and node.value is None:
                # An absent value has no place of its own: the parser marks what follows it.
                node = Scalar(None, key_origin, "")
            if key == "<<":
                what = "merge keys are not supported, repeat the keys or use an overlay (-c a -c b)"
                self._findings.append(Finding(key_origin, path, what))
            elif key in entries:
                what = f"given twice, first at {entries[key].origin}, keep one"
                self._findings.append(Finding(key_origin, (*path, key), what))
            else:
                entries[key] = Entry(node, key_origin)
        return Section(entries, origin)


def _tag(event: NodeEvent) -> str:
    tag = event.ctag if isinstance(event, CollectionStartEvent | ScalarEvent) else None
    return "" if tag is None else str(tag).replace("tag:yaml.org,2002:", "!!")


def _scalar(event: ScalarEvent, origin: Origin) -> Scalar:
    # The parser leaves an escaped pair of surrogates, as JSON writes U+10000 and up, a pair.
    text = str(event.value).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    plain = event.style is None and not _tag(event)
    return Scalar(resolve(text) if plain else text, origin, text)
