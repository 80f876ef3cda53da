"""Folders that nothing outlives."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from baton.runtime.process.scratch import RUN_DIR_VARIABLE, scratch_folder
from baton.serving.cluster import reaper


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)


def test_it_goes_with_the_run_directory_of_the_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(run_dir))
    one, other = scratch_folder("a-"), scratch_folder("a-", short=True)
    assert one.parent == other.parent == run_dir
    assert one != other
    assert one.stat().st_mode & 0o077 == 0, "nobody else may listen there"


@pytest.mark.parametrize("run_dir", ["", "/nowhere/at/all"])
def test_without_a_run_directory_it_is_where_temporary_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_dir: str
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, run_dir)
    assert scratch_folder("a-").parent == tmp_path


def test_the_place_of_temporary_files_may_be_too_long_for_sockets() -> None:
    made = scratch_folder("baton-test-", short=True)
    made.rmdir()
    assert len(str(made)) < 32


def test_the_run_directory_is_the_one_that_is_removed_with_the_deployment() -> None:
    assert RUN_DIR_VARIABLE == reaper.RUN_DIR_VARIABLE
