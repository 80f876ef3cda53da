"""The dashboards' files, what they ask, and broken copies of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "dashboards"
RUNBOOKS = REPOSITORY / "docs" / "operations" / "runbooks"
TOOLS = REPOSITORY / ".tools"
GET_TOOLS = "get it with scripts/tools"

Page = dict[str, Any]


def pages() -> list[Page]:
    return [json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))]


def page(name: str) -> Page:
    loaded: Page = json.loads((FOLDER / f"{name}.json").read_bytes())
    return loaded


def with_query(title: str, expr: str, name: str = "goodput") -> Page:
    """A dashboard in which the first query of one panel is another one."""
    broken = page(name)
    find_panel(broken, title)["targets"][0]["expr"] = expr
    return broken


def find_panel(dashboard: Page, title: str) -> Page:
    return next(panel for panel in panels_of(dashboard) if panel["title"] == title)


def panels_of(of: Page) -> Iterator[Page]:
    """Every panel, also those of rows that are folded; rows are none."""
    for panel in of["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def queries_of(of: Page) -> Iterator[tuple[str, str, str]]:
    """Panel's title, name of the query, expression."""
    for panel in panels_of(of):
        for target in panel["targets"]:
            yield panel["title"], target["refId"], target["expr"]


def substituted(text: str, values: Mapping[str, str]) -> str:
    """An expression with its variables filled in."""
    for name in sorted(values, key=len, reverse=True):
        text = text.replace(f"${{{name}}}", values[name]).replace(f"${name}", values[name])
    return text
