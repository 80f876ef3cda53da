"""The dashboards' files, and broken copies of them."""

from __future__ import annotations

import copy
import json
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
    found: Page = json.loads((FOLDER / f"{name}.json").read_bytes())
    return found


def with_query(title: str, expr: str, name: str = "goodput") -> Page:
    """A dashboard in which the first query of one panel is another one."""
    broken = copy.deepcopy(page(name))
    panel_called(broken, title)["targets"][0]["expr"] = expr
    return broken


def panel_called(of: Page, title: str) -> Page:
    return next(panel for panel in of["panels"] if panel["title"] == title)
