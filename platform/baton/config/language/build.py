"""Builds frozen values from a tree, and collects all errors.

Theory of operation: `Builder.section` walks schema and tree together. A section with a finding is
not built (None) but its siblings are, so that later checks cover as much as possible. Built
sections and origins of leaves are kept by path for these checks.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from baton.config.language.fields import (
    EnvVariables,
    Field,
    Free,
    Mapped,
    NamedSections,
    NamePattern,
    NestedSection,
    NodeLabels,
    RawMapping,
    SecretRef,
    fields_of,
    main_field,
    planned_keys,
)
from baton.config.language.scalars import ListOf, ScalarType, Selector, did_you_mean, suggest
from baton.config.language.tree import (
    DefaultOrigin,
    Entry,
    Finding,
    ListNode,
    Node,
    Origin,
    Path,
    Scalar,
    Section,
    describe_node,
    is_secret_name,
)

_T = TypeVar("_T")


class _InvalidValue(Exception):
    """A value has the wrong type; the finding is recorded."""


class Builder:
    """Builds one configuration, and keeps findings, origins and sections."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.origins: dict[Path, Origin] = {}
        """Origin of each leaf's value."""
        self.section_origins: dict[Path, Origin] = {}
        """Origin of each section's key."""
        self.values: dict[Path, object] = {}

    def section(self, schema: type[_T], entry: Entry, path: Path) -> _T | None:
        """The section as a value of `schema`; None after an error."""
        try:
            return self._section(schema, entry, path)
        except _InvalidValue:
            return None

    def _section(self, schema: type[_T], entry: Entry, path: Path) -> _T:
        node, fields = self._mapping(entry, path, schema), fields_of(schema)
        self.section_origins[path] = entry.origin
        findings_before = len(self.findings)
        for key, value in node.entries.items():
            if key not in fields:
                self._unknown_key(schema, key, Finding(value.origin, (*path, key), ""))
        values = {
            field.attribute: self._field(
                field, node.entries.get(key), section=entry.origin, path=(*path, key)
            )
            for key, field in fields.items()
        }
        if len(self.findings) > findings_before:
            raise _InvalidValue
        try:
            instance = cast(Callable[..., _T], schema)(**values)
        except ValueError as error:
            raise self._invalid(entry.origin, path, str(error)) from error
        self.values[path] = instance
        return instance

    def _mapping(self, entry: Entry, path: Path, schema: type | None = None) -> Section:
        match entry.node:
            case Section() as section:
                return section
            case Scalar(value=None, origin=origin):
                return Section({}, origin)  # all its keys are commented out
            case node:
                raise self._invalid(
                    node.origin,
                    path,
                    f"got {describe_node(node, path)}, expected a mapping"
                    f"{_suggest_main_key(schema, node, path)}",
                )

    def _unknown_key(self, schema: type, key: str, location: Finding) -> None:
        planned = planned_keys(schema)
        if key in planned:
            message = f"not yet: {planned[key]}"
        else:
            message = f"unknown key{_suggest_key(schema, key)}"
        self.findings.append(Finding(location.origin, location.path, message))

    def _field(self, field: Field, entry: Entry | None, *, section: Origin, path: Path) -> object:
        try:
            if entry is None and isinstance(field.kind, NestedSection) and not field.optional:
                entry = Entry(Section({}, DefaultOrigin()), section)
            if entry is not None:
                return self._value(field, entry, path)
            if field.required:
                raise self._invalid(section, path, f"missing, expected {_describe_expected(field)}")
        except _InvalidValue:
            return None
        self.origins[path] = DefaultOrigin()
        return field.default

    def _value(self, field: Field, entry: Entry, path: Path) -> object:
        if isinstance(entry.node, Scalar) and entry.node.value is None and field.optional:
            self.origins[path] = entry.node.origin
            return None
        match field.kind:
            case NestedSection(schema):
                return self._section(schema, entry, path)
            case NamedSections() as named:
                return self._named_sections(named, (entry, path), may_be_empty=not field.required)
            case (RawMapping() | EnvVariables() | NodeLabels()) as mapping:
                return self._user_mapping(mapping, entry, path)
            case scalar_type:
                self.origins[path] = entry.node.origin
                return self._scalar(scalar_type, entry.node, path)

    def _named_sections(
        self, named: NamedSections, location: tuple[Entry, Path], *, may_be_empty: bool
    ) -> dict[str, object]:
        entry, path = location
        entries = self._mapping(entry, path).entries
        if not entries and not may_be_empty:
            raise self._invalid(entry.origin, path, "empty, expected at least one")
        self._check_names(named.names, entry, path)
        schema: type[object] = named.schema
        sections = {
            key: self.section(schema, value, (*path, key)) for key, value in entries.items()
        }
        return {key: value for key, value in sections.items() if value is not None}

    def _check_names(self, pattern: NamePattern, entry: Entry, path: Path) -> None:
        self.section_origins[path] = entry.origin
        for key, value in self._mapping(entry, path).entries.items():
            if not re.fullmatch(pattern.pattern, key):
                message = f"got the name {key[:60]!r}, expected {pattern.description}"
                self.findings.append(Finding(value.origin, path, message))

    def _user_mapping(self, mapping: Free, entry: Entry, path: Path) -> Mapping[str, object]:
        """A mapping with keys of the user's choice to values other than sections."""
        self._check_names(mapping.names, entry, path)
        match mapping:
            case RawMapping():
                return self._raw_mapping(entry, path)
            case EnvVariables():
                return self._environment(entry, path)
            case NodeLabels():
                return self._labels(entry, path)

    def _raw_mapping(self, entry: Entry, path: Path) -> dict[str, object]:
        return {
            key: self._raw_value(value.node, (*path, key))
            for key, value in self._mapping(entry, path).entries.items()
        }

    def _raw_value(self, node: Node, path: Path) -> object:
        match node:
            case Section(entries=entries):
                return {
                    key: self._raw_value(value.node, (*path, key)) for key, value in entries.items()
                }
            case ListNode(items=items, origin=origin):
                self.origins[path] = origin
                return [self._raw_value(item, (*path, str(n))) for n, item in enumerate(items)]
            case Scalar(value=value, origin=origin):
                self.origins[path] = origin
                if isinstance(value, str) and any(is_secret_name(key) for key in path):
                    message = (
                        f"{_LITERAL_SECRET}, expected it in the environment or in a file on the"
                        " node"
                    )
                    self.findings.append(Finding(origin, path, message))
                if isinstance(value, float) and not math.isfinite(value):
                    message = f"got {node.text}, expected a finite number"
                    self.findings.append(Finding(origin, path, message))
                return value

    def _labels(self, entry: Entry, path: Path) -> dict[str, object]:
        labels: dict[str, object] = {}
        for key, value in self._mapping(entry, path).entries.items():
            self.origins[(*path, key)] = value.node.origin
            try:
                labels[key] = self._scalar(Selector(), value.node, (*path, key))
            except _InvalidValue:  # recorded; other labels are still checked
                continue
        return labels

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
                    message = f"{_LITERAL_SECRET}, expected {{env: NAME}} or {{file: PATH}}"
                    self.findings.append(Finding(origin, path, message))
                return text
            case node:
                message = (
                    f"got {describe_node(node, path)}, expected text, {{env: NAME}} or"
                    f" {{file: PATH}}"
                )
                self.findings.append(Finding(node.origin, path, message))
                return ""

    def _scalar(self, scalar_type: ScalarType, node: Node, path: Path) -> object:
        value = scalar_type.read(node)
        if value is not None:
            return value
        if isinstance(scalar_type, ListOf) and isinstance(node, ListNode):
            for index, item in enumerate(node.items):
                self._scalar(scalar_type.item, item, (*path, str(index)))
        message = (
            f"got {describe_node(node, path)}, expected"
            f" {scalar_type.describe()}{suggest(scalar_type, node)}"
        )
        raise self._invalid(node.origin, path, message)

    def _invalid(self, origin: Origin, path: Path, message: str) -> _InvalidValue:
        self.findings.append(Finding(origin, path, message))
        return _InvalidValue()


_LITERAL_SECRET = "looks like a secret and is given as a literal"  # noqa: S105 - a message


def _describe_expected(field: Field) -> str:
    return "a mapping" if isinstance(field.kind, Mapped) else field.kind.describe()


def _suggest_main_key(schema: type | None, node: Node, path: Path) -> str:
    field = None if schema is None else main_field(schema)
    if field is None or isinstance(field.kind, Mapped) or not isinstance(node, Scalar):
        return ""
    if not path or field.kind.read(node) is None:
        return ""
    return f", did you mean '{path[-1]}: {{{field.key}: {node.text}}}'?"


def _suggest_key(schema: type, key: str) -> str:
    fields = fields_of(schema)
    if suggestion := did_you_mean(key, fields):
        return suggestion
    for field in fields.values():
        if isinstance(field.kind, NestedSection):
            nested_matches = difflib.get_close_matches(key, list(fields_of(field.kind.schema)), n=1)
            if nested_matches:
                return f", did you mean '{nested_matches[0]}' under '{field.key}'?"
    return f", expected one of {', '.join(fields)}"
