"""The protections of `mutation_rows.txt`: where each is, how to remove it, and its tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Mutation(NamedTuple):
    """One protection."""

    what: str
    """What is taken away."""
    file: str
    old: str
    """A text that is in the file once."""
    new: str
    tests: tuple[str, ...]
    """What pytest is given."""


def read_rows(text: str) -> Iterator[Mutation]:
    """Read the blocks of a text; its first lines say how they are written.

    Raises:
        ValueError: A block is not complete.
    """
    file = ""
    tests: tuple[str, ...] = ()
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines and lines[0].startswith("@ "):
            file, _, tests_text = lines.pop(0)[2:].partition(" | ")
            tests = tuple(tests_text.split())
        if not lines:
            continue
        what, *rest = lines
        olds = [line[2:] for line in rest if line[0] == "-"]
        news = [line[2:] for line in rest if line[0] == "+"]
        if not (tests and olds and news) or len(olds) + len(news) != len(rest) or what[0] in "@-+":
            raise ValueError(f"a block must name its file, tests, -, +; got {block!r}")
        yield Mutation(what, file, "\n".join(olds), "\n".join(news), tests)


ROWS = tuple(read_rows(Path(__file__).with_suffix(".txt").read_text()))
