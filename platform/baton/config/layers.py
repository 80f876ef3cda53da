"""Layers of a configuration and what each adds: files, environment variables, `--set` options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.config.language.fields import Environment, Kind, Mapped, Named, Nested, fields_of
from baton.config.language.read import Unreadable, read_text
from baton.config.language.tree import (
    Entry,
    EnvOrigin,
    Finding,
    Listing,
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
_ROOT = Nested(DeploymentConfig)
Moved = Callable[[Section], Section]
"""A layer with new names for the old ones in it."""


class _Slot(NamedTuple):
    """What may stand at a key, as far as the schema says."""

    kind: Kind | None
    optional: bool


def merge_sections(low: Node, high: Node, schema: type) -> Node:
    """`high` over `low`, where a section of `schema` stands, which may not be null.

    Mappings key by key, anything else replaced as a whole: lists too, and where a variable is to be
    found.
    """
    return _merge(low, high, _Slot(Nested(schema), optional=False))


def lay_over(low: Section, high: Section) -> Section:
    """The same of whole configurations."""
    return _lay_over(low, high, _ROOT)


def _merge(low: Node, high: Node, slot: _Slot) -> Node:
    if not isinstance(low, Section):
        return high
    if isinstance(high, Section):
        return _lay_over(low, high, slot.kind)
    # A section's key with everything under it commented out adds nothing to the section below,
    # unless null has a meaning of its own there.
    is_null = isinstance(high, Scalar) and high.value is None
    return low if is_null and isinstance(slot.kind, Mapped) and not slot.optional else high


def _lay_over(low: Section, high: Section, kind: Kind | None) -> Section:
    entries = dict(low.entries)
    for key, entry in high.entries.items():
        below = entries.get(key)
        if below is None or isinstance(kind, Environment):  # `{env: NAME}` is one value
            entries[key] = entry
            continue
        node = _merge(below.node, entry.node, _slot(kind, key))
        # A section's place is where it first stood: what is missing in it is missing there.
        replaced = node is entry.node and node is not below.node
        entries[key] = Entry(node, entry.origin if replaced else below.origin)
    return Section(entries, low.origin)


def _slot(kind: Kind | None, key: str) -> _Slot:
    match kind:
        case Nested(schema) if (field := fields_of(schema).get(key)) is not None:
            return _Slot(field.kind, field.optional)
        case Nested() if kind == _ROOT and key == "model":
            return _Slot(Nested(ModelConfig), optional=False)
        case Named(schema):
            return _Slot(Nested(schema), optional=False)
        case _:
            return _Slot(None, optional=True)


def add_env(
    root: Section, env: Mapping[str, str], findings: list[Finding], moved: Moved
) -> Section:
    """`root` with `BATON__POOLS__DECODE__REPLICAS__MAX=6` and its like laid over it.

    Shorter names go first, so that a variable for one key wins over one for the whole section,
    in whatever order the environment lists them.
    """
    names = [name for name in env if name.startswith(ENV_PREFIX)]
    together = Section({}, root.origin)
    for name in sorted(names, key=lambda name: (name.count("__"), name)):
        origin = EnvOrigin(name)
        segments = name.removeprefix(ENV_PREFIX).split("__")
        if not all(segments):
            what = f"wanted a name such as {ENV_PREFIX}SERVER__PORT"
            findings.append(Finding(origin, (), what))
            continue
        path = _existing_path(root, segments)
        layer = _layer(root, path, _Said(origin, env[name], findings))
        root, together = lay_over(root, moved(layer)), lay_over(together, layer)
    moved(together)  # variables have no order: an old and a new name among them are an error
    return root


def add_sets(root: Section, sets: Sequence[str], findings: list[Finding], moved: Moved) -> Section:
    """`root` with `pools.decode.replicas.max=6` and its like laid over it, later ones on top."""
    for option in sets:
        written, equals, value = option.partition("=")
        path = _dotted_path(written)
        if not equals or path is None:
            what = f"got {written[:60]!r}, wanted path.to.key=value"
            findings.append(Finding(SetOrigin(), (), what))
            continue
        layer = _layer(root, path, _Said(SetOrigin(), value, findings))
        root = lay_over(root, moved(layer))
    return root


@dataclass(frozen=True, slots=True)
class _Said:
    """Text that stands for a value, who said it, and where to complain."""

    origin: Origin
    text: str
    findings: list[Finding]


def _layer(root: Section, path: Path, said: _Said) -> Section:
    """What one variable or option adds to `root`; nothing where it is wrong."""
    try:
        node = read_text(said.text, said.origin, said.findings)
    except Unreadable as error:
        what = f"{error.finding.what}, put text with special characters in quotes"
        said.findings.append(Finding(said.origin, path, what))
        return Section({}, said.origin)
    path = _with_model_named(root, path)
    reached: Node = root
    for depth, key in enumerate(path):
        if isinstance(reached, Listing):
            what = f"{format_path(path[:depth])} is a list, set it as a whole: [first, second]"
            said.findings.append(Finding(said.origin, path, what))
            return Section({}, said.origin)
        entry = reached.entries.get(key) if isinstance(reached, Section) else None
        if entry is None:
            break
        reached = entry.node
    for key in reversed(path[1:]):
        node = Section({key: Entry(node, said.origin)}, said.origin)
    return Section({path[0]: Entry(node, said.origin)}, said.origin)


def _with_model_named(root: Section, path: Path) -> Path:
    """`model.max_len` as `models.NAME.max_len` where a file names its only model so."""
    models = root.entries.get("models")
    if path[0] != "model" or models is None or not isinstance(models.node, Section):
        return path
    return ("models", *models.node.entries, *path[1:]) if len(models.node.entries) == 1 else path


def _existing_path(root: Node, segments: Iterable[str]) -> Path:
    """Keys for the segments of a variable's name: as they stand in the tree, else in lower case.

    Environment variables cannot spell `my-pool` or `llama-3.1`; MY_POOL and LLAMA_3_1 find them.
    """
    path: list[str] = []
    node: Node | None = root
    for segment in segments:
        entries = node.entries if isinstance(node, Section) else {}
        key = next((key for key in entries if _spelled(key) == segment.upper()), segment.lower())
        # The keys of `env` are variables themselves and keep their case.
        keep = path[-1:] == ["env"] and key not in entries
        path.append(segment if keep else key)
        node = entries[key].node if key in entries else None
    return tuple(path)


def _spelled(key: str) -> str:
    return re.sub(r"[^A-Z0-9_]", "_", key.upper())


def _dotted_path(text: str) -> Path | None:
    """`models."llama-3.1".source` as its keys; None when it is malformed."""
    path: list[str] = []
    rest = text.strip()
    while found := _SEGMENT.match(rest):
        path.append(found[1] or found[2])
        rest = rest[found.end() :]
        if not rest:
            return tuple(path)
        if not rest.startswith("."):
            return None
        rest = rest[1:]
    return None
