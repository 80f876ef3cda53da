"""A tree to frozen values: every key known, every value of its kind, everything wrong said at once.

Theory of operation: `Builder.section` walks a schema and a tree side by side. A section with a
finding in it is not built (None), its siblings are, so that later checks see all that can be seen.
Sections that were built are kept by path for the cross checks, and so is each leaf's origin.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from baton.config.language.fields import (
    Anything,
    Environment,
    Field,
    Free,
    Labels,
    Mapped,
    Named,
    Names,
    Nested,
    SecretRef,
    fields_of,
    not_yet_of,
)
from baton.config.language.scalars import Leaf, Selector, Several, did_you_mean, hint
from baton.config.language.tree import (
    DefaultOrigin,
    Entry,
    Finding,
    Listing,
    Node,
    Origin,
    Path,
    Scalar,
    Section,
    describe,
    is_secret_name,
)

_T = TypeVar("_T")


class _Wrong(Exception):
    """A value is not of its kind; the finding has been noted."""


class Builder:
    """Builds one configuration and remembers what it met."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.origins: dict[Path, Origin] = {}
        """Where each leaf's value came from."""
        self.sections: dict[Path, Origin] = {}
        """Where each section's key is."""
        self.built: dict[Path, object] = {}

    def section(self, schema: type[_T], entry: Entry, path: Path) -> _T | None:
        """The section as a value of `schema`; None when something in it is wrong."""
        try:
            return self._section(schema, entry, path)
        except _Wrong:
            return None

    def _section(self, schema: type[_T], entry: Entry, path: Path) -> _T:
        node, fields = self._mapping(entry, path), fields_of(schema)
        self.sections[path] = entry.origin
        found_before = len(self.findings)
        for key, value in node.entries.items():
            if key not in fields:
                self._unknown(schema, key, Finding(value.origin, (*path, key), ""))
        values = {
            field.attribute: self._field(
                field, node.entries.get(key), section=entry.origin, path=(*path, key)
            )
            for key, field in fields.items()
        }
        if len(self.findings) > found_before:
            raise _Wrong
        try:
            made = cast(Callable[..., _T], schema)(**values)
        except ValueError as error:
            raise self._wrong(entry.origin, path, str(error)) from error
        self.built[path] = made
        return made

    def _mapping(self, entry: Entry, path: Path) -> Section:
        match entry.node:
            case Section() as section:
                return section
            case Scalar(value=None, origin=origin):
                return Section({}, origin)  # a key with everything under it commented out
            case node:
                raise self._wrong(
                    node.origin, path, f"got {describe(node, path)}, wanted a mapping"
                )

    def _unknown(self, schema: type, key: str, at: Finding) -> None:
        planned = not_yet_of(schema)
        if key in planned:
            what = f"not yet: {planned[key]}"
        else:
            what = f"unknown key{_suggestion(schema, key)}"
        self.findings.append(Finding(at.origin, at.path, what))

    def _field(self, field: Field, entry: Entry | None, *, section: Origin, path: Path) -> object:
        try:
            if entry is None and isinstance(field.kind, Nested) and not field.optional:
                entry = Entry(Section({}, DefaultOrigin()), section)
            if entry is not None:
                return self._value(field, entry, path)
            if field.required:
                raise self._wrong(section, path, f"missing, wanted {_wanted(field)}")
        except _Wrong:
            return None
        self.origins[path] = DefaultOrigin()
        return field.default

    def _value(self, field: Field, entry: Entry, path: Path) -> object:
        if isinstance(entry.node, Scalar) and entry.node.value is None and field.optional:
            self.origins[path] = entry.node.origin
            return None
        match field.kind:
            case Nested(schema):
                return self._section(schema, entry, path)
            case Named() as named:
                return self._named(named, (entry, path), may_be_empty=not field.required)
            case (Anything() | Environment() | Labels()) as mapping:
                return self._free(mapping, entry, path)
            case leaf:
                self.origins[path] = entry.node.origin
                return self._leaf(leaf, entry.node, path)

    def _named(
        self, named: Named, at: tuple[Entry, Path], *, may_be_empty: bool
    ) -> dict[str, object]:
        entry, path = at
        found = self._mapping(entry, path).entries
        if not found and not may_be_empty:
            raise self._wrong(entry.origin, path, "empty, wanted at least one")
        self._check_names(named.names, entry, path)
        schema: type[object] = named.schema
        made = {key: self.section(schema, value, (*path, key)) for key, value in found.items()}
        return {key: value for key, value in made.items() if value is not None}

    def _check_names(self, names: Names, entry: Entry, path: Path) -> None:
        self.sections[path] = entry.origin
        for key, value in self._mapping(entry, path).entries.items():
            if not re.fullmatch(names.pattern, key):
                what = f"got the name {key[:60]!r}, wanted {names.meaning}"
                self.findings.append(Finding(value.origin, path, what))

    def _free(self, mapping: Free, entry: Entry, path: Path) -> Mapping[str, object]:
        """A mapping whose keys the user chooses, to something else than sections."""
        self._check_names(mapping.names, entry, path)
        match mapping:
            case Anything():
                return self._anything(entry, path)
            case Environment():
                return self._environment(entry, path)
            case Labels():
                return self._labels(entry, path)

    def _anything(self, entry: Entry, path: Path) -> dict[str, object]:
        return {
            key: self._raw(value.node, (*path, key))
            for key, value in self._mapping(entry, path).entries.items()
        }

    def _raw(self, node: Node, path: Path) -> object:
        match node:
            case Section(entries=entries):
                return {key: self._raw(value.node, (*path, key)) for key, value in entries.items()}
            case Listing(items=items, origin=origin):
                self.origins[path] = origin
                return [self._raw(item, (*path, str(n))) for n, item in enumerate(items)]
            case Scalar(value=value, origin=origin):
                self.origins[path] = origin
                if isinstance(value, str) and any(is_secret_name(key) for key in path):
                    what = f"{_SECRET}, wanted it in the environment or in a file on the node"
                    self.findings.append(Finding(origin, path, what))
                if isinstance(value, float) and not math.isfinite(value):
                    what = f"got {node.text}, wanted a finite number"
                    self.findings.append(Finding(origin, path, what))
                return value

    def _labels(self, entry: Entry, path: Path) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in self._mapping(entry, path).entries.items():
            self.origins[(*path, key)] = value.node.origin
            try:
                found[key] = self._leaf(Selector(), value.node, (*path, key))
            except _Wrong:  # it is among the findings; the others may be wrong as well
                continue
        return found

    def _environment(self, entry: Entry, path: Path) -> dict[str, str | SecretRef]:
        return {
            key: self._variable(value, (*path, key))
            for key, value in self._mapping(entry, path).entries.items()
        }

    def _variable(self, entry: Entry, path: Path) -> str | SecretRef:
        match entry.node:
            case Section():
                return self.section(SecretRef, entry, path) or ""
            case Scalar(value=value, origin=origin, text=text) if value is not None:
                self.origins[path] = origin
                if is_secret_name(path[-1]):
                    what = f"{_SECRET}, wanted {{env: NAME}} or {{file: PATH}}"
                    self.findings.append(Finding(origin, path, what))
                return text
            case node:
                what = f"got {describe(node, path)}, wanted text, {{env: NAME}} or {{file: PATH}}"
                self.findings.append(Finding(node.origin, path, what))
                return ""

    def _leaf(self, leaf: Leaf, node: Node, path: Path) -> object:
        value = leaf.read(node)
        if value is not None:
            return value
        if isinstance(leaf, Several) and isinstance(node, Listing):
            for index, item in enumerate(node.items):
                self._leaf(leaf.item, item, (*path, str(index)))
        what = f"got {describe(node, path)}, wanted {leaf.wanted()}{hint(leaf, node)}"
        raise self._wrong(node.origin, path, what)

    def _wrong(self, origin: Origin, path: Path, what: str) -> _Wrong:
        self.findings.append(Finding(origin, path, what))
        return _Wrong()


_SECRET = "looks like a secret and is given as a literal"  # noqa: S105 - a message


def _wanted(field: Field) -> str:
    return "a mapping" if isinstance(field.kind, Mapped) else field.kind.wanted()


def _suggestion(schema: type, key: str) -> str:
    fields = fields_of(schema)
    if near := did_you_mean(key, fields):
        return near
    for field in fields.values():
        if isinstance(field.kind, Nested):
            inner = difflib.get_close_matches(key, list(fields_of(field.kind.schema)), n=1)
            if inner:
                return f", did you mean '{inner[0]}' under '{field.key}'?"
    return f", wanted one of {', '.join(fields)}"
