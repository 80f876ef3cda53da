"""That the live check finds what is empty, tried on a deployment that is not there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.telemetry.catalogue import CATALOGUE, Component
from tests.dashboards.asked import Answer, Question, Span, answers, questions, values_of, verdicts
from tests.dashboards.expected_empty import EXPECTED_EMPTY
from tests.dashboards.fake import exposition, fake_baton
from tests.dashboards.pages import GET_TOOLS, page, pages
from tests.dashboards.prometheus import PROMETHEUS, Found, prometheus
from tests.fakes.free_ports import free_port

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


def test_the_deployment_that_is_not_there_has_every_metric() -> None:
    told = "".join(exposition(component, 10.0) for component in Component)

    names = {family.name for family in text_string_to_metric_families(told)}
    assert names == {metric.name.removesuffix("_total") for metric in CATALOGUE}


@pytest.mark.slow
@pytest.mark.skipif(not PROMETHEUS.exists(), reason=f"prometheus is not here: {GET_TOOLS}")
def test_a_metric_that_nobody_has_is_found_in_a_real_prometheus(tmp_path: Path) -> None:
    with (
        fake_baton(without="baton_engine_kv_used_fraction") as url,
        prometheus(url, tmp_path, port=free_port()) as server,
    ):
        started_s = server.clock_s()
        while not server.now("min(count_over_time(up[30s])) >= 4"):
            time.sleep(0.2)
        span = Span(from_s=started_s + 4.0, to_s=server.clock_s(), step_s=1.0, window="8s")
        asked = [one for one in questions(pages(), span) if one.where.startswith("baton / ")]
        given = list(answers(server, asked, span))

    silent = {one: why for one, why in EXPECTED_EMPTY.items() if "Alerts" in one}
    (wrong,) = verdicts(given, silent, everything)
    assert wrong.startswith("baton / Pools & autoscaler: KV cache in use: A: no finite data")
