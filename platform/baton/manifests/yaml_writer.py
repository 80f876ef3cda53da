"""Plain values as YAML that people can read: long texts as blocks, keys in the order given."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from textwrap import indent
from typing import Final

_PLAIN: Final = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*|[0-9]+[A-Za-z]+(?:/[a-z]+)?")
_HEXADECIMAL: Final = re.compile(r"0[xX]")
_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""Which some reader takes for something else than a text, as what begins like `0xff`."""
_STEP: Final = "  "


def yaml_text(*documents: object) -> str:
    """One document, or several one after another."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(one)) for one in documents)


def _lines(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _entry(f"{_scalar(str(key))}:", below)
        return
    assert isinstance(value, list | tuple), "a document is a mapping or a list"
    for one in value:
        if isinstance(one, Mapping | list | tuple) and one:
            first, *rest = _lines(one)
            yield f"- {first}"
            yield from (f"{_STEP}{line}" for line in rest)
        else:
            yield from _entry("-", one)


def _entry(head: str, value: object) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple) and value:
        yield head
        yield from (f"{_STEP}{line}" for line in _lines(value))
    elif isinstance(value, str) and "\n" in value and _survives_as_block(value):
        yield f"{head} |{'' if value.endswith(chr(10)) else '-'}"
        yield from indent(value, _STEP).rstrip("\n").split("\n")
    else:
        yield f"{head} {_scalar(value)}"


def _survives_as_block(text: str) -> bool:
    """Whether a block holds it to the letter: blanks at its edges and odd breaks would be lost."""
    lines = text.removesuffix("\n").split("\n")
    loses_edges = not lines[-1] or text[0] in " \t\n"
    return not loses_edges and all(
        line.replace("\t", " ").isprintable() and not line.isspace() for line in lines
    )


def _scalar(value: object) -> str:
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, list | tuple):
        return "[]"
    if isinstance(value, str) and _reads_as_text(value):
        return value
    # JSON leaves some characters as they are that YAML breaks lines at, or refuses.
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in quoted)


def _reads_as_text(text: str) -> bool:
    """Whether every reader takes it for that text without quotes."""
    plain = _PLAIN.fullmatch(text) and not _HEXADECIMAL.match(text)
    return bool(plain) and text.lower() not in _WORDS
