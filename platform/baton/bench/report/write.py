"""A study into a file: `.html` or `.png`."""

from __future__ import annotations

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
        ReportUnwritable: the file is of another kind, or its folder is not there.
        PlotsMissing: matplotlib is not installed.
    """
    if path.suffix.lower() not in _KINDS:
        raise ReportUnwritable(
            f"a report cannot be written to {str(path)!r}: got {path.suffix or 'no suffix'!r},"
            f" wanted {' or '.join(_KINDS)}",
            "name a file that ends so",
        )
    if not path.absolute().parent.is_dir():
        raise ReportUnwritable(
            f"a report cannot be written to {str(path)!r}: no folder {str(path.parent)!r}",
            "make the folder, or name another",
        )
    require_plots()


def write_report(study: Study, path: Path) -> None:
    """Write a page with tables and plots (`.html`), or the plots alone (`.png`).

    Raises:
        ReportUnwritable: the file is of another kind, or its folder is not there.
        PlotsMissing: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    check_report_path(path)
    if path.suffix.lower() == ".png":
        path.write_bytes(sheet(study))
    else:
        path.write_text(page(study), encoding="utf-8")
