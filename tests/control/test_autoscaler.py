"""The autoscaler: bounds, budget, overrides, doubts, history."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import pytest

from baton.control.autoscaling.autoscaler import Autoscaler
from baton.control.autoscaling.observer import Observer, ObserverOptions
from baton.control.fleet.pool_views import PoolState
from baton.domain.demand import CoordinatorReport, DemandTotals, PoolReport
from baton.domain.fleet import Role
from baton.policy.scaling.actions import (
    AutoscalerTick,
    FlipReplicas,
    ScalingDecision,
    StartReplicas,
    StopReplicas,
)
from baton.policy.scaling.desired import DesiredReplicas, ScalingReason
from baton.policy.scaling.observation import Demand, Observation, PoolObservation
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds, StepLimits
from baton.policy.scaling.pools.groups import PerModelPolicy
from benchmarks.policies.hpa import Hpa
from tests.control.scaling_world import FixedPolicy, observe, options, pool


def prefill(ready: int, **more: int) -> PoolObservation:
    return pool("prefill", Role.PREFILL, ready, **more)


def decode(ready: int, **more: int) -> PoolObservation:
    return pool("decode", Role.DECODE, ready, **more)


def only(tick: AutoscalerTick) -> ScalingDecision:
    (decision,) = tick.decisions
    return decision


def test_it_starts_what_the_policy_wants_and_the_pool_has_not() -> None:
    tick = Autoscaler(FixedPolicy(prefill=5), options()).tick(observe(0.0, prefill(2, starting=1)))
    assert tick.actions == (StartReplicas(pool="prefill", replicas=2),)
    assert (only(tick).current_replicas, only(tick).target_replicas, only(tick).limited_by) == (
        3,
        5,
        "",
    )


def test_it_stops_what_the_policy_does_not_want() -> None:
    tick = Autoscaler(FixedPolicy(prefill=1), options()).tick(observe(0.0, prefill(3)))
    assert tick.actions == (StopReplicas(pool="prefill", replicas=2),)


def test_nothing_is_done_when_the_pool_is_as_it_should_be() -> None:
    tick = Autoscaler(FixedPolicy(prefill=3, decode=2), options()).tick(
        observe(0.0, prefill(3), decode(2))
    )
    assert tick.actions == ()


def test_the_pools_own_bounds_are_kept() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=50), options())
    assert only(scaler.tick(observe(0.0, prefill(3)))).target_replicas == 10
    scaler = Autoscaler(FixedPolicy(prefill=0), options())
    tick = scaler.tick(observe(0.0, prefill(3)))
    assert (only(tick).target_replicas, only(tick).desired_replicas, only(tick).limited_by) == (
        1,
        0,
        "min",
    )


def test_bounds_that_were_changed_are_kept_at_once() -> None:
    slow = StepLimits(cooldown_s=1e6, max_step=1, max_fraction=0.0)
    bounds = {"prefill": PoolBounds(min=2, initial=2, max=4)}
    scaler = Autoscaler(FixedPolicy(prefill=4), options(bounds=bounds, up=slow, down=slow))
    scaler.tick(observe(0.0, prefill(3)))  # a change: from here on the pause runs
    assert only(scaler.tick(observe(1.0, prefill(9)))).target_replicas == 4
    scaler = Autoscaler(FixedPolicy(prefill=2), options(bounds=bounds, up=slow, down=slow))
    assert only(scaler.tick(observe(0.0, prefill(0)))).target_replicas == 2


def test_the_last_replica_goes_only_when_zero_is_allowed_and_configured() -> None:
    zero = {"prefill": PoolBounds(min=0, initial=1, max=4)}
    stays = Autoscaler(FixedPolicy(prefill=0), options(bounds=zero))
    goes = Autoscaler(FixedPolicy(prefill=0), options(bounds=zero, scale_to_zero=True))
    assert only(stays.tick(observe(0.0, prefill(1)))).target_replicas == 1
    assert only(goes.tick(observe(0.0, prefill(1)))).target_replicas == 0


def test_changes_are_no_larger_than_the_greatest_step() -> None:
    limits = StepLimits(cooldown_s=0.0, max_step=2, max_fraction=0.0)
    scaler = Autoscaler(FixedPolicy(prefill=9), options(up=limits))
    tick = scaler.tick(observe(0.0, prefill(3)))
    assert (only(tick).target_replicas, only(tick).limited_by) == (5, "max_step")


def test_a_large_pool_may_change_by_a_part_of_itself() -> None:
    limits = StepLimits(cooldown_s=0.0, max_step=1, max_fraction=0.5)
    scaler = Autoscaler(FixedPolicy(prefill=1), options(down=limits))
    assert only(scaler.tick(observe(0.0, prefill(9)))).target_replicas == 4


def test_a_pool_is_stable_for_a_while_after_a_change_in_either_direction() -> None:
    policy = FixedPolicy(prefill=4)
    scaler = Autoscaler(policy, options(down=StepLimits(cooldown_s=60.0, max_step=9)))
    assert scaler.tick(observe(0.0, prefill(3))).actions
    policy.replicas["prefill"] = 2
    resting = scaler.tick(observe(59.9, prefill(4)))
    assert (only(resting).target_replicas, only(resting).limited_by) == (4, "cooldown")
    assert scaler.tick(observe(60.0, prefill(4))).actions == (
        StopReplicas(pool="prefill", replicas=2),
    )


def test_pools_rest_each_by_itself() -> None:
    policy = FixedPolicy(prefill=4, decode=3)
    scaler = Autoscaler(policy, options(down=StepLimits(cooldown_s=60.0, max_step=9)))
    scaler.tick(observe(0.0, prefill(3), decode(3)))
    policy.replicas |= {"decode": 1}
    assert scaler.tick(observe(1.0, prefill(4), decode(3))).actions == (
        StopReplicas(pool="decode", replicas=2),
    )


def test_the_last_gpus_go_to_the_pool_with_the_smallest_part_of_its_desire() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=4, decode=8), options(gpu_budget=6.0))
    tick = scaler.tick(observe(0.0, prefill(1), decode(1)))
    assert {each.pool: each.target_replicas for each in tick.decisions} == {
        "prefill": 2,
        "decode": 4,
    }
    assert {each.limited_by for each in tick.decisions} == {"gpu_budget"}


def test_replicas_that_drain_still_hold_their_gpus() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=4), options(gpu_budget=4.0))
    tick = scaler.tick(observe(0.0, prefill(1, draining=2)))
    assert only(tick).target_replicas == 2


def test_a_lowered_budget_takes_from_the_pool_that_misses_it_least() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=2, decode=4), options(gpu_budget=4.0))
    tick = scaler.tick(observe(0.0, prefill(2), decode(4)))
    assert {each.pool: each.target_replicas for each in tick.decisions} == {
        "prefill": 1,
        "decode": 3,
    }


def test_an_override_is_exact_until_it_ends() -> None:
    slow = StepLimits(cooldown_s=1e6, max_step=1, max_fraction=0.0)
    scaler = Autoscaler(FixedPolicy(prefill=2), options(up=slow, down=slow))
    scaler.override("prefill", 7, until_s=100.0, now_s=0.0)
    tick = scaler.tick(observe(1.0, prefill(2)))
    assert tick.actions == (StartReplicas(pool="prefill", replicas=5),)
    assert only(tick).reason is ScalingReason.OVERRIDE
    scaler.tick(observe(99.9, prefill(7)))
    assert scaler.overrides()
    ended = scaler.tick(observe(100.0, prefill(7)))
    assert not scaler.overrides()
    assert only(ended).reason is ScalingReason.DEMAND


def test_an_override_may_go_below_the_pools_least() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=2), options())
    scaler.override("prefill", 0, until_s=None, now_s=0.0)
    assert only(scaler.tick(observe(1.0, prefill(2)))).target_replicas == 0


def test_an_override_is_cleared() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=2), options())
    scaler.override("prefill", 5, until_s=None, now_s=0.0)
    assert scaler.clear_override("prefill")
    assert not scaler.clear_override("prefill")
    assert only(scaler.tick(observe(1.0, prefill(2)))).target_replicas == 2


def test_an_override_survives_other_options_and_pools_that_come_and_go() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=2), options())
    scaler.override("prefill", 5, until_s=None, now_s=0.0)
    scaler.reconfigure(FixedPolicy(prefill=1), options(gpu_budget=8.0))
    scaler.tick(observe(1.0))
    assert only(scaler.tick(observe(2.0, prefill(2)))).target_replicas == 5


def test_an_override_is_carried_out_although_metrics_are_missing() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=2, decode=5), options())
    scaler.override("prefill", 5, until_s=None, now_s=0.0)
    tick = scaler.tick(observe(1.0, prefill(2), decode(2), missing=("ingress 1 does not answer",)))
    assert tick.paused_reason == "ingress 1 does not answer"
    assert tick.actions == (StartReplicas(pool="prefill", replicas=3),)


def test_an_override_waits_when_the_pools_own_counts_are_nonsense() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=2), options())
    scaler.override("prefill", 5, until_s=None, now_s=0.0)
    tick = scaler.tick(observe(1.0, replace(prefill(2), starting=-3)))
    assert tick.actions == ()


@pytest.mark.parametrize(
    ("name", "replicas", "until_s", "message"),
    [
        ("prefill", 11, 10.0, "expected 0 to 10"),
        ("prefill", -1, 10.0, "expected 0 to 10"),
        ("nowhere", 1, 10.0, "pools that are: decode, prefill"),
        ("prefill", 1, 0.0, "would end at 0.0"),
        ("prefill", 9, 10.0, "gpu_budget is 8"),
    ],
)
def test_an_override_that_cannot_be_is_refused_in_words(
    name: str, replicas: int, until_s: float, message: str
) -> None:
    scaler = Autoscaler(FixedPolicy(), options(gpu_budget=8.0))
    with pytest.raises(ValueError, match=message):
        scaler.override(name, replicas, until_s=until_s, now_s=5.0)
    assert not scaler.overrides()


def test_the_budget_comes_before_an_override_that_it_was_lowered_beneath() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=2, decode=2), options(gpu_budget=8.0))
    scaler.override("prefill", 6, until_s=None, now_s=0.0)
    scaler.reconfigure(FixedPolicy(prefill=2, decode=2), options(gpu_budget=5.0))
    tick = scaler.tick(observe(1.0, prefill(2), decode(2)))
    assert {each.pool: each.target_replicas for each in tick.decisions} == {
        "prefill": 3,
        "decode": 2,
    }


def test_a_missing_input_pauses_scaling_with_a_reason() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=9), options())
    tick = scaler.tick(observe(0.0, prefill(2), missing=("no report from ingress 2",)))
    assert tick.paused_reason == "no report from ingress 2"
    assert tick.actions == ()
    assert only(tick).reason is ScalingReason.PAUSED


NONSENSE = [
    replace(prefill(2), prefill=-1),
    replace(prefill(2), starting=1_000_000),
    replace(prefill(2), prefill_tokens_per_s=0.0),
    replace(prefill(2), decode_tokens_per_s=math.nan),
    replace(prefill(2), kv_used_fraction=7.0),
    replace(prefill(2), cold_start_s=math.inf),
    replace(prefill(2), gpus_per_replica=0.0),
    replace(prefill(2), queued_tokens=-1.0),
    replace(prefill(2), name="other"),
]


@pytest.mark.parametrize("bad", NONSENSE)
def test_absurd_figures_of_a_pool_make_it_hold(bad: PoolObservation) -> None:
    policy = FixedPolicy(prefill=9, decode=9)
    observation = replace(observe(0.0, decode(2)), pools={"decode": decode(2), "prefill": bad})
    tick = Autoscaler(policy, options()).tick(observation)
    assert "'prefill'" in tick.paused_reason
    assert tick.actions == ()


@pytest.mark.parametrize(
    "bad",
    [
        replace(observe(0.0, prefill(2)), demand=Demand(requests_per_s=math.nan)),
        replace(observe(0.0, prefill(2)), demand=Demand(prompt_tokens_per_s=-1.0)),
        replace(observe(0.0, prefill(2)), window_s=0.0),
        replace(observe(0.0, prefill(2)), ttft_s=0.0),
        replace(observe(0.0, prefill(2)), at_s=math.nan),
    ],
)
def test_absurd_figures_of_the_whole_make_it_hold(bad: Observation) -> None:
    assert Autoscaler(FixedPolicy(prefill=9), options()).tick(bad).paused_reason


def test_negative_slack_is_no_nonsense() -> None:
    late = observe(0.0, prefill(2))
    late = replace(late, service=replace(late.service, min_ttft_slack_s=-3.0))
    assert not Autoscaler(FixedPolicy(prefill=9), options()).tick(late).paused_reason


def test_a_clock_that_goes_back_holds_one_tick_and_no_pause_lasts_longer_for_it() -> None:
    policy = FixedPolicy(prefill=4)
    limits = StepLimits(cooldown_s=60.0, max_step=9)
    scaler = Autoscaler(policy, options(up=limits, down=limits))
    scaler.tick(observe(1000.0, prefill(3)))
    assert (
        scaler.tick(observe(10.0, prefill(4))).paused_reason == "time went back from 1000.0 to 10.0"
    )
    policy.replicas["prefill"] = 2
    assert not scaler.tick(observe(69.0, prefill(4))).actions
    assert scaler.tick(observe(70.0, prefill(4))).actions


class Raises:
    name = "raises"

    def desired(self, seen: Observation) -> Mapping[str, DesiredReplicas]:
        raise KeyError("prefill")


def test_a_policy_that_raises_or_wants_nonsense_makes_it_hold() -> None:
    tick = Autoscaler(Raises(), options()).tick(observe(0.0, prefill(2)))
    assert tick.paused_reason == "policy 'raises' raised KeyError: 'prefill'"
    tick = Autoscaler(FixedPolicy(prefill=-1), options()).tick(observe(0.0, prefill(2)))
    assert tick.paused_reason == "policy 'asks' wants -1 replicas of 'prefill'"
    assert tick.actions == ()


class Answers:
    """A policy of the user's own that answers what no policy should."""

    name = "mine"

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def desired(self, seen: Observation) -> Mapping[str, DesiredReplicas]:
        return cast(Mapping[str, DesiredReplicas], self._answer)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "answers NoneType, expected DesiredReplicas for each pool"),
        ([("prefill", 3)], "answers list, expected DesiredReplicas for each pool"),
        ({"prefill": None}, "answers NoneType for 'prefill', expected DesiredReplicas"),
        ({"prefill": 3}, "answers int for 'prefill', expected DesiredReplicas"),
    ],
)
def test_a_policy_that_answers_no_wants_makes_it_hold_and_say_so(answer: object, why: str) -> None:
    scaler = Autoscaler(Answers(answer), options())
    scaler.override("decode", 4, until_s=None, now_s=0.0)
    tick = scaler.tick(observe(0.0, prefill(2), decode(2)))
    assert tick.paused_reason == f"policy 'mine' {why}"
    assert tick.actions == (StartReplicas(pool="decode", replicas=2),), "an operator's word counts"


