"""What Prometheus' own parser says of the dashboards' expressions."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from tests.dashboards.pages import TOOLS, Page, queries_of, substituted

PROMTOOL = TOOLS / "bin" / "promtool"
EVERYTHING: Final = ".*"
WINDOWS: Final = {"__rate_interval": "1m", "__interval": "1m", "__range": "5m"}
_RULE = re.compile(r'"?query_(?P<number>\d+)"?')


def variable_values(page: Page) -> Mapping[str, str]:
    """What to fill in for a dashboard's variables: everything there is."""
    names = [item["name"] for item in page["templating"]["list"] if item["type"] == "query"]
    return dict.fromkeys(names, EVERYTHING) | dict(WINDOWS)


def find_unparsable(dashboards: Iterable[Page]) -> list[str]:
    """Expressions that Prometheus cannot parse, by dashboard, panel and query."""
    expressions = [
        (f"{page['title']}: panel {title!r}: query {ref}", substituted(expr, variable_values(page)))
        for page in dashboards
        for title, ref, expr in queries_of(page)
    ]
    rules = [{"record": f"query_{n}", "expr": expr} for n, (_, expr) in enumerate(expressions)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rules.yaml"
        file.write_text(json.dumps({"groups": [{"name": "dashboards", "rules": rules}]}))
        command = [str(PROMTOOL), "check", "rules", str(file)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if process.returncode == 0:
        return []
    lines = (process.stdout + process.stderr).splitlines()
    return [
        _with_location(line, [where for where, _ in expressions])
        for line in lines
        if "expression" in line
    ]


def _with_location(line: str, locations: list[str]) -> str:
    match = _RULE.search(line)
    return line if match is None else f"{locations[int(match['number'])]}: {line.strip()}"
