"""Matches labels of nodes with a pool's selectors, as Ray does."""

from __future__ import annotations

from collections.abc import Mapping


def matches_labels(selectors: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels matches all selectors.

    Source: Ray 2.60, "Control scheduling with labels"; a node without a label matches `!a`.
    """
    return all(
        _matches_selector(selector, labels.get(name)) for name, selector in selectors.items()
    )


def _matches_selector(selector: str, value: str | None) -> bool:
    pattern = selector.removeprefix("!")
    if pattern.startswith("in(") and pattern.endswith(")"):
        is_match = value in {part.strip() for part in pattern[3:-1].split(",")}
    else:
        is_match = value == pattern
    return is_match != selector.startswith("!")
