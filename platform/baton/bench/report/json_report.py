"""A study as one JSON object."""

from __future__ import annotations

import math
from dataclasses import asdict

import baton
from baton.bench.report.study import Result, Study
from baton.bench.report.summary import (
    Summary,
    capacity,
    curves_of,
    scales_of,
    shares_of,
    summarize,
    trades_of,
)

SCHEMA_VERSION = 1
"""Counted up when a key changes its meaning or goes away."""


def plain(study: Study) -> dict[str, object]:
    """The whole study but its single requests; what is no number is null."""
    report: dict[str, object] = {
        "schema_version": SCHEMA_VERSION,
        "title": study.title,
        "provenance": {
            "evidence": str(study.evidence),
            "baton": baton.__version__,
            "command": study.command,
            **study.facts,
        },
        "notes": list(study.notes),
        "objectives": asdict(study.objectives) | {"target": study.target},
        "device": study.device,
        "results": [_result(study, one) for one in study.results],
        "attainment_by_rate": [
            {
                "name": curve.name,
                "rate_per_device_and_attainment": curve.points,
                "capacity_per_device": capacity(curve, study.target),
            }
            for curve in curves_of(study)
        ],
        "attainment_by_slo_scale": [
            {
                "name": curve.name,
                "scale_and_attainment": curve.points,
                "a_run_for_each": bool(study.scales),
            }
            for curve in scales_of(study)
        ],
        "trades": [asdict(one) for one in trades_of(study)],
        "tables": [asdict(one) for one in study.tables],
    }
    return {key: finite(value) for key, value in report.items()}


def _result(study: Study, result: Result) -> dict[str, object]:
    figures = summarize(result, study.objectives)
    return (
        asdict(figures)
        | _derived(figures)
        | {
            "counts": dict(result.counts),
            "scaling": None if result.scaling is None else asdict(result.scaling),
            "shares": [asdict(one) for one in shares_of(result)],
        }
    )


def _derived(figures: Summary) -> dict[str, object]:
    return {
        "rate_per_device": figures.rate_per_device,
        "goodput_per_device": figures.goodput_per_device,
        "output_tokens_per_device": figures.output_tokens_per_device,
    }


def finite(value: object) -> object:
    """The same with null for what JSON has no number for."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: finite(one) for key, one in value.items()}
        case list() | tuple():
            return [finite(one) for one in value]
        case _:
            return value
