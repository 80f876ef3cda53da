"""That the live check finds what is empty."""

from __future__ import annotations

from tests.dashboards.evaluate_expressions import (
    Answer,
    Question,
    Span,
    questions,
    values_of,
    verdicts,
)
from tests.dashboards.pages import page, pages
from tests.dashboards.prometheus import Found

SPAN = Span(from_s=0.0, to_s=4.0, step_s=2.0, window="16s")
QUESTION = Question(where="here", expr="sum(baton_leases)")
ALERT = Question(where="alert", expr="sum(baton_leases) > 3", alert=True)


def answer(*values: float, question: Question = QUESTION) -> Answer:
    points = tuple((2.0 * n, value) for n, value in enumerate(values))
    return Answer(question=question, series=(Found(labels={}, points=points),), steps=3)


def everything(_name: str) -> bool:
    return True


def test_a_number_anywhere_is_data() -> None:
    assert verdicts([answer(float("nan"), 2.0)], {}, everything) == []


def test_an_expression_without_a_number_is_named() -> None:
    nothing = Answer(question=QUESTION, series=(), steps=3)

    for empty in (nothing, answer(float("nan"), float("inf"))):
        assert verdicts([empty], {}, everything) == ["here: no finite data (sum(baton_leases))"]


def test_what_is_expected_to_be_empty_may_be_so() -> None:
    nothing = Answer(question=QUESTION, series=(), steps=3)

    assert verdicts([nothing], {"here": "because"}, everything) == []
    assert verdicts([answer(1.0)], {"here": "because"}, everything) == []


def test_what_is_never_empty_is_not_to_be_listed_as_empty() -> None:
    (wrong,) = verdicts([answer(1.0, 2.0, 3.0)], {"here": "because"}, everything)

    assert wrong == "here: is listed as empty and never was: take it off"


def test_a_reason_needs_an_expression() -> None:
    assert verdicts([answer(1.0)], {"there": "because"}, everything) == [
        "there: is listed as empty, there is none"
    ]


def test_an_alert_may_be_empty_when_somebody_has_what_it_names() -> None:
    quiet = Answer(question=ALERT, series=(), steps=3)

    assert verdicts([quiet], {}, everything) == []
    assert verdicts([quiet], {}, lambda _: False) == ["alert: nobody has the metric baton_leases"]


def test_an_alert_that_names_no_metric_of_the_catalogue_is_named() -> None:
    quiet = Answer(
        question=Question(where="alert", expr="baton_rents > 1", alert=True), series=(), steps=3
    )

    assert verdicts([quiet], {}, everything) == ["alert: baton_rents is not in the catalogue"]


def test_every_variable_is_filled_in() -> None:
    for one in questions(pages(), SPAN):
        if one.where.startswith("baton / "):
            assert "$" not in one.expr, one.where
    assert values_of(page("goodput"), SPAN)["class"] == ".*"
