"""Whether a node's labels are what a pool asks for; as Ray reads selectors."""

from __future__ import annotations

from collections.abc import Mapping


def matches_labels(selectors: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels may be taken.

    Source: Ray 2.60, "Control scheduling with labels"; a node without a label passes `!a`.
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
