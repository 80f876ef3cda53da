"""That the live check finds what is empty."""

from __future__ import annotations

from tests.dashboards.evaluate_expressions import (
    Expression,
    QueryRange,
    Result,
    expressions,
    find_problems,
    variable_values,
)
from tests.dashboards.pages import page, pages
from tests.dashboards.prometheus import Series

SPAN = QueryRange(from_s=0.0, to_s=4.0, step_s=2.0, window="16s")
QUESTION = Expression(location="here", expr="sum(baton_ingress_kv_leases)")
ALERT = Expression(location="alert", expr="sum(baton_ingress_kv_leases) > 3", is_alert=True)


def answer(*values: float, question: Expression = QUESTION) -> Result:
    points = tuple((2.0 * n, value) for n, value in enumerate(values))
    return Result(expression=question, series=(Series(labels={}, points=points),), steps=3)


def everything(_name: str) -> bool:
    return True


def test_a_number_anywhere_is_data() -> None:
    assert find_problems([answer(float("nan"), 2.0)], {}, everything) == []


def test_an_expression_without_a_number_is_named() -> None:
    nothing = Result(expression=QUESTION, series=(), steps=3)

    for empty in (nothing, answer(float("nan"), float("inf"))):
        assert find_problems([empty], {}, everything) == [
            "here: no finite data (sum(baton_ingress_kv_leases))"
        ]


def test_an_expression_expected_to_be_empty_may_be_so() -> None:
    nothing = Result(expression=QUESTION, series=(), steps=3)

    assert find_problems([nothing], {"here": "because"}, everything) == []
    assert find_problems([answer(1.0)], {"here": "because"}, everything) == []


def test_an_expression_that_is_never_empty_is_not_listed_as_empty() -> None:
    (wrong,) = find_problems([answer(1.0, 2.0, 3.0)], {"here": "because"}, everything)

    assert wrong == "here: is listed as empty and never was: take it off"


def test_a_reason_needs_an_expression() -> None:
    assert find_problems([answer(1.0)], {"there": "because"}, everything) == [
        "there: is listed as empty, there is none"
    ]


def test_an_alert_may_be_empty_where_its_metric_exists() -> None:
    quiet = Result(expression=ALERT, series=(), steps=3)

    assert find_problems([quiet], {}, everything) == []
    assert find_problems([quiet], {}, lambda _: False) == [
        "alert: nobody has the metric baton_ingress_kv_leases"
    ]


def test_an_alert_that_names_no_metric_of_the_catalogue_is_named() -> None:
    quiet = Result(
        expression=Expression(location="alert", expr="baton_rents > 1", is_alert=True),
        series=(),
        steps=3,
    )

    assert find_problems([quiet], {}, everything) == ["alert: baton_rents is not in the catalogue"]


def test_every_variable_is_filled_in() -> None:
    for expression in expressions(pages(), SPAN):
        if expression.location.startswith("baton / "):
            assert "$" not in expression.expr, expression.location
    assert variable_values(page("goodput"), SPAN)["class"] == ".*"