def test_answers_for_unknown_pools_are_ignored() -> None:
    tick = Autoscaler(Answers({"nobody": None}), options()).tick(observe(0.0, prefill(2)))
    assert tick.paused_reason == ""


def test_a_pool_without_bounds_or_wants_is_left_as_it_is() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=9), options(bounds={"decode": PoolBounds(max=5)}))
    tick = scaler.tick(observe(0.0, prefill(2), decode(2)))
    assert tick.actions == ()
    whys = [each.detail for each in tick.decisions]
    assert whys == [
        "the policy says nothing of this pool",
        "no bounds are configured for this pool, so it is left as it is",
    ]


def test_a_dry_run_says_what_it_would_do_and_does_only_what_an_operator_said() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=5, decode=5), options(dry_run=True))
    scaler.override("decode", 3, until_s=None, now_s=0.0)
    tick = scaler.tick(observe(0.0, prefill(2), decode(2)))
    assert {each.pool: each.target_replicas for each in tick.decisions} == {
        "prefill": 5,
        "decode": 3,
    }
    assert tick.actions == (StartReplicas(pool="decode", replicas=1),)
    assert tick.dry_run


def test_flips_come_before_starts_and_starts_before_stops() -> None:
    policy = FixedPolicy(prefill=5, decode=2)
    policy.flips["decode"] = {Role.PREFILL: 1}
    tick = Autoscaler(policy, options()).tick(observe(0.0, prefill(2), decode(3)))
    assert tick.actions == (
        FlipReplicas(pool="decode", replicas=1, role=Role.PREFILL),
        StartReplicas(pool="prefill", replicas=3),
        StopReplicas(pool="decode", replicas=1),
    )


