"""Every expression of dashboards and rules, asked of a Prometheus that has scraped a baton."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from baton.telemetry.catalogue import BY_NAME
from tests.dashboards.pages import FOLDER, Page, panels_of, substituted
from tests.dashboards.prometheus import Prometheus, Series
from tests.dashboards.promtool import EVERYTHING

_METRIC = re.compile(r"\bbaton_\w+")
_PART = re.compile(r"_(bucket|sum|count)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryRange:
    """Over which time is asked."""

    from_s: float
    to_s: float
    step_s: float
    window: str
    """Of rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """One expression."""

    location: str
    """Dashboard, panel and query; or file and rule."""
    expr: str
    is_alert: bool = False
    """Empty unless something is wrong; then its metrics are looked for one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came back."""

    expression: Expression
    series: tuple[Series, ...]
    steps: int
    """At how many times there could be a value."""

    @property
    def has_data(self) -> bool:
        """Whether there is a number."""
        return any(found.finite for found in self.series)

    @property
    def always_has_data(self) -> bool:
        """Whether there is one at each time."""
        times = {at for found in self.series for at, _ in found.finite}
        return len(times) >= self.steps


def expressions(pages: Iterable[Page], span: QueryRange) -> Iterator[Expression]:
    """Of every panel and of every rule."""
    for page in pages:
        for panel in panels_of(page):
            for target in panel["targets"]:
                location = f"{page['title']}: {panel['title']}: {target['refId']}"
                expr = substituted(target["expr"], variable_values(page, span))
                yield Expression(location=location, expr=expr)
    for file in sorted((FOLDER / "rules").glob("*.yaml")):
        yield from _rule_expressions(file)


def variable_values(page: Page, span: QueryRange) -> Mapping[str, str]:
    """What to fill in for the variables: everything there is, over this span."""
    names = [item["name"] for item in page["templating"]["list"] if item["type"] == "query"]
    whole = f"{max(1, round(span.to_s - span.from_s))}s"
    windows = {"__rate_interval": span.window, "__interval": span.window, "__range": whole}
    return dict.fromkeys(names, EVERYTHING) | windows


def evaluate(
    server: Prometheus, expressions: Iterable[Expression], span: QueryRange
) -> Iterator[Result]:
    """What the server says to each."""
    steps = int((span.to_s - span.from_s) / span.step_s) + 1
    for question in expressions:
        series = server.query_range(
            question.expr, from_s=span.from_s, to_s=span.to_s, step_s=span.step_s
        )
        yield Result(expression=question, series=series, steps=steps)


def find_problems(
    results: Iterable[Result], expected_empty: Mapping[str, str], has_metric: Callable[[str], bool]
) -> list[str]:
    """What is wrong: no data where some was expected, or the list of the expected is wrong.

    Alerts are empty while all is well: it is enough that somebody has each metric that they name.
    """
    results = list(results)
    problems = []
    for answer in results:
        question = answer.expression
        if question.is_alert:
            problems += [
                f"{question.location}: {what}" for what in _missing_metrics(question, has_metric)
            ]
        elif question.location in expected_empty:
            if answer.always_has_data:
                problems.append(
                    f"{question.location}: is listed as empty and never was: take it off"
                )
        elif not answer.has_data:
            problems.append(f"{question.location}: no finite data ({question.expr})")
    locations = {answer.expression.location for answer in results}
    problems += [
        f"{name}: is listed as empty, there is none" for name in expected_empty.keys() - locations
    ]
    return problems


def _rule_expressions(file: Path) -> Iterator[Expression]:
    groups: list[dict[str, Any]] = YAML(typ="safe").load(file)["groups"]
    for group in groups:
        for rule in group["rules"]:
            name = rule.get("record") or rule["alert"]
            labels = rule.get("labels", {}) if "alert" in rule else {}
            severity = f" ({labels['severity']})" if "severity" in labels else ""
            location = f"{file.name}: {name}{severity}"
            yield Expression(location=location, expr=rule["expr"], is_alert="alert" in rule)


def _missing_metrics(question: Expression, has_metric: Callable[[str], bool]) -> Iterator[str]:
    """Metrics that an alert names and that nobody has."""
    for name in sorted(set(_METRIC.findall(question.expr))):
        if _PART.sub("", name) not in BY_NAME and name not in BY_NAME:
            yield f"{name} is not in the catalogue"
        elif not has_metric(name):
            yield f"nobody has the metric {name}"
