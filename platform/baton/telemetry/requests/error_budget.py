"""SLO results of one request, and the parts of its TTFT."""

from __future__ import annotations

from collections.abc import Mapping

from baton.domain.commands import RequestRecord
from baton.policy.admission.slo_evaluation import (
    MAX_ITL_VIOLATION_FRACTION,
    excluded,
    tpot_s,
    ttft_s,
)
from baton.telemetry.requests.waterfall import Part, waterfall

Values = Mapping[str, object]


def verdict(record: RequestRecord) -> str:
    """`good`, `missed`, `excluded` or `client_error`.

    Excluded: the client left before output was due. Client error: rejected for an error of its
    tenant or client.
    """
    if record.is_client_error:
        return "client_error"
    if excluded(record, record.slo_result):
        return "excluded"
    return "good" if record.slo_result.is_good else "missed"


def missed_objectives(record: RequestRecord) -> tuple[str, ...]:
    """The names of missed objectives; `served` if it was rejected or failed.

    Empty for a client error, which is not evaluated.
    """
    if record.is_client_error:
        return ()
    result = record.slo_result
    met = {
        "served": result.was_served,
        "ttft": result.ttft_met,
        "tpot": result.tpot_met,
        "itl": result.itl_met,
    }
    return tuple(name for name, ok in met.items() if not ok)


def objective_rows(record: RequestRecord) -> list[Values]:
    """One row for each objective of its class: bound, result, and whether it was met."""
    slo, result = record.slo, record.slo_result
    allowed_gaps = int(MAX_ITL_VIOLATION_FRACTION * max(0, record.output_tokens - 1))
    gaps: dict[str, object] = {"slow_gaps": record.itl_violations, "allowed_gaps": allowed_gaps}
    rows = [
        _objective_row("ttft", slo.ttft_s, ttft_s(record), met=result.ttft_met),
        _objective_row("tpot", slo.tpot_s, tpot_s(record), met=result.tpot_met),
        _objective_row("itl", slo.itl_p99_s, record.max_itl_s, met=result.itl_met) | gaps,
    ]
    return [row for row in rows if row["objective_s"] is not None]


def _objective_row(
    name: str, bound_s: float | None, actual_s: float | None, *, met: bool
) -> dict[str, object]:
    return {"objective": name, "objective_s": bound_s, "actual_s": _rounded(actual_s), "met": met}


def ttft_parts(record: RequestRecord) -> Mapping[str, float] | None:
    """Seconds of TTFT by `waterfall.Part`, in order; None without a first token."""
    if record.first_token_at_s is None:
        return None
    first_s = record.first_token_at_s - record.arrived_at_s
    parts = dict.fromkeys(Part, 0.0)
    for bar in waterfall(record):
        if bar.from_s < first_s:
            parts[bar.part] += min(bar.to_s, first_s) - bar.from_s
    return {f"{part}_s": round(part_s, 6) for part, part_s in parts.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
