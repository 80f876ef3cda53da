"""Run cases of the chaos suite, keep what came of them, and write the page that shows it.

Each case runs in a process of its own, one after the other, for three times its minutes at most.

    python -m tests.chaos --list
    python -m tests.chaos --case F1 --case 'L*'
    python -m tests.chaos --quick               those of two minutes at most
    python -m tests.chaos --page                write the page again; run nothing
    python -m tests.chaos --case F1 --note '...'    what was found to be the cause of a miss
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks._provenance import provenance
from tests.chaos import results
from tests.chaos.case import MINUTES, Bound, Case, Outcome, Verdict, exactly, load_cases
from tests.chaos.isolated import ProcessExit, run_isolated
from tests.chaos.report import PAGE, render_page
from tests.chaos.results import FILE, AlreadyRunningError, CaseResults, ResultsByCase, Run

_QUICK_MINUTES = 2.0
_DEADLINE_FACTOR = 3.0
"""Times its minutes: a case that takes longer is ended."""
_START_S = 60.0
_KEEP_S = 60.0
_KEPT_CHARS = 1500
"""Characters of the last words of a case that broke, which are kept ..."""
_PRINTED_CHARS = 20_000
"""... and shown."""
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.-]+/)+")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 0 when all of it passed, 2 when nothing could be run."""
    options = _options(arguments)
    cases = load_cases()
    if options.child:
        return _run_child(cases[options.child], options.folder, options.outcome)
    chosen = choose(cases, options.case, quick=options.quick)
    if options.list:
        _list_cases(chosen, results.read(options.results))
        return 0
    if options.page or options.note:
        with _kept_results(cases, options) as lines:
            if options.note:
                (key,) = options.case
                lines[key] = results.add_note(lines[key], options.note)
        return 0
    if not chosen:
        sys.stderr.write(f"no case is called {' or '.join(options.case)}: see --list\n")
        return 2
    try:
        with results.exclusive_lock(options.results.parent, wait_s=options.wait):
            return _run_all(cases, chosen, options)
    except AlreadyRunningError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", default=[], metavar="KEY", help="or a pattern")
    parser.add_argument("--quick", action="store_true", help="cases of two minutes at most")
    parser.add_argument("--list", action="store_true", help="what there is; run nothing")
    parser.add_argument("--page", action="store_true", help="write the page again; run nothing")
    parser.add_argument("--minutes", type=float, help="for cases that can be longer or shorter")
    parser.add_argument("--wait", type=float, default=0.0, metavar="S", help="for another's end")
    parser.add_argument("--note", metavar="TEXT", help="say why the last run of one case missed")
    parser.add_argument("--results", type=Path, default=FILE, help="where they are kept")
    parser.add_argument("--write-page", type=Path, default=PAGE, help="where the page is")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--outcome", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.results.resolve().parent == options.write_page.resolve().parent:
        parser.error("--results and --write-page name one folder, and each locks its own: name two")
    return options


def choose(cases: Mapping[str, Case], patterns: Sequence[str], *, quick: bool) -> list[Case]:
    """Cases whose key a pattern names, in order; without a pattern all of them."""
    matching = [
        case
        for key, case in cases.items()
        if not patterns or any(fnmatchcase(key, pattern) for pattern in patterns)
    ]
    selected = [case for case in matching if not quick or case.minutes <= _QUICK_MINUTES]
    return sorted(selected, key=lambda case: results.sort_key(case.key))


def _list_cases(cases: Sequence[Case], lines: Mapping[str, CaseResults]) -> None:
    for case in cases:
        line = lines.get(case.key)
        run = None if line is None else line.current_run
        verdict = "not run" if run is None else f"{run.verdict} {run.began_at[:10]}"
        about = f"{case.engines}, {case.minutes:g} min"
        sys.stdout.write(f"{case.key:14} {verdict:18} {case.title} ({about})\n")


# ------------------------------------------------------------------ running


def _run_all(cases: Mapping[str, Case], chosen: Sequence[Case], options: argparse.Namespace) -> int:
    verdicts = []
    for case in chosen:
        sys.stderr.write(f"{case.key}: {case.title}; about {case.minutes:g} min ...\n")
        run = run_case(case, minutes=options.minutes)
        with _kept_results(cases, options) as lines:
            lines[case.key] = lines[case.key].with_run(run)
        verdicts.append(run.verdict)
        sys.stdout.write(f"{case.key}: {run.verdict} in {run.took_s:.0f} s\n")
        for bound in run.bounds:
            mark = "  " if bound.is_met else "! "
            sys.stdout.write(
                f"  {mark}{bound.description}: {bound.actual} (expected {bound.expected})\n"
            )
        if run.note:
            sys.stdout.write(f"  {run.note}\n")
        sys.stdout.flush()
    return 0 if all(verdict is Verdict.PASSED for verdict in verdicts) else 1


