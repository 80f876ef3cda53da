"""Lists in messages, cut where they become too long to read."""

from __future__ import annotations

from collections.abc import Sequence


def few(items: Sequence[str], most: int = 3, *, separator: str = "; ") -> str:
    """At most `most` items, and how many more there are: `a; b; c; and 2 more`."""
    more = len(items) - most
    return separator.join([*items[:most], *([f"and {more} more"] if more > 0 else [])])
