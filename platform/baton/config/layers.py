"""Layers of a configuration: files, environment variables, `--set` options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.config.language.fields import (
    EnvVariables,
    FieldType,
    Mapped,
    NamedSections,
    NestedSection,
    fields_of,
)
from baton.config.language.read import Unreadable, read_text
from baton.config.language.tree import (
    Entry,
    EnvOrigin,
    Finding,
    ListNode,
    Node,
    Origin,
    Path,
    Scalar,
    Section,
    SetOrigin,
    format_path,
)
from baton.config.schema.deployment import DeploymentConfig, ModelConfig

ENV_PREFIX = "BATON__"
_SEGMENT = re.compile(r'"([^"]+)"|([^".]+)')
_ROOT = NestedSection(DeploymentConfig)
Moved = Callable[[Section], Section]
"""Replaces old names of keys in a layer by new names."""


class _KeySchema(NamedTuple):
    """The schema's type of a key."""

    kind: FieldType | None
    optional: bool


def merge_sections(base: Node, overlay: Node, schema: type) -> Node:
    """`overlay` over `base`, a section of `schema` that may not be null.

    Mappings merge key by key; the overlay replaces anything else, including lists and secret
    references.
    """
    return _merge(base, overlay, _KeySchema(NestedSection(schema), optional=False))


def merge_configs(base: Section, overlay: Section) -> Section:
    """`merge_sections` for whole configurations."""
    return _merge_entries(base, overlay, _ROOT)


def _merge(base: Node, overlay: Node, key_schema: _KeySchema) -> Node:
    if not isinstance(base, Section):
        return overlay
    if isinstance(overlay, Section):
        return _merge_entries(base, overlay, key_schema.kind)
    # A section whose keys are all commented out adds nothing, unless null has a meaning there.
    is_null = isinstance(overlay, Scalar) and overlay.value is None
    return (
        base
        if is_null and isinstance(key_schema.kind, Mapped) and not key_schema.optional
        else overlay
    )


def _merge_entries(base: Section, overlay: Section, kind: FieldType | None) -> Section:
    entries = dict(base.entries)
    for key, entry in overlay.entries.items():
        base_entry = entries.get(key)
        if base_entry is None or isinstance(kind, EnvVariables):  # `{env: NAME}` is one value
            entries[key] = entry
            continue
        node = _merge(base_entry.node, entry.node, _key_schema(kind, key))
        # A section's origin is its first place: there, a missing key is reported.
        replaced = node is entry.node and node is not base_entry.node
        entries[key] = Entry(node, entry.origin if replaced else base_entry.origin)
    return Section(entries, base.origin)


def _key_schema(kind: FieldType | None, key: str) -> _KeySchema:
    match kind:
        case NestedSection(schema) if (field := fields_of(schema).get(key)) is not None:
            return _KeySchema(field.kind, field.optional)
        case NestedSection() if kind == _ROOT and key == "model":
            return _KeySchema(NestedSection(ModelConfig), optional=False)
        case NamedSections(schema):
            return _KeySchema(NestedSection(schema), optional=False)
        case _:
            return _KeySchema(None, optional=True)


def add_env(
    root: Section, env: Mapping[str, str], findings: list[Finding], moved: Moved
) -> Section:
    """`root` overlaid with variables such as `BATON__POOLS__DECODE__REPLICAS__MAX=6`.

    Shorter names go first: a variable for a key overrides a variable for its section.
    """
    names = [name for name in env if name.startswith(ENV_PREFIX)]
    together = Section({}, root.origin)
    for name in sorted(names, key=lambda name: (name.count("__"), name)):
        origin = EnvOrigin(name)
        segments = name.removeprefix(ENV_PREFIX).split("__")
        if not all(segments):
            message = f"expected a name such as {ENV_PREFIX}SERVER__PORT"
            findings.append(Finding(origin, (), message))
            continue
        path = _existing_path(root, segments)
        layer = _layer(root, path, _Override(origin, env[name], findings))
        root, together = merge_configs(root, moved(layer)), merge_configs(together, layer)
    moved(together)  # variables have no order: an old and a new name together are an error
    return root


def add_sets(root: Section, sets: Sequence[str], findings: list[Finding], moved: Moved) -> Section:
    """`root` overlaid with options such as `pools.decode.replicas.max=6`, in order."""
    for option in sets:
        key_text, equals, value = option.partition("=")
        path = _dotted_path(key_text)
        if not equals or path is None:
            message = f"got {key_text[:60]!r}, expected path.to.key=value"
            findings.append(Finding(SetOrigin(), (), message))
            continue
        layer = _layer(root, path, _Override(SetOrigin(), value, findings))
        root = merge_configs(root, moved(layer))
    return root


@dataclass(frozen=True, slots=True)
class _Override:
    """Text of a value, its origin, and the list for its errors."""

    origin: Origin
    text: str
    findings: list[Finding]


def _layer(root: Section, path: Path, override: _Override) -> Section:
    """The layer of one variable or option; empty after an error."""
    try:
        node = read_text(override.text, override.origin, override.findings)
    except Unreadable as error:
        what = f"{error.finding.message}, put text with special characters in quotes"
        override.findings.append(Finding(override.origin, path, what))
        return Section({}, override.origin)
    path = _expand_model_alias(root, path)
    reached: Node = root
    for depth, key in enumerate(path):
        if isinstance(reached, ListNode):
            what = f"{format_path(path[:depth])} is a list, set it as a whole: [first, second]"
            override.findings.append(Finding(override.origin, path, what))
            return Section({}, override.origin)
        entry = reached.entries.get(key) if isinstance(reached, Section) else None
        if entry is None:
            break
        reached = entry.node
    for key in reversed(path[1:]):
        node = Section({key: Entry(node, override.origin)}, override.origin)
    return Section({path[0]: Entry(node, override.origin)}, override.origin)


def _expand_model_alias(root: Section, path: Path) -> Path:
    """`model.max_len` as `models.NAME.max_len` when there is exactly one model."""
    models = root.entries.get("models")
    if path[0] != "model" or models is None or not isinstance(models.node, Section):
        return path
    return ("models", *models.node.entries, *path[1:]) if len(models.node.entries) == 1 else path


def _existing_path(root: Node, segments: Iterable[str]) -> Path:
    """Keys for the segments of a variable's name: an existing key, or the lower-case segment.

    Environment variables cannot spell `my-pool` or `llama-3.1`; MY_POOL and LLAMA_3_1 match these.
    """
    path: list[str] = []
    node: Node | None = root
    for segment in segments:
        entries = node.entries if isinstance(node, Section) else {}
        key = next(
            (key for key in entries if _env_spelling(key) == segment.upper()), segment.lower()
        )
        # Keys of `env` are names of variables and keep their case.
        keep_case = path[-1:] == ["env"] and key not in entries
        path.append(segment if keep_case else key)
        node = entries[key].node if key in entries else None
    return tuple(path)


def _env_spelling(key: str) -> str:
    return re.sub(r"[^A-Z0-9_]", "_", key.upper())


def _dotted_path(text: str) -> Path | None:
    """The keys of `models."llama-3.1".source`; None when it is malformed."""
    path: list[str] = []
    remaining = text.strip()
    while match := _SEGMENT.match(remaining):
        path.append(match[1] or match[2])
        remaining = remaining[match.end() :]
        if not remaining:
            return tuple(path)
        if not remaining.startswith("."):
            return None
        remaining = remaining[1:]
    return None
