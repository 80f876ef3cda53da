"""Writes a study to a file: `.html` or `.png`."""

from __future__ import annotations

import os
from base64 import b64encode
from html import escape
from pathlib import Path

import baton
from baton.bench.report.plots import render_panels, render_sheet, require_plots
from baton.bench.report.study import Study, Table
from baton.bench.report.tables import format_objectives, tables_of
from baton.domain.errors import OperatorError

_SUFFIXES = (".html", ".png")
_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif;
  color: #1e293b; background: #f1f5f9; margin: 0; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 0 0 2px; }
section, header { background: #fff; border: 1px solid #e2e8f0; border-radius: 10px;
  padding: 20px 24px; margin: 0 0 18px; overflow-x: auto; }
p.answer { font-size: 17px; font-weight: 600; margin: 10px 0 0; }
p.says { color: #64748b; margin: 0 0 12px; font-size: 14px; }
.badge { display: inline-block; font-size: 12px; font-weight: 600; border-radius: 99px;
  padding: 2px 10px; vertical-align: 4px; margin-left: 8px; }
.simulated { color: #1d4ed8; background: #dbeafe; }
.measured { color: #166534; background: #dcfce7; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 14px 0 0;
  font-size: 14px; }
dt { color: #64748b; }
dd { margin: 0; overflow-wrap: anywhere; }
code { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 0 4px 22px; white-space: nowrap;
  border-bottom: 1px solid #f1f5f9; }
th { color: #475569; font-weight: 600; border-bottom-color: #cbd5e1; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: pre; }
th.text, td.text { text-align: left; white-space: normal; min-width: 16ch; }
img { display: block; width: 100%; height: auto; }
ul { margin: 6px 0 0; padding-left: 20px; font-size: 14px; }
"""
_WRAPPED_FROM_CHARS = 28
"""A column with a longer cell is text: without wraps it would push the others off the page."""
_DEFINITIONS = (
    "TTFT: from arrival to the first token. TPOT: (last token - first token) / (output tokens - 1),"
    " per request. Worst gap: the longest time between two tokens of a request.",
    "Attainment: the share of arrived requests that finished and met all objectives together;"
    " refused and failed ones miss. Goodput: such requests per second.",
    "Quantiles are over requests that have the figure: TTFT over those with a token, TPOT and gaps"
    " over those with two, end to end over those that finished.",
    "Rates per second are over the time from the first arrival to the last end.",
    "(M) measured on something that ran; (S) simulated: baton's own decisions on modelled engines.",
)


class ReportUnwritable(OperatorError):
    """A report cannot be written to the given path."""


def check_report_path(path: Path) -> None:
    """Check a path of `write_report` before the work is done.

    Raises:
        ReportUnwritable: the file has another suffix, or cannot be written.
        PlotsMissing: matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ReportUnwritable(
            f"a report cannot be written to {str(path)!r}: got {path.suffix or 'no suffix'!r},"
            f" expected {' or '.join(_SUFFIXES)}",
            "name a file that ends so",
        )
    check_writable(path, "a report")
    require_plots()


def check_writable(path: Path, label: str) -> None:
    """Check that a file can be written, before the work is done.

    Raises:
        ReportUnwritable: the folder is missing, the path is a folder, or permission is denied.
    """
    if not path.absolute().parent.is_dir():
        raise _unwritable(path, label, f"no folder {str(path.parent)!r}", "make the folder")
    if path.is_dir():
        raise _unwritable(path, label, "it is a folder", "add a name to it")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise _unwritable(path, label, "permission denied", "ask for it")


def _unwritable(path: Path, label: str, reason: str, remedy: str) -> ReportUnwritable:
    return ReportUnwritable(
        f"{label} cannot be written to {str(path)!r}: {reason}", f"{remedy}, or name another"
    )


def write_report(study: Study, path: Path) -> None:
    """Write a page with tables and plots (`.html`), or the plots alone (`.png`).

    Raises:
        ReportUnwritable: the file has another suffix, or cannot be written.
        PlotsMissing: matplotlib is not installed.
    """
    check_report_path(path)
    content = render_sheet(study) if path.suffix.lower() == ".png" else render_page(study).encode()
    try:
        path.write_bytes(content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise _unwritable(path, "a report", reason, "make room or a folder for it") from error


def render_page(study: Study) -> str:
    """The HTML; equal for equal studies.

    Raises:
        PlotsMissing: matplotlib is not installed.
    """
    mark = study.evidence.mark
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(study.title)}</title><style>{_STYLE}</style></head><body><main>",
        _header(study),
        *(_table(table, mark) for table in tables_of(study)),
    ]
    for panel, image in render_panels(study):
        alt = escape(f"{panel.title}. {panel.caption}", quote=True)
        data = b64encode(image).decode("ascii")
        parts.append(
            f"<section><h2>{escape(panel.title)} ({mark})</h2>"
            f'<p class="says">{escape(panel.caption)}</p>'
            f'<img alt="{alt}" src="data:image/png;base64,{data}"></section>'
        )
    parts += [
        _notes("Notes", study.notes),
        _notes("What the words mean", study.definitions or _DEFINITIONS),
    ]
    return "\n".join([*parts, "</main></body></html>", ""])


def _header(study: Study) -> str:
    facts = {
        "objectives": escape(format_objectives(study)),
        **{name: escape(value) for name, value in study.facts.items()},
        "made by": f"<code>{escape(study.command)}</code>",
        "baton": escape(baton.__version__),
    }
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{value}</dd>" for name, value in facts.items())
    badge = f'<span class="badge {study.evidence}">{study.evidence} ({study.evidence.mark})</span>'
    return (
        f"<header><h1>{escape(study.title)}{badge}</h1>{_answer(study.answer)}<dl>{rows}</dl>"
        "</header>"
    )


def _answer(lines: tuple[str, ...]) -> str:
    """The answer, and its reasons as a list; empty for a study without one."""
    if not lines:
        return ""
    answer, *reasons = lines
    items = "".join(f"<li>{escape(reason.strip())}</li>" for reason in reasons)
    return f'<p class="answer">{escape(answer)}</p><ul>{items}</ul>'


def _table(table: Table, mark: str) -> str:
    classes = [
        ' class="text"' if number and max(map(len, cells)) > _WRAPPED_FROM_CHARS else ""
        for number, cells in enumerate(zip(*table.rows, strict=True))
    ] or [""] * len(table.columns)
    head = "".join(
        f"<th{css}>{escape(column)}</th>"
        for css, column in zip(classes, table.columns, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(f"<td{css}>{escape(cell)}</td>" for css, cell in zip(classes, row, strict=True))
        + "</tr>"
        for row in table.rows
    )
    return (
        f"<section><h2>{escape(table.title)} ({mark})</h2>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section>"
    )


def _notes(title: str, notes: tuple[str, ...]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<section><h2>{escape(title)}</h2><ul>{items}</ul></section>"
