"""What one request was promised, what it got, and where the time to its first token went."""

from __future__ import annotations

from collections.abc import Mapping

from baton.domain.commands import RequestRecord
from baton.policy.admission.slo_evaluation import SLOW_GAPS_ALLOWED, excused, tpot_s, ttft_s
from baton.telemetry.requests.waterfall import Part, waterfall

Values = Mapping[str, object]


def verdict(record: RequestRecord) -> str:
    """In a word: `good` or `missed`; or it is not judged at all.

    It is `excused` when its client left and was owed nothing, and `barred` when it was refused for
    what its tenant or client did.
    """
    if record.barred:
        return "barred"
    if excused(record, record.judgement):
        return "excused"
    return "good" if record.judgement.good else "missed"


def missed(record: RequestRecord) -> tuple[str, ...]:
    """The objectives that were broken, by name; `served` when it was refused or failed.

    None of one that is barred: it is not judged.
    """
    if record.barred:
        return ()
    judgement = record.judgement
    met = {
        "served": judgement.served,
        "ttft": judgement.ttft_met,
        "tpot": judgement.tpot_met,
        "itl": judgement.itl_met,
    }
    return tuple(name for name, ok in met.items() if not ok)


def objectives(record: RequestRecord) -> list[Values]:
    """One row for each objective of its class: what was promised, what came, whether it was met."""
    slo, judgement = record.slo, record.judgement
    allowed = int(SLOW_GAPS_ALLOWED * max(0, record.output_tokens - 1))
    gaps: dict[str, object] = {"slow_gaps": record.slow_gaps, "allowed_gaps": allowed}
    rows = [
        _objective("ttft", slo.ttft_s, ttft_s(record), met=judgement.ttft_met),
        _objective("tpot", slo.tpot_s, tpot_s(record), met=judgement.tpot_met),
        _objective("itl", slo.itl_p99_s, record.worst_gap_s, met=judgement.itl_met) | gaps,
    ]
    return [row for row in rows if row["promised_s"] is not None]


def _objective(
    name: str, promised_s: float | None, got_s: float | None, *, met: bool
) -> dict[str, object]:
    return {"objective": name, "promised_s": promised_s, "got_s": _rounded(got_s), "met": met}


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