def test_replicas_flip_only_as_far_as_they_have_not_yet() -> None:
    policy = FixedPolicy(decode=3)
    scaler = Autoscaler(policy, options())
    policy.flips["decode"] = {Role.PREFILL: 2}
    tick = scaler.tick(observe(0.0, decode(3, other=1)))
    assert tick.actions == (FlipReplicas(pool="decode", replicas=1, role=Role.PREFILL),)
    assert scaler.tick(observe(1.0, decode(3, other=2))).actions == ()
    policy.flips["decode"] = {}
    tick = scaler.tick(observe(2.0, decode(3, other=2)))
    assert tick.actions == (FlipReplicas(pool="decode", replicas=2, role=Role.DECODE),)


def test_no_more_flip_than_take_work() -> None:
    policy = FixedPolicy(decode=3)
    policy.flips["decode"] = {Role.PREFILL: 9}
    tick = Autoscaler(policy, options()).tick(observe(0.0, decode(2, starting=1)))
    assert tick.actions == (FlipReplicas(pool="decode", replicas=2, role=Role.PREFILL),)


def test_no_replica_changes_role_while_paused() -> None:
    scaler = Autoscaler(FixedPolicy(decode=3), options())
    tick = scaler.tick(observe(0.0, decode(3, other=1), missing=("all",)))
    assert tick.actions == ()


