"""Writes a configuration as YAML with every key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.config.language.fields import (
    EnvVariables,
    Field,
    NamedSections,
    NestedSection,
    NodeLabels,
    RawMapping,
    SecretRef,
    fields_of,
)
from baton.config.language.tree import Path, format_path, is_secret_name, is_vllm_argument
from baton.config.schema.deployment import DeploymentConfig
from baton.config.write.yaml_writer import scalar_text

REDACTED = "(not shown)"
PlainMapping = Mapping[str, object]


def render(config: DeploymentConfig) -> str:
    """The effective configuration as YAML; loading it gives an equal configuration."""
    return "\n".join(_lines(to_plain(config), 0)) + "\n"


def render_redacted(config: DeploymentConfig) -> str:
    """As `render`, for display: raw engine arguments that may be secrets are not shown.

    Other keys hold only the name of a secret's variable or file.
    """
    return "\n".join(_lines(_redact_secrets(to_plain(config), ()), 0)) + "\n"


def _redact_secrets(values: PlainMapping, path: Path) -> dict[str, object]:
    redacted: dict[str, object] = {}
    for key, value in values.items():
        key_path = (*path, key)
        if is_vllm_argument(path) and is_secret_name(key):
            redacted[key] = REDACTED
        else:
            redacted[key] = (
                _redact_secrets(value, key_path) if isinstance(value, Mapping) else value
            )
    return redacted


def to_plain(section: object) -> dict[str, object]:
    """A section as plain JSON values, by key in the file."""
    return {
        key: plain_value(field, getattr(section, field.attribute))
        for key, field in fields_of(type(section)).items()
    }


def origin_lines(config: DeploymentConfig, origins: Mapping[str, str]) -> Iterator[str]:
    """Each key with its value and origin: `server.port: 8000  # default`."""
    for path, value in _leaves(to_plain(config), ()):
        yield (
            f"{format_path(path)}: {format_flow(value)}  #"
            f" {origins.get(format_path(path), 'default')}"
        )


def _leaves(values: PlainMapping, path: Path) -> Iterator[tuple[Path, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def plain_value(field: Field, value: object) -> object:
    """The value of one key, or of one name in a mapping to values, as plain JSON."""
    kind = field.kind
    if value is None or isinstance(kind, RawMapping | NodeLabels):
        return value
    if isinstance(kind, NamedSections | EnvVariables) and isinstance(value, Mapping):
        return {name: plain_value(field, inner) for name, inner in value.items()}
    if isinstance(kind, NestedSection | NamedSections):
        return to_plain(value)
    if isinstance(kind, EnvVariables):
        return _plain_variable(value)
    return kind.write(value)


def _plain_variable(value: object) -> object:
    if isinstance(value, SecretRef):
        return {"env": value.env} if value.file is None else {"file": value.file}
    return value


def _lines(values: PlainMapping, indent: int) -> Iterator[str]:
    pad = "  " * indent
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"{pad}{format_flow(key)}:"
            yield from _lines(value, indent + 1)
        else:
            yield f"{pad}{format_flow(key)}: {format_flow(value)}"


def format_flow(value: object) -> str:
    """Plain JSON as YAML on one line."""
    match value:
        case Mapping():
            return (
                "{"
                + ", ".join(f"{format_flow(key)}: {format_flow(v)}" for key, v in value.items())
                + "}"
            )
        case list() | tuple():
            return "[" + ", ".join(format_flow(item) for item in value) + "]"
        case _:
            return scalar_text(value)
