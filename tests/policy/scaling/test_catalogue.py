"""Scaling policies by their names, and those loaded from outside the package."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.config.schema.scaling import MOVED_POLICIES
from baton.domain.errors import ConfigInvalid
from baton.policy.scaling.catalogue import RULES, make_scaling_policy
from baton.policy.scaling.fixed import Static
from baton.policy.scaling.ingresses import IngressBounds, IngressSizer
from baton.policy.scaling.observation import Demand, Observation
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds, ScalingRule
from tests.policy.scaling.simulated_pools import decode_pool, demand, observe, options, prefill_pool

HERE = __name__
NOTHING = Demand()
ALL = [*map(str, ScalingRule), *MOVED_POLICIES.values()]


def test_static_wants_what_is_configured_and_leaves_other_pools_alone() -> None:
    bounds = {"prefill": PoolBounds(min=1, initial=3, max=9)}
    observation = observe(0.0, NOTHING, prefill_pool(1), decode_pool(4, starting=1))
    desired = Static(AutoscalerOptions(bounds=bounds)).desired(observation)
    assert {name: want.replicas for name, want in desired.items()} == {"prefill": 3, "decode": 5}


@pytest.mark.parametrize("rule", list(ScalingRule))
def test_every_rule_has_a_policy_of_its_name(rule: ScalingRule) -> None:
    assert make_scaling_policy(rule, options()).name == rule
    assert set(RULES) == set(ScalingRule)


@pytest.mark.parametrize("rule", ALL)
def test_every_policy_decides_for_every_pool_in_any_order(rule: str) -> None:
    pools = [
        replace(prefill_pool(3), utilization_fraction=0.9),
        replace(decode_pool(2), running_requests=50.0),
    ]
    one = make_scaling_policy(rule, options()).desired(observe(0.0, demand(3.0, 2.0), *pools))
    two = make_scaling_policy(rule, options()).desired(observe(0.0, demand(3.0, 2.0), *pools[::-1]))
    assert one == two
    assert set(one) == {"prefill", "decode"}


@pytest.mark.parametrize("rule", ALL)
def test_every_policy_accepts_missing_reports_and_unknown_capacities(rule: str) -> None:
    policy = make_scaling_policy(rule, options())
    unknown = [
        replace(pool, prefill_tokens_per_s=None, decode_tokens_per_s=None, decode_streams=None)
        for pool in (prefill_pool(0), decode_pool(2))
    ]
    for second in range(0, 400, 10):
        desired = policy.desired(observe(float(second), NOTHING, *unknown))
        assert all(want.replicas >= 0 for want in desired.values())


class Own:
    """A user's own policy."""

    name = "own"

    def __init__(self, options: AutoscalerOptions) -> None:
        self.options = options

    def desired(self, observation: Observation) -> dict[str, object]:
        return {}


def nothing(options: AutoscalerOptions) -> None:
    """Makes no policy."""


def test_a_users_own_policy_is_loaded_with_the_options() -> None:
    given = options()
    policy = make_scaling_policy(f"{HERE}:Own", given)
    assert policy.name == "own"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("nonsense", "no policy of that name, expected one of slo"),
        ("no.such.module:f", "ModuleNotFoundError"),
        (f"{HERE}:absent", "AttributeError"),
        (f"{HERE}:nothing", "made a NoneType"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused_in_words(rule: str, message: str) -> None:
    with pytest.raises(ConfigInvalid, match=message):
        make_scaling_policy(rule, options())


# ---------- how many ingresses there should be, by how busy they are
UP_TO_FOUR = IngressBounds(min=1, max=4)


@pytest.mark.parametrize(
    ("busy", "want"),
    [((0.5,), 1), ((0.61,), 2), ((0.9, 0.9), 3), ((1.0, 1.0, 1.0), 4), ((1.0,) * 4, 4)],
)
def test_ingresses_are_added_for_the_measured_use(busy: tuple[float, ...], want: int) -> None:
    assert IngressSizer(UP_TO_FOUR).desired(len(busy), busy, 0.0) == want


def test_one_goes_when_the_rest_had_room_for_a_minute() -> None:
    sizer = IngressSizer(UP_TO_FOUR)
    calm = (0.2, 0.2, 0.2)
    assert [sizer.desired(3, calm, float(now)) for now in (0, 30, 59, 60)] == [3, 3, 3, 2]
    assert sizer.desired(2, (0.3, 0.3), 61.0) == 2


def test_a_burst_restarts_the_minute() -> None:
    sizer = IngressSizer(UP_TO_FOUR)
    assert sizer.desired(2, (0.1, 0.1), 0.0) == 2
    assert sizer.desired(2, (0.3, 0.3), 30.0) == 2
    assert sizer.desired(2, (0.1, 0.1), 61.0) == 2
    assert sizer.desired(2, (0.1, 0.1), 121.0) == 1


def test_no_number_is_outside_of_the_bounds() -> None:
    sizer = IngressSizer(IngressBounds(min=2, max=3))
    assert sizer.desired(2, (0.0, 0.0), 0.0) == 2
    assert sizer.desired(2, (0.0, 0.0), 1e6) == 2
    assert sizer.desired(5, (0.9,) * 5, 1e6) == 3
    assert not IngressBounds(min=2, max=2).is_scalable
