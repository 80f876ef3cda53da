"""Every key of a configuration file as a page: from the schema, and from what is said there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from baton.config.diff import conditional_reloads, reload_class
from baton.config.language.fields import (
    Field,
    NamedSections,
    NestedSection,
    fields_of,
    planned_keys,
)
from baton.config.language.scalars import Choice, Pluggable, Quantity, ScalarType
from baton.config.language.units import Unit, format_quantity
from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.render import format_flow
from tests.reference.docstrings import attribute_docs, class_doc

HEAD = """\
# Configuration: every key

Written by `scripts/render-reference` from the schema (`platform/baton/config/`). How the file is
layered, checked and changed while it is in use: [configuration](../operations/configuration.md).
Files to start from: `configs/`. The same for editors: `baton config schema`. What a file means
with all defaults: `baton config show -c FILE`.

A duration is written with its unit (`500ms`, `2s`, `5m`, `30d`), and so are a size (`512KiB`,
`4MiB`, `1GB`), a rate (`10/s`, `50k/min`) and a speed (`500MB/s`). `NAME` is a name that you
choose. The last column says what a change of the key takes on a deployment that runs
([more](../operations/configuration.md#reload-classes)).

One model may be written short, as `model:` with the keys of `models.NAME` and, if you like, a
`name`.
"""
_UNITS: Mapping[Unit, str] = {
    Unit.SECONDS: "a duration",
    Unit.BYTES: "a size",
    Unit.PER_SECOND: "a rate",
    Unit.BYTES_PER_SECOND: "a speed",
}
_LONG_UNITS = {"d": 86_400, "h": 3_600, "min": 60}
_NAME = "NAME"
Path = tuple[str, ...]


def render_page() -> str:
    """The page in Markdown."""
    # What pools have in common with their model is listed where a change of it has an effect.
    sections = list(_sections(DeploymentConfig, ()))
    last_section_of = {schema: path for path, schema in sections}
    blocks = [HEAD]
    for path, schema in sections:
        blocks.append("\n".join(_section(path, schema, last_section_of[schema])))
    return "\n".join(blocks)


def _sections(schema: type, path: Path) -> Iterator[tuple[Path, type]]:
    yield path, schema
    for key, field in fields_of(schema).items():
        match field.kind:
            case NestedSection(schema=inner):
                yield from _sections(inner, (*path, key))
            case NamedSections(schema=inner):
                yield from _sections(inner, (*path, key, _NAME))


def _section(path: Path, schema: type, last: Path) -> Iterator[str]:
    yield f"## {_dotted(path)}" if path else "## The file"
    yield ""
    if path != last:
        yield f"{class_doc(schema)} The keys are those of [`{_dotted(last)}`](#{_anchor(last)})."
        yield ""
        return
    yield class_doc(schema)
    yield ""
    docs = attribute_docs(schema)
    rows = [_row(path, field, docs) for field in fields_of(schema).values()]
    yield from ["| key | value | unless said | what it says | a change |", "|---|---|---|---|---|"]
    yield from rows
    yield ""
    for key, until_then in planned_keys(schema).items():
        yield f"`{key}` is refused, not yet: {until_then}."
        yield ""


def _row(section_path: Path, field: Field, docs: Mapping[str, str]) -> str:
    match field.kind:
        case NestedSection(schema=inner):
            value, default = f"[keys](#{_anchor((*section_path, field.key))})", "-"
            text, change = docs.get(field.attribute, class_doc(inner)), "-"
            default = "none" if field.optional else "-"
        case NamedSections(schema=inner):
            path = (*section_path, field.key, _NAME)
            value, default = (
                f"[keys](#{_anchor(path)}) under names",
                "-" if field.required else "none",
            )
            text, change = docs.get(field.attribute, class_doc(inner)), "-"
        case leaf if isinstance(leaf, ScalarType):
            value, default = _value(leaf), _default(field, leaf)
            text, change = _leaf_text(field, leaf, docs), _change((*section_path, field.key))
        case _:
            value, default = "names and values", "none"
            text, change = docs[field.attribute], _change((*section_path, field.key, _NAME))
    return f"| `{field.key}` | {value} | {default} | {text} | {change} |"


def _change(path: Path) -> str:
    others = (f"; {reload} {words}" for words, reload in conditional_reloads(path).items())
    return str(reload_class(path)) + "".join(others)


def _leaf_text(field: Field, leaf: ScalarType, docs: Mapping[str, str]) -> str:
    if not isinstance(leaf, Choice | Pluggable):
        return docs.get(field.attribute, "")
    members = attribute_docs(leaf.enum)
    text = [docs.get(field.attribute) or class_doc(leaf.enum)]
    text += [
        f"`{value}`: {_lower(members[value.name])}" for value in leaf.enum if value.name in members
    ]
    return " ".join(text)


def _value(leaf: ScalarType) -> str:
    match leaf:
        case Choice(enum):
            return _members(enum)
        case Pluggable(enum):
            return f"{_members(enum)}, `module:function`"
        case Quantity(unit, bounds):
            return _UNITS[unit] + bounds.describe(lambda number: _quantity(number, unit))
        case _:
            return leaf.describe().partition(" (")[0]


def _members(enum: type[StrEnum]) -> str:
    return ", ".join(f"`{member}`" for member in enum)


def _default(field: Field, leaf: ScalarType) -> str:
    if field.required:
        return "-"
    match leaf, field.default:
        case _, None:
            return "null"
        case Quantity(unit), int() | float() as number:
            return f"`{_quantity(number, unit)}`"
        case _, value:
            return f"`{format_flow(leaf.write(value))}`"


def _quantity(number: float, unit: Unit) -> str:
    """As people would write it: 30d rather than 2592000s."""
    if unit is Unit.SECONDS:
        for name, length_s in _LONG_UNITS.items():
            if number >= length_s and number % length_s == 0:
                return f"{number / length_s:g}{name}"
    return format_quantity(number, unit)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _dotted(path: Path) -> str:
    return ".".join(path)


def _anchor(path: Path) -> str:
    return "".join(path).lower()
