"""The request machine's transition table: every edge a request may take, and no other."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from baton.domain.request import Phase

_ENDS_EARLY = frozenset({Phase.FAILED, Phase.CANCELLED})
_GIVES_UP_REPLICA = _ENDS_EARLY | {Phase.RESUME}

TRANSITIONS: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        # A LOCAL placement and a disaggregated one both begin with PREFILL.
        # ARRIVED → FAILED: it asks for what it may not have, now or later.
        Phase.ARRIVED: frozenset({Phase.QUEUED, Phase.PREFILL, Phase.SHED, Phase.FAILED}),
        Phase.QUEUED: _ENDS_EARLY | {Phase.PREFILL, Phase.EVICTED},
        # PREFILL → DECODE is LOCAL's edge: the first token came from the replica that prefilled.
        # PREFILL → FINISHED: the first token was also the last.
        Phase.PREFILL: _GIVES_UP_REPLICA | {Phase.TRANSFER, Phase.DECODE, Phase.FINISHED},
        Phase.TRANSFER: _GIVES_UP_REPLICA | {Phase.DECODE, Phase.FINISHED},
        Phase.DECODE: _GIVES_UP_REPLICA | {Phase.FINISHED},
        Phase.RESUME: _ENDS_EARLY | {Phase.QUEUED, Phase.PREFILL, Phase.EVICTED},
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
