"""The delay after which a rejected client may retry.

`retry_after_seconds` rounds every wait in seconds (HTTP's `Retry-After`, the text of an error, an
entry of a gate's map), so that no two of them differ.
"""

from __future__ import annotations

import math

MIN_RETRY_AFTER_S = 1
"""Sooner than any queue empties, and the wait of clients that read only the status."""
MAX_RETRY_AFTER_S = 3600
"""A limit of zero per second never has room again; its client asks once an hour whether it was
raised."""


def retry_after_seconds(wait_s: float) -> int:
    """Whole seconds that are never less than the wait, from 1 to 3600; for no number: 1.

    Rounded up: a client that comes back a part of a second early is refused once more.
    """
    if math.isnan(wait_s):
        return MIN_RETRY_AFTER_S
    return math.ceil(min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S))


def retry_after_text(wait_s: float) -> str:
    """The words for it in an error's text."""
    return f"retry in {retry_after_seconds(wait_s)} s"
