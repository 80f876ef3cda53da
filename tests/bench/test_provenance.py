"""Figures say where they come from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import baton
from baton.bench.provenance import _git_describe, provenance


def test_versions_and_the_machine_are_said() -> None:
    told = provenance()
    assert told["baton"] == baton.__version__
    assert {"python", "aiohttp", "git_sha"} <= told.keys()
    machine = told["machine"]
    assert isinstance(machine, dict)
    assert machine["cpus"] >= 1
    assert machine["memory_gib"] > 0


def test_a_checkout_has_a_commit_and_says_when_it_was_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        name = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *name, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    clean = _git_describe(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "file").write_text("2")
    assert _git_describe(tmp_path) == f"{clean}-dirty"


def test_where_there_is_no_checkout_or_no_git_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert _git_describe(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _git_describe(tmp_path) is None
