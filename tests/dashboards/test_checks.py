from __future__ import annotations

import copy

import pytest

from baton.telemetry.dashboards.checks import problems
from tests.dashboards.pages import RUNBOOKS, Page, page, pages, panel_called, with_query

TITLE = "Attainment"
WHERE = f"baton / Goodput & SLO: panel '{TITLE}'"


def only_problem(of: Page) -> str:
    found = problems([of])
    assert len(found) == 1, found
    return found[0]


def test_nothing_is_wrong_with_the_dashboards() -> None:
    runbooks = frozenset(path.stem for path in RUNBOOKS.glob("*.md"))

    assert problems(pages(), runbooks) == []


def test_a_renamed_metric_is_named_with_its_panel() -> None:
    renamed = with_query(TITLE, "sum by (slo_class) (rate(baton_slo_hits_total[5m]))")

    problem = only_problem(renamed)

    assert problem.startswith(f"{WHERE}: query A: baton_slo_hits_total: there is no such metric")


def test_every_metric_that_is_renamed_is_noticed() -> None:
    for one in pages():
        for panel in one["panels"]:
            for target in panel.get("targets", ()):
                if "baton_" not in target["expr"]:
                    continue
                before, target["expr"] = (
                    target["expr"],
                    target["expr"].replace("baton_", "baton_x_", 1),
                )
                assert repr(panel["title"]) in only_problem(one)
                target["expr"] = before


@pytest.mark.parametrize(
    "expr",
    [
        'sum by (slo_class) (rate(baton_slo_requests_total{klass="a"}[5m]))',
        "sum by (slo_class, klass) (rate(baton_slo_requests_total[5m]))",
        "sum without (klass) (rate(baton_slo_requests_total[5m]))",
        "sum by (slo_class) (rate(baton_slo_requests_total[5m]))"
        " / on (klass) sum by (slo_class) (rate(baton_slo_requests_total[5m]))",
    ],
)
def test_a_label_that_there_is_not_is_named_with_its_panel(expr: str) -> None:
    problem = only_problem(with_query(TITLE, expr))

    assert problem.startswith(f"{WHERE}: query A: ")
    assert "klass" in problem


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("sum by (slo_class) (rate(baton_slo_requests_total[5m])", "got 'the end'"),
        ("sum(rate(baton_slo_requests_total[5m])))", "is not expected there"),
        ("rat(baton_slo_requests_total[5m])", "there is no function 'rat'"),
        ("rate(baton_slo_requests_total)", "rate wants a window"),
        ("baton_slo_requests_total{slo_class=~default}", "is no matcher"),
        ("sum(baton_leases) baton_leases", "is not expected there"),
        ("sum(baton_leases) +", "the end"),
        ("topk(sum(baton_leases))", "topk wants 2 argument(s)"),
        ("sum by (pool) (baton_leases) / sum(baton_leases)", "nothing matches"),
        ("baton_leases # so many", "cannot be read"),
        ("histogram_quantile(0.9, sum(rate(baton_held_seconds_bucket[5m])))", "wants buckets"),
        ("rate(baton_held_seconds[5m])", "there is no such metric"),
        ("", "the end"),
    ],
)
def test_what_is_not_promql_is_named_with_its_panel(expr: str, complaint: str) -> None:
    broken = with_query(TITLE, expr)
    panel_called(broken, TITLE)["targets"][0]["legendFormat"] = "__auto"

    problem = only_problem(broken)

    assert problem.startswith(f"{WHERE}: query A: ")
    assert complaint in problem


def test_two_queries_with_one_ref_id_are_named_with_their_panel() -> None:
    broken = page("goodput")
    panel_called(broken, TITLE)["targets"][1]["refId"] = "A"

    assert only_problem(broken) == f"{WHERE}: 2 queries have the refId A"


def test_a_legend_names_only_what_its_result_has() -> None:
    broken = page("goodput")
    panel_called(broken, TITLE)["targets"][0]["legendFormat"] = "{{tenant}}"

    assert "its legend names tenant" in only_problem(broken)


def test_a_variable_that_is_not_declared_is_noticed() -> None:
    broken = with_query(
        TITLE, 'sum by (job, slo_class) (baton_slo_target_fraction{slo_class="$clas"})'
    )

    assert only_problem(broken) == f"{WHERE}: query A: there is no variable $clas"


def test_a_choice_is_made_among_values_that_there_are() -> None:
    broken = page("goodput")
    choice = next(one for one in broken["templating"]["list"] if one["name"] == "class")
    choice["query"] = "label_values(baton_slo_target_fraction, tenant)"

    assert "variable 'class': baton_slo_target_fraction has no label tenant" in only_problem(broken)


def test_a_runbook_that_there_is_not_is_noticed() -> None:
    broken = page("goodput")
    link = {"title": "What to do", "url": "${runbooks}/Nowhere.md"}
    panel_called(broken, TITLE)["links"] = [link]

    (problem,) = problems([broken], frozenset(path.stem for path in RUNBOOKS.glob("*.md")))

    assert problem == f"{WHERE}: links to the runbook Nowhere, which there is not"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"description": ""}, "does not say what it shows"),
        ({"fieldConfig": {}}, "has no unit"),
        ({"targets": []}, "asks nothing"),
        ({"gridPos": {"x": 20, "y": 900, "w": 8, "h": 8}}, "is wider than the page"),
        ({"gridPos": {"x": 0, "y": 1, "w": 8, "h": 8}}, "lies over 'Error budget left'"),
    ],
)
def test_a_panel_explains_itself_and_has_a_place(change: Page, complaint: str) -> None:
    broken = page("goodput")
    panel_called(broken, TITLE).update(change)

    assert complaint in only_problem(broken)


def test_panels_and_dashboards_have_names_of_their_own() -> None:
    broken = page("goodput")
    first, second = [panel for panel in broken["panels"] if panel["type"] != "row"][:2]
    second["id"] = first["id"]

    assert only_problem(broken) == f"{broken['title']}: 2 panels have the id {first['id']}"
    assert (
        "2 dashboards have this uid" in problems([page("pools"), copy.deepcopy(page("pools"))])[0]
    )
