"""Nothing is wrong with the dashboards, and a wrong panel is named."""

from __future__ import annotations

import pytest

from tests.dashboards.checks import problems
from tests.dashboards.pages import (
    Page,
    find_panel,
    page,
    pages,
    panels_of,
    substituted,
    with_query,
)
from tests.dashboards.queries import asked

TITLE = "SLO attainment"
WHERE = f"baton / Goodput & SLO: panel '{TITLE}'"
NARROWED = 'baton_slo_requests_total{job=~"$job"}[5m]'


def only_problem(of: Page) -> str:
    found = problems([of])
    assert len(found) == 1, found
    return found[0]


def test_nothing_is_wrong_with_the_dashboards() -> None:
    assert problems(pages()) == []


def test_every_metric_that_is_renamed_is_noticed() -> None:
    for dashboard in pages():
        for panel in panels_of(dashboard):
            for target in panel["targets"]:
                before = target["expr"]
                if "baton_" not in before:
                    continue
                target["expr"] = before.replace("baton_", "baton_x_", 1)
                problem = only_problem(dashboard)
                assert f"panel {panel['title']!r}: query {target['refId']}: baton_x_" in problem
                assert "there is no such metric" in problem
                target["expr"] = before


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        # What the catalogue does not have.
        (f'sum(rate({NARROWED})) / sum(baton_rents{{job=~"$job"}})', "there is no such metric"),
        ('sum(rate(baton_held_seconds{job=~"$job"}[5m]))', "there is no such metric"),
        ('sum(baton_ingress_kv_leases{job=~"$job", klass="a"})', "has no label klass"),
        (f"sum by (job, klass) (rate({NARROWED}))", "by (klass): there is no such label"),
        (f"sum without (klass) (rate({NARROWED}))", "without (klass): there is no such label"),
        ('sum(baton_pool_replicas{job=~"$job", state="redy"})', "state is never redy"),
        ('sum(baton_pool_replicas{job=~"$job", state=~"ready|redy"})', "state is never redy"),
        # What a metric of its kind is not asked for.
        ('sum(baton_slo_requests_total{job=~"$job"})', "is a counter, expected its rate"),
        ('sum(rate(baton_ingress_kv_leases{job=~"$job"}[5m]))', "is a gauge, has no rate"),
        ("sum(baton_ingress_kv_leases)", 'is not narrowed by job=~"$job"'),
        (
            'histogram_quantile(0.9, sum(rate(baton_held_seconds_bucket{job=~"$job"}[5m])))',
            "wants buckets, by le",
        ),
        # Sides that never match.
        (f"sum by (job) (rate({NARROWED})) / sum(rate({NARROWED}))", "nothing matches"),
        (f"sum by (job) (rate({NARROWED})) / on (pool) sum(rate({NARROWED}))", "on (pool): one"),
        # No PromQL.
        ("sum(rate(baton_slo_requests_total)", "got 'the end', expected ')'"),
        (f"sum(rate({NARROWED})))", "')' is not expected there"),
        ("baton_slo_requests_total{slo_class=~default}", "is no matcher"),
        ('sum(baton_ingress_kv_leases{job=~"$job"}) +', "'the end' is not expected there"),
        ("baton_ingress_kv_leases # so many", "cannot be read"),
    ],
)
def test_a_wrong_expression_is_named_with_its_panel(expr: str, complaint: str) -> None:
    broken = with_query(TITLE, expr)
    find_panel(broken, TITLE)["targets"][0]["legendFormat"] = "__auto"

    problem = only_problem(broken)

    assert problem.startswith(f"{WHERE}: query A: ")
    assert complaint in problem


