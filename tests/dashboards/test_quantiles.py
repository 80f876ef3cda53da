"""Percentiles across applies and processes: each is one of requests that there were."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.utils import floatToGoString

from baton.telemetry import catalogue as c
from baton.telemetry.histograms import Histogram, digest
from tests.dashboards.pages import (
    GET_TOOLS,
    find_panel,
    page,
    pages,
    queries_of,
    substituted,
)
from tests.dashboards.promtool import EVERYTHING, PROMTOOL
from tests.dashboards.queries import asked
from tests.dashboards.reference_promql import (
    SCRAPE_S,
    ScrapedSeries,
    bucket_of,
    grouped_by,
    quantiles,
)

CHAT = ("chat", "tiny", "decode")
P99 = next(
    expr
    for dashboard in pages()
    for title, _, expr in queries_of(dashboard)
    if title == "Time to first token (TTFT)" and "0.99" in expr
)
"""As the dashboard asks for it."""
WINDOW_S = 300.0
APPLIED_S = (0.3, 0.35, 28.0)
SCRAPES = 20
"""As many as the window spans."""
AT_S = SCRAPES * SCRAPE_S - 1
"""When is asked: just before the next scrape."""


class Process:
    """One ingress' histogram, and what was observed in it between its scrapes, by set of edges."""

    def __init__(self, name: str, scraped: ScrapedSeries, objective_s: float) -> None:
        self.name = name
        self._scraped = scraped
        self._own_s = objective_s
        self._histogram = Histogram(c.TTFT, [objective_s])
        self.observed: dict[str, list[float]] = {}
        """By set of edges."""

    @property
    def edges(self) -> tuple[float, ...]:
        return tuple(sorted({*c.TTFT.edges, self._own_s}))

    def apply(self, objective_s: float) -> None:
        self._own_s = objective_s
        self._histogram.set_edges([objective_s])

    def observe(self, *values_s: float) -> None:
        self.observed.setdefault(digest(self.edges), []).extend(values_s)
        for value_s in values_s:
            self._histogram.observe(value_s, *CHAT)

    def scrape(self, at_s: float) -> None:
        self._scraped.scrape(at_s, self.name, self._histogram.family())


def matchers(expr: str) -> list[tuple[str, str, str]]:
    return [matcher for selector in asked(expr).selectors for matcher in selector.matchers]


def escaped(edge: str) -> str:
    """As a regular expression within a string of PromQL."""
    return re.escape(edge).replace("\\", "\\\\")


# --------------------------------------------------------------------------- what is asked


def test_every_percentile_of_a_histogram_whose_edges_change_is_taken_by_set_of_edges() -> None:
    taken = 0
    for dashboard in pages():
        for title, _, expr in queries_of(dashboard):
            metric = next((other for other in c.CATALOGUE if f"{other.name}_bucket" in expr), None)
            if metric is None or c.Label.EDGES not in metric.labels:
                continue
            taken += 1
            if "histogram_quantile" in expr:
                assert c.Label.EDGES in grouped_by(expr), (title, expr)
            else:
                # Those between edges that every process has.
                edges = [*map(floatToGoString, metric.edges), "+Inf"]
                assert ("le", "=~", "|".join(map(escaped, edges))) in matchers(expr), (title, expr)
    assert taken >= 20


def test_latencies_of_two_models_are_distinguished_and_can_be_narrowed_to_a_pool() -> None:
    for title in (
        "Time to first token (TTFT)",
        "Time per output token (TPOT)",
        "End-to-end latency",
    ):
        for target in find_panel(page("goodput"), title)["targets"]:
            if not target["legendFormat"].endswith("objective"):
                assert {"model", "pool"} <= {*grouped_by(target["expr"])}, title
                assert ("model", "=~", "$model") in matchers(target["expr"])
                assert ("pool", "=~", "$pool") in matchers(target["expr"])
                assert "{{model}}" in target["legendFormat"]


def test_a_ratio_has_edges_that_stay_and_is_added_up_without_them() -> None:
    asked_for = [expr for dashboard in pages() for _, _, expr in queries_of(dashboard)
                 if f"{c.TTFT_RATIO.name}_bucket" in expr]  # fmt: skip
    assert len(asked_for) == 4
    for expr in asked_for:
        assert c.Label.EDGES not in grouped_by(expr)
        assert "le" not in [label for label, _, _ in matchers(expr)]


# --------------------------------------------------------------------------- what comes out


def test_a_percentile_is_not_pinned_at_an_edge_below_what_a_timeout_permits() -> None:
    scraped = ScrapedSeries()
    process = Process("a", scraped, 0.3)
    process.observe(0.1)
    for number in range(SCRAPES):
        process.scrape(number * SCRAPE_S)
        process.observe(*[29.0] * 5)
    [p99_s] = quantiles(scraped, 0.99, at_s=19 * SCRAPE_S, window_s=WINDOW_S).values()
    assert 20.0 < p99_s <= 30.0


def idle_then_applied() -> ScrapedSeries:
    """Little to do; 0.35 s is applied instead of 0.3 s; then a fifth of the requests is slow."""
    scraped = ScrapedSeries()
    process = Process("a", scraped, 0.3)
    process.observe(0.28)
    for number in range(SCRAPES - 2):
        process.scrape(number * SCRAPE_S)
    process.apply(0.35)
    process.observe(0.32, 0.32)
    process.scrape((SCRAPES - 2) * SCRAPE_S)
    process.observe(*[0.32] * 80, *[4.0] * 20)
    process.scrape((SCRAPES - 1) * SCRAPE_S)
    return scraped


