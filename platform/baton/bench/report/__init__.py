"""Reports of runs, measured or simulated: terminal tables, JSON, and pages with plots."""

from baton.bench.report.json_report import plain
from baton.bench.report.study import Curve, Evidence, Moment, Result, Scaling, Study, Table, Trade
from baton.bench.report.terminal import print_study
from baton.bench.report.write import check_report_path, write_report

__all__ = [
    "Curve",
    "Evidence",
    "Moment",
    "Result",
    "Scaling",
    "Study",
    "Table",
    "Trade",
    "check_report_path",
    "plain",
    "print_study",
    "write_report",
]
