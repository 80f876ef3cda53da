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
from tests.chaos.report import PAGE, render_page
from tests.chaos.results import FILE, MUTATIONS, MutationOutcome, MutationResult, MutationResults

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
        runner, mutation_results = MutationRunner(folder / "tree"), list[MutationResult]()
        for row in chosen:
            mutation_results.append(_print_result(runner.run_mutation(row)))
            _save(mutation_results)  # at once: an interrupted run keeps its findings
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(result.outcome is MutationOutcome.CAUGHT for result in mutation_results) else 1


def _print_result(result: MutationResult) -> MutationResult:
    sys.stdout.write(f"{result.outcome}: {result.description} ({result.file}): {result.detail}\n")
    sys.stdout.flush()
    return result


def _save(mutation_results: Sequence[MutationResult]) -> None:
    """Keep what was tried now, and of the rest what was found last, where there is a row yet."""
    with results.exclusive_lock(PAGE.parent, wait_s=_KEEP_S):
        results_by_row = {(row.description, row.file): row for row in results.read_mutations().rows}
        results_by_row |= {(result.description, result.file): result for result in mutation_results}
        known = [
            results_by_row[row.what, row.file]
            for row in ROWS
            if (row.what, row.file) in results_by_row
        ]
        all_results = MutationResults(
            rows=tuple(known),
            began_at=datetime.now(UTC).isoformat(timespec="seconds"),
            revision=_revision(),
            untried=len(ROWS) - len(known),
        )
        results.write_mutations(all_results, MUTATIONS)
        results.write_atomically(PAGE, render_page(results.read(FILE), all_results))


def _revision() -> str:
    """Of this tree; ends in `+` where it was changed since."""
    revision = provenance()
    return f"{str(revision['git_sha'])[:10]}{'+' if revision['git_dirty'] else ''}"


class MutationRunner:
    """A copy of the tree in which things are broken, one at a time."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._revision = _revision()
        self._baseline: dict[tuple[str, ...], tuple[MutationOutcome, str] | None] = {}
        """By what is run: None when it passes on the tree as it is."""
        copy_tree(_ROOT, tree)
        self._check_imports()

    def run_mutation(self, row: Mutation) -> MutationResult:
        """Take one protection away, run its tests, put it back."""
        catch, by = self._check_text(row) or self._check_baseline(row) or self._run_mutated(row)
        tests = " ".join(row.tests)
        return MutationResult(
            description=row.what,
            file=row.file,
            outcome=catch,
            detail=by,
            tests=tests,
            revision=self._revision,
        )

    def _check_text(self, row: Mutation) -> tuple[MutationOutcome, str] | None:
        found = (self._tree / row.file).read_text().count(row.old)
        return (
            None
            if found == 1
            else (MutationOutcome.BROKE, f"it is there {found} times, expected once")
        )

    def _check_baseline(self, row: Mutation) -> tuple[MutationOutcome, str] | None:
        """Why its tests say nothing: they fail on the tree as it is."""
        if row.tests not in self._baseline:
            catch, by = self._run(row.tests)
            passed = catch is MutationOutcome.SURVIVED
            self._baseline[row.tests] = (
                None if passed else (MutationOutcome.BROKE, f"before that: {by}")
            )
        return self._baseline[row.tests]

    def _run_mutated(self, row: Mutation) -> tuple[MutationOutcome, str]:
        catch, by = self._run_without(row, row.tests)
        if catch is not MutationOutcome.CAUGHT:
            return catch, by
        # A test that fails now and then notices nothing: it must pass with it, and fail without.
        failed_test = (by.partition("[")[0],)
        passes, _ = self._run(failed_test)
        again, _ = self._run_without(row, failed_test)
        if passes is MutationOutcome.SURVIVED and again is MutationOutcome.CAUGHT:
            return MutationOutcome.CAUGHT, by
        return MutationOutcome.BROKE, f"{by} failed, and does so now and then, or not by itself"

    def _run_without(self, row: Mutation, tests: Sequence[str]) -> tuple[MutationOutcome, str]:
        """What tests say while the protection is away."""
        file = self._tree / row.file
        original = file.read_text()
        file.write_text(original.replace(row.old, row.new))
        try:
            return self._run(tests)
        finally:
            file.write_text(original)

    def _run(self, tests: Sequence[str]) -> tuple[MutationOutcome, str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-m", "not real and not slow and not thorough", *tests]
        try:
            process = subprocess.run(
                command,
                cwd=self._tree,
                env=self._environment(),
                capture_output=True,
                text=True,
                check=False,
                timeout=_RUN_S,
            )
        except subprocess.TimeoutExpired:
            return MutationOutcome.BROKE, f"not done within {_RUN_S:g} s"
        return read_outcome(process.returncode, process.stdout)

    def _environment(self) -> Mapping[str, str]:
        # Compiled files are distinguished by second and size: a mutation may change neither.
        path = f"{self._tree / 'platform'}{os.pathsep}{self._tree}"
        return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}

    def _check_imports(self) -> None:
        """See that tests in the copy import the copy, not what is installed."""
        imported_from = subprocess.run(
            [sys.executable, "-c", "import baton; print(baton.__file__)"],
            cwd=self._tree,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        if not Path(imported_from).is_relative_to(self._tree):
            raise RuntimeError(
                f"tests in {self._tree} import {imported_from}: nothing would be broken"
            )


def read_outcome(status: int, output: str) -> tuple[MutationOutcome, str]:
    """What pytest's exit status and output mean, and which test failed first."""
    first = _FIRST.search(output)
    name = first[1] if first is not None else ""
    if status == _PASSED:
        return MutationOutcome.SURVIVED, "every test passed"
    if status == _FAILED and name and "::" in name:
        return MutationOutcome.CAUGHT, name
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "nothing")
    return MutationOutcome.BROKE, f"pytest ended with {status}: {name or last}"[:200]


def copy_tree(source: Path, target: Path) -> None:
    """What git tracks, or would track, with the files as they are now."""
    output = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=source,
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout
    for name in filter(None, output.decode().split("\0")):
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


if __name__ == "__main__":
    sys.exit(main())