def test_starts_that_do_not_come_up_are_not_piled_upon() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=9), options())
    scaler.tick(observe(0.0, prefill(2, starting=2)))
    patient = scaler.tick(observe(180.0, prefill(2, starting=2)))
    assert only(patient).target_replicas == 9
    stuck = scaler.tick(observe(181.0, prefill(2, starting=2)))
    assert (only(stuck).target_replicas, only(stuck).limited_by) == (4, "starting")
    assert "2 have been starting for 181 s, which takes 60 s" in only(stuck).detail
    ready = scaler.tick(observe(182.0, prefill(3, starting=1)))
    assert only(ready).target_replicas == 9


def test_a_larger_desire_does_not_delay_the_first_replica() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=9), options())
    scaler.tick(observe(0.0, prefill(2, starting=2)))
    scaler.tick(observe(100.0, prefill(2, starting=3)))
    assert only(scaler.tick(observe(181.0, prefill(2, starting=3)))).limited_by == "starting"


def test_starts_that_come_up_one_by_one_are_not_stuck_however_many_follow_them() -> None:
    scaler = Autoscaler(FixedPolicy(prefill=9), options())
    for minute in range(5):
        tick = scaler.tick(observe(60.0 * minute, prefill(1 + minute, starting=3)))
        assert only(tick).limited_by != "starting"
    stuck = scaler.tick(observe(60.0 * 4 + 181.0, prefill(5, starting=3)))
    assert only(stuck).limited_by == "starting", "and when none comes any more, they are"


