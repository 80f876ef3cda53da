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


def values_of(page: Page) -> Mapping[str, str]:
    """What to fill in for a dashboard's variables: everything there is."""
    names = [one["name"] for one in page["templating"]["list"] if one["type"] == "query"]
    return dict.fromkeys(names, EVERYTHING) | dict(WINDOWS)


def unparsable(of: Iterable[Page]) -> list[str]:
    """Expressions that Prometheus cannot parse, by dashboard, panel and query."""
    asked = [
        (f"{page['title']}: panel {title!r}: query {ref}", substituted(expr, values_of(page)))
        for page in of
        for title, ref, expr in queries_of(page)
    ]
    rules = [{"record": f"query_{n}", "expr": expr} for n, (_, expr) in enumerate(asked)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rules.yaml"
        file.write_text(json.dumps({"groups": [{"name": "dashboards", "rules": rules}]}))
        command = [str(PROMTOOL), "check", "rules", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        return []
    lines = (done.stdout + done.stderr).splitlines()
    return [_named(line, [where for where, _ in asked]) for line in lines if "expression" in line]


def _named(line: str, places: list[str]) -> str:
    match = _RULE.search(line)
    return line if match is None else f"{places[int(match['number'])]}: {line.strip()}"
