"""What Prometheus' parser and Grafana's schema say; `make check-dashboards` runs these too."""

from __future__ import annotations

import pytest

from tests.dashboards.pages import GET_TOOLS, find_panel, page, pages, with_query
from tests.dashboards.promtool import PROMTOOL, find_unparsable
from tests.dashboards.typecheck import TSC, mismatches

needs_promtool = pytest.mark.skipif(
    not PROMTOOL.exists(), reason=f"promtool is not here: {GET_TOOLS} prometheus"
)
needs_schema = pytest.mark.skipif(
    not TSC.exists(), reason=f"Grafana's schema is not here: {GET_TOOLS} schema"
)


@needs_promtool
def test_prometheus_parses_every_expression() -> None:
    assert find_unparsable(pages()) == []


@needs_promtool
def test_an_unparsable_expression_is_named_with_its_panel() -> None:
    (found,) = find_unparsable([with_query("SLO attainment", "sum by (rate(x[5m]))")])

    assert found.startswith("baton / Goodput & SLO: panel 'SLO attainment': query A: ")


@needs_schema
@pytest.mark.slow
def test_a_violation_of_grafanas_schema_is_named_with_its_panel() -> None:
    broken = page("goodput")
    broken["refreshes"] = "10s"
    attainment = find_panel(broken, "SLO attainment")
    attainment["options"]["tooltip"]["mode"] = "several"
    attainment["fieldConfig"]["defaults"]["custom"]["lineWidht"] = 1
    attainment["targets"][0]["hide"] = "no"

    found = mismatches([broken])

    where = "baton / Goodput & SLO"
    assert [name.split(": TS")[0] for name in found] == [
        where,
        f"{where}: panel 'SLO attainment': options",
        f"{where}: panel 'SLO attainment': fields",
        f"{where}: panel 'SLO attainment': query A",
    ]