def run_case(case: Case, *, minutes: float | None = None) -> Run:
    """Run one case in a process of its own; what it leaves running counts against it."""
    settings = {} if minutes is None else {MINUTES: f"{minutes:g}"}
    # A short path: sockets have names that may not be long.
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    outcome = folder / "outcome.json"
    (folder / "case").mkdir()
    # A baton that the user has running is none of the case's business, and the other way round.
    (folder / "run").mkdir(mode=0o700)
    settings["XDG_RUNTIME_DIR"] = str(folder / "run")
    began_at = datetime.now(UTC).isoformat(timespec="seconds")
    revision = _revision()
    command = [sys.executable, "-m", "tests.chaos", "--child", case.key]
    command += ["--folder", str(folder / "case"), "--outcome", str(outcome)]
    try:
        process_exit = run_isolated(
            command,
            log=folder / "log",
            deadline_s=_START_S + _DEADLINE_FACTOR * 60.0 * max(case.minutes, minutes or 0.0),
            environment=os.environ | settings,
        )
        outcome_read = _read_outcome(outcome)
        crash_reason = _crash_reason(process_exit, folder / "log") if outcome_read is None else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    command_line = f"python -m tests.chaos --case {case.key}"
    return with_verdict(
        process_exit,
        outcome_read,
        crash_reason,
        Run(
            verdict=Verdict.BROKE,
            began_at=began_at,
            took_s=round(process_exit.took_s, 1),
            revision=revision,
            command=command_line if minutes is None else f"{command_line} --minutes {minutes:g}",
        ),
    )


def with_verdict(
    process_exit: ProcessExit, outcome_read: Outcome | None, crash_reason: str, run: Run
) -> Run:
    """The run with its verdict, given what the case saw, or why it saw nothing."""
    if outcome_read is None:
        return replace(run, note=without_folders(crash_reason))
    left_bound = exactly("processes left running", len(process_exit.leftovers), 0)
    outcome = replace(outcome_read, bounds=(*outcome_read.bounds, left_bound))
    left_text = (
        f"left running: {'; '.join(process_exit.leftovers)}" if process_exit.leftovers else ""
    )
    return replace(
        run,
        # One that bounds nothing has not passed, however tidy it was.
        verdict=outcome.verdict if outcome_read.bounds else Verdict.MISSED,
        bounds=outcome.bounds,
        figures=dict(outcome_read.figures),
        note=without_folders("\n".join(part for part in (outcome_read.note, left_text) if part)),
    )


def without_folders(text: str) -> str:
    """Names of files alone: results do not tell of the machine that they come from."""
    return _FOLDERS.sub("", text)


def _crash_reason(process_exit: ProcessExit, log: Path) -> str:
    output = log.read_text(errors="replace") if log.exists() else ""
    sys.stderr.write(output[-_PRINTED_CHARS:])
    last_output = output[-_KEPT_CHARS:]
    reason = (
        "it was ended for taking too long"
        if process_exit.is_timed_out
        else f"exit status {process_exit.status}"
    )
    return f"{reason}; its last output:\n{last_output}".strip()


def _revision() -> str:
    git_info = provenance()
    return f"{str(git_info['git_sha'])[:10]}{'+' if git_info['git_dirty'] else ''}"


@contextmanager
def _kept_results(
    cases: Mapping[str, Case], options: argparse.Namespace
) -> Iterator[ResultsByCase]:
    """What is kept, to be changed; it is written, and the page with it."""
    page: Path = options.write_page
    page.parent.mkdir(parents=True, exist_ok=True)
    with results.exclusive_lock(page.parent, wait_s=_KEEP_S):
        lines = results.for_cases(results.read(options.results), cases)
        yield lines
        results.write(lines, options.results)
        results.write_atomically(page, render_page(lines, results.read_mutations()))


# ------------------------------------------------------------------ in the case's own process


def _run_child(case: Case, folder: Path, outcome: Path) -> int:
    # Set even where a shell has SIGINT ignored, as it does for a job in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result = case.run(folder)
    outcome.write_text(json.dumps(asdict(result)))
    return 0


def _read_outcome(outcome: Path) -> Outcome | None:
    if not outcome.exists():
        return None
    document = json.loads(outcome.read_text())
    bounds = tuple(Bound(**item) for item in document["bounds"])
    return Outcome(bounds=bounds, figures=document["figures"], note=document["note"])


if __name__ == "__main__":
    sys.exit(main())
