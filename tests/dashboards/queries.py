"""A reader of PromQL: the selectors of an expression, and the labels of its result.

promtool checks the syntax. The reader finds metrics, labels and label values that baton does not
have, and operators whose sides never match. It knows the part of PromQL that dashboards use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from baton.domain.demand import AdmissionOutcome
from baton.domain.fleet import Role
from baton.domain.handoff import HandoffMode
from baton.domain.request import Phase
from baton.policy.links.estimates import LinkState
from baton.policy.resilience.circuit_breakers import CircuitState
from baton.telemetry.catalogue import (
    CATALOGUE,
    Component,
    EnginePhase,
    EngineRequestState,
    FrameOutcome,
    Kind,
    Label,
    Metric,
    Objective,
    PoolBound,
    PoolCount,
    ScalingAction,
    TickOutcome,
    TokenKind,
    Window,
)
from baton.telemetry.requests.waterfall import Part

Labels = frozenset[str]

_OF_TARGETS: Final = frozenset({"job", "instance", "component", "replica", "node"})
"""Labels that a scrape adds to each series."""
_OF_ALERTS: Final = frozenset({"alertname", "alertstate", "severity", "pool", "slo_class"})
_VALUES: Final[Mapping[str, frozenset[str]]] = {
    Label.ACTION: frozenset(ScalingAction),
    Label.BOUND: frozenset(PoolBound),
    Label.MODE: frozenset(HandoffMode),
    Label.OBJECTIVE: frozenset(Objective),
    Label.OUTCOME: frozenset({*Phase, *AdmissionOutcome, *TickOutcome, "client_error"}),
    Label.PART: frozenset(Part),
    Label.PHASE: frozenset({*Phase, *EnginePhase}),
    Label.ROLE: frozenset(Role),
    Label.STATE: frozenset(
        {*PoolCount, *EngineRequestState, *FrameOutcome, *LinkState, *CircuitState}
    ),
    Label.TOKENS: frozenset(TokenKind),
    Label.WINDOW: frozenset(Window),
}
"""Values of labels; those that are not here come from configurations and the fleet."""
_AGGREGATIONS: Final = frozenset({"sum", "min", "max", "avg", "count", "group", "stddev"})
_OPERATORS: Final = frozenset({"+", "-", "*", "/", "%", "^", "==", "!=", ">", "<", ">=", "<="})
_SET_OPERATORS: Final = frozenset({"and", "or", "unless"})
_TOKEN = re.compile(r"""\s*("(?:\\.|[^"\\])*"|\[[^\]]*\]|[\w.:]+|=~|!~|[=!<>]=|[-+*/%^=<>(){},])""")


class BadQuery(ValueError):
    """An expression that cannot be read, asks for unknown series, or never matches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Which series are asked for."""

    name: str
    kind: Kind
    """The parts of a histogram are counters."""
    matchers: tuple[tuple[str, str, str], ...]
    """Label, operator, value."""
    window: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """The selectors of an expression, and the labels of its result."""

    selectors: tuple[Selector, ...]
    labels: Labels


def asked(text: str) -> Query:
    """The selectors of an expression, and the labels of its result.

    Raises:
        BadQuery: the expression cannot be read, or is wrong.
    """
    reader = _Reader(text)
    labels = reader.expression()
    if reader.left:
        raise BadQuery(f"{reader.left!r} is not expected there")
    return Query(selectors=tuple(reader.selectors), labels=labels or frozenset())


def _all_series() -> Mapping[str, tuple[Kind, Labels]]:
    found = {
        "up": (Kind.GAUGE, _OF_TARGETS | {"pool"}),
        "ALERTS": (Kind.GAUGE, _OF_TARGETS | _OF_ALERTS),
    }
    for metric in CATALOGUE:
        labels = _labels_of(metric)
        if metric.kind is not Kind.HISTOGRAM:
            found[metric.name] = metric.kind, labels
            continue
        found[f"{metric.name}_bucket"] = Kind.COUNTER, labels | {"le"}
        for part in ("sum", "count"):
            found[f"{metric.name}_{part}"] = Kind.COUNTER, labels
    return found


def _labels_of(metric: Metric) -> Labels:
    # Replicas are of one pool; other processes name the pool that a number is about.
    own = {str(label) for label in metric.labels}
    return _OF_TARGETS | own | ({"pool"} if metric.component is Component.REPLICA else set())


_SERIES: Final = _all_series()


