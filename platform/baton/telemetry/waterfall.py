"""Where the time of one request went, phase by phase, without gaps from its arrival to its end."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from baton.domain.commands import RequestRecord
from baton.telemetry.promises import ttft_parts


class Part(StrEnum):
    """What a request was doing (a metric label, hence an enum)."""

    HELD = "held"
    """It waited at the ingress for its turn."""
    LOST = "lost"
    """It ran somewhere where it could not go on."""
    QUEUE = "queue"
    """It waited in an engine."""
    PREFILL = "prefill"
    TRANSFER = "transfer"
    """Its blocks were on their way, or waited for their turn."""
    DECODE = "decode"


class Bar(NamedTuple):
    """One stretch of a request's time."""

    part: Part
    replica_id: str
    """Where; empty at the ingress."""
    from_s: float
    """Since arrival, as is the next."""
    to_s: float
    predicted_s: float | None = None
    """How long it was predicted to take; None where nothing was."""


def waterfall(record: RequestRecord) -> tuple[Bar, ...]:
    """A record's time in order, each bar beginning where the one before it ends."""
    end_s = record.ended_at_s - record.arrived_at_s
    parts = ttft_parts(record)
    if parts is None:
        return (Bar(Part.HELD, "", 0.0, end_s),)
    route = record.routes[-1]
    prefill_id = route.prefill_replica_id or route.decode_replica_id
    bars: list[Bar] = []
    at_s = 0.0
    for name, part_s in parts.items():
        part = Part(name.removesuffix("_s"))
        computing = part in {Part.TRANSFER, Part.DECODE}
        where = route.decode_replica_id if computing else prefill_id
        if part_s > 0:
            where = "" if part is Part.HELD else where
            bars.append(Bar(part, where, at_s, at_s + part_s))
            at_s += part_s
    bars.append(Bar(Part.DECODE, route.decode_replica_id, at_s, end_s))
    return tuple(bars)