@pytest.mark.parametrize(
    ("expr", "labels"),
    [
        ("baton_ingress_kv_leases * 2 > 0",
         {"job", "instance", "component", "replica", "node", "pool"}),
        ("1 - sum by (job) (baton_ingress_kv_leases)", {"job"}),
        ("sum(baton_ingress_kv_leases) or vector(0)", set()),
        ("sum by (le, job) (rate(baton_held_seconds_bucket[5m]))", {"le", "job"}),
        ("sum by (job, pool) (baton_ingress_kv_leases) / on (job) group_left () max by (job) (up)",
         {"job", "pool"}),
        ("max by (job, pool) (up) * on (job) max by (job) (up)", {"job"}),
        ("topk(3, sum without (instance, component, replica, node) (up))", {"job", "pool"}),
    ],
)  # fmt: skip
def test_the_labels_of_a_result_are_known(expr: str, labels: set[str]) -> None:
    assert asked(expr).labels == labels


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ({"legendFormat": "{{tenant}}"}, "query A: its legend names tenant"),
        ({"datasource": {"uid": "mine"}}, "query A: asks another data source than ${datasource}"),
        ({"format": "table"}, "query A: has the format table, a timeseries reads time_series"),
        ({"refId": "B"}, "2 queries have the refId B"),
    ],
)
def test_a_wrong_query_is_named_with_its_panel(target: Page, complaint: str) -> None:
    broken = page("goodput")
    find_panel(broken, TITLE)["targets"][0].update(target)

    assert only_problem(broken).startswith(f"{WHERE}: {complaint}")


def test_a_variable_that_is_not_declared_is_noticed() -> None:
    broken = with_query(TITLE, f"sum by (job, slo_class) (rate({NARROWED.replace('5m', '$long')}))")

    assert only_problem(broken) == f"{WHERE}: query A: there is no variable $long"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"description": ""}, "does not say what it shows"),
        ({"fieldConfig": {}}, "has no unit"),
        ({"datasource": {"uid": "mine"}}, "has another data source"),
        ({"gridPos": {"x": 20, "y": 900, "w": 8, "h": 8}}, "is wider than the page"),
        ({"gridPos": {"x": 0, "y": 1, "w": 8, "h": 8}}, "lies over 'Error budget left'"),
        ({"title": "Tokens"}, "2 panels have the title Tokens"),
        ({"id": 921661}, "2 panels have the id 921661"),
        ({"targets": []}, "asks nothing"),
        ({"links": []}, "links to the runbooks [], its description names ['BatonGoodputBurnsSl"),
        ({"links": [{"url": "${runbooks}/Nowhere.md"}]}, "links to the runbook Nowhere, which th"),
    ],
)
def test_a_wrong_panel_is_noticed(change: Page, complaint: str) -> None:
    broken = page("goodput")
    find_panel(broken, TITLE).update(change)

    assert complaint in "\n".join(problems([broken]))


def test_a_matrix_has_the_labels_of_its_result_as_rows_and_columns() -> None:
    broken = page("pools")
    panel = find_panel(broken, "Inputs of the last decision")
    panel["transformations"][0]["options"]["rowField"] = "reason"

    assert "is a matrix of ['pool', 'reason'], its result has ['input'" in only_problem(broken)


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("label_values(baton_slo_target_fraction{job=~\"$job\"}, tenant)", "has no label tenant"),
        ("label_values(baton_slo_target_fraction, slo_class)", "is not narrowed by job"),
        ("label_values(baton_rents, slo_class)", "baton_rents: there is no such metric"),
        ("baton_slo_target_fraction", "expected label_values(series, label)"),
    ],
)  # fmt: skip
def test_a_choice_is_made_among_values_that_there_are(query: str, complaint: str) -> None:
    broken = page("goodput")
    variables = broken["templating"]["list"]
    choice = next(variable for variable in variables if variable["name"] == "class")
    choice["query"] = query

    problem = only_problem(broken)

    assert problem.startswith(f"{broken['title']}: variable 'class': ")
    assert complaint in problem


def test_a_link_to_dashboards_that_there_are_not_is_noticed() -> None:
    broken = page("goodput")
    broken["links"][0]["tags"] = ["batton"]

    assert "links to dashboards with the tags ['batton']" in only_problem(broken)


def test_two_dashboards_have_names_of_their_own() -> None:
    assert problems([page("pools"), page("pools")]) == ["baton-pools: 2 dashboards have this uid"]


def test_longer_names_of_variables_are_filled_in_first() -> None:
    assert substituted("$class ${class} $cl", {"cl": "x", "class": "y"}) == "y y x"
