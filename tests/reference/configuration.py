"""Every key of a configuration file as a page: from the schema, and from what is said there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from baton.config.diff import elsewhere, reload_class
from baton.config.language.fields import Field, Named, Nested, fields_of, not_yet_of
from baton.config.language.scalars import Choice, Leaf, Pluggable, Quantity
from baton.config.language.units import Unit, format_quantity
from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.render import flow
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
_LONG = {"d": 86_400, "h": 3_600, "min": 60}
_NAME = "NAME"
Path = tuple[str, ...]


def page() -> str:
    """The page in Markdown."""
    # What pools have in common with their model is listed where a change of it has an effect.
    sections = list(_sections(DeploymentConfig, ()))
    last_of = {schema: at for at, schema in sections}
    blocks = [HEAD]
    for at, schema in sections:
        blocks.append("\n".join(_section(at, schema, last_of[schema])))
    return "\n".join(blocks)


def _sections(schema: type, at: Path) -> Iterator[tuple[Path, type]]:
    yield at, schema
    for key, field in fields_of(schema).items():
        match field.kind:
            case Nested(schema=inner):
                yield from _sections(inner, (*at, key))
            case Named(schema=inner):
                yield from _sections(inner, (*at, key, _NAME))


def _section(at: Path, schema: type, last: Path) -> Iterator[str]:
    yield f"## {_written(at)}" if at else "## The file"
    yield ""
    if at != last:
        yield f"{class_doc(schema)} The keys are those of [`{_written(last)}`](#{_anchor(last)})."
        yield ""
        return
    yield class_doc(schema)
    yield ""
    said = attribute_docs(schema)
    rows = [_row(at, field, said) for field in fields_of(schema).values()]
    yield from ["| key | value | unless said | what it says | a change |", "|---|---|---|---|---|"]
    yield from rows
    yield ""
    for key, until_then in not_yet_of(schema).items():
        yield f"`{key}` is refused, not yet: {until_then}."
        yield ""


def _row(at: Path, field: Field, said: Mapping[str, str]) -> str:
    match field.kind:
        case Nested(schema=inner):
            value, default = f"[keys](#{_anchor((*at, field.key))})", "-"
            text, change = said.get(field.attribute, class_doc(inner)), "-"
            default = "none" if field.optional else "-"
        case Named(schema=inner):
            path = (*at, field.key, _NAME)
            value, default = (
                f"[keys](#{_anchor(path)}) under names",
                "-" if field.required else "none",
            )
            text, change = said.get(field.attribute, class_doc(inner)), "-"
        case leaf if isinstance(leaf, Leaf):
            value, default = _value(leaf), _default(field, leaf)
            text, change = _leaf_text(field, leaf, said), _change((*at, field.key))
        case _:
            value, default = "names and values", "none"
            text, change = said[field.attribute], _change((*at, field.key, _NAME))
    return f"| `{field.key}` | {value} | {default} | {text} | {change} |"


def _change(path: Path) -> str:
    others = (f"; {reload} {words}" for words, reload in elsewhere(path).items())
    return str(reload_class(path)) + "".join(others)


def _leaf_text(field: Field, leaf: Leaf, said: Mapping[str, str]) -> str:
    if not isinstance(leaf, Choice | Pluggable):
        return said.get(field.attribute, "")
    members = attribute_docs(leaf.enum)
    text = [said.get(field.attribute) or class_doc(leaf.enum)]
    text += [f"`{one}`: {_lower(members[one.name])}" for one in leaf.enum if one.name in members]
    return " ".join(text)


def _value(leaf: Leaf) -> str:
    match leaf:
        case Choice(enum):
            return _members(enum)
        case Pluggable(enum):
            return f"{_members(enum)}, `module:function`"
        case Quantity(unit, bounds):
            return _UNITS[unit] + bounds.describe(lambda number: _quantity(number, unit))
        case _:
            return leaf.wanted().partition(" (")[0]


def _members(enum: type[StrEnum]) -> str:
    return ", ".join(f"`{member}`" for member in enum)


def _default(field: Field, leaf: Leaf) -> str:
    if field.required:
        return "-"
    match leaf, field.default:
        case _, None:
            return "null"
        case Quantity(unit), int() | float() as number:
            return f"`{_quantity(number, unit)}`"
        case _, value:
            return f"`{flow(leaf.write(value))}`"


def _quantity(number: float, unit: Unit) -> str:
    """As people would write it: 30d rather than 2592000s."""
    if unit is Unit.SECONDS:
        for name, length_s in _LONG.items():
            if number >= length_s and number % length_s == 0:
                return f"{number / length_s:g}{name}"
    return format_quantity(number, unit)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _written(path: Path) -> str:
    return ".".join(path)


def _anchor(path: Path) -> str:
    return "".join(path).lower()
