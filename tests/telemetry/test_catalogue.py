"""The catalogue: names that Prometheus takes, in base units, each declared once."""

from __future__ import annotations

import re

import pytest
from prometheus_client.validation import _validate_metric_name

from baton.telemetry.catalogue import BY_NAME, CATALOGUE, Component, Kind, Label, Metric

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
