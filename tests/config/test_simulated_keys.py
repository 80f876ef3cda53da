"""Every key of a configuration is simulated, does not matter to it, or is said not to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import DeploymentConfig, load_config
from baton.config.language.tree import format_path, matches
from baton.config.simulation.simulated_keys import _ROWS, Treatment, row_of, said
from baton.config.simulation.to_scenario import CannotModel, Simulated, simulated
from baton.perf.step_timing import StepBatch
from baton.simulator.v1.settings import V1Settings
from tests.config.every_key import Changed, changes, general, keys_of_the_schema
from tests.config.state import state

GPU = Path(__file__).parents[2] / "configs" / "gpu-example.yaml"
NOT_ALONE = frozenset(
    {("pools", "*", "model"), ("pools", "*", "engine", "kind"), ("models", "*", "engine", "kind")}
)
"""Keys of which another value takes a second model, or another deployment altogether."""


def treatment(change: Changed) -> Treatment:
    values = dict(said(change.new))
    return row_of(change.path, change.new, values.get(change.path)).treatment


def makes(config: DeploymentConfig) -> Simulated | None:
    try:
        return simulated(config)
    except CannotModel:
        return None


STEPS = (
    StepBatch(prefill_tokens=500),
    StepBatch(decode_requests=8, decode_context_tokens=8000),
    StepBatch(prefill_tokens=2000, decode_requests=1, decode_context_tokens=100),
)
SIMULATED = [
    (change, before, after)
    for change in changes()
    if (before := makes(change.old)) is not None and (after := makes(change.new)) is not None
]


def decides(made: Simulated) -> dict[str, object]:
    """The scenario, how long its engines' steps take, and the policies that it makes."""
    scenario, scaler = made.scenario, made.scenario.autoscaler
    policies = (scenario.placer(), None if scaler is None else scaler())
    engines = [pool.settings for pool in scenario.pools]
    steps = [
        one.timing.step_s(step) for one in engines if isinstance(one, V1Settings) for step in STEPS
    ]
    plain = {at: one for at, one in state(scenario).items() if ".timing." not in at}
    return plain | state(policies) | {"steps": steps}


def test_every_key_of_the_schema_is_looked_at() -> None:
    looked_at = {general(change.path) for change, _, _ in SIMULATED}
    one_value = {("version",), ("transfer", "connector")}
    assert keys_of_the_schema() - looked_at - one_value <= NOT_ALONE


@pytest.mark.parametrize("key", sorted(keys_of_the_schema()), ids=format_path)
def test_it_is_said_of_every_key_what_a_simulation_makes_of_it(key: tuple[str, ...]) -> None:
    config = load_config([GPU], env={}).config
    row_of(tuple("decode" if one == "*" else one for one in key), config, None)


def test_every_row_is_about_a_key_that_exists() -> None:
    for row in _ROWS:
        extra = row.pattern.startswith("pools.*.engine.extra.")
        assert extra or any(matches(key, row.pattern) for key in keys_of_the_schema()), row.pattern


def test_whatever_is_not_modelled_says_so_or_why_not() -> None:
    assert all(bool(row.words) != (row.treatment is Treatment.MODELLED) for row in _ROWS)


@pytest.mark.parametrize(
    ("change", "before", "after"), SIMULATED, ids=[str(c) for c, _, _ in SIMULATED]
)
def test_what_is_modelled_reaches_the_scenario_and_what_is_noted_every_report(
    change: Changed, before: Simulated, after: Simulated
) -> None:
    reaches = decides(before) != decides(after)
    new = [note for note in after.notes if note not in before.notes]
    named = [note for note in after.notes if format_path(change.path) in note]
    match treatment(change):
        case Treatment.MODELLED:
            assert reaches
            assert not named
        case Treatment.NOTED if change.path in dict(said(change.new)):
            assert len(named) == 1
            assert "not simulated" in named[0]
        case Treatment.NOTED:
            assert not named
        case Treatment.IRRELEVANT:
            assert not reaches
            assert not new
