"""A study as one JSON object."""

from __future__ import annotations

import math
from dataclasses import asdict

import baton
from baton.bench.report.study import RunResult, Study
from baton.bench.report.summary import (
    attainment_by_class,
    capacity,
    rate_curves_for,
    scale_curves_for,
    summarize,
    tradeoffs_for,
)

SCHEMA_VERSION = 1
"""Rises when a key changes its meaning or goes away."""


def study_to_dict(study: Study) -> dict[str, object]:
    """The study without single requests; numbers that are not finite are null."""
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
        "error_bands": dict(study.error_bands),
        "objectives": asdict(study.objectives) | {"target": study.target},
        "device": study.device,
        "results": [_result_to_dict(study, result) for result in study.results],
        "attainment_by_rate": [
            {
                "name": curve.name,
                "rate_per_device_and_attainment": curve.points,
                "capacity_per_device": capacity(curve, study.target),
            }
            for curve in rate_curves_for(study)
        ],
        "attainment_by_slo_scale": [
            {
                "name": curve.name,
                "scale_and_attainment": curve.points,
                "a_run_for_each": bool(study.scale_curves),
            }
            for curve in scale_curves_for(study)
        ],
        "trades": [asdict(tradeoff) for tradeoff in tradeoffs_for(study)],
        "tables": [asdict(table) for table in study.tables],
    }
    return {key: json_safe(value) for key, value in report.items()}


def _result_to_dict(study: Study, result: RunResult) -> dict[str, object]:
    summary = summarize(result, study.objectives)
    return asdict(summary) | {
        "rate_per_device": summary.rate_per_device,
        "goodput_per_device": summary.goodput_per_device,
        "output_tokens_per_device": summary.output_tokens_per_device,
        "counts": dict(result.event_counts),
        "scaling": None if result.scaling is None else asdict(result.scaling),
        "shares": [asdict(attainment) for attainment in attainment_by_class(result)],
    }


def json_safe(value: object) -> object:
    """The same with null for numbers that are not finite."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: json_safe(other) for key, other in value.items()}
        case list() | tuple():
            return [json_safe(item) for item in value]
        case _:
            return value
