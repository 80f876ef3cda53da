"""Lists and counts in messages."""

from __future__ import annotations

from collections.abc import Sequence


def few(items: Sequence[str], most: int = 3, *, separator: str = "; ") -> str:
    """At most `most` items, and how many more there are: `a; b; c; and 2 more`."""
    more = len(items) - most
    return separator.join([*items[:most], *([f"and {more} more"] if more > 0 else [])])


def count_text(count: int, singular: str, plural: str | None = None) -> str:
    """A count with its noun: `1 pair`, `2 pairs`.

    The plural adds an s if none is given.
    """
    return f"{count} {singular if count == 1 else plural or singular + 's'}"
