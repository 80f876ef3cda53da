"""`docs/reliability.md`: every line that baton is measured by, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.chaos.case import Bound, Engines, Figure, Verdict
from tests.chaos.results import (
    CaseResults,
    MutationOutcome,
    MutationResults,
    ResultsByCase,
    Run,
    sort_key,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"

LINES: Final = tuple(
    f"{letter}{number}"
    for letter, count in (("L", 6), ("F", 18), ("B", 9))
    for number in range(1, count + 1)
)
"""What is asked of every version, whether or not it was run; each has a case that says what."""

_GROUPS: Final = {
    "L": "Loads",
    "F": "Faults",
    "B": "Abuse",
    "S": "Security",
}
_OTHER: Final = "Others"

_HEAD: Final = """\
# Reliability

What baton is put through, what must hold, and what came of it. This page is written by
`python -m tests.chaos` from [`reliability.json`](../benchmarks/results/reliability.json); do
not edit it.

    make chaos ARGS="--list"               what there is
    make chaos ARGS="--case F1"            one line; patterns too: --case 'L*'
    make chaos ARGS="--quick"              what takes two minutes at most
    make mutations                         take each protection away, and see its test fail

A case runs in a process of its own with a deadline, and must leave nothing running. How it was run:

| word | what computes | what the figures are |
|---|---|---|
| real | vLLM on the CPU, blocks moved by NIXL | measured |
| simulated | simulated engines in real time; links, coordinators and all else that the case names \
are the real ones | measured, but for what engines take |
| virtual | the simulator in virtual time, with the live decisions | simulated |
| none | no engine takes part | measured |

*Missed* means that it ran to its end and a bound was not kept; *broke*, that the case itself did
not come to its end, and says nothing; *not run*, that no result is kept. A missed run is kept
beside the runs after it.
"""


def render_page(lines: ResultsByCase, removals: MutationResults) -> str:
    """The page in Markdown."""
    page_lines = [_HEAD, *_summary(lines)]
    known = sorted({*lines, *_undeclared_lines(lines)}, key=sort_key)
    for letter, title in [*_GROUPS.items(), ("", _OTHER)]:
        keys = [key for key in known if _letter(key) == letter]
        if keys:
            page_lines += [f"## {title}", "", *_table(keys, lines), ""]
    page_lines += [*_misses(lines), *_mutation_table(removals)]
    return "\n".join(page_lines).rstrip() + "\n"


def _letter(key: str) -> str:
    return key[0] if key[0] in _GROUPS and key[1:2].isdigit() else ""


def _line_key(key: str) -> str:
    """`F1` of `F1-real`."""
    return key.partition("-")[0]


def _undeclared_lines(lines: ResultsByCase) -> set[str]:
    """Lines that are asked for and that no case is of."""
    return set(LINES) - {_line_key(key) for key in lines}


def _summary(lines: ResultsByCase) -> Iterator[str]:
    runs = [line.current_run for line in lines.values()]
    count = {
        verdict: sum(run is not None and run.verdict is verdict for run in runs)
        for verdict in Verdict
    }
    not_run = sum(run is None for run in runs) + len(_undeclared_lines(lines))
    verdict_counts = ", ".join(f"{number} {verdict}" for verdict, number in count.items())
    yield (
        f"Of {len(lines) + len(_undeclared_lines(lines))} lines: {verdict_counts}, {not_run}"
        " not run."
    )
    yield ""


# ------------------------------------------------------------------ tables


def _table(keys: list[str], lines: ResultsByCase) -> Iterator[str]:
    yield "| | what | verdict | what was seen, and what was expected | run |"
    yield "|---|---|---|---|---|"
    for key in keys:
        line = lines.get(key)
        title = "no case is of it" if line is None else line.title
        run = None if line is None else line.current_run
        cells = [key, _escape_cell(title), "not run", "", ""]
        if line is not None and run is not None:
            cells[2:] = [_verdict(run), "<br>".join(map(_bound, run.bounds)), _run(line, run)]
        yield f"| {' | '.join(cells)} |"


def _verdict(run: Run) -> str:
    text = str(run.verdict) if run.verdict is Verdict.PASSED else f"**{run.verdict}**"
    if run.is_shortened:
        ran, full = run.figures["minutes"], run.figures["minutes_in_full"]
        text += f", shortened: {_figure(ran)} of {_figure(full)} minutes"
    return text


def _bound(bound: Bound) -> str:
    text = (
        f"{_escape_cell(bound.description)}: {_figure(bound.actual)}"
        f" ({_escape_cell(bound.expected)})"
    )
    return text if bound.is_met else f"**{text}**"


def _figure(value: Figure) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return _escape_cell(str(value))


def _run(line: CaseResults, run: Run) -> str:
    when, engines = run.began_at[:10], line.engines
    mark = {Engines.VIRTUAL: "S"}.get(engines, "M")
    return f"{mark}, {engines}, {run.took_s:.0f} s, {when}, `{run.revision}`<br>`{run.command}`"


def _escape_cell(text: str) -> str:
    """Text that breaks no table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# ------------------------------------------------------------------ below the tables


