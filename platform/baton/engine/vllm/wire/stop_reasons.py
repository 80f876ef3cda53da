"""Stop reasons that say what was wrong with a request; `patches.refusals` writes them."""

from __future__ import annotations

from baton.domain.request import FinishReason

STOP_REASON_MARKS = {
    FinishReason.INVALID: "baton-invalid: ",
    FinishReason.REJECTED: "baton-refused: ",
}
"""What the stop reason of such an end begins with."""


def parse_stop_reason(stop_reason: object) -> tuple[FinishReason, str] | None:
    """Which end a stop reason tells of, and why; None for any other."""
    if isinstance(stop_reason, str):
        for finish, mark in STOP_REASON_MARKS.items():
            if stop_reason.startswith(mark):
                return finish, stop_reason.removeprefix(mark)
    return None
