"""Prompts from a file: JSON or JSON lines, as in ShareGPT and vLLM's benchmarks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from baton.bench.client.client import Message
from baton.domain.errors import TraceInvalid
from baton.domain.names.words import count_text
from baton.simulator.workloads.lines import numbered_lines, parse_tokens

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_ROLES |= {"chatgpt": "assistant", "system": "system"}


class DatasetRow(NamedTuple):
    """One prompt."""

    messages: tuple[Message, ...]
    output_tokens: int | None = None
    answer: str | None = None
    """The recorded answer, whose length may be used."""

    @property
    def text(self) -> str:
        """As a plain prompt."""
        return "\n".join(message["content"] for message in self.messages)


def read_rows(
    text: str, name: str, *, ignore_invalid: bool = False
) -> tuple[list[DatasetRow], int]:
    """The prompts of a file, and the number of skipped entries.

    Formats are vLLM's custom data set (`prompt`), OpenAI (`messages`) and ShareGPT
    (`conversations`). Like vLLM, only the first prompt and its answer are used.

    Raises:
        TraceInvalid: an entry is invalid, unless `ignore_invalid`; there are none.
    """
    rows: list[DatasetRow] = []
    skipped = 0
    for line, entry in _entries(text, name):
        try:
            rows.append(_parse_row(entry))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if not ignore_invalid:
                raise TraceInvalid(name, line, _error_text(error)) from error
            skipped += 1
    if not rows:
        raise TraceInvalid(
            name, 0, f"holds no prompts; left out {count_text(skipped, 'entry', 'entries')}"
        )
    return rows, skipped


def shuffled(rows: Sequence[DatasetRow], seed: str) -> list[DatasetRow]:
    """In an order that depends on the seed alone."""
    shuffled_rows = list(rows)
    random.Random(seed).shuffle(shuffled_rows)  # noqa: S311 - seeded, not secret
    return shuffled_rows


def _entries(text: str, name: str) -> Iterator[tuple[int, object]]:
    """Entries with their line, or with their position in a JSON array."""
    if text.lstrip("\ufeff \t\r\n").startswith("["):
        try:
            entries = json.loads(text.lstrip("\ufeff"))
        except (ValueError, RecursionError) as error:
            raise TraceInvalid(name, 1, f"not JSON: {error}") from error
        yield from enumerate(entries, start=1)
        return
    # Not splitlines(): JSON text may contain other line separators, such as U+2028.
    for number, line in numbered_lines(text.split("\n")):
        if line.strip():
            try:
                yield number, json.loads(line.lstrip("\ufeff"))
            except (ValueError, RecursionError) as error:
                yield number, ValueError(f"not JSON: {error}")


def _parse_row(entry: object) -> DatasetRow:
    if isinstance(entry, ValueError):
        raise entry
    if not isinstance(entry, dict):
        raise ValueError(f"got {type(entry).__name__}, expected an object")  # noqa: TRY004 - of a file
    declared_tokens = entry.get("output_tokens", entry.get("max_tokens"))
    output_tokens = (
        None
        if declared_tokens is None
        else parse_tokens(declared_tokens, "output_tokens", minimum=1)
    )
    if isinstance(entry.get("prompt"), str) and entry["prompt"]:
        return DatasetRow(
            (Message(role="user", content=entry["prompt"]),), output_tokens, entry.get("answer")
        )
    turns = entry.get("messages", entry.get("conversations", entry.get("conversation")))
    if not isinstance(turns, list):
        raise ValueError("no prompt, messages or conversations")  # noqa: TRY004 - of a file
    return _first_exchange([_parse_message(turn) for turn in turns], output_tokens)


def _first_exchange(messages: list[Message], output: int | None) -> DatasetRow:
    prompt_index = next(
        (at for at, message in enumerate(messages) if message["role"] == "user"), None
    )
    if prompt_index is None:
        raise ValueError("it has no question")
    reply = messages[prompt_index + 1 : prompt_index + 2]
    answer = reply[0]["content"] if reply and reply[0]["role"] == "assistant" else None
    return DatasetRow(tuple(messages[: prompt_index + 1]), output, answer)


def _parse_message(fields: dict[str, object]) -> Message:
    role, content = (
        fields.get("role", fields.get("from")),
        fields.get("content", fields.get("value")),
    )
    if role not in _ROLES or not isinstance(content, str) or not content:
        raise ValueError(f"a message of {role!r} without text, expected one of {', '.join(_ROLES)}")
    return Message(role=_ROLES[str(role)], content=content)


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"not as expected: {error!r}"


def lacks_output_lengths(rows: Iterable[DatasetRow]) -> bool:
    """Whether a prompt has no output length."""
    return any(row.output_tokens is None for row in rows)
