"""What one request was promised, what it got, and where the time to its first token went."""

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
    """In a word: `is_good` or `missed_objectives`; or it is not judged at all.

    It is `excluded` when its client left and was owed nothing, and `is_client_error` when it was
    refused for what its tenant or client did.
    """
    if record.is_client_error:
        return "client_error"
    if excluded(record, record.slo_result):
        return "excluded"
    return "good" if record.slo_result.is_good else "missed"


def missed_objectives(record: RequestRecord) -> tuple[str, ...]:
    """The objectives that were broken, by name; `was_served` when it was refused or failed.

    None of one that is barred: it is not judged.
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
    """One row for each objective of its class: what was promised, what came, whether it was met."""
    slo, result = record.slo, record.slo_result
    allowed_gaps = int(MAX_ITL_VIOLATION_FRACTION * max(0, record.output_tokens - 1))
    gaps: dict[str, object] = {"slow_gaps": record.itl_violations, "allowed_gaps": allowed_gaps}
    rows = [
        _objective_row("ttft", slo.ttft_s, ttft_s(record), met=result.ttft_met),
        _objective_row("tpot", slo.tpot_s, tpot_s(record), met=result.tpot_met),
        _objective_row("itl", slo.itl_p99_s, record.max_itl_s, met=result.itl_met) | gaps,
    ]
    return [row for row in rows if row["promised_s"] is not None]


def _objective_row(
    name: str, bound_s: float | None, actual_s: float | None, *, met: bool
) -> dict[str, object]:
    return {"objective": name, "promised_s": bound_s, "got_s": _rounded(actual_s), "met": met}


def ttft_parts(record: RequestRecord) -> Mapping[str, float] | None:
    """Where the time to its first token went, in order; None without one.

    The parts add up to it; what they are is in `telemetry.waterfall`.
    """
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