def test_an_apply_does_not_hide_that_requests_are_slow() -> None:
    found = quantiles(idle_then_applied(), 0.99, *grouped_by(P99), at_s=AT_S, window_s=WINDOW_S)
    assert [round(value_s, 3) for value_s in found.values()] == [4.874]


def test_without_the_label_a_percentile_would_lie_where_no_request_does() -> None:
    scraped = ScrapedSeries()
    process = Process("a", scraped, 0.3)
    process.observe(0.28)
    for number in range(SCRAPES):
        process.scrape(number * SCRAPE_S)
        if number == SCRAPES // 2:
            process.apply(0.35)
        process.observe(*[0.28] * (100 if number < SCRAPES // 2 else 1))
    by = grouped_by(P99)
    without = [label for label in by if label != c.Label.EDGES]
    [wrong_s] = quantiles(scraped, 0.999, *without, at_s=AT_S, window_s=WINDOW_S).values()
    assert wrong_s > 0.35
    found = quantiles(scraped, 0.999, *by, at_s=AT_S, window_s=WINDOW_S)
    assert sorted(round(value_s, 1) for value_s in found.values()) == [0.3, 0.3]
    assert max(found.values()) <= 0.35


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[str, int, tuple[float, ...]]]:
    """What happens to two processes: scrapes, observations and applies, in any order."""
    values = st.sampled_from([0.02, 0.2, 0.27, 0.32, 0.45, 0.7, 4.0, 29.0, 550.0])
    steps = st.one_of(
        st.tuples(st.just("observe"), st.integers(0, 1), st.lists(values, min_size=1).map(tuple)),
        st.tuples(st.just("apply"), st.integers(0, 1), st.sampled_from([(0.3,), (0.35,), (28.0,)])),
        st.tuples(st.just("scrape"), st.just(0), st.just(())),
    )
    return draw(st.lists(steps, max_size=40))


@given(lives(), st.sampled_from([0.5, 0.9, 0.99]), st.floats(0.0, 14.0))
def test_a_percentile_lies_in_a_bucket_of_its_set_in_which_a_request_lies(
    life: list[tuple[str, int, tuple[float, ...]]], fraction: float, late_s: float
) -> None:
    scraped, at_s = ScrapedSeries(), 0.0
    processes = [Process("a", scraped, 0.3), Process("b", scraped, 0.3)]
    for what, which, values in [*life, ("scrape", 0, ()), ("scrape", 0, ())]:
        if what == "observe":
            processes[which].observe(*values)
        elif what == "apply":
            processes[which].apply(*values)
        else:
            for process in processes:
                process.scrape(at_s)
            at_s += SCRAPE_S
    now_s, by = at_s - SCRAPE_S + late_s, grouped_by(P99)
    own_s = {digest(sorted({*c.TTFT.edges, one_s})): one_s for one_s in APPLIED_S}
    found = quantiles(scraped, fraction, *by, at_s=now_s, window_s=now_s)
    for key, told_s in found.items():
        edges = key[by.index("edges")]
        observed = [one_s for process in processes for one_s in process.observed.get(edges, ())]
        buckets = [bucket_of(one_s, {*c.TTFT.edges, own_s[edges]}) for one_s in observed]
        assert any(low <= told_s <= high for low, high in buckets), (told_s, observed)


# --------------------------------------------------------------------------- Prometheus' own word


def as_series(scraped: ScrapedSeries, at_s: float) -> Iterator[Mapping[str, str]]:
    """What was scraped, as promtool writes it."""
    for labels, samples in scraped.series.items():
        known = {round(time_s / SCRAPE_S): value for time_s, value in samples}
        numbers = range(round(at_s // SCRAPE_S) + 1)
        values = [f"{known[number]:g}" if number in known else "_" for number in numbers]
        yield {"series": f"{c.TTFT.name}_bucket{braced(labels)}", "values": " ".join(values)}


def braced(labels: Iterable[tuple[str, str]]) -> str:
    return "{" + ", ".join(f'{name}="{value}"' for name, value in labels) + "}"


@pytest.mark.skipif(not PROMTOOL.exists(), reason=f"promtool is not here: {GET_TOOLS} prometheus")
@pytest.mark.parametrize("late_s", [0, 14])
def test_prometheus_takes_the_same_percentile(tmp_path: Path, late_s: int) -> None:
    at_s, scraped, by = (SCRAPES - 1) * SCRAPE_S + late_s, idle_then_applied(), grouped_by(P99)
    wanted = quantiles(scraped, 0.99, *by, at_s=at_s, window_s=WINDOW_S)
    everything = dict.fromkeys(("job", "class", "model", "pool"), EVERYTHING)
    expr = substituted(P99, everything | {"__rate_interval": "5m"})
    question = {
        # Numbers only, and rounded: promtool compares to the last bit.
        "expr": f"round(({expr}) > 0, 0.1)",
        "eval_time": f"{at_s:g}s",
        "exp_samples": [
            {"labels": braced(zip(by, key, strict=True)), "value": round(value_s, 1)}
            for key, value_s in wanted.items()
        ],
    }
    series = [*as_series(scraped, at_s)]
    test = {"interval": "15s", "input_series": series, "promql_expr_test": [question]}
    file = tmp_path / "quantiles.yaml"
    file.write_text(json.dumps({"evaluation_interval": "15s", "tests": [test]}))
    command = [str(PROMTOOL), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
