"""A study into a file: `.html` or `.png`."""

from __future__ import annotations

import os
from pathlib import Path

from baton.bench.report.images import render_sheet, require_plots
from baton.bench.report.page import render_page
from baton.bench.report.study import Study
from baton.domain.errors import OperatorError

_SUFFIXES = (".html", ".png")


class ReportUnwritable(OperatorError):
    """A report cannot be written where it was asked for."""


def check_report_path(path: Path) -> None:
    """Refuse, before the work is done, what `write_report` could not write.

    Raises:
        ReportUnwritable: the file is of another kind, or cannot be written there.
        PlotsMissing: matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ReportUnwritable(
            f"a report cannot be written to {str(path)!r}: got {path.suffix or 'no suffix'!r},"
            f" wanted {' or '.join(_SUFFIXES)}",
            "name a file that ends so",
        )
    check_writable(path, "a report")
    require_plots()


def check_writable(path: Path, label: str) -> None:
    """Refuse, before the work is done, a place where no file can be written.

    Raises:
        ReportUnwritable: there is no such folder, it is a folder itself, or that is not allowed.
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
        ReportUnwritable: the file is of another kind, or cannot be written there.
        PlotsMissing: matplotlib is not installed.
    """
    check_report_path(path)
    content = render_sheet(study) if path.suffix.lower() == ".png" else render_page(study).encode()
    try:
        path.write_bytes(content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise _unwritable(path, "a report", reason, "make room or a folder for it") from error
