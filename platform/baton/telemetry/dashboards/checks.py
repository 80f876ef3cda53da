"""What can be wrong with a dashboard's file, without a Grafana or a Prometheus to ask.

Each problem is one line that names the dashboard, the panel and the query.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from baton.telemetry.catalogue import CATALOGUE, Kind
from baton.telemetry.dashboards.model import COLUMNS
from baton.telemetry.dashboards.parse import BadQuery, Selector, parsed
from baton.telemetry.dashboards.promql import (
    FROM_PROMETHEUS,
    LE,
    Part,
    labels_of,
    legend_labels,
)

Page = Mapping[str, Any]
"""A dashboard, as its file says it."""

_BUILT_IN: Final = frozenset({"__rate_interval", "__interval", "__range"})
_VARIABLE: Final = re.compile(r"\$\{?(\w+)")
_VALUES: Final = re.compile(r"^label_values\((?P<series>.*),\s*(?P<label>\w+)\)$", re.DOTALL)
_DATASOURCE: Final = "${datasource}"
_RUNBOOK: Final = re.compile(r"\$\{runbooks\}/(?P<name>[\w-]+)\.md")


def problems(pages: Iterable[Page], runbooks: frozenset[str] | None = None) -> list[str]:
    """Everything that is wrong with dashboards; `runbooks` are the pages that there are."""
    pages = list(pages)
    found = [f"{uid}: {times} dashboards have this uid" for uid, times in _repeated(pages)]
    for page in pages:
        found += [f"{page['title']}: {problem}" for problem in _page_problems(page, runbooks)]
    return found


def panels_of(page: Page) -> Iterator[Page]:
    """Every panel, also those of rows that are folded; rows are none."""
    for panel in page.get("panels", ()):
        if panel["type"] == "row":
            yield from panel.get("panels", ())
        else:
            yield panel


def queries_of(page: Page) -> Iterator[tuple[str, str, str]]:
    """Panel's title, name of the query, expression."""
    for panel in panels_of(page):
        for target in panel.get("targets", ()):
            yield panel["title"], target["refId"], target["expr"]


def known_labels(selector: Selector) -> frozenset[str]:
    """The labels of what a selector asks for.

    Raises:
        BadQuery: there is no such metric, it has no such label, or it is asked for wrongly.
    """
    labels = _SERIES.get(selector.name)
    if labels is None:
        raise BadQuery(f"{selector.name}: there is no such metric in the catalogue")
    if missing := {label for label, _, _ in selector.matchers} - labels:
        raise BadQuery(
            f"{selector.name}: has no label {', '.join(sorted(missing))};"
            f" it has {', '.join(sorted(labels))}"
        )
    return labels


def _all_series() -> Mapping[str, frozenset[str]]:
    found = dict(FROM_PROMETHEUS)
    for metric in CATALOGUE:
        labels = labels_of(metric)
        if metric.kind is not Kind.HISTOGRAM:
            found[metric.name] = labels
            continue
        for part in Part:
            found[metric.name + part] = labels | ({LE} if part is Part.BUCKET else frozenset())
    return found


_SERIES: Final = _all_series()


def _page_problems(page: Page, runbooks: frozenset[str] | None) -> Iterator[str]:
    panels = list(panels_of(page))
    variables = page.get("templating", {}).get("list", [])
    declared = frozenset(variable["name"] for variable in variables) | _BUILT_IN
    for number, times in Counter(panel["id"] for panel in _with_rows(page)).items():
        if times > 1:
            yield f"{times} panels have the id {number}"
    for variable in variables:
        if variable["type"] == "query":
            yield from _choice_problems(variable, declared)
    for panel in panels:
        for problem in _panel_problems(panel, declared, runbooks):
            yield f"panel {panel['title']!r}: {problem}"
    yield from _places(panels)


def _panel_problems(
    panel: Page, declared: frozenset[str], runbooks: frozenset[str] | None
) -> Iterator[str]:
    if not panel.get("description"):
        yield "does not say what it shows"
    if not panel.get("fieldConfig", {}).get("defaults", {}).get("unit"):
        yield "has no unit"
    targets = panel.get("targets", [])
    if not targets:
        yield "asks nothing"
    for ref, times in Counter(target["refId"] for target in targets).items():
        if times > 1:
            yield f"{times} queries have the refId {ref}"
    for target in targets:
        for problem in _target_problems(target, declared):
            yield f"query {target['refId']}: {problem}"
    for link in panel.get("links", ()):
        page = _RUNBOOK.search(link["url"])
        if page and runbooks is not None and page["name"] not in runbooks:
            yield f"links to the runbook {page['name']}, which there is not"


def _target_problems(target: Page, declared: frozenset[str]) -> Iterator[str]:
    if target.get("datasource", {}).get("uid") != _DATASOURCE:
        yield f"asks another data source than {_DATASOURCE}"
    yield from _unknown_variables(target["expr"], declared)
    try:
        asked = parsed(target["expr"], known_labels)
    except BadQuery as error:
        yield f"{error} (in: {target['expr']})"
        return
    if missing := legend_labels(target.get("legendFormat", "")) - asked.labels:
        yield f"its legend names {', '.join(sorted(missing))}, its result does not have that"


def _choice_problems(variable: Page, declared: frozenset[str]) -> Iterator[str]:
    text = variable["query"]
    found = _VALUES.match(text)
    name = f"variable {variable['name']!r}"
    if found is None:
        yield f"{name}: got {text!r}, wanted label_values(series, label)"
        return
    for problem in _unknown_variables(found["series"], declared):
        yield f"{name}: {problem}"
    try:
        asked = parsed(found["series"], known_labels)
    except BadQuery as error:
        yield f"{name}: {error}"
        return
    if found["label"] not in asked.labels:
        yield f"{name}: {found['series']} has no label {found['label']}"


def _unknown_variables(text: str, declared: frozenset[str]) -> Iterator[str]:
    for name in sorted(set(_VARIABLE.findall(text)) - declared):
        yield f"there is no variable ${name}"


def _places(panels: Sequence[Page]) -> Iterator[str]:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        at, title = panel["gridPos"], panel["title"]
        if at["x"] + at["w"] > COLUMNS:
            yield f"panel {title!r}: is wider than the page"
        cells = [
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        ]
        if other := next((taken[cell] for cell in cells if cell in taken), None):
            yield f"panel {title!r}: lies over {other!r}"
        taken.update((cell, title) for cell in cells)


def _with_rows(page: Page) -> Iterator[Page]:
    yield from (panel for panel in page.get("panels", ()) if panel["type"] == "row")
    yield from panels_of(page)


def _repeated(pages: Sequence[Page]) -> list[tuple[str, int]]:
    times = Counter(page["uid"] for page in pages)
    return [(uid, count) for uid, count in times.items() if count > 1]
