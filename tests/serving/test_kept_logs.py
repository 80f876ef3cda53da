"""A start that fails keeps its evidence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.serving.cluster.failed_start_logs import archive_logs, failures_folder, last_error

TRACE = """Traceback (most recent call last):
  File "engine.py", line 9, in start
    raise ValueError("current platform cpu does not support ray")
ValueError: current platform cpu does not support ray
"""


def session(run_dir: Path, **files: str) -> Path:
    """A run directory as `LocalCluster` has it, with logs below."""
    logs = run_dir / "r" / "session_1" / "logs"
    (logs / "serve").mkdir(parents=True)
    (run_dir / "r" / "session_latest").symlink_to("session_1")
    (run_dir / "session_latest").symlink_to("r/session_latest")
    for name, text in files.items():
        (logs / name.replace("__", "/")).with_suffix(".log").write_text(text)
    return logs


def test_logs_outlive_the_folder_that_they_were_in(tmp_path: Path) -> None:
    run_dir, folder = tmp_path / "baton-a", tmp_path / "failed"
    folder.mkdir()
    session(run_dir, serve__replica_x=TRACE)
    kept = archive_logs(run_dir, folder)
    assert kept == folder / "baton-a"
    assert (kept / "serve" / "replica_x.log").read_text() == TRACE
    assert last_error(kept) == "ValueError: current platform cpu does not support ray"


def test_a_start_that_logged_nothing_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "failed").mkdir()
    (tmp_path / "baton-a").mkdir()
    assert archive_logs(tmp_path / "baton-a", tmp_path / "failed") is None
    assert not list((tmp_path / "failed").iterdir())


def test_the_last_five_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "failed"
    folder.mkdir()
    for number in range(7):
        run_dir = tmp_path / f"baton-{number}"
        session(run_dir, serve__replica_x=TRACE)
        kept = archive_logs(run_dir, folder)
        assert kept is not None
        os.utime(kept, (number, number))
    left = {path.name for path in folder.iterdir()}
    assert left >= {f"baton-{number}" for number in range(3, 7)}
    assert len(left) == 5


def test_what_a_replica_said_counts_before_what_ray_says_of_it(tmp_path: Path) -> None:
    logs = session(
        tmp_path / "baton-a",
        serve__replica_x="RuntimeError: a worker died\n",
        serve__controller_1="ActorDiedError: The actor died unexpectedly\n",
    )
    assert last_error(logs) == "RuntimeError: a worker died"


@pytest.mark.parametrize(
    "text", ["", "all is well\n", "asyncio.exceptions.CancelledError: closing\n"]
)
def test_where_nobody_complained_nothing_is_said(tmp_path: Path, text: str) -> None:
    assert last_error(session(tmp_path / "baton-a", serve__replica_x=text)) == ""


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = failures_folder()
    assert folder == tmp_path / "baton" / "failed"
    assert folder.stat().st_mode & 0o077 == 0