def _misses(lines: ResultsByCase) -> Iterator[str]:
    """Every bound that was not kept, with its cause; the runs before among them."""
    items = [
        item for key in sorted(lines, key=sort_key) for item in _misses_of(key, lines[key]) if item
    ]
    yield "## What was missed"
    yield ""
    yield (
        "Keys in bold stand as missed. *Missed before* is what an earlier revision did, with what "
        "was known of it then; the case has been run again since, and the tables say how that went."
    )
    yield ""
    yield from items or ["Nothing that is kept."]
    yield ""


def _misses_of(key: str, line: CaseResults) -> Iterator[str]:
    current_run = line.current_run
    if current_run is not None and current_run.verdict is not Verdict.PASSED:
        yield (
            f"- **{key}**, {current_run.verdict} on {current_run.began_at[:10]}:"
            f" {_miss_reason(current_run)}"
        )
    for run in line.earlier_misses:
        yield (
            f"- {key}, missed before, on {run.began_at[:10]} at `{run.revision}`:"
            f" {_miss_reason(run)}"
        )


def _miss_reason(run: Run) -> str:
    bounds = "; ".join(_bound(bound) for bound in run.bounds if not bound.is_met)
    # Of a case that broke, only the last line says why; the rest is in the results.
    note = run.note if run.verdict is not Verdict.BROKE else run.note.strip().rpartition("\n")[2]
    return ". ".join(part for part in (bounds, _escape_cell(note)) if part) or "it does not say why"


def _mutation_table(removals: MutationResults) -> Iterator[str]:
    yield "## Each protection, taken away"
    yield ""
    yield (
        "A test that guards a protection must fail without it. `make mutations` takes each one "
        "away in a copy of the tree, after its tests have passed there, and runs them again."
    )
    yield ""
    if not removals.rows:
        yield "Not run."
        return
    caught = sum(row.outcome is MutationOutcome.CAUGHT for row in removals.rows)
    yield (
        f"{caught} of {len(removals.rows)} caught, the last on {removals.began_at[:10]} at "
        f"`{removals.revision}`; a row that was not tried then keeps an earlier result. "
        f"{removals.untried} more not tried. A row names the commit that it was tried with; of "
        "rows last tried before 29 November 2026, the first commit with that result."
    )
    yield ""
    yield "| what was taken away | where | caught by | commit |"
    yield "|---|---|---|---|"
    for row in removals.rows:
        by = f"`{row.detail}`" if "::" in row.detail else row.detail
        if row.outcome is not MutationOutcome.CAUGHT:
            by = f"**{row.outcome}**: {_escape_cell(row.detail)}"
        commit = f"`{row.revision}`" if row.revision else "not kept"
        yield f"| {_escape_cell(row.description)} | `{row.file}` | {by} | {commit} |"
