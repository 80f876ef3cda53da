"""Whether a node's labels are what a pool asks for; as Ray reads selectors."""

from __future__ import annotations

from collections.abc import Mapping


def selects(selectors: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels may be taken.

    Source: Ray 2.60, "Control scheduling with labels"; a node without a label passes `!a`.
    """
    return all(_passes(selector, labels.get(name)) for name, selector in selectors.items())


def _passes(selector: str, value: str | None) -> bool:
    wanted = selector.removeprefix("!")
    if wanted.startswith("in(") and wanted.endswith(")"):
        found = value in {one.strip() for one in wanted[3:-1].split(",")}
    else:
        found = value == wanted
    return found != selector.startswith("!")
