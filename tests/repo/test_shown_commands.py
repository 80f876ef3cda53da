"""Commands that the documents show are understood, and print what stands below them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from baton.cli.backend import Backend
from baton.cli.main import build_app
from tests.repo.project import ROOT
from tests.repo.shown_commands import Example, ShownCommand, baton_calls, commands, examples, files

GUIDES = (
    "docs/quickstart.md",
    "docs/sizing.md",
    "docs/tuning.md",
    "docs/tutorials/from-colocated-to-disaggregated.md",
    "docs/migrate/from-vllm-serve.md",
    "docs/migrate/from-ray-serve-llm.md",
)
"""Where output that is shown must be what comes out. Elsewhere it may be of another day."""
ALONE = {"size", "calibrate", "plan", "simulate", "config"}
"""Verbs that need nothing that runs."""
AT_ONCE = {"size", "calibrate", "config"}
LONG = (pytest.mark.long, pytest.mark.timeout(600))
WRONGLY_CALLED: type[Exception] = typer.BadParameter.__mro__[1]
"""Of all the ways to call a command wrongly, which Typer exports only one of."""


@pytest.mark.parametrize("shown", commands(), ids=str)
def test_a_command_that_is_shown_is_understood(shown: ShownCommand) -> None:
    understand(shown.words)


@pytest.mark.parametrize(
    "wrong", ["statsu", "status --jsno", "scale", "explain rute", "bench -h 1"]
)
def test_a_command_that_is_misspelt_is_noticed(wrong: str) -> None:
    (words,) = baton_calls(f"baton {wrong}")
    with pytest.raises((KeyError, WRONGLY_CALLED)):
        understand(words)


def understand(words: tuple[str, ...]) -> None:
    """Parse a command as `baton` would, and do nothing.

    Raises:
        KeyError: there is no such verb.
        WRONGLY_CALLED: it is called wrongly.
    """
    command = typer.main.get_command(build_app())
    rest = list(words)
    while isinstance(command, TyperGroup):
        command = command.commands[rest.pop(0)]
    command.make_context("baton", rest, obj=Backend(environ={}))


def cases() -> Sequence[object]:
    found = []
    for document in GUIDES:
        for example in examples(document):
            verbs = {words[0] for words in example.commands}
            if verbs <= ALONE:
                marks = () if verbs <= AT_ONCE else LONG
                found.append(pytest.param(document, example, id=str(example), marks=marks))
    return found


@pytest.mark.parametrize(("document", "example"), cases())
def test_the_output_shown_below_a_command_is_its_own(
    document: str, example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name, text in files(document).items():
        (tmp_path / name).write_text(text)

    printed: list[str] = []
    for words in example.commands:
        result = CliRunner().invoke(build_app(), words, obj=Backend(environ={}))
        printed += [line.rstrip() for line in (result.stdout + result.stderr).splitlines()]

    lines = iter(printed)
    missing = [line for line in example.output if line not in lines]
    assert not missing, "\n".join(printed)
