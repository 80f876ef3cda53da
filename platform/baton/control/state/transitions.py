"""The request machine's transition table: every edge a request may take, and no other."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from baton.domain.request import Phase

_EARLY_ENDS = frozenset({Phase.FAILED, Phase.CANCELLED})
_LEAVES_REPLICA = _EARLY_ENDS | {Phase.RESUME}

TRANSITIONS: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        # A LOCAL placement and a disaggregated one both begin with PREFILL.
        # ARRIVED → FAILED: it asks for what it may not have, now or later.
        Phase.ARRIVED: frozenset({Phase.QUEUED, Phase.PREFILL, Phase.SHED, Phase.FAILED}),
        Phase.QUEUED: _EARLY_ENDS | {Phase.PREFILL, Phase.EVICTED},
        # PREFILL → DECODE is LOCAL's edge: the first token came from the replica that prefilled.
        # PREFILL → FINISHED: the first token was also the last.
        Phase.PREFILL: _LEAVES_REPLICA | {Phase.TRANSFER, Phase.DECODE, Phase.FINISHED},
        Phase.TRANSFER: _LEAVES_REPLICA | {Phase.DECODE, Phase.FINISHED},
        Phase.DECODE: _LEAVES_REPLICA | {Phase.FINISHED},
        Phase.RESUME: _EARLY_ENDS | {Phase.QUEUED, Phase.PREFILL, Phase.EVICTED},
        Phase.FINISHED: frozenset(),
        Phase.SHED: frozenset(),
        Phase.EVICTED: frozenset(),
        Phase.FAILED: frozenset(),
        Phase.CANCELLED: frozenset(),
    }
)


def check_edge(request_id: str, source: Phase, target: Phase) -> None:
    """Refuse an edge that is not in the table.

    Raises:
        ValueError: naming the request and both phases.
    """
    if target not in TRANSITIONS[source]:
        allowed = ", ".join(sorted(TRANSITIONS[source])) or "none, it has ended"
        raise ValueError(
            f"request {request_id!r}: no edge from {source} to {target} (allowed: {allowed})"
        )
