"""Readable YAML of plain values: long texts as blocks, keys in the given order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from textwrap import indent
from typing import Final

_PLAIN_SCALAR: Final = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*|[0-9]+[A-Za-z]+(?:/[a-z]+)?")
_HEXADECIMAL: Final = re.compile(r"0[xX]")
_RESERVED_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""Words that some YAML reader does not take for text."""
_INDENT: Final = "  "


def yaml_text(*documents: object) -> str:
    """One document or several."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _entry(f"{scalar_text(str(key))}:", child)
        return
    assert isinstance(value, list | tuple), "a document is a mapping or a list"
    for entry in value:
        if isinstance(entry, Mapping | list | tuple) and entry:
            first, *remaining = _lines(entry)
            yield f"- {first}"
            yield from (f"{_INDENT}{line}" for line in remaining)
        else:
            yield from _entry("-", entry)


def _entry(prefix: str, value: object) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple) and value:
        yield prefix
        yield from (f"{_INDENT}{line}" for line in _lines(value))
    elif isinstance(value, str) and "\n" in value and _fits_block_scalar(value):
        yield f"{prefix} |{'' if value.endswith(chr(10)) else '-'}"
        yield from indent(value, _INDENT).rstrip("\n").split("\n")
    else:
        yield f"{prefix} {scalar_text(value)}"


def _fits_block_scalar(text: str) -> bool:
    """Whether a block keeps it exactly: blanks at its ends and unusual breaks would be lost."""
    lines = text.removesuffix("\n").split("\n")
    loses_whitespace = not lines[-1] or text[0] in " \t\n"
    return not loses_whitespace and all(
        line.replace("\t", " ").isprintable() and not line.isspace() for line in lines
    )


def scalar_text(value: object) -> str:
    """A scalar or an empty collection."""
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        return "[]"
    if isinstance(value, str) and _is_plain_string(value):
        return value
    # YAML breaks lines at, or rejects, some characters that JSON leaves as they are.
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(
        character if character.isprintable() else f"\\U{ord(character):08x}" for character in quoted
    )


def _is_plain_string(text: str) -> bool:
    """Whether every reader takes it for that text without quotes."""
    is_plain = _PLAIN_SCALAR.fullmatch(text) and not _HEXADECIMAL.match(text)
    return bool(is_plain) and text.lower() not in _RESERVED_WORDS
