"""Histograms: exact at their edges, weighted, bounded, with series of their own for other edges."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import DeploymentConfig
from baton.config.derive.options import coordinator_limits, slo_classes
from baton.config.language.bounds import Timeout
from baton.config.language.fields import fields_of
from baton.config.language.scalars import Quantity
from baton.config.language.units import Unit
from baton.config.schema.deployment import TransferConfig
from baton.config.schema.service import SloObjectives, Timeouts
from baton.control.state.limits import CoordinatorLimits
from baton.domain.slo import Slo
from baton.telemetry import catalogue as c
from baton.telemetry.catalogue import ITL, OTHER, TTFT, TTFT_RATIO
from baton.telemetry.histograms import MAX_EDGE_SETS, Histogram, all_edges, changed_edges, digest
from tests.config.test_config_properties import CONFIGS, Tree, load, slow_machines

VALUES = st.floats(0, 20_000, allow_nan=False)
CHAT = ("chat", "tiny", "decode")
Rows = dict[tuple[str, ...], dict[str, float]]


def told(histogram: Histogram, *own_edges: float) -> Rows:
    """By labels: cumulative counts by edge, `sum` and `count`, of the set with these own edges."""
    wanted = digest(sorted({*histogram._metric.edges, *own_edges}))
    rows: Rows = {}
    for sample in histogram.family().samples:
        if sample.labels.pop("edges", wanted) != wanted:
            continue
        edge = sample.labels.pop("le", None)
        row = rows.setdefault(tuple(sample.labels.values()), {})
        row[edge or sample.name.rpartition("_")[2]] = sample.value
    return rows


def sets_of(histogram: Histogram) -> set[str]:
    return {sample.labels["edges"] for sample in histogram.family().samples}


@given(st.lists(VALUES, max_size=50), st.lists(st.floats(0.01, 90_000.0), max_size=3))
def test_every_bucket_counts_what_is_at_most_its_edge(
    values: list[float], own_edges: list[float]
) -> None:
    histogram = Histogram(TTFT, own_edges)
    for value in values:
        histogram.observe(value, *CHAT)
    edges = sorted({*TTFT.edges, *own_edges})
    row = told(histogram, *own_edges).get(CHAT, {})
    rounded = sorted(value - 1e-9 for value in values)
    counts = [bisect_right(rounded, edge) for edge in edges]
    if values:
        assert [row[edge] for edge in row if edge not in {"sum", "count"}] == [*counts, len(values)]
        assert row["sum"] == pytest.approx(sum(values))
        assert row["count"] == len(values)


def test_a_value_at_an_objective_meets_it_but_for_rounding_as_in_its_evaluation() -> None:
    histogram = Histogram(TTFT, [0.3])
    for value in (0.1 + 0.2, 0.3, 0.3 + 1e-10, 0.3 + 1e-6):
        histogram.observe(value, *CHAT)
    assert told(histogram, 0.3)[CHAT]["0.3"] == 3


def test_a_shared_value_is_observed_once_with_a_weight() -> None:
    histogram = Histogram(ITL)
    histogram.observe(0.02, "decode", weight=7)
    row = told(histogram)["decode",]
    assert (row["0.01"], row["0.025"], row["count"]) == (0, 7, 7)
    assert row["sum"] == pytest.approx(0.14)


def test_the_same_edges_change_nothing() -> None:
    histogram = Histogram(TTFT, [0.3])
    histogram.observe(0.2, *CHAT)
    assert not histogram.set_edges([0.3, 0.3, 0.5])  # there is an edge at 0.5 anyway
    assert told(histogram, 0.3)[CHAT]["count"] == 1
    assert len(sets_of(histogram)) == 1


def test_other_edges_begin_new_series_and_old_observations_stay() -> None:
    histogram = Histogram(TTFT, [0.3])
    histogram.observe(0.2, *CHAT)
    before = told(histogram, 0.3)
    assert histogram.set_edges([0.35])
    assert told(histogram, 0.3) == before
    histogram.observe(0.2, *CHAT)
    assert told(histogram, 0.3) == before
    now = told(histogram, 0.35)[CHAT]
    assert (now["0.25"], now["0.35"], now["count"]) == (1, 1, 1)
    assert "0.3" not in now


def test_edges_that_come_again_go_on_where_they_were() -> None:
    histogram = Histogram(TTFT, [0.3])
    histogram.observe(0.2, *CHAT)
    histogram.set_edges([0.35])
    histogram.observe(0.2, *CHAT)
    assert histogram.set_edges([0.3])
    histogram.observe(0.2, *CHAT)
    assert told(histogram, 0.3)[CHAT]["count"] == 2
    assert told(histogram, 0.35)[CHAT]["count"] == 1


def test_ten_thousand_sets_of_edges_are_no_more_series_than_a_few() -> None:
    histogram = Histogram(TTFT)
    for number in range(10_000):
        histogram.set_edges([3.0 + number / 1000])
        histogram.observe(0.1, *CHAT)
    assert len(sets_of(histogram)) == MAX_EDGE_SETS
    assert told(histogram, 3.0 + 9_999 / 1000)[CHAT]["count"] == 1


def test_sets_with_which_nothing_was_observed_take_no_room() -> None:
    histogram = Histogram(TTFT, [0.3])
    histogram.observe(0.1, *CHAT)
    for number in range(10):
        histogram.set_edges([3.0 + number])
    histogram.set_edges([0.35])
    histogram.observe(0.1, *CHAT)
    assert told(histogram, 0.3)[CHAT]["count"] == told(histogram, 0.35)[CHAT]["count"] == 1


def test_the_same_edges_have_the_same_label_in_every_process() -> None:
    one, other = Histogram(TTFT, [0.3, 2]), Histogram(TTFT)
    other.set_edges([2.0, 0.3])
    for histogram in (one, other):
        histogram.observe(0.1, *CHAT)
    assert sets_of(one) == sets_of(other)
    assert len(sets_of(one)) == 1


def test_a_histogram_whose_edges_never_change_does_not_name_them() -> None:
    histogram = Histogram(TTFT_RATIO)
    histogram.observe(1.0, "pull", "tiny")
    assert {*histogram.family().samples[0].labels} == {"mode", "model", "le"}


def test_beyond_the_bound_classes_stay_apart_and_then_nothing_does() -> None:
    histogram = Histogram(TTFT, max_rows=3)
    for number in range(1000):
        histogram.observe(0.1, "chat", "tiny", f"pool-{number}")
    rows = told(histogram)
    assert len(rows) == 4
    assert rows["chat", OTHER, OTHER]["count"] == 997
    for number in range(1000):
        histogram.observe(0.1, f"class-{number}", "tiny", "decode")
    rows = told(histogram)
    assert len(rows) == 2 * 3 + 1
    assert rows[OTHER, OTHER, OTHER]["count"] == 998
    assert sum(row["count"] for row in rows.values()) == 2000


def test_there_is_no_more_than_one_row_beyond_the_bound_of_a_single_label() -> None:
    histogram = Histogram(ITL, max_rows=3)
    for number in range(1000):
        histogram.observe(0.1, f"pool-{number}")
    rows = told(histogram)
    assert len(rows) == 4
    assert rows[OTHER,]["count"] == 997


def test_a_copy_does_not_change() -> None:
    histogram = Histogram(TTFT, [0.3])
    histogram.observe(0.1, *CHAT)
    copied = histogram.copy()
    histogram.observe(0.1, *CHAT)
    histogram.set_edges([0.35])
    assert told(copied, 0.3)[CHAT]["count"] == 1


def test_labels_that_were_not_declared_are_an_error() -> None:
    with pytest.raises(ValueError, match="expected slo_class, model, pool"):
        Histogram(TTFT).observe(0.1, "chat", "decode")


# -------------------------------------------------------------------- edges


HISTOGRAMS = [metric for metric in c.CATALOGUE if metric.kind is c.Kind.HISTOGRAM]
LIMITS = CoordinatorLimits()


def objectives_of(config: DeploymentConfig, objective: str) -> list[float | None]:
    classes = (config.slo.default, *config.slo.classes.values())
    return [getattr(class_, objective) for class_ in classes]


def between_tokens(config: DeploymentConfig) -> list[float | None]:
    timeouts = config.admission.timeouts
    return [
        timeouts.stall_s,
        timeouts.resume_s,
        timeouts.first_token_s,
        timeouts.total_s,
        config.transfer.deadline_s,
    ]


WATCHED: Mapping[str, Callable[[DeploymentConfig], list[float | None]]] = {
    "baton_time_to_first_token_seconds": lambda config: [
        *objectives_of(config, "ttft_s"),
        config.admission.timeouts.first_token_s,
        config.admission.timeouts.total_s,
    ],
    "baton_time_per_output_token_seconds": lambda config: [
        *objectives_of(config, "tpot_s"),
        *between_tokens(config),
    ],
    "baton_worst_token_gap_seconds": lambda config: [
        *objectives_of(config, "itl_p99_s"),
        *between_tokens(config),
    ],
    "baton_inter_token_seconds": lambda config: [
        *objectives_of(config, "itl_p99_s"),
        config.admission.timeouts.stall_s,
        config.admission.timeouts.total_s,
    ],
    "baton_request_duration_seconds": lambda config: [config.admission.timeouts.total_s],
    "baton_held_seconds": lambda config: [
        *objectives_of(config, "ttft_s"),
        config.admission.queue_timeout_s,
        config.admission.timeouts.first_token_s,
        config.admission.timeouts.total_s,
    ],
    "baton_handoff_gap_seconds": lambda config: [
        config.transfer.deadline_s,
        config.transfer.lease_s,
        config.admission.timeouts.first_token_s,
        config.admission.timeouts.total_s,
    ],
}
"""What bounds each histogram of seconds, by the keys of the configuration."""


def test_every_histogram_of_seconds_is_looked_at() -> None:
    in_seconds = {metric.name for metric in HISTOGRAMS if metric.name.endswith("_seconds")}
    assert WATCHED.keys() == in_seconds
    for metric in HISTOGRAMS:
        assert (c.Deadline.TOTAL in metric.deadlines) == (metric.name in in_seconds), metric.name
        follows_config = bool(metric.objective or metric.deadlines)
        assert (metric.labels[-1] is c.Label.EDGES) == follows_config, metric.name


@slow_machines
@given(tree=CONFIGS)
def test_any_configuration_has_an_edge_at_each_objective_and_limit(tree: Tree) -> None:
    config = load(tree).config
    edges = all_edges(slo_classes(config).classes.values(), coordinator_limits(config))
    assert [*edges] == HISTOGRAMS
    for metric, own in edges.items():
        assert [*own] == sorted(set(own)), metric.name
        assert {*metric.edges} <= {*own}, metric.name
        bounds = WATCHED.get(metric.name)
        for bound_s in () if bounds is None else bounds(config):
            assert bound_s is None or bound_s in own, (metric.name, bound_s)
            assert bound_s is None or own[-1] >= bound_s, (metric.name, bound_s)


def test_no_timeout_and_no_objective_can_be_longer_than_the_last_edge() -> None:
    assert Timeout.high == c.MAX_TIMEOUT_S
    for section in (Timeouts, TransferConfig, SloObjectives):
        for key, field in fields_of(section).items():
            if isinstance(field.kind, Quantity) and key != "window":
                assert (field.kind.bounds.high or 0) <= c.MAX_TIMEOUT_S, key
    for metric in HISTOGRAMS:
        if metric.deadlines:
            assert metric.edges[-1] == c.MAX_TIMEOUT_S, metric.name


@pytest.mark.parametrize("deadline", c.Deadline)
def test_a_deadline_is_named_as_in_the_configuration(deadline: c.Deadline) -> None:
    section: type = DeploymentConfig
    *sections, key = deadline.split(".")
    for name in sections:
        section = fields_of(section)[name].kind.schema  # type: ignore[union-attr]
    assert key in fields_of(section)


NOT_OBSERVED = {"admission.timeouts.drain"}
"""It bounds how long streams run on where a replica drains, which no histogram observes."""


def test_every_timeout_of_a_request_is_an_edge_or_bounds_nothing_that_is_observed() -> None:
    timeouts = {f"admission.timeouts.{key}" for key in fields_of(Timeouts)}
    timeouts |= {
        f"transfer.{key}"
        for key, field in fields_of(TransferConfig).items()
        if isinstance(field.kind, Quantity) and field.kind.unit is Unit.SECONDS
    }
    edges = {str(deadline) for metric in HISTOGRAMS for deadline in metric.deadlines}
    assert edges == set(map(str, c.Deadline))
    assert timeouts <= edges | NOT_OBSERVED, timeouts - edges


def test_changes_are_reported_by_histogram() -> None:
    old = all_edges([Slo(ttft_s=0.3)], LIMITS)
    new = all_edges([Slo(ttft_s=0.35)], LIMITS)
    assert [str(changed_edge) for changed_edge in changed_edges(old, new)] == [
        "baton_time_to_first_token_seconds: +0.35 s, -0.3 s",
        "baton_held_seconds: +0.35 s, -0.3 s",
    ]
    assert changed_edges(new, new) == ()


def test_an_objective_at_an_edge_that_there_is_changes_nothing() -> None:
    old = all_edges([Slo()], LIMITS)
    assert changed_edges(old, all_edges([Slo(tpot_s=0.05)], LIMITS)) == ()


def test_sets_of_edges_that_differ_have_different_digests() -> None:
    assert digest([0.1, 1.0]) == digest([0.1, 1]) != digest([0.1, 1.5])
