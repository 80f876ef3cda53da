"""Ingresses are told how long first replicas take, when that has changed."""

from __future__ import annotations

from pathlib import Path

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
from tests.fakes.scaled_deadline import ScaledDeadline

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


def test_a_start_without_an_observed_begin_has_its_whole_duration() -> None:
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


class Notices:
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
    at = Notices()
    assert len(await at.turn("a")) == 1
    assert not await at.turn("a")
    at.seen = seen(pool("decode", starting=1, cold_start_s=20.0, oldest_start_age_s=1.0))
    ((told,),) = [list(entry.values()) for entry in await at.turn("a")]
    assert told.remaining_s == 19.0


async def test_an_ingress_that_is_new_is_told_what_others_know() -> None:
    at = Notices()
    await at.turn("a")
    assert len(await at.turn("a", "b")) == 1
    assert not await at.turn("a", "b")


async def test_a_replica_that_missed_the_message_is_told_again() -> None:
    at = Notices()
    at.ingresses.hear = False
    await at.turn("a")
    assert len(await at.turn("a")) == 1
    at.ingresses.hear = True
    await at.turn("a", missing=("b is silent",))
    assert len(await at.turn("a")) == 1
    assert not await at.turn("a")


async def test_no_replica_is_told_before_the_first_observation() -> None:
    at = Notices()
    at.seen = None
    assert not await at.turn("a")
    at.seen = seen(pool("decode"))
    assert not await at.turn()


async def test_under_a_policy_that_starts_nothing_nothing_can_start() -> None:
    at = Notices(ScalingRule.STATIC)
    (told,) = await at.turn("a")
    assert not told[""].can_start


async def test_a_word_of_an_operator_is_passed_on() -> None:
    at = Notices()
    at.overrides = {"decode": Override(replicas=0)}
    (told,) = await at.turn("a")
    assert not told[""].can_start


# -------------------------------------------------------------------- reports of starts


class _Broken(HeadStore):
    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        raise RuntimeError("the head is away")


def phases(watch: StartWatch, now_s: float, **starting: int) -> str:
    watch.poll(now_s)
    return watch.describe(starting, now_s)


def test_each_starting_replica_is_shown_with_its_phase_and_seconds() -> None:
    store = HeadStore()
    one, other = (StartReporter("decode", "n", store, replica=name) for name in ("a", "b"))
    watch = StartWatch(store)
    assert phases(watch, 0.0, decode=2) == "2 of decode starting (0 s)"
    for second in range(7):
        one.progress(f"downloading m: {second}.0 of 16.1 GB")
        text = phases(watch, float(second), decode=2)
    assert text == ("decode-a downloading m: 6.0 of 16.1 GB (5 s), decode starting (6 s)")
    one.progress("loading weights")
    other.progress("loading weights")
    assert phases(watch, 8.0, decode=2) == (
        "decode-a loading weights (0 s), decode-b loading weights (0 s)"
    )
    one.done()
    other.progress("warming up")
    assert phases(watch, 9.0, decode=1) == "decode-b warming up (0 s)"
    other.done()
    assert store.values == {}
    assert phases(watch, 10.0) == ""


def test_a_fleet_that_starts_takes_one_line() -> None:
    store = HeadStore()
    for number in range(20):
        StartReporter("decode", "n", store, replica=f"{number:02}").progress("loading weights")
    assert phases(StartWatch(store), 0.0, decode=20).endswith(", and 12 more")


def test_a_killed_process_is_not_shown_forever() -> None:
    store = HeadStore()
    StartReporter("decode", "n", store).progress("downloading m: 1.0 of 2.0 GB")
    watch = StartWatch(store)
    assert "downloading" in phases(watch, 0.0, decode=1)
    assert phases(watch, 19.0, decode=1) == "decode downloading m: 1.0 of 2.0 GB (19 s)"
    assert phases(watch, 21.0, decode=1) == "decode starting (0 s)"


def test_a_phase_is_reported_while_its_work_blocks_and_a_file_names_later_ones(
    tmp_path: Path,
) -> None:
    store = HeadStore()
    watch = StartWatch(store)
    reporter = StartReporter("decode", "n", store, replica="a")
    with reporter.reporting("starting the engine", tmp_path / "phase"):
        deadline = ScaledDeadline(30)
        while not store.values:
            assert not deadline.is_expired()
        assert "starting the engine" in phases(watch, 0.0, decode=1)
        (tmp_path / "phase").write_text("loading weights")
        while "loading weights" not in phases(StartWatch(store), 0.0, decode=1):
            assert not deadline.is_expired()
    assert store.values == {}


def test_a_permanent_error_ends_the_start() -> None:
    store = HeadStore()
    reporter = StartReporter("decode", "10.0.0.7", store)
    reporter.failed(EngineStartFailed("model m is gated", "accept its licence"))
    with pytest.raises(EngineStartFailed) as failed:
        StartWatch(store).check()
    assert failed.value.reason == "model m is gated, on node 10.0.0.7"
    assert failed.value.remedy == "accept its licence"


def test_a_store_that_is_away_stops_no_start() -> None:
    reporter = StartReporter("decode", "n", _Broken())
    reporter.progress("downloading m: 1.0 of 2.0 GB")
    reporter.failed(EngineStartFailed("why", "remedy"))
    reporter.done()
