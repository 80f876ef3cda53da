"""A rollout, stage by stage, against a fleet that is made up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from baton.config import DeploymentConfig, load_config
from baton.control.autoscaling.rollout import RolloutCounts, RolloutRules
from baton.domain.errors import ApplyRejected, ClusterFailed
from baton.runtime.link.frames import PROTOCOL_VERSION
from baton.runtime.process.progress import StatusLine
from baton.serving.application.builds import (
    Build,
    BuildRecord,
    BuildRef,
    Builds,
    decode_build_record,
    encode_build_record,
)
from baton.serving.rollout.rollout import (
    FleetStatus,
    RolloutOptions,
    RolloutPlan,
    revert,
    run_rollout,
)
from baton.serving.rollout.upgrade import upgrade
from baton.serving.shared.names import CONTROLLER, INGRESS
from baton.serving.versions import code_version
from tests.serving.test_apply import BOTH, Fleet, Make, make

__all__ = ["make"]  # the fixture
GOOD, BAD = RolloutCounts(200, 0, 200, 200), RolloutCounts(200, 60, 200, 200)


@pytest.fixture(scope="module")
def config() -> DeploymentConfig:
    return load_config(["configs/sim.yaml"]).config


def rollout_plan(config: DeploymentConfig, *stages: tuple[str, ...]) -> RolloutPlan:
    names = [name for stage in stages for name in stage]
    old = {name: Build(config=config, version="old") for name in names}
    return RolloutPlan(
        old=old, new={n: replace(b, version="new") for n, b in old.items()}, stages=stages
    )


@dataclass
class Script:
    """Shows one sight after the other, the last one for ever; a look takes no time."""

    sights: list[FleetStatus | None]
    orders: list[dict[str, str]] = field(default_factory=list)
    notes: list[Mapping[str, object]] = field(default_factory=list)
    now_s: float = 0.0

    def deploy_builds(self, builds: Builds) -> None:
        self.orders.append({name: build.version for name, build in builds.items()})

    def fleet_status(self, names: Sequence[str]) -> FleetStatus | None:
        assert names
        return self.sights.pop(0) if len(self.sights) > 1 else self.sights[0]

    def record_progress(self, progress: Mapping[str, object]) -> None:
        self.notes.append(progress)

    def options(self, *, bake_s: float = 2.0) -> RolloutOptions:
        return RolloutOptions(
            rules=RolloutRules(bake_s=bake_s),
            stage_timeout_s=60.0,
            now_s=lambda: self.now_s,
            sleep=self._sleep,
        )

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds


def status_of(
    *ready: str, done: bool = True, target: int = 2, **tallies: RolloutCounts
) -> FleetStatus:
    return FleetStatus(done=done, ready=frozenset(ready), targets={"d": target}, tallies=tallies)


def test_a_stage_reports_replaced_replicas_and_phases_of_new_ones(
    config: DeploymentConfig,
) -> None:
    script = Script(
        [
            FleetStatus(ready=frozenset({"old"}), targets={"decode": 1}),
            FleetStatus(
                ready=frozenset({"old"}),
                targets={"decode": 1},
                phases="decode-x loading weights (3 s)",
            ),
            FleetStatus(done=True, ready=frozenset({"new"}), targets={"decode": 1}),
        ]
    )
    told = list[str]()
    manner = replace(script.options(), on_progress=told.append)
    run_rollout(script, rollout_plan(config, ("decode",)), manner)
    statuses = [line for line in told if isinstance(line, StatusLine)]
    assert statuses[0] == "decode: 0 of 1 replicas replaced; decode-x loading weights (3 s)"
    assert statuses[1].startswith("decode: watched for 0 of ")
    assert not any(isinstance(note["reason"], StatusLine) for note in script.notes)


def test_a_stage_is_watched_for_a_while_after_its_last_replica(config: DeploymentConfig) -> None:
    script = Script(
        [
            status_of("a", "b"),
            *[status_of("a", "n", done=False)] * 6,
            status_of("m", "n", m=GOOD, n=GOOD),
        ]
    )
    outcome = run_rollout(script, rollout_plan(config, ("d",)), script.options(bake_s=5))
    assert (outcome.failure, outcome.stages_started) == ("", 1)
    assert script.now_s == pytest.approx(3 + 5)


def test_the_next_stage_waits_for_the_decision_on_this_one(config: DeploymentConfig) -> None:
    bad = status_of("a", "n", done=False, a=GOOD, n=BAD)
    script = Script([status_of("a", "b", a=GOOD), bad])
    outcome = run_rollout(script, rollout_plan(config, ("d",), ("p",)), script.options())
    assert "legs broke on new replicas" in outcome.failure
    assert (outcome.stages_started, script.orders) == (1, [{"d": "new", "p": "old"}])
    assert script.now_s < 1, "it is not waited for the others"
    assert script.notes[-1]["state"] == "failed"


def test_a_new_replica_that_vanishes_is_a_death_and_an_old_one_is_not(
    config: DeploymentConfig,
) -> None:
    well = [status_of("a", "b"), status_of("a", "n", done=False), status_of("n", "m")]
    lived = Script(list(well))
    assert not run_rollout(lived, rollout_plan(config, ("d",)), lived.options()).failure
    died = Script([*well[:2], status_of("a", done=False)])
    assert (
        "ended by themselves"
        in run_rollout(died, rollout_plan(config, ("d",)), died.options()).failure
    )


@pytest.mark.parametrize(("most", "least", "ok"), [(2, 1, True), (3, 2, True), (2, 2, False)])
def test_a_replica_that_was_stopped_has_not_died(
    config: DeploymentConfig, most: int, least: int, *, ok: bool
) -> None:
    """The autoscaler goes on meanwhile."""
    script = Script(
        [
            status_of("a", "b"),
            status_of("n", "m", "o", target=most),
            status_of("n", "m", target=least),
        ]
    )
    assert (not run_rollout(script, rollout_plan(config, ("d",)), script.options()).failure) is ok


def test_a_replica_that_was_stopped_has_not_died_when_another_starts_later(
    config: DeploymentConfig,
) -> None:
    fewer_and_more = [
        status_of("a", "b"),
        status_of("a", "n", "m", done=False, target=3),
        status_of("a", "n", done=False, target=2),
        status_of("n", "k", "o", target=3),
    ]
    lived = Script(list(fewer_and_more))
    assert not run_rollout(lived, rollout_plan(config, ("d",)), lived.options()).failure
    died = Script([*fewer_and_more, status_of("n", "k", target=3)])
    assert (
        "1 new replicas ended"
        in run_rollout(died, rollout_plan(config, ("d",)), died.options()).failure
    )


def test_one_that_was_starting_before_is_an_old_one(config: DeploymentConfig) -> None:
    before = replace(status_of("a"), starting=frozenset({"b"}))
    script = Script([before, status_of("a", "b", done=False), status_of("n", "m")])
    assert not run_rollout(script, rollout_plan(config, ("d",)), script.options()).failure


def test_a_failed_observation_decides_nothing_and_the_deadline_does(
    config: DeploymentConfig,
) -> None:
    script = Script([None, status_of("a"), None, None, status_of("n")])
    assert not run_rollout(script, rollout_plan(config, ("d",)), script.options()).failure
    for never in (None, status_of("a", done=False)):
        script = Script([status_of("a"), never])
        outcome = run_rollout(script, rollout_plan(config, ("d",)), script.options())
        assert "d: not replaced after 60 s" in outcome.failure
        assert 60 <= script.now_s < 62
    silent = Script([None])
    outcome = run_rollout(silent, rollout_plan(config, ("d",)), silent.options())
    assert (outcome.failure, silent.orders) == ("no report of the running replicas", [])


def test_a_soaking_stage_is_not_late(config: DeploymentConfig) -> None:
    script = Script([status_of("a"), status_of("n")])
    assert not run_rollout(script, rollout_plan(config, ("d",)), script.options(bake_s=90)).failure


@pytest.mark.parametrize("meanwhile", [None, status_of("n", "m", done=False)])
def test_a_soak_past_the_deadline_is_not_late_by_one_observation(
    config: DeploymentConfig, meanwhile: FleetStatus | None
) -> None:
    """It fails, or finds one more replica on its way."""
    slow, done = [status_of("a", "n", done=False)] * 118, status_of("n", "m")
    script = Script([status_of("a", "b"), *slow, done, meanwhile, meanwhile, done])
    assert not run_rollout(script, rollout_plan(config, ("d",)), script.options()).failure
    assert script.now_s > 60


def test_a_soak_without_observations_has_a_deadline(
    config: DeploymentConfig,
) -> None:
    script = Script([status_of("a"), status_of("n"), None])
    outcome = run_rollout(script, rollout_plan(config, ("d",)), script.options(bake_s=5))
    assert outcome.failure == "d: no report of them for 60 s"
    assert script.now_s == pytest.approx(5 + 60)


def test_serve_s_own_word_ends_it_and_the_way_back_is_waited_for(config: DeploymentConfig) -> None:
    way = rollout_plan(config, ("d",))
    script = Script(
        [status_of("a"), FleetStatus(failure="no such option"), FleetStatus(), status_of("a")]
    )
    assert run_rollout(script, way, script.options()).failure == "no such option"
    assert revert(script, way, way.old, script.options()) == ()
    assert script.orders == [{"d": "new"}, {"d": "old"}]
    stuck = Script([FleetStatus()])
    (reason,) = revert(stuck, way, way.old, stuck.options())
    assert "not back after 60 s" in reason


@dataclass
class Refusing(Script):
    """Takes no order the next few times."""

    refused: int = 0

    def deploy_builds(self, builds: Builds) -> None:
        if self.refused:
            self.refused -= 1
            raise ClusterFailed("Ray Serve took no order", "look")
        super().deploy_builds(builds)


def test_the_way_back_is_ordered_again_where_serve_does_not_take_it(
    config: DeploymentConfig,
) -> None:
    way = rollout_plan(config, ("d",))
    script = Refusing([status_of("a")], refused=4)
    outcome = run_rollout(script, way, script.options())
    assert (outcome.failure, script.orders) == ("ClusterFailed: Ray Serve took no order; look", [])
    assert revert(script, way, way.old, script.options()) == ()
    assert (script.orders, script.notes[-1]["state"]) == ([{"d": "old"}], "done")
    never = Refusing([status_of("a")], refused=9999)
    assert revert(never, way, way.old, never.options()) == ("Ray Serve took no order",)
    assert never.notes[-1]["state"] == "failed"


# ------------------------------------------------------------------ another version of baton


def test_code_goes_pool_by_pool_and_ingresses_come_last(make: Make) -> None:
    fleet = Fleet(make(), code="0.0.9", python="/new/bin/python")
    told = upgrade(fleet, fleet.options(operation="upgrade"))
    assert told.code_versions is not None
    assert [other.partition(" ")[0] for other in told.code_versions] == ["0.0.9", code_version()]
    begun = [{n for n, python in other.items() if python} for other in fleet.pythons]
    assert begun == [{"d"}, {"d", "p"}, {"d", "p", CONTROLLER}, {"d", "p", CONTROLLER, INGRESS}]
    assert fleet.signed
    assert fleet.current().generation == 0


def test_pools_get_another_vllm_together(make: Make) -> None:
    fleet = Fleet(make(), vllm="0.0.1", python="/new/bin/python")
    upgrade(fleet, fleet.options(operation="upgrade"))
    assert {n for n, python in fleet.pythons[0].items() if python} == {"d", "p"}


def test_code_that_is_no_good_gives_way_to_the_old_interpreter(make: Make) -> None:
    fleet = Fleet(make(), code="0.0.9", python="/new/bin/python", worse=True)
    with pytest.raises(ApplyRejected, match="the old code runs again"):
        upgrade(fleet, fleet.options(operation="upgrade"))
    assert set(fleet.pythons[-1].values()) == {""}
    assert not fleet.signed


def test_code_in_the_place_of_the_old_keeps_what_is_not_replaced_yet(make: Make) -> None:
    fleet = Fleet(make(), code="0.0.9", worse=True)
    with pytest.raises(ApplyRejected, match="install the old version again"):
        upgrade(fleet, fleet.options(operation="upgrade"))
    assert fleet.marks == fleet.began_with


def test_an_interrupted_upgrade_in_place_begins_no_further_stage(make: Make) -> None:
    fleet = Fleet(make(), code="0.0.9", interrupted=True)
    with pytest.raises(ApplyRejected, match="interrupted"):
        upgrade(fleet, fleet.options(operation="upgrade"))
    assert fleet.marks == fleet.began_with


@dataclass
class Disturbed(Fleet):
    """Something happens when the prefill pool is looked at; once."""

    by: BaseException | None = None

    def fleet_status(self, names: Sequence[str]) -> FleetStatus | None:
        if "p" in names and self.by is not None:
            by, self.by = self.by, None
            raise by
        return super().fleet_status(names)


def test_an_interruption_between_two_stages_reverts_the_first(make: Make) -> None:
    fleet = Disturbed(make(), code="0.0.9", python="/new/bin/python", by=KeyboardInterrupt())
    with pytest.raises(ApplyRejected, match="interrupted; the old code runs again"):
        upgrade(fleet, fleet.options(operation="upgrade"))
    assert [{n for n, python in other.items() if python} for other in fleet.pythons] == [
        {"d"},
        set(),
    ]
    assert not fleet.signed


def test_code_in_place_that_is_interrupted_between_two_stages_keeps_both(make: Make) -> None:
    fleet = Disturbed(make(), code="0.0.9", by=KeyboardInterrupt())
    with pytest.raises(ApplyRejected, match="interrupted; this code lies where"):
        upgrade(fleet, fleet.options(operation="upgrade"))
    replaced = {name for name, mark in fleet.marks.items() if mark != fleet.began_with[name]}
    assert replaced == {"d"}


def test_a_change_of_another_command_is_not_reverted(make: Make) -> None:
    lost = ApplyRejected("b:2 has begun to change what runs", "look")
    fleet = Disturbed(make(), code="0.0.9", python="/new/bin/python", by=lost)
    with pytest.raises(ApplyRejected, match="b:2 has begun"):
        upgrade(fleet, fleet.options(operation="upgrade"))
    fleet_too = Disturbed(make(), by=lost)
    with pytest.raises(ApplyRejected, match="b:2 has begun"):
        fleet_too.apply(make(*BOTH))
    assert (len(fleet.orders), len(fleet_too.orders)) == (1, 1)
    assert fleet_too.history()[-1].reason == "b:2 has begun to change what runs"
    assert fleet_too.fates() == ["started", "not reverted"]


def test_code_of_another_protocol_is_refused_before_anything_changes(make: Make) -> None:
    fleet = Fleet(make(), code="0.0.9", link=PROTOCOL_VERSION - 1)
    with pytest.raises(ApplyRejected, match=f"protocol: got {PROTOCOL_VERSION - 1}, expected"):
        upgrade(fleet, fleet.options(operation="upgrade"))
    assert fleet.orders == []


def test_code_that_runs_already_is_not_rolled_out(make: Make) -> None:
    fleet = Fleet(make())
    assert upgrade(fleet, fleet.options(operation="upgrade")).code_versions is None
    assert fleet.orders == []


def test_stored_builds_come_back_unchanged() -> None:
    marks = {"d": BuildRef(version="1a2b"), INGRESS: BuildRef(version="0.1.0", python="/x")}
    built = BuildRecord(
        code="0.1.0",
        vllm="0.32.0",
        link_protocol=4,
        base_python="/usr/bin/python",
        build_refs=marks,
    )
    assert decode_build_record(encode_build_record(built)) == built
    for data in (b"{}", b"[]", b"nonsense", b'{"build_refs": {"a": {"x": 1}}}'):
        with pytest.raises(ValueError):  # noqa: PT011 - any of its kinds
            decode_build_record(data)
