"""Messages name commands that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.cli.command_lines import misused

PLATFORM = Path(__file__).parents[2] / "platform"
_NAMED = re.compile(r"'baton ([a-z][^'\n]*)'")
_VALUE = "VALUE"
"""Stands for what is filled in."""


def texts(tree: ast.AST) -> Iterator[str]:
    """Every string of a module, with what is filled in as one word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else _VALUE
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_command_in_a_message_exists_with_its_options() -> None:
    named = {
        (str(path.relative_to(PLATFORM)), command)
        for path in PLATFORM.rglob("*.py")
        for text in texts(ast.parse(path.read_text()))
        for command in _NAMED.findall(text)
    }
    assert len(named) > 60
    wrong = {(where, command, misused(command)) for where, command in named}
    assert {row for row in wrong if row[2].replace(f"--{_VALUE}", "")} == set()


def test_an_option_that_there_is_not_is_noticed() -> None:
    (text,) = texts(ast.parse("fix = 'see \\'baton trace --slowest\\''"))
    assert [misused(command) for command in _NAMED.findall(text)] == ["--slowest"]