def test_stops_are_carried_out_while_starts_do_not_come_up() -> None:
    policy = FixedPolicy(prefill=9)
    scaler = Autoscaler(policy, options())
    scaler.tick(observe(0.0, prefill(2, starting=2)))
    policy.replicas["prefill"] = 3
    tick = scaler.tick(observe(500.0, prefill(2, starting=2)))
    assert tick.actions == (StopReplicas(pool="prefill", replicas=1),)


def test_history_is_bounded_and_keeps_what_was_done_longest() -> None:
    policy = FixedPolicy(prefill=3)
    scaler = Autoscaler(policy, options())
    scaler.tick(observe(0.0, prefill(2)))
    for second in range(1, 700):
        scaler.tick(observe(float(second), prefill(3)))
    ticks = scaler.history()
    assert len(ticks) == 301
    assert ticks[0].at_s == 0.0
    assert ticks[0].actions
    assert [tick.at_s for tick in ticks] == sorted(tick.at_s for tick in ticks)


def test_a_pool_that_comes_back_has_no_past() -> None:
    limits = StepLimits(cooldown_s=1e6, max_step=9)
    scaler = Autoscaler(FixedPolicy(prefill=3), options(up=limits))
    scaler.tick(observe(0.0, prefill(2)))
    scaler.tick(observe(1.0))
    assert scaler.tick(observe(2.0, prefill(2))).actions


