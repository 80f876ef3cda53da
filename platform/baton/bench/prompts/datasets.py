"""Prompts out of a file: JSON or JSON lines, as ShareGPT and vLLM's benchmarks have them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from baton.bench.client.client import Message
from baton.domain.errors import BadTrace
from baton.simulator.workloads.lines import numbered, tokens

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_ROLES |= {"chatgpt": "assistant", "system": "system"}


class Row(NamedTuple):
    """One prompt."""

    messages: tuple[Message, ...]
    """As a conversation; a plain prompt is one message of a user."""
    output_tokens: int | None = None
    answer: str | None = None
    """That was given to it, whose length may be taken."""

    @property
    def text(self) -> str:
        """As a plain prompt."""
        return "\n".join(one["content"] for one in self.messages)


def read_rows(text: str, name: str, *, skip_bad: bool = False) -> tuple[list[Row], int]:
    """The prompts of a file, and how many bad entries were left out.

    Known are: `{"prompt": ..., "output_tokens": ...}` (vLLM's custom data set), `{"messages": ...}`
    (OpenAI), and `{"conversations": [{"from": "human", "value": ...}, ...]}` (ShareGPT), of which
    the first prompt and its answer are taken, as vLLM does.

    Raises:
        BadTrace: an entry is bad, unless `skip_bad`; there are none.
    """
    rows: list[Row] = []
    skipped = 0
    for line, entry in _entries(text, name):
        try:
            rows.append(_row(entry))
        except (ValueError, TypeError, KeyError, AttributeError) as wrong:
            if not skip_bad:
                raise BadTrace(name, line, _why(wrong)) from wrong
            skipped += 1
    if not rows:
        raise BadTrace(name, 0, f"holds no prompts, and {skipped} entries that were left out")
    return rows, skipped


def shuffled(rows: Sequence[Row], seed: str) -> list[Row]:
    """In an order that depends on the seed alone."""
    mixed = list(rows)
    random.Random(seed).shuffle(mixed)  # noqa: S311 - seeded, not secret
    return mixed


def _entries(text: str, name: str) -> Iterator[tuple[int, object]]:
    """Each with its line, or for a JSON array with its place in it."""
    if text.lstrip("\ufeff \t\r\n").startswith("["):
        try:
            whole = json.loads(text.lstrip("\ufeff"))
        except (ValueError, RecursionError) as wrong:
            raise BadTrace(name, 1, f"not JSON: {wrong}") from wrong
        yield from enumerate(whole, start=1)
        return
    # Not splitlines(): JSON text may hold other marks that end a line, such as U+2028.
    for number, line in numbered(text.split("\n")):
        if line.strip():
            try:
                yield number, json.loads(line.lstrip("\ufeff"))
            except (ValueError, RecursionError) as wrong:
                yield number, ValueError(f"not JSON: {wrong}")


def _row(entry: object) -> Row:
    if isinstance(entry, ValueError):
        raise entry
    if not isinstance(entry, dict):
        raise ValueError(f"got {type(entry).__name__}, wanted an object")  # noqa: TRY004 - of a file
    said = entry.get("output_tokens", entry.get("max_tokens"))
    output = None if said is None else tokens(said, "output_tokens", at_least=1)
    if isinstance(entry.get("prompt"), str) and entry["prompt"]:
        return Row((Message(role="user", content=entry["prompt"]),), output, entry.get("answer"))
    turns = entry.get("messages", entry.get("conversations", entry.get("conversation")))
    if not isinstance(turns, list):
        raise ValueError("no prompt, messages or conversations")  # noqa: TRY004 - of a file
    return _conversation([_message(one) for one in turns], output)


def _conversation(messages: list[Message], output: int | None) -> Row:
    """Up to its first prompt, with the answer to that."""
    asked = next((at for at, one in enumerate(messages) if one["role"] == "user"), None)
    if asked is None:
        raise ValueError("nobody asks anything in it")
    follows = messages[asked + 1 : asked + 2]
    answer = follows[0]["content"] if follows and follows[0]["role"] == "assistant" else None
    return Row(tuple(messages[: asked + 1]), output, answer)


def _message(one: dict[str, object]) -> Message:
    who, what = one.get("role", one.get("from")), one.get("content", one.get("value"))
    if who not in _ROLES or not isinstance(what, str) or not what:
        raise ValueError(f"a message of {who!r} without text, wanted one of {', '.join(_ROLES)}")
    return Message(role=_ROLES[str(who)], content=what)


def _why(wrong: Exception) -> str:
    return str(wrong) if isinstance(wrong, ValueError) else f"not as wanted: {wrong!r}"


def lengths_wanted(rows: Iterable[Row]) -> bool:
    """Whether any prompt does not say how long its answer shall be."""
    return any(one.output_tokens is None for one in rows)
