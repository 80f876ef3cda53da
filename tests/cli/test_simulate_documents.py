"""What the document on simulating shows, run as it is shown."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.backend import Backend
from baton.cli.main import build_app
from tests.repo.project import code_blocks

ROOT = Path(__file__).parents[2]
CHEAP = ("baton size ", "baton calibrate ", "baton simulate -c configs/sim.yaml ")


def examples() -> list[str]:
    blocks = [block for block in code_blocks("bash") if block.file == "docs/operations/simulate.md"]
    return [block.text.strip() for block in blocks if block.text.startswith(CHEAP)]


def test_there_are_examples() -> None:
    assert len(examples()) >= 2


@pytest.mark.parametrize("example", examples())
def test_an_example_runs(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    _, *arguments = shlex.split(example)
    result = CliRunner().invoke(build_app(), arguments, obj=Backend(environ={}))
    assert result.exit_code == 0, result.stderr
    assert result.stdout
