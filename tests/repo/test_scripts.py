"""The scripts say what is wrong, and CI leaves nothing running."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.repo.project import ROOT

MAKEFILE = (
    "install install-gpu check check-deploy test test-long test-gpu demo-once:\n\t@echo step $@\n"
)
STAND_INS = {
    ".venv/bin/python": "echo step ${2##*.}",
    ".venv-gpu/bin/python": "echo step ${2##*.}",
    "scripts/tools": "echo step tools",
}
STEPS = (
    "install check install-gpu pip tools test test-long test-gpu check-deploy typecheck"
    " demo-once outcomes"
)


def run(tree: Path, command: str, *, path: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(tree / command)],
        cwd=tree,
        env={"PATH": path or os.environ["PATH"], "HOME": str(tree)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def only(folder: Path, *names: str) -> str:
    """A PATH on which these commands are, and no other."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return str(folder)


@pytest.fixture
def installable(tmp_path: Path) -> Path:
    tree = tmp_path / "a tree"
    for folder in ("scripts", "requirements"):
        shutil.copytree(ROOT / folder, tree / folder)
    shutil.copy(ROOT / "pyproject.toml", tree)
    return tree


@pytest.fixture
def ci(tmp_path: Path) -> Path:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    for program, does in STAND_INS.items():
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / program).chmod(0o755)
    return tmp_path


def steps(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")]


def test_without_python_3_11_the_installer_says_so_and_makes_nothing(
    installable: Path, tmp_path: Path
) -> None:
    path = only(
        tmp_path / "bin", "bash", "env", "dirname", "realpath", "flock", "cat", "sha256sum",
        "cut", "uname", "df", "awk", "grep",
    )  # fmt: skip
    newer = Path(path) / "python3"
    newer.write_text("#!/bin/sh\nexit 1\n")  # what a Python 3.12 answers to the question
    newer.chmod(0o755)

    done = run(installable, "scripts/install", path=path)

    assert done.returncode == 1
    assert "no Python 3.11 was found" in done.stderr
    assert not (installable / ".venv").exists()


def test_on_another_kind_of_machine_the_installer_says_so(
    installable: Path, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    uname = tmp_path / "bin/uname"
    uname.write_text("#!/bin/sh\ncase $1 in -s) echo Darwin;; -m) echo arm64;; esac\n")
    uname.chmod(0o755)

    done = run(installable, "scripts/install", path=f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    assert done.returncode == 1
    assert "the locks are for Linux on x86-64, this is Darwin on arm64" in done.stderr
    assert not (installable / ".venv").exists()


def test_ci_runs_the_readmes_commands_in_order(ci: Path) -> None:
    done = run(ci, ".ci/run")

    assert done.returncode == 0, done.stderr
    assert steps(done) == STEPS.split()


def test_ci_asks_twice_for_programs_of_others_and_goes_no_further_without_them(ci: Path) -> None:
    (ci / "scripts/tools").write_text("#!/bin/sh\necho step tools\n[ -e away ]\n")
    done = run(ci, ".ci/run")
    assert done.returncode != 0
    assert steps(done) == [*STEPS.partition(" tools")[0].split(), "tools", "tools"]

    (ci / "scripts/tools").write_text("#!/bin/sh\n[ -e away ] || { touch away; exit 1; }\n")
    assert run(ci, ".ci/run").returncode == 0


def test_ci_fails_where_something_was_skipped_that_may_not_be(ci: Path) -> None:
    (ci / ".venv/bin/python").write_text("#!/bin/sh\n[ $2 != tests.outcomes ]\n")
    done = run(ci, ".ci/run")
    assert done.returncode != 0
    assert "step demo-once" in done.stdout


def test_ci_stops_at_the_first_step_that_fails(ci: Path) -> None:
    (ci / "Makefile").write_text(MAKEFILE.replace("echo step $@", "echo step $@; [ $@ != check ]"))

    done = run(ci, ".ci/run")

    assert done.returncode != 0
    assert "step check" in done.stdout
    assert "step test" not in done.stdout


def test_ci_fails_when_a_step_leaves_a_process_behind_and_ends_it(ci: Path) -> None:
    (ci / "Makefile").write_text(
        MAKEFILE + "\t@setsid sleep 300 >/dev/null 2>&1 & echo $$! >>left\n"
    )

    done = run(ci, ".ci/run")

    assert done.returncode != 0
    assert "processes were left behind" in done.stderr
    assert "sleep 300" in done.stderr
    (pid,) = (ci / "left").read_text().split()
    assert not Path(f"/proc/{pid}/exe").exists()
