"""Reads the part of PromQL that dashboards use, and says what is wrong with it.

Prometheus' own tool is the judge of syntax, where it is at hand; this finds what that cannot know:
metrics and labels that baton does not have. An expression is read into its selectors and the labels
of its result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

_AGGREGATIONS: Final = frozenset(
    {"sum", "min", "max", "avg", "count", "stddev", "group", "topk", "bottomk", "quantile"}
)
_WITH_PARAMETER: Final = frozenset({"topk", "bottomk", "quantile"})
# Of a window, and of an instant.
_OVER_WINDOW: Final = frozenset(
    {"rate", "increase", "irate", "delta", "deriv", "changes", "resets", "max_over_time"}
    | {"min_over_time", "avg_over_time", "sum_over_time", "count_over_time", "last_over_time"}
)
_OF_INSTANT: Final = frozenset(
    {"abs", "ceil", "floor", "round", "clamp", "clamp_min", "clamp_max", "absent", "scalar"}
    | {"sort", "sort_desc", "time", "vector", "histogram_quantile", "label_replace"}
)
_OPERATORS: Final = frozenset({"+", "-", "*", "/", "%", "^", "==", "!=", ">", "<", ">=", "<="})
_SET_OPERATORS: Final = frozenset({"and", "or", "unless"})
_DURATION = r"\$__\w+|(?:\d+(?:ms|[smhdwy]))+"
_TOKEN = re.compile(
    rf"""\s*(?:(?P<string>"(?:\\.|[^"\\])*")|(?P<window>\[\s*(?:{_DURATION})\s*\])"""
    r"|(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<name>[a-zA-Z_:][\w:]*)"
    r"|(?P<mark>=~|!~|!=|==|>=|<=|[-+*/%^=<>(){},]))"
)


