"""Edges: one at every objective and timeout of any configuration, and none that is too early."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given

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
from baton.telemetry.histograms import all_edges, changed_edges, digest
from tests.config.test_config_properties import CONFIGS, Tree, load, slow_machines

HISTOGRAMS = [metric for metric in c.CATALOGUE if metric.kind is c.Kind.HISTOGRAM]
LIMITS = CoordinatorLimits()


def promised(config: DeploymentConfig, objective: str) -> list[float | None]:
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
        *promised(config, "ttft_s"),
        config.admission.timeouts.first_token_s,
        config.admission.timeouts.total_s,
    ],
    "baton_time_per_output_token_seconds": lambda config: [
        *promised(config, "tpot_s"),
        *between_tokens(config),
    ],
    "baton_worst_token_gap_seconds": lambda config: [
        *promised(config, "itl_p99_s"),
        *between_tokens(config),
    ],
    "baton_inter_token_seconds": lambda config: [
        *promised(config, "itl_p99_s"),
        config.admission.timeouts.stall_s,
        config.admission.timeouts.total_s,
    ],
    "baton_request_duration_seconds": lambda config: [config.admission.timeouts.total_s],
    "baton_held_seconds": lambda config: [
        *promised(config, "ttft_s"),
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
def test_any_configuration_has_an_edge_at_all_that_it_promises_and_permits(tree: Tree) -> None:
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


def test_what_changes_is_told_by_histogram() -> None:
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
