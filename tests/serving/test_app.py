"""From a configuration to Serve's options: what each deployment asks for."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config import DeploymentConfig, load_config
from baton.config.derive.options import split_by_model
from baton.config.simulation.to_scenario import CannotModel, to_scenario
from baton.serving.application.app import (
    build_app,
    ingress_options,
    initial_sizes,
    pool_options,
    with_interpreter,
)
from baton.serving.application.builds import (
    BuildRef,
    fresh_builds,
    initial_build_record,
    pool_version,
)
from baton.serving.ingress.deployment import merge_statuses
from tests.serving.configs import example


def test_a_pool_starts_with_as_many_replicas_as_it_says() -> None:
    assert pool_options(example("sim.yaml"), "prefill")["num_replicas"] == 2


def test_a_pool_without_replicas_is_ordered_with_one_for_serve_takes_none_with_zero() -> None:
    config = example("sim.yaml", "pools.prefill.replicas.min=0", "pools.prefill.replicas.initial=0")
    for sizes, decode in ((None, 2), ({"prefill": 0, "decode": 3}, 3)):
        bound = build_app(config, sizes=sizes)._bound_deployment
        pools = [pool._bound_deployment for pool in bound.init_args[1]]
        assert [pool.num_replicas for pool in pools] == [1, decode]
        assert initial_sizes(config, sizes) == {"prefill": 0, "decode": decode}


def test_a_replica_may_drain_for_as_long_as_a_stream_may_last() -> None:
    options = pool_options(example("sim.yaml", "admission.timeouts.total=900s"), "decode")
    grace_s = options["graceful_shutdown_timeout_s"]
    assert isinstance(grace_s, float)
    assert grace_s > 900


def test_an_ingress_takes_many_requests_at_once() -> None:
    taken = ingress_options(example("sim.yaml"))["max_ongoing_requests"]
    assert isinstance(taken, int)
    assert taken >= 1000


def test_a_replica_with_one_worker_is_one_actor() -> None:
    options = pool_options(example("gpu-example.yaml"), "decode")
    assert options["ray_actor_options"] == {
        "num_cpus": 4,
        "num_gpus": 1,
        "accelerator_type": "H100",
    }
    assert "placement_group_bundles" not in options


def test_a_split_engine_gets_a_bundle_for_each_worker() -> None:
    split = example(
        "gpu-example.yaml",
        "pools.decode.parallel.tp=4",
        "pools.decode.parallel.pp=2",
        "pools.decode.resources.gpus=8",
        "pools.decode.resources.cpus=16",
        "pools.decode.placement.strategy=spread",
    )
    options = pool_options(split, "decode")
    bundles = options["placement_group_bundles"]
    assert isinstance(bundles, list)
    assert len(bundles) == 8
    assert {bundle["GPU"] for bundle in bundles} == {1.0}
    assert sum(bundle["CPU"] for bundle in bundles) == pytest.approx(16)
    assert all("accelerator_type:H100" in bundle for bundle in bundles)
    assert options["placement_group_strategy"] == "SPREAD"
    assert options["ray_actor_options"] == {"num_cpus": 0}


def test_a_split_engine_on_cpus_is_one_actor_with_all_of_its_cpus() -> None:
    split = example(
        "quickstart.yaml", "pools.decode.parallel.tp=2", "pools.decode.resources.cpus=4"
    )
    options = pool_options(split, "decode")
    assert options["ray_actor_options"] == {"num_cpus": 4}
    assert "placement_group_bundles" not in options


@pytest.mark.parametrize(
    ("change", "replaces"),
    [
        ("pools.decode.engine.max_num_seqs=9", True),
        ("pools.decode.resources.cpus=2", True),
        ("pools.decode.placement.strategy=spread", True),
        ("transfer.lease=1m", True),
        ("model.max_len=2048", True),
        ("pools.prefill.engine.max_num_seqs=9", False),
        ("pools.decode.replicas.initial=3", False),
        ("pools.decode.resources.price_per_hour=3", False),
        ("slo.default.ttft=1s", False),
        ("tenants.acme.weight=2", False),
        ("autoscaler={}", False),
        ("admission.max_queued_requests=9", False),
        ("admission.timeouts.first_token=9s", False),
        ("router.seed=9", False),
        ("server.port=8001", False),
    ],
)
def test_a_pool_has_another_version_when_it_is_built_from_something_else(
    change: str, *, replaces: bool
) -> None:
    before, after = (example("sim.yaml", *changes) for changes in ((), (change,)))
    assert (pool_version(after, "decode") != pool_version(before, "decode")) == replaces


def test_an_overridden_key_of_the_model_is_no_part_of_a_pools_version() -> None:
    own = "pools.decode.engine.max_num_seqs=256"
    assert pool_version(example("sim.yaml", own, "model.engine.max_num_seqs=9"), "decode") == (
        pool_version(example("sim.yaml", own), "decode")
    )


def test_a_new_revision_of_the_model_replaces_pools_and_ingresses() -> None:
    before, after = (
        fresh_builds(example("sim.yaml", *sets)) for sets in ([], ["model.revision=abc"])
    )
    changed = {name for name, build in after.items() if build.version != before[name].version}
    assert changed == {"prefill", "decode", "ingress"}


def test_actors_on_another_interpreter_ask_ray_for_it() -> None:
    options = pool_options(example("sim.yaml"), "decode")
    assert with_interpreter(options, "") == options
    assert with_interpreter(options, "/new/bin/python")["ray_actor_options"] == {
        "num_cpus": 0.1,
        "runtime_env": {"py_executable": "/new/bin/python"},
    }


def test_builds_of_other_code_keep_their_version_and_interpreter() -> None:
    """Two versions of baton need not call the same configuration by the same word."""
    old, new = example("sim.yaml"), example("sim.yaml", "pools.decode.engine.max_num_seqs=9")
    built = replace(
        initial_build_record(old),
        build_refs={n: BuildRef(version="x", python="/a") for n in fresh_builds(old)},
    )
    assert {(b.version, b.python) for b in built.builds(old).values()} == {("x", "/a")}
    assert {b.python for b in built.builds_for_config(new).values()} == {"/a"}
    assert {b.python for b in built.builds_for_current_code(old).values()} == {""}
    elsewhere = replace(built, base_python="/b")
    assert {b.python for b in elsewhere.builds_for_current_code(old).values()} == {sys.executable}
    assert (
        built.with_builds(built.builds_for_current_code(old)).build_refs
        == initial_build_record(old).build_refs
    )


# -------------------------------------------------------------------- several models


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def config() -> DeploymentConfig:
    return load_config([CONFIGS / "models-example.yaml"], env={}, sets=()).config


def test_each_model_has_its_pools_and_the_shared_processes(config: DeploymentConfig) -> None:
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
