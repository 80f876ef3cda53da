"""The schema as JSON Schema, for editors and for checks outside baton."""

from __future__ import annotations

from baton.config.language.fields import (
    EnvVariables,
    Field,
    NamedSections,
    NestedSection,
    NodeLabels,
    RawMapping,
    fields_of,
)
from baton.config.language.scalars import Json, Selector
from baton.config.schema.deployment import DeploymentConfig, ModelConfig


def json_schema() -> Json:
    """JSON Schema (draft 2020-12) of a configuration file.

    Keys that pools inherit from their model are optional, and there are no checks between keys.
    """
    root = _section(DeploymentConfig)
    properties = root["properties"]
    if not isinstance(properties, dict):
        raise TypeError(f"properties of the root are {properties!r}")
    model = _section(ModelConfig)
    short_form = {"name": {"type": "string"}} | _properties(ModelConfig)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "baton",
        **root,
        "required": ["version", "pools"],
        "properties": properties | {"model": model | {"properties": short_form}},
        "oneOf": [{"required": ["model"]}, {"required": ["models"]}],
    }


def _section(section_type: type) -> Json:
    required = [field.key for field in fields_of(section_type).values() if field.required]
    return {
        "type": "object",
        "properties": _properties(section_type),
        "additionalProperties": False,
        # The model of a pool is optional when there is only one.
        "required": [key for key in required if key != "model"],
    }


def _properties(section_type: type) -> Json:
    return {key: _value(field) for key, field in fields_of(section_type).items()}


def _value(field: Field) -> Json:
    is_required = field.required
    match field.kind:
        case NestedSection(schema=section_type):
            value = _section(section_type)
        case NamedSections(section_type, names):
            names_schema = {"pattern": f"^(?:{names.pattern})$"}
            value = {"type": "object", "additionalProperties": _section(section_type)}
            value |= {"propertyNames": names_schema} | ({"minProperties": 1} if is_required else {})
        case RawMapping(names):
            value = {"type": "object", "propertyNames": {"pattern": f"^(?:{names.pattern})$"}}
        case EnvVariables(names):
            text: Json = {"type": ["string", "number", "boolean"]}
            secrets = [{"required": [key], "type": "object"} for key in ("env", "file")]
            value = {"type": "object", "propertyNames": {"pattern": f"^(?:{names.pattern})$"}}
            value |= {"additionalProperties": {"anyOf": [text, *secrets]}}
        case NodeLabels(names):
            value = {"type": "object", "propertyNames": {"pattern": f"^(?:{names.pattern})$"}}
            value |= {"additionalProperties": Selector().json_schema()}
        case scalar_type:
            value = scalar_type.json_schema()
            return {"anyOf": [value, {"type": "null"}]} if field.optional else value
    # A section whose keys are all commented out is empty.
    return {"anyOf": [value, {"type": "null"}]}
