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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks._provenance import provenance
from tests.chaos import results
from tests.chaos.case import MINUTES, Bound, Case, Outcome, Verdict, exactly, load_cases
from tests.chaos.isolated import Ended, run_apart
from tests.chaos.report import PAGE, page
from tests.chaos.results import FILE, AnotherRunError, Line, Lines, Run

_ROOT = Path(__file__).resolve().parents[2]
_QUICK_MINUTES = 2.0
_LATE = 3.0
"""Times its minutes: a case that takes longer is ended."""
_START_S = 60.0
_KEEP_S = 60.0
_TAIL = 1500
"""Characters of the last words of a case that broke, which are kept ..."""
_SHOWN = 20_000
"""... and shown."""
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.-]+/)+")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 0 when all of it passed, 2 when nothing could be run."""
    options = _options(arguments)
    cases = load_cases()
    if options.child:
        return _be_the_case(cases[options.child], options.folder, options.outcome)
    chosen = choose(cases, options.case, quick=options.quick)
    if options.list:
        _show(chosen, results.read(options.results))
        return 0
    if options.page or options.merge or options.note:
        others = results.read(options.merge or options.results)
        if options.note:
            (key,) = options.case
            others = {key: results.noted(others[key], options.note)}
        _keep(cases, others, options.results, options.write_page)
        return 0
    if not chosen:
        sys.stderr.write(f"no case is called {' or '.join(options.case)}: see --list\n")
        return 2
    try:
        with results.only_one(options.results.parent, wait_s=options.wait):
            return _run_all(cases, chosen, options)
    except AnotherRunError as error:
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
    parser.add_argument("--merge", type=Path, help="keep the runs of another file of results, too")
    parser.add_argument("--results", type=Path, default=FILE, help="where they are kept")
    parser.add_argument("--write-page", type=Path, default=PAGE, help="where the page is")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--outcome", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if found.results.resolve().parent == found.write_page.resolve().parent:
        parser.error("--results and --write-page name one folder, and each locks its own: name two")
    return found


def choose(cases: Mapping[str, Case], patterns: Sequence[str], *, quick: bool) -> list[Case]:
    """Cases whose key a pattern names, in order; without a pattern all of them."""
    named = [
        case
        for key, case in cases.items()
        if not patterns or any(fnmatchcase(key, pattern) for pattern in patterns)
    ]
    wanted = [case for case in named if not quick or case.minutes <= _QUICK_MINUTES]
    return sorted(wanted, key=lambda case: results.in_order(case.key))


def _show(cases: Sequence[Case], lines: Mapping[str, Line]) -> None:
    for case in cases:
        line = lines.get(case.key)
        run = None if line is None else line.standing
        verdict = "not run" if run is None else f"{run.verdict} {run.began_at[:10]}"
        about = f"{case.engines}, {case.minutes:g} min"
        sys.stdout.write(f"{case.key:14} {verdict:18} {case.title} ({about})\n")


# ------------------------------------------------------------------ running


def _run_all(cases: Mapping[str, Case], chosen: Sequence[Case], options: argparse.Namespace) -> int:
    verdicts = []
    for case in chosen:
        sys.stderr.write(f"{case.key}: {case.title}; about {case.minutes:g} min ...\n")
        run = run_case(case, minutes=options.minutes)
        line = Line(title=case.title, engines=case.engines, minutes=case.minutes, runs=(run,))
        _keep(cases, {case.key: line}, options.results, options.write_page)
        verdicts.append(run.verdict)
        sys.stdout.write(f"{case.key}: {run.verdict} in {run.took_s:.0f} s\n")
        for bound in run.bounds:
            kept = "  " if bound.held else "! "
            sys.stdout.write(f"  {kept}{bound.what}: {bound.got} (wanted {bound.wanted})\n")
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
        ended = run_apart(
            command,
            log=folder / "log",
            deadline_s=_START_S + _LATE * 60.0 * max(case.minutes, minutes or 0.0),
            environment=os.environ | settings,
        )
        seen = _seen(outcome)
        broke = _why_it_broke(ended, folder / "log") if seen is None else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    called = f"python -m tests.chaos --case {case.key}"
    return judged(
        ended,
        seen,
        broke,
        Run(
            verdict=Verdict.BROKE,
            began_at=began_at,
            took_s=round(ended.took_s, 1),
            revision=revision,
            command=called if minutes is None else f"{called} --minutes {minutes:g}",
        ),
    )


def judged(ended: Ended, seen: Outcome | None, broke: str, run: Run) -> Run:
    """The run with its verdict, given what the case saw, or why it saw nothing."""
    if seen is None:
        return replace(run, note=without_folders(broke))
    tidy = exactly("processes left running", len(ended.left), 0)
    outcome = replace(seen, bounds=(*seen.bounds, tidy))
    left = f"left running: {'; '.join(ended.left)}" if ended.left else ""
    return replace(
        run,
        # One that bounds nothing has not passed, however tidy it was.
        verdict=outcome.verdict if seen.bounds else Verdict.MISSED,
        bounds=outcome.bounds,
        figures=dict(seen.figures),
        note=without_folders("\n".join(part for part in (seen.note, left) if part)),
    )


def without_folders(text: str) -> str:
    """Names of files alone: results do not tell of the machine that they come from."""
    return _FOLDERS.sub("", text)


def _why_it_broke(ended: Ended, log: Path) -> str:
    whole = log.read_text(errors="replace") if log.exists() else ""
    sys.stderr.write(whole[-_SHOWN:])
    said = whole[-_TAIL:]
    why = "it was ended for taking too long" if ended.late else f"exit status {ended.status}"
    return f"{why}; it said last:\n{said}".strip()


def _revision() -> str:
    found = provenance()
    return f"{str(found['git_sha'])[:10]}{'+' if found['git_dirty'] else ''}"


def _keep(cases: Mapping[str, Case], others: Lines, file: Path, shown: Path) -> None:
    """Add the runs of `others` to what is kept, and write the page."""
    shown.parent.mkdir(parents=True, exist_ok=True)
    with results.only_one(shown.parent, wait_s=_KEEP_S):
        lines = results.with_declared(results.merged(results.read(file), others), cases)
        results.write(lines, file)
        results.write_whole(shown, page(lines, results.read_removals()))


# ------------------------------------------------------------------ in the case's own process


def _be_the_case(case: Case, folder: Path, outcome: Path) -> int:
    # Set even where a shell has SIGINT ignored, as it does for a job in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seen = case.run(folder)
    outcome.write_text(json.dumps(asdict(seen)))
    return 0


def _seen(outcome: Path) -> Outcome | None:
    if not outcome.exists():
        return None
    found = json.loads(outcome.read_text())
    bounds = tuple(Bound(**one) for one in found["bounds"])
    return Outcome(bounds=bounds, figures=found["figures"], note=found["note"])


if __name__ == "__main__":
    sys.exit(main())
