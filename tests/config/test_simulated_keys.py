"""Every key of a configuration is simulated, does not matter to it, or is said not to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import DeploymentConfig, load_config
from baton.config.language.tree import format_path, matches
from baton.config.simulation.simulated_keys import (
    _TREATMENTS,
    Treatment,
    non_default_keys,
    treatment_of,
)
from baton.config.simulation.to_scenario import CannotModel, SimulatedDeployment, to_scenario
from baton.perf.step_timing import StepBatch
from baton.simulator.v1.settings import V1Settings
from tests.config.every_key import (
    ONE_VALUE,
    KeyChange,
    all_changes,
    schema_keys,
    wildcard_path,
)
from tests.config.state import state

GPU = Path(__file__).parents[2] / "configs" / "gpu-example.yaml"
NOT_ALONE = frozenset(
    {("pools", "*", "model"), ("pools", "*", "engine", "kind"), ("models", "*", "engine", "kind")}
)
"""Keys of which another value takes a second model, or another deployment altogether."""


def treatment(change: KeyChange) -> Treatment:
    values = dict(non_default_keys(change.new))
    return treatment_of(change.path, change.new, values.get(change.path)).treatment


def makes(config: DeploymentConfig) -> SimulatedDeployment | None:
    try:
        return to_scenario(config)
    except CannotModel:
        return None


STEPS = (
    StepBatch(prefill_tokens=500),
    StepBatch(decode_requests=8, decode_context_tokens=8000),
    StepBatch(prefill_tokens=2000, decode_requests=1, decode_context_tokens=100),
)
SIMULATED = [
    (change, before, after)
    for change in all_changes()
    if (before := makes(change.old)) is not None and (after := makes(change.new)) is not None
]


def decides(made: SimulatedDeployment) -> dict[str, object]:
    """The scenario, how long its engines' steps take, and the policies that it makes."""
    scenario, scaler = made.scenario, made.scenario.autoscaler
    policies = (scenario.placer(), None if scaler is None else scaler())
    engines = [pool.settings for pool in scenario.pools]
    steps = [
        engine.timing.step_s(step)
        for engine in engines
        if isinstance(engine, V1Settings)
        for step in STEPS
    ]
    plain = {at: value for at, value in state(scenario).items() if ".timing." not in at}
    return plain | state(policies) | {"steps": steps}


def test_every_key_of_the_schema_is_looked_at() -> None:
    looked_at = {wildcard_path(change.path) for change, _, _ in SIMULATED}
    assert schema_keys() - looked_at - ONE_VALUE <= NOT_ALONE


@pytest.mark.parametrize("key", sorted(schema_keys()), ids=format_path)
def test_it_is_said_of_every_key_what_a_simulation_makes_of_it(key: tuple[str, ...]) -> None:
    config = load_config([GPU], env={}).config
    treatment_of(tuple("decode" if name == "*" else name for name in key), config, None)


def test_every_row_is_about_a_key_that_exists() -> None:
    for row in _TREATMENTS:
        extra = row.pattern.startswith("pools.*.engine.extra.")
        assert extra or any(matches(key, row.pattern) for key in schema_keys()), row.pattern


def test_every_unmodelled_key_says_so_or_has_a_reason() -> None:
    assert all(
        bool(row.explanation) != (row.treatment is Treatment.MODELLED) for row in _TREATMENTS
    )


@pytest.mark.parametrize(
    ("change", "before", "after"), SIMULATED, ids=[str(c) for c, _, _ in SIMULATED]
)
def test_modelled_keys_reach_the_scenario_and_noted_keys_every_report(
    change: KeyChange, before: SimulatedDeployment, after: SimulatedDeployment
) -> None:
    reaches = decides(before) != decides(after)
    new = [note for note in after.notes if note not in before.notes]
    named = [note for note in after.notes if format_path(change.path) in note]
    match treatment(change):
        case Treatment.MODELLED:
            assert reaches
            assert not named
        case Treatment.NOT_SIMULATED if change.path in dict(non_default_keys(change.new)):
            assert len(named) == 1
            assert "not simulated" in named[0]
        case Treatment.NOT_SIMULATED:
            assert not named
        case Treatment.IRRELEVANT:
            assert not reaches
            assert not new
