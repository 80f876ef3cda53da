"""Ingresses are told how long first replicas take, when that has changed."""

from __future__ import annotations

import pytest

from baton.control.autoscaling.autoscaler import Override
from baton.control.queue.cold_start_forecast import forecast_cold_starts, startable_pools
from baton.domain.demand import ColdStart, CoordinatorReport
from baton.domain.errors import EngineStartFailed
from baton.domain.fleet import Role
from baton.policy.scaling.observation import Observation, PoolObservation
from baton.policy.scaling.options import AutoscalerOptions, PoolBounds, ScalingRule
from baton.serving.controller.cold_start_notices import ColdStartNotifier, ColdStartsByModel
from baton.serving.replica.start_reports import StartReporter, StartWatch
from baton.serving.scaling.plan import ScalingPlan
from baton.serving.scaling.ports import TickInputs
from tests.fakes.head_store import HeadStore

BOUNDS = {
    "prefill": PoolBounds(min=0, initial=1, max=2),
    "decode": PoolBounds(min=0, initial=1, max=2),
}
ZERO = AutoscalerOptions(scale_to_zero=True, bounds=BOUNDS)


def pool(name: str, *, ready: int = 0, starting: int = 0, **known: float | bool) -> PoolObservation:
    role = Role(name)
    return PoolObservation(
        name=name,
        role=role,
        prefill=ready if role is Role.PREFILL else 0,
        decode=ready if role is Role.DECODE else 0,
        starting=starting,
        **known,  # type: ignore[arg-type]  # tests name them right
    )


def seen(*pools: PoolObservation, models: dict[str, Observation] | None = None) -> Observation:
    by_name = {other.name: other for other in pools}
    return Observation(at_s=0.0, window_s=1.0, pools=by_name, models=models or {})


def test_the_pool_that_is_there_first_counts() -> None:
    at = seen(
        pool("prefill", starting=1, cold_start_s=50.0, oldest_start_age_s=10.0),
        pool(
            "decode",
            starting=1,
            cold_start_s=30.0,
            oldest_start_age_s=5.0,
            is_cold_start_measured=True,
        ),
    )
    told = forecast_cold_starts(at, startable=startable_pools(ZERO, {}))
    assert told == {
        "": ColdStart(can_start=True, duration_s=30.0, is_measured=True, remaining_s=25.0)
    }


def test_a_start_that_nobody_saw_begin_takes_all_of_it() -> None:
    told = forecast_cold_starts(
        seen(pool("decode", starting=1, cold_start_s=30.0)), startable={"decode"}
    )
    assert told[""].remaining_s == 30.0


def test_while_there_is_a_replica_none_is_waited_for() -> None:
    told = forecast_cold_starts(seen(pool("decode", ready=1, starting=1)), startable={"decode"})
    assert told[""].remaining_s is None


def test_a_pool_that_an_operator_keeps_at_zero_does_not_start() -> None:
    able = startable_pools(ZERO, {"decode": 0})
    assert able == {"prefill"}
    assert not forecast_cold_starts(seen(pool("decode")), startable=able)[""].can_start
    assert startable_pools(ZERO, {"decode": 1}) == {"prefill", "decode"}
    assert not startable_pools(AutoscalerOptions(bounds=BOUNDS), {})


def test_of_several_models_each_has_its_own() -> None:
    models = {"a": seen(pool("prefill", cold_start_s=7.0)), "b": seen(pool("decode", ready=1))}
    told = forecast_cold_starts(seen(models=models), startable=startable_pools(ZERO, {}))
    assert told["a"].duration_s == 7.0
    assert told.keys() == {"a", "b"}


class Ingresses:
    """Those that listen; some may not hear."""

    def __init__(self) -> None:
        self.sent: list[ColdStartsByModel] = []
        self.hear = True

    async def send(self, starts: ColdStartsByModel) -> int:
        self.sent.append(starts)
        return int(self.hear)


class Desk:
    """A desk, what it sees and whom it tells."""

    def __init__(self, rule: ScalingRule = ScalingRule.SLO) -> None:
        self.ingresses = Ingresses()
        self.seen: Observation | None = seen(pool("decode"))
        self.overrides: dict[str, Override] = {}
        plan = ScalingPlan(rule=rule, options=ZERO, roles={"decode": Role.DECODE})
        self.desk = ColdStartNotifier(
            self.ingresses.send,
            observation=lambda: self.seen,
            plan=lambda: plan,
            overrides=lambda: self.overrides,
        )

    async def turn(self, *ingresses: str, missing: tuple[str, ...] = ()) -> list[ColdStartsByModel]:
        """What was sent in one turn."""
        reports = tuple(
            CoordinatorReport(coordinator_id=ingress, at_s=0.0) for ingress in ingresses
        )
        before = len(self.ingresses.sent)
        await self.desk.on_tick(TickInputs(reports=reports, missing=missing))
        return self.ingresses.sent[before:]


