"""Parses YAML text to a tree with positions.

Theory of operation: a recursive descent builds the tree from the events of ruamel's parser, so that
the bounds below limit deep nesting and fans of aliases. ruamel's own composer keeps no position of
an alias and has no bound on depth. Only YAML 1.2's core types exist: `yes`, `1_000` and dates are
text. Invalid YAML raises `Unreadable` with one finding; all other errors are collected.
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
    ListNode,
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
    """The text is not a YAML document that can be checked further."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding


def read_file(file: FilePath, findings: list[Finding]) -> Node:
    """The tree of one file; errors of single keys are added to `findings`.

    Raises:
        Unreadable: the file is missing, not text, not YAML, or too large.
    """
    origin = FileOrigin(str(file), 1, 1)
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise Unreadable(Finding(origin, (), f"cannot be read: {reason}")) from error
    if len(raw) > MAX_FILE_BYTES:
        message = f"too large: more than {MAX_FILE_BYTES} bytes, expected a configuration file"
        raise Unreadable(Finding(origin, (), message))
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text: byte {error.start} cannot be decoded"
        raise Unreadable(Finding(origin, (), message)) from error
    return read_text(text, origin, findings)


def read_text(text: str, source_origin: Origin, findings: list[Finding]) -> Node:
    """The tree of one YAML document.

    Args:
        text: the document.
        source_origin: origin of the text; positions are kept only for files.
        findings: receives errors of single keys.

    Raises:
        Unreadable: it is not one YAML document within the bounds.
    """
    builder = _TreeBuilder(source_origin, findings)
    try:
        return builder.document(YAML(typ="safe", pure=True).parse(io.StringIO(text)))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        origin = source_origin if mark is None else builder.origin_at(mark)
        raise Unreadable(Finding(origin, (), _error_message(error))) from error
    except ReaderError as error:
        origin = _character_origin(source_origin, text, error.position)
        message = f"character U+{ord(text[error.position]):04X} is not allowed in YAML"
        raise Unreadable(Finding(origin, (), message)) from error
    except (YAMLError, ValueError) as error:
        raise Unreadable(Finding(source_origin, (), f"not YAML: {error}")) from error


def _error_message(error: MarkedYAMLError) -> str:
    problem = str(error.problem or error)
    if r"'\t'" in problem:
        return "not YAML: a tab where only spaces are allowed, indent with spaces"
    return f"not YAML: {error.context}, {problem}" if error.context else f"not YAML: {problem}"


def _character_origin(source_origin: Origin, text: str, position: int) -> Origin:
    if not isinstance(source_origin, FileOrigin):
        return source_origin
    line = text.count("\n", 0, position)
    return FileOrigin(
        source_origin.file, line + 1, position - (text.rfind("\n", 0, position) + 1) + 1
    )


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


class _TreeBuilder:
    """Builds one document's tree and limits its size."""

    def __init__(self, source_origin: Origin, findings: list[Finding]) -> None:
        self._source_origin = source_origin
        self._findings = findings
        self._anchors: dict[str, tuple[Node, int] | None] = {}
        """Node and number of values of each anchor; None while it is read."""
        self._value_count = 0

    def origin_at(self, mark: StringMark) -> Origin:
        if not isinstance(self._source_origin, FileOrigin):
            return self._source_origin
        return FileOrigin(self._source_origin.file, mark.line + 1, mark.column + 1)

    def document(self, events: Iterator[Event]) -> Node:
        root: Node | None = None
        for event in events:
            if isinstance(event, DocumentStartEvent) and root is not None:
                self._fail(self.origin_at(event.start_mark), "a second document, expected only one")
            if isinstance(event, NodeEvent):
                root = self._node(event, events, ())
        return root if root is not None else Scalar(None, self._source_origin, "")

    def _fail(self, origin: Origin, message: str, path: Path = ()) -> NoReturn:
        raise Unreadable(Finding(origin, path, message))

    def _node(self, event: NodeEvent, events: Iterator[Event], path: Path) -> Node:
        origin = self.origin_at(event.start_mark)
        count_before = self._value_count
        self._count(1, origin)
        if len(path) > MAX_DEPTH:
            self._fail(origin, f"nested more than {MAX_DEPTH} deep")
        if isinstance(event, AliasEvent):
            return self._alias(event.anchor, origin, path)
        if event.anchor:
            self._anchors[event.anchor] = None
        if isinstance(event, ScalarEvent):
            node: Node = _scalar(event, origin)
        elif isinstance(event, SequenceStartEvent):
            node = self._list(events, origin, path)
        else:
            node = self._section(events, origin, path)
        if tag := _tag(event):
            self._findings.append(Finding(origin, path, f"tag {tag} is not allowed, remove it"))
        if event.anchor:
            self._anchors[event.anchor] = node, self._value_count - count_before
        return node

    def _count(self, values: int, origin: Origin) -> None:
        self._value_count += values
        if self._value_count > MAX_VALUES:
            self._fail(origin, f"more than {MAX_VALUES} values (aliases count as what they repeat)")

    def _alias(self, anchor: str, origin: Origin, path: Path) -> Node:
        if anchor not in self._anchors:
            self._fail(origin, f"alias *{anchor} has no anchor before it", path)
        anchored = self._anchors[anchor]
        if anchored is None:
            self._fail(origin, f"alias *{anchor} contains itself", path)
        node, values = anchored
        self._count(values, origin)
        return node

    def _list(self, events: Iterator[Event], origin: Origin, path: Path) -> ListNode:
        items: list[Node] = []
        while isinstance(event := next(events), NodeEvent):
            items.append(self._node(event, events, (*path, str(len(items)))))
        return ListNode(tuple(items), origin)

    def _section(self, events: Iterator[Event], origin: Origin, path: Path) -> Section:
        entries: dict[str, Entry] = {}
        while isinstance(event := next(events), NodeEvent):
            key_origin = self.origin_at(event.start_mark)
            if not isinstance(event, ScalarEvent):
                self._fail(key_origin, "a key that is no plain text, expected a name", path)
            key, value_event = str(event.value), next(events)
            assert isinstance(value_event, NodeEvent), "the parser puts a node after each key"
            node = self._node(value_event, events, (*path, key))
            if isinstance(node, Scalar) and not node.text and node.value is None:
                # The parser gives an absent value the position of the next event.
                node = Scalar(None, key_origin, "")
            if key == "<<":
                message = (
                    "merge keys are not supported, repeat the keys or use an overlay (-c a -c b)"
                )
                self._findings.append(Finding(key_origin, path, message))
            elif key in entries:
                message = f"given twice, first at {entries[key].origin}, keep one"
                self._findings.append(Finding(key_origin, (*path, key), message))
            else:
                entries[key] = Entry(node, key_origin)
        return Section(entries, origin)


def _tag(event: NodeEvent) -> str:
    tag = event.ctag if isinstance(event, CollectionStartEvent | ScalarEvent) else None
    return "" if tag is None else str(tag).replace("tag:yaml.org,2002:", "!!")


def _scalar(event: ScalarEvent, origin: Origin) -> Scalar:
    # JSON writes U+10000 and above as two escaped surrogates, which the parser does not join.
    text = str(event.value).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    plain = event.style is None and not _tag(event)
    return Scalar(resolve(text) if plain else text, origin, text)
