"""The commands of `baton` that the documents show, as the shell would hand them over."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import dropwhile, pairwise
from pathlib import PurePosixPath
from typing import NamedTuple

from tests.repo.project import CodeBlock, code_blocks, documents

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"^version: 1 +# (\S+\.yaml)$", re.MULTILINE)
_SEPARATORS = {"&&", "||", ";", "|", "&"}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")


class ShownCommand(NamedTuple):
    """One command of a block: what follows `baton`."""

    block: CodeBlock
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.block}: baton {' '.join(self.words)}"


class Example(NamedTuple):
    """Commands, and the output that a document shows right below them."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    output: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


def commands() -> list[ShownCommand]:
    """Every command that any document shows."""
    return [
        ShownCommand(block, words)
        for block in code_blocks("bash")
        for words in baton_calls(block.text)
    ]


def baton_calls(text: str) -> list[tuple[str, ...]]:
    """What a piece of shell says to `baton`, call by call."""
    calls = []
    for line in text.replace("\\\n", " ").splitlines():
        if "baton" not in line:  # it may be a part of what is quoted over several lines
            continue
        for command in _split(shlex.split(line, comments=True)):
            words = list(dropwhile(_ASSIGNMENT.fullmatch, command))
            if words and PurePosixPath(words[0]).name == "baton":
                calls.append(tuple(_without_redirection(words[1:])))
    return calls


def files(document: str) -> dict[str, str]:
    """The configurations that a document names behind their first line, by that name."""
    named_blocks = (block for block in code_blocks("yaml") if block.file == document)
    return {found[1]: block.text for block in named_blocks if (found := _NAMED.match(block.text))}


def examples(document: str) -> list[Example]:
    """The blocks of a document whose output stands in the next one."""
    text = documents()[document]
    blocks = list(_FENCE.finditer(text))
    return [
        Example(
            f"{document}:{text.count(chr(10), 0, block.start()) + 1}",
            tuple(baton_calls(block[2])),
            tuple(line.rstrip() for line in after[2].splitlines() if line.strip()),
        )
        for block, after in pairwise(blocks)
        if block[1] == "bash" and after[1] == "text" and baton_calls(block[2])
    ]


def _split(words: Sequence[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in words:
        if word in _SEPARATORS:
            yield command
            command = []
        else:
            command.append(word)
    yield command


def _without_redirection(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word.startswith((">", "<", "2>")):
            return
        yield word
