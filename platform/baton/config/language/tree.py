"""Configuration trees: values without a schema, with their origins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

Path = tuple[str, ...]
"""Keys from the root, e.g. `("pools", "decode", "role")`."""

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_/-]+")


@dataclass(frozen=True, slots=True)
class FileOrigin:
    """A position in a file; line and column start at 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class EnvOrigin:
    """An environment variable."""

    name: str

    def __str__(self) -> str:
        return f"env {self.name}"


@dataclass(frozen=True, slots=True)
class SetOrigin:
    """A `--set` option."""

    def __str__(self) -> str:
        return "--set"


@dataclass(frozen=True, slots=True)
class DefaultOrigin:
    """A default; `reason` explains a derived default."""

    reason: str = ""

    def __str__(self) -> str:
        return f"default ({self.reason})" if self.reason else "default"


Origin = FileOrigin | EnvOrigin | SetOrigin | DefaultOrigin


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value. `text` is its original spelling, which environment variables keep."""

    value: str | int | float | bool | None
    origin: Origin
    text: str


@dataclass(frozen=True, slots=True)
class ListNode:
    """A list of values."""

    items: tuple[Node, ...]
    origin: Origin


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value; `origin` is the position of the key."""

    node: Node
    origin: Origin


@dataclass(frozen=True, slots=True)
class Section:
    """Keys and their values."""

    entries: Mapping[str, Entry]
    origin: Origin


Node = Scalar | ListNode | Section


@dataclass(frozen=True, slots=True)
class Finding:
    """One error and its position."""

    origin: Origin
    path: Path
    message: str

    def __str__(self) -> str:
        location = "" if isinstance(self.origin, DefaultOrigin) else str(self.origin)
        return ": ".join(part for part in (location, format_path(self.path), self.message) if part)


def format_path(path: Path) -> str:
    """`("models", "llama-3.1", "source")` as `models."llama-3.1".source`, the syntax of `--set`."""
    return ".".join(key if _PLAIN_KEY.fullmatch(key) else f'"{key}"' for key in path)


def matches(path: Path, pattern: str) -> bool:
    """Whether a path matches a pattern such as `pools.*.engine.**`.

    `*` is one name; `**`, only at the end, is any number of names.
    """
    pattern_names = pattern.split(".")
    if pattern_names[-1] == "**":
        pattern_names = pattern_names[:-1]
        path = path[: len(pattern_names)]
    return len(path) == len(pattern_names) and all(
        want in ("*", key) for key, want in zip(path, pattern_names, strict=True)
    )


def sort_key(finding: Finding) -> tuple[int, str, int, int]:
    """A sort key: files by line, then environment variables, options, and defaults."""
    match finding.origin:
        case FileOrigin(file, line, column):
            return 0, file, line, column
        case EnvOrigin(name):
            return 1, name, 0, 0
        case SetOrigin():
            return 2, "", 0, 0
        case DefaultOrigin():
            return 3, "", 0, 0


def is_secret_name(name: str) -> bool:
    """Whether a value under this name is likely a secret: `api_key`, `HF_TOKEN`.

    It compares words, so `max_prompt_tokens` is not a secret. Neither are vLLM's arguments about
    tokens of a text: `token_ids`, `long_prefill_token_threshold`.
    """
    words = re.split(r"[^a-z]+", _TOKENIZER_TERMS.sub("", name.lower().replace("-", "_")))
    return any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words)


def is_vllm_argument(path: Path) -> bool:
    """Whether the value is a raw argument of a vLLM engine or API server."""
    return "extra" in path or (path[:1] in {("model",), ("models",)} and "api" in path)


_SECRET_WORDS = frozenset(
    {"key", "keys", "token", "secret", "secrets", "password", "passwd", "credential", "credentials"}
)
_SECRET_ENDINGS = ("apikey", "password", "secret")
_TOKENIZER_TERMS = re.compile(
    r"(?<![a-z])(?:first_token|token_(?:ids?|thresholds?|budgets?|num|prob)|per_token)(?![a-z])"
)


def describe_node(node: Node, path: Path) -> str:
    """The node, for error messages; never the value of a likely secret."""
    match node:
        case Section():
            return "a mapping"
        case ListNode():
            return "a list"
        case Scalar(value=None):
            return "nothing"
        case Scalar() if any(is_secret_name(key) for key in path):
            return "a literal that is not shown"
        case Scalar(value=str(value)):
            return repr(value if len(value) <= _MAX_SHOWN_CHARS else value[:_MAX_SHOWN_CHARS] + "…")
        case Scalar(text=text):
            return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


_MAX_SHOWN_CHARS = 60
