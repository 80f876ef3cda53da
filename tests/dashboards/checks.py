"""Checks of the dashboards' files that need neither Grafana nor Prometheus.

Each problem is one line that names the dashboard, the panel and the query.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Final

from baton.telemetry.catalogue import Kind
from tests.dashboards.pages import REPOSITORY, RUNBOOKS, Page, panels_of
from tests.dashboards.queries import BadQuery, Query, Selector, asked

_COLUMNS: Final = 24
_BUILT_IN: Final = frozenset({"__rate_interval", "__interval", "__range"})
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_FORMATS: Final = {"table": "table", "heatmap": "heatmap"}
"""How a panel of this type reads its queries' results; all others: as time series."""
_VARIABLE: Final = re.compile(r"\$\{?(\w+)")
_VALUES: Final = re.compile(r"^label_values\((?P<series>.*),\s*(?P<label>\w+)\)$", re.DOTALL)
_LEGEND_LABEL: Final = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_RUNBOOK: Final = re.compile(r"\$\{runbooks\}/([\w-]+)\.md$")
_RUNBOOK_TEXT: Final = re.compile(r"\nRunbook: docs/operations/runbooks/([\w-]+)\.md$")
_JOB: Final = ("job", "=~", "$job")


def problems(pages: Iterable[Page]) -> list[str]:
    """All problems of these dashboards; none when they are right."""
    pages = list(pages)
    found = [f"{uid}: {times} dashboards have this uid" for uid, times in _repeated(pages, "uid")]
    tags = {tag for page in pages for tag in page["tags"]}
    for page in pages:
        found += [f"{page['title']}: {problem}" for problem in _page_problems(page, tags)]
    return found


def _page_problems(page: Page, tags: set[str]) -> Iterator[str]:
    panels = list(panels_of(page))
    rows = [panel for panel in page["panels"] if panel["type"] == "row"]
    variables = {variable["name"]: variable for variable in page["templating"]["list"]}
    known = variables.keys() | _BUILT_IN
    for key in ("id", "title"):
        for value, times in _repeated([*rows, *panels], key):
            yield f"{times} panels have the {key} {value}"
    yield from _link_problems(page, tags, known)
    if not (REPOSITORY / variables["runbooks"]["query"]).is_dir():
        yield f"variable 'runbooks': there is no {variables['runbooks']['query']}"
    for name, variable in variables.items():
        if variable["type"] == "query":
            for problem in _choice_problems(variable, known):
                yield f"variable {name!r}: {problem}"
    for panel in panels:
        for problem in _panel_problems(panel, known):
            yield f"panel {panel['title']!r}: {problem}"
    yield from _places([*rows, *panels])


def _link_problems(page: Page, tags: set[str], known: set[str]) -> Iterator[str]:
    for link in page["links"]:
        if link["type"] == "dashboards" and not set(link["tags"]) <= tags:
            yield f"links to dashboards with the tags {link['tags']}, which there are not"
        yield from _unknown_variables(link.get("url", ""), known)


def _panel_problems(panel: Page, known: set[str]) -> Iterator[str]:
    if not panel.get("description"):
        yield "does not say what it shows"
    if not panel["fieldConfig"].get("defaults", {}).get("unit"):
        yield "has no unit"
    if panel["datasource"] != _DATASOURCE:
        yield f"has another data source than {_DATASOURCE['uid']}"
    if not panel["targets"]:
        yield "asks nothing"
    for ref, times in _repeated(panel["targets"], "refId"):
        yield f"{times} queries have the refId {ref}"
    refs = {target["refId"] for target in panel["targets"]}
    for override in panel["fieldConfig"].get("overrides", ()):
        matcher = override["matcher"]
        if matcher["id"] == "byFrameRefID" and matcher["options"] not in refs:
            yield f"overrides query {matcher['options']}, which there is not"
    for target in panel["targets"]:
        for problem in _target_problems(panel, target, known):
            yield f"query {target['refId']}: {problem}"
    yield from _runbook_problems(panel)


def _runbook_problems(panel: Page) -> Iterator[str]:
    linked = [name for link in panel.get("links", ()) for name in _RUNBOOK.findall(link["url"])]
    for name in linked:
        if not (RUNBOOKS / f"{name}.md").exists():
            yield f"links to the runbook {name}, which there is not"
    if linked != (told := _RUNBOOK_TEXT.findall(panel["description"])):
        yield f"links to the runbooks {linked}, its description names {told}"


def _target_problems(panel: Page, target: Page, known: set[str]) -> Iterator[str]:
    if target["datasource"] != _DATASOURCE:
        yield f"asks another data source than {_DATASOURCE['uid']}"
    wanted = _FORMATS.get(panel["type"], "time_series")
    if target["format"] != wanted:
        yield f"has the format {target['format']}, a {panel['type']} reads {wanted}"
    yield from _unknown_variables(target["expr"], known)
    try:
        found = asked(target["expr"])
    except BadQuery as error:
        yield f"{error} (in: {target['expr']})"
        return
    for selector in found.selectors:
        if selector.kind is Kind.COUNTER and not selector.window:
            yield f"{selector.name}: is a counter, expected its rate or increase"
        yield from _deployment_problems(selector)
    yield from _label_problems(panel, target, found)


def _deployment_problems(selector: Selector) -> Iterator[str]:
    # Alerts of rules that add up over targets have no job.
    if selector.name != "ALERTS" and _JOB not in selector.matchers:
        yield f'{selector.name}: is not narrowed by job=~"$job"'


def _label_problems(panel: Page, target: Page, found: Query) -> Iterator[str]:
    """Labels that a legend or a matrix uses must be labels of the result."""
    named = set(_LEGEND_LABEL.findall(target.get("legendFormat", "")))
    if missing := named - found.labels:
        yield f"its legend names {', '.join(sorted(missing))}, its result does not have that"
    for change in panel.get("transformations", ()):
        if change["id"] == "groupingToMatrix":
            fields = {change["options"]["rowField"], change["options"]["columnField"]}
            if fields != found.labels:
                yield f"is a matrix of {sorted(fields)}, its result has {sorted(found.labels)}"


def _choice_problems(variable: Page, known: set[str]) -> Iterator[str]:
    if variable["datasource"] != _DATASOURCE:
        yield f"asks another data source than {_DATASOURCE['uid']}"
    match = _VALUES.match(variable["query"])
    if match is None:
        yield f"got {variable['query']!r}, expected label_values(series, label)"
        return
    yield from _unknown_variables(match["series"], known)
    try:
        found = asked(match["series"])
    except BadQuery as error:
        yield str(error)
        return
    if match["label"] not in found.labels:
        yield f"{match['series']} has no label {match['label']}"
    if variable["name"] != "job":
        for selector in found.selectors:
            yield from _deployment_problems(selector)


def _unknown_variables(text: str, known: set[str]) -> Iterator[str]:
    for name in sorted(set(_VARIABLE.findall(text)) - known):
        yield f"there is no variable ${name}"


def _places(panels: Iterable[Page]) -> Iterator[str]:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        at, title = panel["gridPos"], panel["title"]
        if at["x"] + at["w"] > _COLUMNS:
            yield f"panel {title!r}: is wider than the page"
        across, down = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
        cells = list(product(across, down))
        if other := next((taken[cell] for cell in cells if cell in taken), None):
            yield f"panel {title!r}: lies over {other!r}"
        taken.update((cell, title) for cell in cells)


def _repeated(of: Iterable[Page], key: str) -> list[tuple[object, int]]:
    counted = Counter(page[key] for page in of)
    return [(value, times) for value, times in counted.items() if times > 1]
