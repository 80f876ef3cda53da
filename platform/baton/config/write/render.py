"""A configuration back to YAML: every key, as loading it again would read it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from baton.config.language.fields import (
    Anything,
    Environment,
    Field,
    Labels,
    Named,
    Nested,
    SecretRef,
    fields_of,
)
from baton.config.language.read import resolve
from baton.config.language.tree import Path, format_path, is_raw, is_secret_name
from baton.config.schema.deployment import DeploymentConfig

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*|[0-9]+[A-Za-z]+(?:/[a-z]+)?")
# JSON leaves these unescaped, YAML does not read them as they are.
_ESCAPED = re.compile("[\x7f-\xa0\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")

NOT_SHOWN = "(not shown)"
Plain = Mapping[str, object]


def render(config: DeploymentConfig) -> str:
    """The effective configuration as YAML; loading it gives an equal configuration."""
    return "\n".join(_lines(plain(config), 0)) + "\n"


def render_for_all(config: DeploymentConfig) -> str:
    """As `render`, for whoever looks: raw engine arguments that may be secrets are not shown.

    Elsewhere secrets cannot be written but as the name of a variable or a file.
    """
    return "\n".join(_lines(_without_secrets(plain(config), ()), 0)) + "\n"


def _without_secrets(values: Plain, path: Path) -> dict[str, object]:
    shown: dict[str, object] = {}
    for key, value in values.items():
        here = (*path, key)
        if is_raw(path) and is_secret_name(key):
            shown[key] = NOT_SHOWN
        else:
            shown[key] = _without_secrets(value, here) if isinstance(value, Mapping) else value
    return shown


def plain(section: object) -> dict[str, object]:
    """A section as plain JSON values under its keys in the file."""
    return {
        key: plain_value(field, getattr(section, field.attribute))
        for key, field in fields_of(type(section)).items()
    }


def origin_lines(config: DeploymentConfig, origins: Mapping[str, str]) -> Iterator[str]:
    """Each key with its value and where that came from: `server.port: 8000  # default`."""
    for path, value in _leaves(plain(config), ()):
        yield f"{format_path(path)}: {flow(value)}  # {origins.get(format_path(path), 'default')}"


def _leaves(values: Plain, path: Path) -> Iterator[tuple[Path, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def plain_value(field: Field, value: object) -> object:
    """The value of one key, or of one name in a mapping to values, as plain JSON."""
    kind = field.kind
    if value is None or isinstance(kind, Anything | Labels):
        return value
    if isinstance(kind, Named | Environment) and isinstance(value, Mapping):
        return {name: plain_value(field, inner) for name, inner in value.items()}
    if isinstance(kind, Nested | Named):
        return plain(value)
    if isinstance(kind, Environment):
        return _variable(value)
    return kind.write(value)


def _variable(value: object) -> object:
    if isinstance(value, SecretRef):
        return {"env": value.env} if value.file is None else {"file": value.file}
    return value


def _lines(values: Plain, indent: int) -> Iterator[str]:
    pad = "  " * indent
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"{pad}{flow(key)}:"
            yield from _lines(value, indent + 1)
        else:
            yield f"{pad}{flow(key)}: {flow(value)}"


def flow(value: object) -> str:
    """Plain JSON as YAML on one line."""
    match value:
        case str():
            return _text(value)
        case Mapping():
            return "{" + ", ".join(f"{flow(key)}: {flow(v)}" for key, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(flow(item) for item in value) + "]"
        case _:
            return json.dumps(value)


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and resolve(text) == text:
        return text
    return _ESCAPED.sub(_escape, json.dumps(text, ensure_ascii=False))


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