class BadQuery(ValueError):
    """An expression that is not PromQL, or that asks for what there is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Which series are asked for."""

    name: str
    matchers: tuple[tuple[str, str, str], ...] = ()
    """Label, operator, value."""
    window: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What an expression asks for, and the labels of what comes back."""

    selectors: tuple[Selector, ...] = ()
    labels: frozenset[str] = field(default=frozenset())


Known = Callable[[Selector], frozenset[str]]
"""The labels of a metric; raises BadQuery when there is none, or the selector does not fit it."""


def parsed(text: str, known: Known) -> Asked:
    """What an expression asks for.

    Raises:
        BadQuery: it is not PromQL, or names a metric or a label that there is not.
    """
    reader = _Reader(_tokens(text), known)
    asked = reader.expression()
    reader.finish()
    return asked


def substituted(text: str, values: Mapping[str, str]) -> str:
    """An expression with its variables filled in."""
    for name in sorted(values, key=len, reverse=True):
        text = text.replace(f"${{{name}}}", values[name]).replace(f"${name}", values[name])
    return text


def _tokens(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise BadQuery(f"cannot be read from {text[at : at + 20]!r} on")
        found.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return found


class _Reader:
    """Reads one expression from the left; precedence does not matter for what is asked."""

    def __init__(self, tokens: list[tuple[str, str]], known: Known) -> None:
        self._tokens = tokens
        self._at = 0
        self._known = known

    def finish(self) -> None:
        """Raises BadQuery when something is left."""
        if self._at < len(self._tokens):
            raise BadQuery(f"{self._tokens[self._at][1]!r} is not expected there")

    def expression(self) -> Asked:
        """Operands with operators between them."""
        left = self._operand()
        while (operator := self._peek()[1]) in _OPERATORS | _SET_OPERATORS:
            self._at += 1
            matched = self._matching()
            right = self._operand()
            left = _joined(left, operator, matched, right)
        return left

    def _operand(self) -> Asked:
        if self._peek()[1] == "-":
            self._at += 1
        kind, text = self._next()
        match kind:
            case "number" | "string":
                return Asked()
            case "name":
                return self._named(text)
            case _ if text == "(":
                inside = self.expression()
                self._expect(")")
                return inside
            case _ if text == "{":
                raise BadQuery("a selector without a metric's name")
            case _:
                raise BadQuery(f"{text or 'the end'!r} is not expected there")

    def _named(self, name: str) -> Asked:
        if name in _AGGREGATIONS:
            return self._aggregation(name)
        if self._peek()[1] != "(":
            return self._selector(name)
        if name not in _OVER_WINDOW | _OF_INSTANT:
            raise BadQuery(f"there is no function {name!r}")
        arguments = self._arguments()
        selectors = tuple(one for asked in arguments for one in asked.selectors)
        if name in _OVER_WINDOW and not all(one.window for one in selectors):
            raise BadQuery(f"{name} wants a window, as [5m]")
        labels = frozenset[str]().union(*(asked.labels for asked in arguments))
        if name == "histogram_quantile":
            if "le" not in labels:
                raise BadQuery("histogram_quantile wants buckets, by le")
            labels -= {"le"}
        return Asked(selectors=selectors, labels=labels)

    def _aggregation(self, name: str) -> Asked:
        by = self._grouping()
        arguments = self._arguments()
        wanted = 2 if name in _WITH_PARAMETER else 1
        if len(arguments) != wanted:
            raise BadQuery(f"{name} wants {wanted} argument(s), got {len(arguments)}")
        by = by or self._grouping()
        inside = arguments[-1]
        if by is None:
            kept = inside.labels if name in {"topk", "bottomk"} else frozenset[str]()
            return Asked(selectors=inside.selectors, labels=kept)
        how, labels = by
        if missing := labels - inside.labels:
            raise BadQuery(f"{name} {how} ({', '.join(sorted(missing))}): there is no such label")
        kept = labels if how == "by" else inside.labels - labels
        return Asked(selectors=inside.selectors, labels=kept)

    def _grouping(self) -> tuple[str, frozenset[str]] | None:
        how = self._peek()[1]
        if how not in {"by", "without"}:
            return None
        self._at += 1
        return how, self._label_list()

    def _matching(self) -> frozenset[str] | None:
        """The labels of `on`, or None without it."""
        if self._peek()[1] == "bool":
            self._at += 1
        if self._peek()[1] != "on":
            return None
        self._at += 1
        on = self._label_list()
        if self._peek()[1] in {"group_left", "group_right"}:
            self._at += 1
            if self._peek()[1] == "(":
                self._label_list()
        return on

    def _label_list(self) -> frozenset[str]:
        self._expect("(")
        labels: set[str] = set()
        while (token := self._next())[1] != ")":
            if token[0] == "name":
                labels.add(token[1])
            elif token[1] != ",":
                raise BadQuery(f"{token[1] or 'the end'!r} among labels")
        return frozenset(labels)

    def _arguments(self) -> list[Asked]:
        self._expect("(")
        if self._peek()[1] == ")":
            self._at += 1
            return []
        found = [self.expression()]
        while self._peek()[1] == ",":
            self._at += 1
            found.append(self.expression())
        self._expect(")")
        return found

    def _selector(self, name: str) -> Asked:
        matchers: list[tuple[str, str, str]] = []
        if self._peek()[1] == "{":
            self._at += 1
            while self._peek()[1] != "}":
                matchers.append(self._matcher())
                if self._peek()[1] == ",":
                    self._at += 1
            self._at += 1
        window = ""
        if self._peek()[0] == "window":
            window = self._next()[1]
        selector = Selector(name=name, matchers=tuple(matchers), window=window)
        return Asked(selectors=(selector,), labels=self._known(selector))

    def _matcher(self) -> tuple[str, str, str]:
        (kind, label), (_, operator), (value_kind, value) = self._next(), self._next(), self._next()
        if kind != "name" or operator not in {"=", "!=", "=~", "!~"} or value_kind != "string":
            raise BadQuery(f'{label + operator + value!r} is no matcher, as label="value"')
        return label, operator, value[1:-1]

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _next(self) -> tuple[str, str]:
        token = self._peek()
        self._at += 1
        return token

    def _expect(self, mark: str) -> None:
        got = self._next()[1]
        if got != mark:
            raise BadQuery(f"got {got or 'the end'!r}, wanted {mark!r}")


def _joined(left: Asked, operator: str, on: frozenset[str] | None, right: Asked) -> Asked:
    for side in (left, right):
        if on is not None and (missing := on - side.labels):
            raise BadQuery(f"on ({', '.join(sorted(missing))}): one side has no such label")
    unmatched = on is None and operator in _OPERATORS and left.selectors and right.selectors
    if unmatched and left.labels != right.labels:
        raise BadQuery(
            f"{operator}: nothing matches, the sides have labels"
            f" ({', '.join(sorted(left.labels))}) and ({', '.join(sorted(right.labels))})"
        )
    labels = left.labels if left.selectors else right.labels
    if operator == "or":
        labels = left.labels & right.labels if right.selectors else left.labels
    return Asked(selectors=left.selectors + right.selectors, labels=labels)