async def test_ingresses_are_told_once_and_again_when_something_changes() -> None:
    at = Desk()
    assert len(await at.turn("a")) == 1
    assert not await at.turn("a")
    at.seen = seen(pool("decode", starting=1, cold_start_s=20.0, oldest_start_age_s=1.0))
    ((told,),) = [list(entry.values()) for entry in await at.turn("a")]
    assert told.remaining_s == 19.0


async def test_an_ingress_that_is_new_is_told_what_others_know() -> None:
    at = Desk()
    await at.turn("a")
    assert len(await at.turn("a", "b")) == 1
    assert not await at.turn("a", "b")


async def test_who_did_not_hear_is_told_again() -> None:
    at = Desk()
    at.ingresses.hear = False
    await at.turn("a")
    assert len(await at.turn("a")) == 1
    at.ingresses.hear = True
    await at.turn("a", missing=("b is silent",))
    assert len(await at.turn("a")) == 1
    assert not await at.turn("a")


async def test_nobody_is_told_before_anything_was_seen() -> None:
    at = Desk()
    at.seen = None
    assert not await at.turn("a")
    at.seen = seen(pool("decode"))
    assert not await at.turn()


async def test_under_a_policy_that_starts_nothing_nothing_can_start() -> None:
    at = Desk(ScalingRule.STATIC)
    (told,) = await at.turn("a")
    assert not told[""].can_start


async def test_a_word_of_an_operator_is_passed_on() -> None:
    at = Desk()
    at.overrides = {"decode": Override(replicas=0)}
    (told,) = await at.turn("a")
    assert not told[""].can_start


# -------------------------------------------------------------------- reports of starts


class _Broken(HeadStore):
    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        raise RuntimeError("the head is away")


def test_what_a_process_does_is_shown_every_few_seconds_until_it_is_done() -> None:
    store, shown = HeadStore(), list[str]()
    reporter, watch = StartReporter("decode", "10.0.0.7", store), StartWatch(shown.append, store)
    for second in range(12):
        reporter.progress(f"downloading m: {second}.0 of 16.1 GB")
        watch.poll(float(second))
    assert shown == [
        f"downloading m: {second}.0 of 16.1 GB, on node 10.0.0.7" for second in (0, 4, 8)
    ]
    reporter.done()
    watch.poll(20.0)
    assert len(shown) == 3
    assert store.values == {}


def test_replicas_of_a_node_that_wait_for_one_model_have_one_line() -> None:
    store, shown = HeadStore(), list[str]()
    for pool in ("prefill", "decode"):
        StartReporter(pool, "n", store).progress("downloading m: 1.0 of 2.0 GB")
    StartReporter("decode", "o", store).progress("downloading m: 1.0 of 2.0 GB")
    StartWatch(shown.append, store).poll(0.0)
    assert shown == [f"downloading m: 1.0 of 2.0 GB, on node {node}" for node in ("n", "o")]


def test_a_process_that_was_killed_is_not_shown_for_ever() -> None:
    store, shown = HeadStore(), list[str]()
    StartReporter("decode", "n", store).progress("downloading m: 1.0 of 2.0 GB")
    watch = StartWatch(shown.append, store)
    for second in range(100):
        watch.poll(float(second))
    assert len(shown) == 5


def test_what_can_only_fail_again_ends_the_start() -> None:
    store, shown = HeadStore(), list[str]()
    reporter = StartReporter("decode", "10.0.0.7", store)
    reporter.failed(EngineStartFailed("model m is gated", "accept its licence"))
    with pytest.raises(EngineStartFailed) as failed:
        StartWatch(shown.append, store).poll(0.0)
    assert failed.value.why == "model m is gated, on node 10.0.0.7"
    assert failed.value.remedy == "accept its licence"


def test_a_store_that_is_away_stops_no_start() -> None:
    reporter = StartReporter("decode", "n", _Broken())
    reporter.progress("downloading m: 1.0 of 2.0 GB")
    reporter.failed(EngineStartFailed("why", "remedy"))
    reporter.done()
