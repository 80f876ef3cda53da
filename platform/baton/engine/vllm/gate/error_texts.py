"""What vLLM and its frameworks say of a bad request, in words that its sender can use.

pydantic's text names classes, repeats inputs and links to its own manual. Clients know fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from baton.domain.names.words import few

_MAX_FIELDS = 10
_MAX_CHARS = 300
"""Of what is said about one field."""
_PYDANTIC_HEADER = re.compile(r"\d+ validation errors? for [^\n]*\n")
_DETAILS = re.compile(r"\s*\[type=.*", re.DOTALL)
# A field, or the place in a list. All else in a location is the name of a class or of a check.
_FIELD = re.compile(r"[a-z_][a-z0-9_]*|[0-9]+")
_NON_FIELD_PARTS = frozenset(
    {
        "body",
        "str",
        "int",
        "float",
        "bool",
        "bytes",
        "list",
        "tuple",
        "dict",
        "set",
        "none",
        "nonetype",
        "union",
        "nullable",
        "default",
        "call",
        "callable",
        "arguments",
        "chain",
        "json",
        "lax",
        "strict",
        "constrained",
    }
)
# Of the server's files; `/v1/models` is none.
_FILE_PATH = re.compile(
    r'(?:File )?"?(?:/(?:[\w.\-]+/)*(?:home|usr|opt|var|tmp|root|lib|mnt|srv|etc|site-packages)'
    r'(?:/[\w.\-]+)+|(?:/[\w.\-]+)+\.py)"?(?:, line \d+(?:, in \S+)?)?'
)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PREFIXES = ("Value error, ", "Assertion failed, ")
_JSON_WORDS = (
    ("a valid dictionary or object to extract fields from", "an object"),
    ("a valid dictionary", "an object"),
)
_UNABLE_TO_PARSE = re.compile(r", unable to (parse|interpret) .*")
_SHOULD_PREFIX = "Input should "
_UNREADABLE = "the body is not valid JSON"


def describe_field_errors(errors: Sequence[object]) -> str:
    """What is wrong with which fields, from a framework's list of errors."""
    descriptions = list(dict.fromkeys(_describe_field_error(error) for error in errors))
    return few(descriptions, _MAX_FIELDS)


def sanitize(message: str) -> str:
    """A message without pydantic's text, files of the server and addresses in its memory."""
    header = _PYDANTIC_HEADER.search(message)
    if header is not None:
        return describe_field_errors(list(_parse_pydantic_errors(message[header.end() :])))
    return _ADDRESS.sub("", _FILE_PATH.sub("a file", message)).strip()


def _parse_pydantic_errors(text: str) -> Iterator[Mapping[str, object]]:
    """The errors in pydantic's text: a line with the location, and one that is indented."""
    location = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            location = line
        elif not line.startswith("   "):
            yield {"loc": tuple(location.split(".")), "msg": _DETAILS.sub("", line.strip())}


def _describe_field_error(error: object) -> str:
    if not isinstance(error, Mapping):
        return str(error)[:_MAX_CHARS]
    message = str(error.get("msg", "is not valid"))[:_MAX_CHARS]
    if error.get("type") == "json_invalid":
        context = error.get("ctx")
        why = context.get("error") if isinstance(context, Mapping) else None
        return f"{_UNREADABLE}: {str(why).lower()}" if why else _UNREADABLE
    for prefix in _PREFIXES:
        message = message.removeprefix(prefix)
    field = field_path(error.get("loc"))
    name = f"'{field}'" if field else "the body"
    if message == "Field required":
        return f"{name} is required"
    if message.startswith(_SHOULD_PREFIX):
        message = _UNABLE_TO_PARSE.sub("", message)
        for pydantic_words, json_words in _JSON_WORDS:
            message = message.replace(pydantic_words, json_words)
        return f"{name} should {message.removeprefix(_SHOULD_PREFIX)}"
    return f"{name}: {message}"


def field_path(location: object) -> str:
    """The field at a framework's location, with dots; empty where that is the body itself."""
    parts = [str(part) for part in location] if isinstance(location, (list, tuple)) else []
    return ".".join(part for part in parts if _is_field(part))


def strip_class_names(param: str) -> str:
    """A location as vLLM tells it (`body.messages.0`), without the names of classes in it."""
    return ".".join(part for part in param.split(".") if _FIELD.fullmatch(part))


def _is_field(part: str) -> bool:
    return _FIELD.fullmatch(part) is not None and part not in _NON_FIELD_PARTS
