"""One ingress, several models: what each part of it sees, and what is told of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import DeploymentConfig, load_config
from baton.config.derive.options import split_by_model
from baton.config.simulation.to_scenario import CannotModel, to_scenario
from baton.serving.application.app import pool_options
from baton.serving.ingress.deployment import merge_statuses

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def config() -> DeploymentConfig:
    return load_config([CONFIGS / "models-example.yaml"], env={}, sets=()).config


def test_each_model_has_its_pools_and_what_all_share(config: DeploymentConfig) -> None:
    parts = split_by_model(config)
    assert {name: tuple(part.pools) for name, part in parts.items()} == {
        "small": ("small",),
        "large": ("large-prefill", "large-decode"),
    }
    assert {name: part.model_name for name, part in parts.items()} == {
        "small": "small",
        "large": "large",
    }
    assert all(part.tenants == config.tenants for part in parts.values())
    assert all(part.admission == config.admission for part in parts.values())


def test_every_pool_is_a_deployment_of_its_own(config: DeploymentConfig) -> None:
    assert [pool_options(config, name)["name"] for name in config.pools] == [
        "small",
        "large-prefill",
        "large-decode",
    ]


def test_models_are_simulated_one_after_the_other(config: DeploymentConfig) -> None:
    with pytest.raises(CannotModel, match="got small, large, expected one"):
        to_scenario(config)


def test_the_status_of_one_model_is_as_it_is() -> None:
    told: dict[str, object] = {"healthy": True, "replicas": [{"id": 1}], "in_flight": {}}
    assert merge_statuses({"small": told}) == told


def test_statuses_of_several_models_are_added_up() -> None:
    one: dict[str, object] = {
        "healthy": False,
        "replicas": [{"id": 1}],
        "in_flight": {"decode": 2},
        "policy": {"name": "predicted"},
    }
    other = one | {
        "healthy": True,
        "replicas": [{"id": 2}],
        "in_flight": {"decode": 1, "queued": 4},
    }
    assert merge_statuses({"small": one, "large": other}) == {
        "healthy": True,
        "replicas": [{"id": 1}, {"id": 2}],
        "in_flight": {"decode": 3, "queued": 4},
        "policy": {"name": "predicted"},
        "models": {"small": {"healthy": False}, "large": {"healthy": True}},
    }
