"""A study into a file: `.html` or `.png`."""

from __future__ import annotations

import os
from pathlib import Path

from baton.bench.report.images import require_plots, sheet
from baton.bench.report.page import page
from baton.bench.report.study import Study
from baton.domain.errors import OperatorError

_KINDS = (".html", ".png")


class ReportUnwritable(OperatorError):
    """A report cannot be written where it was asked for."""


def check_report_path(path: Path) -> None:
    """Refuse, before the work is done, what `write_report` could not write.

    Raises:
        ReportUnwritable: the file is of another kind, or cannot be written there.
        PlotsMissing: matplotlib is not installed.
    """
    if path.suffix.lower() not in _KINDS:
        raise ReportUnwritable(
            f"a report cannot be written to {str(path)!r}: got {path.suffix or 'no suffix'!r},"
            f" wanted {' or '.join(_KINDS)}",
            "name a file that ends so",
        )
    check_place(path, "a report")
    require_plots()


def check_place(path: Path, what: str) -> None:
    """Refuse, before the work is done, a place where no file can be written.

    Raises:
        ReportUnwritable: there is no such folder, it is a folder itself, or that is not allowed.
    """
    if not path.absolute().parent.is_dir():
        raise _unwritable(path, what, f"no folder {str(path.parent)!r}", "make the folder")
    if path.is_dir():
        raise _unwritable(path, what, "it is a folder", "add a name to it")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise _unwritable(path, what, "permission denied", "ask for it")


def _unwritable(path: Path, what: str, why: str, do: str) -> ReportUnwritable:
    return ReportUnwritable(
        f"{what} cannot be written to {str(path)!r}: {why}", f"{do}, or name another"
    )


def write_report(study: Study, path: Path) -> None:
    """Write a page with tables and plots (`.html`), or the plots alone (`.png`).

    Raises:
        ReportUnwritable: the file is of another kind, or cannot be written there.
        PlotsMissing: matplotlib is not installed.
    """
    check_report_path(path)
    whole = sheet(study) if path.suffix.lower() == ".png" else page(study).encode()
    try:
        path.write_bytes(whole)
    except OSError as error:
        why = error.strerror or str(error)
        raise _unwritable(path, "a report", why, "make room or a folder for it") from error