def test_decisions_keep_their_inputs() -> None:
    class Explains(FixedPolicy):
        def desired(self, observation: Observation) -> Mapping[str, DesiredReplicas]:
            return {
                name: replace(want, inputs={"need": 4.2})
                for name, want in super().desired(observation).items()
            }

    tick = Autoscaler(Explains(prefill=3), options()).tick(observe(0.0, prefill(2)))
    assert only(tick).inputs == {"need": 4.2}
    assert only(tick).detail == "the test wants 3"


# ---------- models that share GPUs: each one's pools follow what it is asked for, within one budget
BUDGET = 8


class Shared:
    """Two models, an ingress, and replicas that are there as soon as they are wanted."""

    def __init__(self) -> None:
        limits = StepLimits(cooldown_s=0.0, max_step=BUDGET)
        options = AutoscalerOptions(
            bounds={name: PoolBounds(min=1, max=BUDGET) for name in ("a", "b")},
            gpu_budget=BUDGET,
            scale_up=limits,
            scale_down=limits,
        )
        self.machine = Autoscaler(PerModelPolicy(lambda: Hpa(options)), options)
        self.observer = Observer(ObserverOptions(window_s=30.0))
        self.replicas = {"a": 1, "b": 1}
        self.busy_s = dict.fromkeys("ab", 0.0)
        self.now_s = 0.0

    def run(self, seconds: float, **wanted: float) -> None:
        """Let time pass while each model is asked for what so many replicas could do."""
        for _ in range(int(seconds / 2.0)):
            self.now_s += 2.0
            states = {
                name: PoolState(role=Role.MIXED, running=count, model=name)
                for name, count in self.replicas.items()
            }
            reports = [self._report(name, wanted[name]) for name in "ab"]
            tick = self.machine.tick(self.observer.observe(reports, states, self.now_s))
            for action in tick.actions:
                match action:
                    case StartReplicas():
                        self.replicas[action.pool] += action.replicas
                    case StopReplicas():
                        self.replicas[action.pool] -= action.replicas
            assert sum(self.replicas.values()) <= BUDGET

    def _report(self, model: str, wanted: float) -> CoordinatorReport:
        count = self.replicas[model]
        self.busy_s[model] += 2.0 * min(wanted, count)
        return CoordinatorReport(
            coordinator_id=f"ingress/{model}",
            at_s=self.now_s,
            demand=DemandTotals(requests=int(self.now_s)),
            pools=(PoolReport(model, mixed=count, busy_s=self.busy_s[model]),),
        )


def test_gpus_move_to_the_model_that_is_asked_for() -> None:
    shared = Shared()
    shared.run(600, a=4.0, b=0.2)
    first = dict(shared.replicas)
    shared.run(600, a=0.2, b=4.0)
    assert first["a"] >= 4 > first["b"]
    assert shared.replicas["b"] >= 4 > shared.replicas["a"]


def test_each_model_is_seen_with_its_own_requests_and_pools() -> None:
    observer = Observer(ObserverOptions(window_s=30.0))
    states = {name: PoolState(role=Role.MIXED, running=1, model=name) for name in "ab"}
    for at_s, asked in ((0.0, 0), (2.0, 6)):
        reports = [
            CoordinatorReport(
                coordinator_id=f"i/{name}",
                at_s=at_s,
                demand=DemandTotals(requests=asked * (1 + (name == "b"))),
                pools=(PoolReport(name, mixed=1),),
                slack_s=0.5 if name == "a" else 0.1,
            )
            for name in "ab"
        ]
        seen = observer.observe(reports, states, at_s)
    assert {name: tuple(part.pools) for name, part in seen.models.items()} == {
        "a": ("a",),
        "b": ("b",),
    }
    assert seen.models["a"].demand.requests_per_s == pytest.approx(3.0)
    assert seen.models["b"].demand.requests_per_s == pytest.approx(6.0)
    assert seen.demand.requests_per_s == pytest.approx(9.0)
    assert seen.models["a"].service.min_ttft_slack_s == 0.5
    assert seen.models["b"].service.min_ttft_slack_s == seen.service.min_ttft_slack_s == 0.1


def test_with_one_model_there_are_no_totals_by_model() -> None:
    observer = Observer(ObserverOptions(window_s=30.0))
    one = CoordinatorReport(coordinator_id="i", at_s=0.0, pools=(PoolReport("p", mixed=1),))
    assert observer.observe([one], {"p": PoolState(role=Role.MIXED)}, 0.0).models == {}