class _Reader:
    """Reads one expression from the left; precedence does not change labels.

    Labels are None for numbers and strings, which have no series.
    """

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        self._at = 0
        self.selectors: list[Selector] = []
        at = 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if match is None:
                raise BadQuery(f"cannot be read from {text[at : at + 20]!r} on")
            self._tokens.append(match[1])
            at = match.end()

    @property
    def left(self) -> str:
        """The next token, empty at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def expression(self) -> Labels | None:
        """Operands with operators between them."""
        labels = self._operand()
        while self.left in _OPERATORS | _SET_OPERATORS:
            operator = self._next()
            on = self._label_list() if self._skipped("on") else None
            many = self._skipped("group_left")
            added = self._label_list() if many and self.left == "(" else frozenset[str]()
            right = self._operand()
            if on is None:
                labels = _joined(labels, operator, right)
                continue
            for side in (labels, right):
                if missing := on - (side or frozenset()):
                    raise BadQuery(f"on ({_names(missing)}): one side has no such label")
            labels = (labels or frozenset()) | added if many else on
        return labels

    def _operand(self) -> Labels | None:
        if self._skipped("-"):
            return self._operand()
        if self._skipped("("):
            inside = self.expression()
            self._expect(")")
            return inside
        name = self._next()
        if name[:1] == '"' or name[:1].isdigit():
            return None
        if not name[:1].isalpha():
            raise BadQuery(f"{name or 'the end'!r} is not expected there")
        if name in _AGGREGATIONS:
            return self._aggregation(name)
        return self._function(name) if self.left == "(" else self._selector(name)

    def _aggregation(self, name: str) -> Labels:
        how = self._next() if self.left in {"by", "without"} else ""
        listed = self._label_list() if how else frozenset()
        inside = self._arguments() or frozenset()
        if missing := listed - inside:
            raise BadQuery(f"{name} {how} ({_names(missing)}): there is no such label")
        return inside - listed if how == "without" else listed

    def _function(self, name: str) -> Labels | None:
        before = len(self.selectors)
        labels = self._arguments()
        for selector in self.selectors[before:]:
            if name in {"rate", "increase"} and selector.kind is not Kind.COUNTER:
                raise BadQuery(f"{selector.name}: is a {selector.kind}, has no {name}")
        if name == "histogram_quantile":
            if "le" not in (labels or ()):
                raise BadQuery("histogram_quantile wants buckets, by le")
            return (labels or frozenset()) - {"le"}
        return labels

    def _arguments(self) -> Labels | None:
        """The labels of all of them together."""
        self._expect("(")
        labels: Labels | None = None
        while self.left != ")":
            if (more := self.expression()) is not None:
                labels = more | (labels or frozenset())
            if not self._skipped(","):
                break
        self._expect(")")
        return labels

    def _selector(self, name: str) -> Labels:
        matchers: list[tuple[str, str, str]] = []
        if self._skipped("{"):
            while not self._skipped("}"):
                label, operator, value = self._next(), self._next(), self._next()
                if operator not in {"=", "!=", "=~", "!~"} or value[:1] != '"':
                    raise BadQuery(f'{label + operator + value!r} is no matcher, as label="value"')
                matchers.append((label, operator, value[1:-1]))
                self._skipped(",")
        window = self._next() if self.left.startswith("[") else ""
        if name not in _SERIES:
            raise BadQuery(f"{name}: there is no such metric in the catalogue")
        kind, labels = _SERIES[name]
        selector = Selector(name=name, kind=kind, matchers=tuple(matchers), window=window)
        _check_matchers(selector, labels)
        self.selectors.append(selector)
        return labels

    def _label_list(self) -> Labels:
        self._expect("(")
        labels: set[str] = set()
        while self.left != ")":
            labels.add(self._next())
            if not self._skipped(","):
                break
        self._expect(")")
        return frozenset(labels)

    def _next(self) -> str:
        token = self.left
        self._at += 1
        return token

    def _skipped(self, token: str) -> bool:
        found = self.left == token
        self._at += found
        return found

    def _expect(self, token: str) -> None:
        if (got := self._next()) != token:
            raise BadQuery(f"got {got or 'the end'!r}, expected {token!r}")


def _check_matchers(selector: Selector, labels: Labels) -> None:
    if missing := {label for label, _, _ in selector.matchers} - labels:
        raise BadQuery(f"{selector.name}: has no label {_names(missing)}; it has {_names(labels)}")
    for label, operator, value in selector.matchers:
        if label not in _VALUES or value.startswith("$"):
            continue
        wanted = value.split("|") if "~" in operator else [value]
        if strangers := set(wanted) - _VALUES[label]:
            raise BadQuery(f"{selector.name}: {label} is never {_names(strangers)}")


def _joined(left: Labels | None, operator: str, right: Labels | None) -> Labels | None:
    if left is None or right is None:
        return right if left is None else left
    if operator in _OPERATORS and left != right:
        raise BadQuery(
            f"{operator}: nothing matches, the sides have labels"
            f" ({_names(left)}) and ({_names(right)})"
        )
    return left & right if operator == "or" else left


def _names(labels: Labels | set[str]) -> str:
    return ", ".join(sorted(labels))
