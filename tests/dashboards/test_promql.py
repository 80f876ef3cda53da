from __future__ import annotations

from dataclasses import replace

import pytest

from baton.telemetry import catalogue as c
from baton.telemetry.dashboards.boards import boards
from baton.telemetry.dashboards.checks import known_labels
from baton.telemetry.dashboards.model import Choice, Panel, Query, Shape, Unit
from baton.telemetry.dashboards.parse import parsed, substituted
from baton.telemetry.dashboards.promql import (
    mean,
    quantile,
    rate,
    series,
    total,
)


def test_a_metric_outside_the_catalogue_cannot_be_asked_for() -> None:
    renamed = replace(c.LEASES, name="baton_rents")

    with pytest.raises(ValueError, match="baton_rents: is not in the catalogue"):
        series(renamed)


def test_a_label_that_a_metric_has_not_cannot_be_matched() -> None:
    with pytest.raises(ValueError, match="baton_leases: has no label tenant"):
        series(c.LEASES, tenant="acme")


def test_nothing_is_added_up_by_a_label_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="cannot be told apart by tenant"):
        total(series(c.LEASES), "tenant")


def test_counters_are_seen_as_rates_only_and_nothing_else_is() -> None:
    with pytest.raises(ValueError, match="is a counter, wanted a gauge"):
        series(c.RESUMES)
    with pytest.raises(ValueError, match="is a gauge, wanted a counter"):
        rate(c.LEASES)
    with pytest.raises(ValueError, match="is a gauge, wanted a histogram"):
        quantile(0.9, c.LEASES)


def test_sides_with_different_labels_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="labels pool do not match none"):
        total(series(c.LEASES), "pool") / total(series(c.LEASES))
    with pytest.raises(ValueError, match="has labels pool, wanted none"):
        total(series(c.LEASES), "pool").per(total(series(c.LEASES), "pool"))


def test_a_legend_names_only_what_its_result_has() -> None:
    with pytest.raises(ValueError, match=r"legend '\{\{tenant\}\}' names"):
        Query(expr=total(series(c.LEASES), "pool"), legend="{{tenant}}")


def test_a_choice_is_made_among_values_that_there_are() -> None:
    with pytest.raises(ValueError, match="has no label 'tenant'"):
        Choice(name="tenant", label="Tenant", of=series(c.LEASES), values="tenant")


def test_a_matrix_has_rows_and_columns() -> None:
    query = Query(expr=series(c.LINK_SETUP))

    with pytest.raises(ValueError, match="a matrix, and only that, has two labels"):
        Panel(title="t", about="a", shape=Shape.MATRIX, queries=(query,), unit=Unit.SECONDS)


def test_an_expression_reads_as_it_was_meant() -> None:
    expr = total(series(c.LEASES), "pool") / (total(series(c.LEASES), "pool") - 1)

    assert expr.text == (
        'sum by (pool) (baton_leases{job=~"$job"})'
        ' / (sum by (pool) (baton_leases{job=~"$job"}) - 1)'
    )


def test_a_mean_is_what_was_observed_over_how_often() -> None:
    assert mean(c.TTFT, slo_class="=~$class").text == (
        'sum(rate(baton_time_to_first_token_seconds_sum{job=~"$job", slo_class=~"$class"}'
        "[$__rate_interval])) / "
        'sum(rate(baton_time_to_first_token_seconds_count{job=~"$job", slo_class=~"$class"}'
        "[$__rate_interval]))"
    )


def test_what_is_built_and_what_is_read_agree_on_the_labels_of_each_result() -> None:
    queries = [query for board in boards() for panel in board.panels() for query in panel.queries]

    for query in queries:
        assert parsed(query.expr.text, known_labels).labels == query.expr.labels, query.expr.text


def test_longer_names_of_variables_are_filled_in_first() -> None:
    assert substituted("$class ${class} $cl", {"cl": "x", "class": "y"}) == "y y x"
