"""What one request was promised, what it got, and where the time to its first token went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.domain.commands import RequestRecord
from baton.domain.handoff import Option
from baton.policy.judging import SLOW_GAPS_ALLOWED, excused, tpot_s, ttft_s

Values = Mapping[str, object]


def verdict(record: RequestRecord) -> str:
    """In a word: `good`, `missed`, or `excused` when its client left and was owed nothing."""
    if excused(record, record.judgement):
        return "excused"
    return "good" if record.judgement.good else "missed"


def missed(record: RequestRecord) -> tuple[str, ...]:
    """The objectives that were broken, by name; `served` when it was refused or failed."""
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

    The parts add up to it. When it was placed, when its prompt was computed and when the first
    token came is known; how long it queued in an engine, and what of the rest was a transfer, is
    not said by engines: there, what was predicted for computing is taken to have been right.
    """
    first_at_s = record.first_token_at_s
    placed = [
        made for made in record.decisions if first_at_s is not None and made.at_s <= first_at_s
    ]
    if first_at_s is None or not placed:
        return None
    last = placed[-1]
    option = last.options[0] if last.options else None
    parts = {
        "held_s": placed[0].at_s - record.arrived_at_s,
        "lost_s": last.at_s - placed[0].at_s,
    }
    parts |= dict(_engine_parts(record, last.at_s, first_at_s, option))
    return {name: round(max(0.0, part_s), 6) for name, part_s in parts.items()}


def _engine_parts(
    record: RequestRecord, placed_at_s: float, first_at_s: float, option: Option | None
) -> Iterator[tuple[str, float]]:
    done_at_s = record.prefill_done_at_s
    handed_off = done_at_s is not None and placed_at_s <= done_at_s <= first_at_s
    computed_at_s = done_at_s if handed_off and done_at_s is not None else first_at_s
    waited_s = computed_at_s - placed_at_s
    prefill_s = waited_s if option is None else min(option.prefill_s, waited_s)
    yield "queue_s", waited_s - prefill_s
    yield "prefill_s", prefill_s
    rest_s = first_at_s - computed_at_s
    decode_s = 0.0 if option is None else min(option.decode_s, rest_s)
    yield "transfer_s", rest_s - decode_s
    yield "decode_s", decode_s


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
