"""Reports of runs, measured or simulated: terminal tables, JSON, and pages with plots."""

from baton.bench.report.json_report import study_to_dict
from baton.bench.report.study import (
    Curve,
    Evidence,
    FleetSample,
    RunResult,
    ScalingSummary,
    Study,
    Table,
    Tradeoff,
)
from baton.bench.report.tables import print_study
from baton.bench.report.write import check_report_path, write_report

__all__ = [
    "Curve",
    "Evidence",
    "FleetSample",
    "RunResult",
    "ScalingSummary",
    "Study",
    "Table",
    "Tradeoff",
    "check_report_path",
    "print_study",
    "study_to_dict",
    "write_report",
]
