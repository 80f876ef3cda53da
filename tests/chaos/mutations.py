"""Take each protection away, in a copy of the tree, and see that a test that guards it fails.

For each row of `mutation_rows`: its tests pass in the copy, the text of the protection is replaced,
the same tests are run again. *Caught* means that they fail then, by a test that failed; a mutation
that nothing can be imported with, or whose tests do not pass without it either, is *broke*.

    python -m tests.chaos.mutations [--only TEXT] [--list]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks._provenance import provenance
from tests.chaos import results
from tests.chaos.mutation_rows import ROWS, Mutation
from tests.chaos.report import PAGE, page
from tests.chaos.results import FILE, MUTATIONS, Catch, Removal, Removals

_ROOT = Path(__file__).resolve().parents[2]
_RUN_S = 240.0
"""For the tests of one row. A test that hangs is ended, and named, long before that."""
_KEEP_S = 60.0
_PASSED, _FAILED = 0, 1
_FIRST = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all, or those whose text or file has `--only`; 0 when every one was caught."""
    parser = argparse.ArgumentParser(prog="tests.chaos.mutations", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="in what, or where, it is")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    chosen = [row for row in ROWS if options.only in f"{row.what} {row.file}"]
    if options.list:
        for row in chosen:
            sys.stdout.write(f"{row.file}: {row.what} | {' '.join(row.tests)}\n")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="mutations-", dir="/tmp"))
    try:
        laboratory, found = Laboratory(folder / "tree"), list[Removal]()
        for row in chosen:
            found.append(_said(laboratory.try_one(row)))
            _keep(found)  # at once: whoever ends this keeps what was found
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(one.catch is Catch.CAUGHT for one in found) else 1


def _said(found: Removal) -> Removal:
    sys.stdout.write(f"{found.catch}: {found.what} ({found.file}): {found.by}\n")
    sys.stdout.flush()
    return found


def _keep(found: Sequence[Removal]) -> None:
    """Keep what was tried now, and of the rest what was found last, where there is a row yet."""
    with results.only_one(PAGE.parent, wait_s=_KEEP_S):
        before = {(one.what, one.file): one for one in results.read_removals().rows}
        before |= {(one.what, one.file): one for one in found}
        known = [before[row.what, row.file] for row in ROWS if (row.what, row.file) in before]
        revision = provenance()
        told = f"{str(revision['git_sha'])[:10]}{'+' if revision['git_dirty'] else ''}"
        whole = Removals(
            rows=tuple(known),
            began_at=datetime.now(UTC).isoformat(timespec="seconds"),
            revision=told,
            untried=len(ROWS) - len(known),
        )
        results.write_removals(whole, MUTATIONS)
        results.write_whole(PAGE, page(results.read(FILE), whole))


class Laboratory:
    """A copy of the tree in which things are broken, one at a time."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._sound: dict[tuple[str, ...], tuple[Catch, str] | None] = {}
        """By what is run: None when it passes on the tree as it is."""
        copy_tree(_ROOT, tree)
        self._check_imports()

    def try_one(self, row: Mutation) -> Removal:
        """Take one protection away, run its tests, put it back."""
        catch, by = self._does_not_fit(row) or self._is_unsound(row) or self._broken(row)
        tests = " ".join(row.tests)
        return Removal(what=row.what, file=row.file, catch=catch, by=by, tests=tests)

    def _does_not_fit(self, row: Mutation) -> tuple[Catch, str] | None:
        found = (self._tree / row.file).read_text().count(row.old)
        return None if found == 1 else (Catch.BROKE, f"it is there {found} times, wanted once")

    def _is_unsound(self, row: Mutation) -> tuple[Catch, str] | None:
        """Why its tests say nothing: they fail on the tree as it is."""
        if row.tests not in self._sound:
            catch, by = self._run(row.tests)
            passed = catch is Catch.SURVIVED
            self._sound[row.tests] = None if passed else (Catch.BROKE, f"before that: {by}")
        return self._sound[row.tests]

    def _broken(self, row: Mutation) -> tuple[Catch, str]:
        catch, by = self._without(row, row.tests)
        if catch is not Catch.CAUGHT:
            return catch, by
        # A test that fails now and then notices nothing: it must pass with it, and fail without.
        alone = (by.partition("[")[0],)
        passes, _ = self._run(alone)
        again, _ = self._without(row, alone)
        if passes is Catch.SURVIVED and again is Catch.CAUGHT:
            return Catch.CAUGHT, by
        return Catch.BROKE, f"{by} failed, and does so now and then, or not by itself"

    def _without(self, row: Mutation, tests: Sequence[str]) -> tuple[Catch, str]:
        """What tests say while the protection is away."""
        file = self._tree / row.file
        sound = file.read_text()
        file.write_text(sound.replace(row.old, row.new))
        try:
            return self._run(tests)
        finally:
            file.write_text(sound)

    def _run(self, tests: Sequence[str]) -> tuple[Catch, str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-m", "not real and not slow and not thorough", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=self._tree,
                env=self._environment(),
                capture_output=True,
                text=True,
                check=False,
                timeout=_RUN_S,
            )
        except subprocess.TimeoutExpired:
            return Catch.BROKE, f"not done within {_RUN_S:g} s"
        return read_outcome(done.returncode, done.stdout)

    def _environment(self) -> Mapping[str, str]:
        # Compiled files are told apart by second and size: a mutation may change neither.
        path = f"{self._tree / 'platform'}{os.pathsep}{self._tree}"
        return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}

    def _check_imports(self) -> None:
        """See that tests in the copy import the copy, not what is installed."""
        where = subprocess.run(
            [sys.executable, "-c", "import baton; print(baton.__file__)"],
            cwd=self._tree,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        if not Path(where).is_relative_to(self._tree):
            raise RuntimeError(f"tests in {self._tree} import {where}: nothing would be broken")


def read_outcome(status: int, said: str) -> tuple[Catch, str]:
    """What pytest's exit status and output mean, and which test failed first."""
    first = _FIRST.search(said)
    name = first[1] if first is not None else ""
    if status == _PASSED:
        return Catch.SURVIVED, "every test passed"
    if status == _FAILED and name and "::" in name:
        return Catch.CAUGHT, name
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "nothing")
    return Catch.BROKE, f"pytest ended with {status}: {name or last}"[:200]


def copy_tree(source: Path, target: Path) -> None:
    """What git tracks, or would track, with the files as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=source,
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


if __name__ == "__main__":
    sys.exit(main())
