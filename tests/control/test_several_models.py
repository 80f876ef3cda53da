"""Models that share GPUs: each one's pools follow what it is asked for, within one budget."""

from __future__ import annotations

import pytest

from baton.control.autoscaling.autoscaler import Autoscaler
from baton.control.autoscaling.observer import Observer, ObserverOptions
from baton.control.fleet.pool_views import PoolState
from baton.domain.demand import CoordinatorReport, DemandTotals, PoolReport
from baton.domain.fleet import Role
from baton.policy.scaling.actions import StartReplicas, StopReplicas
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds, StepLimits
from baton.policy.scaling.pools.groups import PerModelPolicy
from benchmarks.policies.hpa import Hpa

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


def test_with_one_model_nothing_is_told_apart() -> None:
    observer = Observer(ObserverOptions(window_s=30.0))
    one = CoordinatorReport(coordinator_id="i", at_s=0.0, pools=(PoolReport("p", mixed=1),))
    assert observer.observe([one], {"p": PoolState(role=Role.MIXED)}, 0.0).models == {}
