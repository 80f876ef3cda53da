"""By which rules a configuration is scaled."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import load_config
from baton.domain.errors import ConfigInvalid
from baton.domain.fleet import Role
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.serving.ray.serve_control import DeploymentState
from baton.serving.scaling.plan import ScalingPlan, observer_options, scaling_plan

SIM = Path(__file__).parents[2] / "configs" / "sim.yaml"


def plan(*sets: str) -> ScalingPlan:
    return scaling_plan(load_config([SIM], env={}, sets=sets).config)


@pytest.mark.parametrize(
    ("sets", "automatic", "text"),
    [
        ((), False, "none is configured, pools are scaled by hand only"),
        (("autoscaler.policy=static",), False, "static, pools are scaled by hand only"),
        (("autoscaler.policy=slo",), True, "slo"),
        (("autoscaler.policy=slo", "autoscaler.dry_run=true"), True, "slo, dry run"),
    ],
)
def test_only_a_configured_autoscaler_that_is_not_static_scales(
    sets: tuple[str, ...], *, automatic: bool, text: str
) -> None:
    found = plan(*sets)
    assert (found.is_automatic, found.description) == (automatic, text)


def test_what_nobody_scales_is_wanted_as_it_is() -> None:
    pool = PoolObservation(name="decode", role=Role.DECODE, decode=5, starting=1)
    seen = Observation(at_s=0.0, window_s=1.0, pools={"decode": pool})
    assert plan().policy().desired(seen)["decode"].replicas == 6


def test_a_policy_of_the_users_own_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigInvalid, match="no_such_module"):
        plan("autoscaler.policy=no_such_module:make").policy()


def test_a_pool_is_seen_as_serve_has_it_in_the_role_that_it_is_configured_for() -> None:
    sets = ("pools.prefill.parallel.tp=2", "pools.prefill.resources.gpus=2")
    config = load_config([SIM.with_name("gpu-example.yaml")], env={}, sets=sets).config
    state = DeploymentState(name="prefill", target=3, running=2, starting=1, stopping=1)
    seen = scaling_plan(config).pool_state(state)
    assert (seen.role, seen.gpus_per_replica) == (Role.PREFILL, 2.0)
    assert (seen.running, seen.starting, seen.draining) == (2, 1, 1)


@pytest.mark.parametrize(("interval", "window_s"), [("2s", 30.0), ("10s", 150.0), ("100ms", 5.0)])
def test_who_ticks_faster_takes_rates_over_less_time(interval: str, window_s: float) -> None:
    options = observer_options(plan("autoscaler.policy=slo", f"autoscaler.interval={interval}"))
    assert options.window_s == pytest.approx(window_s)
