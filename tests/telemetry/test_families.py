"""Numbers for one scrape: labelled as declared, finite, and in a bounded number of series."""

from __future__ import annotations

import math
import re

import pytest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.validation import _validate_metric_name

from baton.telemetry.catalogue import (
    BY_NAME,
    CATALOGUE,
    CIRCUIT_BREAKERS,
    LINK_SETUP,
    OTHER,
    RESUMES,
    SLACK,
    SLO_REQUESTS,
    STEP_ERROR,
    TTFT,
    Component,
    Kind,
    Label,
    Metric,
)
from baton.telemetry.families import Families


def told(families: Families) -> dict[tuple[str, ...], float]:
    [family] = families.collect()
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_counters_and_gauges_are_called_as_the_catalogue_calls_them() -> None:
    families = Families()
    families.add(RESUMES, 2)
    families.add(STEP_ERROR, 3, "decode")
    counter, gauge = families.collect()
    assert isinstance(counter, CounterMetricFamily)
    assert isinstance(gauge, GaugeMetricFamily)
    assert [sample.name for sample in counter.samples] == [RESUMES.name]
    assert [(sample.name, sample.labels) for sample in gauge.samples] == [
        (STEP_ERROR.name, {"pool": "decode"})
    ]
    assert (counter.documentation, gauge.documentation) == (RESUMES.help, STEP_ERROR.help)


def test_a_renamed_metric_is_exported_by_both_names() -> None:
    families = Families()
    families.add(CIRCUIT_BREAKERS, 2, "decode", "open")
    current, deprecated = families.collect()
    assert (current.name, deprecated.name) == ("baton_circuit_breakers", "baton_circuits")
    assert deprecated.documentation == "Deprecated, use baton_circuit_breakers."
    assert [sample[1:3] for sample in deprecated.samples] == [
        sample[1:3] for sample in current.samples
    ]


def test_values_added_under_the_same_labels_are_one_series() -> None:
    families = Families()
    families.add(STEP_ERROR, 1, "a")
    families.add(STEP_ERROR, 2, "b")
    families.add(STEP_ERROR, 3, "a")
    assert told(families) == {("a",): 4, ("b",): 2}


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_left_out(value: float | None) -> None:
    families = Families()
    families.add(SLACK, value)
    assert list(families.collect()) == []


def test_nought_is_a_number() -> None:
    families = Families()
    families.add(SLACK, 0.0)
    assert told(families) == {(): 0.0}


@pytest.mark.parametrize("labels", [(), ("a", "b")])
def test_labels_that_were_not_declared_are_an_error(labels: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected pool"):
        Families().add(STEP_ERROR, 1, *labels)


def test_a_histogram_is_not_added_to() -> None:
    families = Families()
    families.add(TTFT, 1.0, "default", "tiny", "decode", "0a1b2c3d")
    with pytest.raises(ValueError, match="histogram observes"):
        list(families.collect())


def test_ten_thousand_tenants_are_no_more_series_than_there_is_room_for() -> None:
    families = Families(max_values=20)
    for number in range(10_000):
        families.add(SLO_REQUESTS, 1, "chat", f"tenant-{number}", "m", "p")
    series = told(families)
    assert len(series) == 21
    assert series["chat", OTHER, "m", "p"] == 10_000 - 20
    assert series["chat", "tenant-19", "m", "p"] == 1


def test_a_label_without_room_leaves_the_others_as_they_are() -> None:
    families = Families(max_values=2)
    for tenant in "abcd":
        for slo_class in ("chat", "batch"):
            families.add(SLO_REQUESTS, 1, slo_class, tenant, "m", "p")
    series = told(families)
    assert series["chat", OTHER, "m", "p"] == series["batch", OTHER, "m", "p"] == 2
    by_class = dict.fromkeys(("chat", "batch"), 0.0)
    for (slo_class, *_), value in series.items():
        by_class[slo_class] += value
    assert by_class == {"chat": 4, "batch": 4}


def test_each_metric_has_room_of_its_own() -> None:
    families = Families(max_values=1)
    families.add(STEP_ERROR, 1, "a")
    families.add(LINK_SETUP, 1, "b", "c")
    assert [len(family.samples) for family in families.collect()] == [1, 1]
    assert [tuple(f.samples[0].labels.values()) for f in families.collect()] == [("a",), ("b", "c")]


# -------------------------------------------------------------------- the catalogue


_UNITS = ("seconds", "bytes", "tokens", "requests", "fraction", "ratio", "blocks", "replicas")


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_metric_is_named_as_prometheus_and_this_project_want_it(metric: Metric) -> None:
    _validate_metric_name(metric.name)
    assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in metric.labels)
    assert re.fullmatch(r"baton_[a-z][a-z0-9_]*[a-z0-9]", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert not metric.name.endswith(("_bucket", "_count", "_sum", "_created"))
    assert not re.search(r"_(ms|milliseconds|percent|minutes|kb|mb)(_|$)", metric.name)
    assert metric.help.endswith(".")


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_its_labels_are_declared_and_none_is_one_that_targets_have(metric: Metric) -> None:
    assert set(metric.labels) <= set(Label)
    assert len(set(metric.labels)) == len(metric.labels)
    own = {"component", "replica", "node", "instance", "job", "le", "quantile"}
    assert not own & set(metric.labels)
    if metric.component is Component.REPLICA:
        assert Label.POOL not in metric.labels, "the target has it"


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_histograms_and_no_others_have_edges_that_rise(metric: Metric) -> None:
    assert bool(metric.edges) == (metric.kind is Kind.HISTOGRAM)
    assert list(metric.edges) == sorted(set(metric.edges))
    if metric.kind is Kind.HISTOGRAM:
        assert metric.name.endswith(_UNITS)


def test_a_name_is_declared_once() -> None:
    assert len(BY_NAME) == len(CATALOGUE) > 50
    names = [name for metric in CATALOGUE for name in metric.names]
    assert len(set(names)) == len(names)


def test_no_histogram_is_exported_twice() -> None:
    assert not [
        metric for metric in CATALOGUE if metric.kind is Kind.HISTOGRAM and metric.names[1:]
    ]


def test_no_counter_is_called_like_a_series_of_a_histogram() -> None:
    families = [metric.name.removesuffix("_total") for metric in CATALOGUE]
    assert len(set(families)) == len(families)
    for metric in CATALOGUE:
        if metric.kind is Kind.HISTOGRAM:
            made = {f"{metric.name}_{part}" for part in ("bucket", "count", "sum", "created")}
            assert not made & {other.name for other in CATALOGUE}
