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
from tests.dashboards.prometheus import Found, Prometheus
from tests.dashboards.promtool import EVERYTHING

_METRIC = re.compile(r"\bbaton_\w+")
_PART = re.compile(r"_(bucket|sum|count)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Over which time is asked."""

    from_s: float
    to_s: float
    step_s: float
    window: str
    """Of rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One expression."""

    where: str
    """Dashboard, panel and query; or file and rule."""
    expr: str
    alert: bool = False
    """Empty unless something is wrong; then its metrics are looked for one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back."""

    question: Question
    series: tuple[Found, ...]
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


def questions(pages: Iterable[Page], span: Span) -> Iterator[Question]:
    """Of every panel and of every rule."""
    for page in pages:
        for panel in panels_of(page):
            for target in panel["targets"]:
                where = f"{page['title']}: {panel['title']}: {target['refId']}"
                expr = substituted(target["expr"], values_of(page, span))
                yield Question(where=where, expr=expr)
    for file in sorted((FOLDER / "rules").glob("*.yaml")):
        yield from _of_rules(file)


def values_of(page: Page, span: Span) -> Mapping[str, str]:
    """What to fill in for the variables: everything there is, over this span."""
    names = [one["name"] for one in page["templating"]["list"] if one["type"] == "query"]
    whole = f"{max(1, round(span.to_s - span.from_s))}s"
    windows = {"__rate_interval": span.window, "__interval": span.window, "__range": whole}
    return dict.fromkeys(names, EVERYTHING) | windows


def answers(server: Prometheus, asked: Iterable[Question], span: Span) -> Iterator[Answer]:
    """What the server says to each."""
    steps = int((span.to_s - span.from_s) / span.step_s) + 1
    for question in asked:
        series = server.over(question.expr, from_s=span.from_s, to_s=span.to_s, step_s=span.step_s)
        yield Answer(question=question, series=series, steps=steps)


def verdicts(
    given: Iterable[Answer], expected_empty: Mapping[str, str], has_metric: Callable[[str], bool]
) -> list[str]:
    """What is wrong: no data where some was expected, or the list of the expected is wrong.

    Alerts are empty while all is well: it is enough that somebody has each metric that they name.
    """
    given = list(given)
    wrong = []
    for answer in given:
        question = answer.question
        if question.alert:
            wrong += [f"{question.where}: {what}" for what in _unheard_of(question, has_metric)]
        elif question.where in expected_empty:
            if answer.always_has_data:
                wrong.append(f"{question.where}: is listed as empty and never was: take it off")
        elif not answer.has_data:
            wrong.append(f"{question.where}: no finite data ({question.expr})")
    known = {answer.question.where for answer in given}
    wrong += [
        f"{name}: is listed as empty, there is none" for name in expected_empty.keys() - known
    ]
    return wrong


def _of_rules(file: Path) -> Iterator[Question]:
    groups: list[dict[str, Any]] = YAML(typ="safe").load(file)["groups"]
    for group in groups:
        for rule in group["rules"]:
            name = rule.get("record") or rule["alert"]
            labels = rule.get("labels", {}) if "alert" in rule else {}
            severity = f" ({labels['severity']})" if "severity" in labels else ""
            where = f"{file.name}: {name}{severity}"
            yield Question(where=where, expr=rule["expr"], alert="alert" in rule)


def _unheard_of(question: Question, has_metric: Callable[[str], bool]) -> Iterator[str]:
    """Metrics that an alert names and that nobody has."""
    for name in sorted(set(_METRIC.findall(question.expr))):
        if _PART.sub("", name) not in BY_NAME and name not in BY_NAME:
            yield f"{name} is not in the catalogue"
        elif not has_metric(name):
            yield f"nobody has the metric {name}"
