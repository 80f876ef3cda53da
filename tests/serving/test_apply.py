"""Another configuration for a deployment that runs, against one that is made up."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from baton.config import DeploymentConfig
from baton.config.diff import diff
from baton.control.autoscaling.rollout import RolloutCounts, RolloutRules
from baton.domain.errors import ApplyRejected
from baton.runtime.link.frames import PROTOCOL_VERSION
from baton.runtime.process.log_events import FIELDS
from baton.serving.application.builds import (
    BuildRecord,
    BuildRef,
    Builds,
    initial_build_record,
    vllm_version,
)
from baton.serving.commands import history_rows
from baton.serving.rollout.apply import (
    apply_config,
    report,
    roll_back,
    shown_changes,
    target_sizes,
)
from baton.serving.rollout.live_deployment import cpu_shortfall
from baton.serving.rollout.ports import ApplyResult
from baton.serving.rollout.rollout import FleetStatus, RolloutOptions
from baton.serving.store.config_participant import ConfigParticipant, Switch
from baton.serving.store.config_store import (
    STARTED_BY_KEY,
    GenerationRecord,
    Generations,
    GenerationStatus,
    LiveConfig,
)
from baton.serving.versions import code_version
from tests.fakes.head_store import HeadStore
from tests.serving.configs import written

BASE = (
    "version: 1\nmodel: {source: tiny, max_len: 4096}\n"
    "pools:\n  p: {role: prefill, replicas: {min: 1, initial: 2, max: 4}}\n"
    "  d: {role: decode, replicas: {min: 1, initial: 3, max: 6}}\n"
)
Make = Callable[..., DeploymentConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return partial(written, tmp_path, BASE)


@dataclass
class Fleet:
    """A deployment of two ingresses and a controller, as far as applying sees it.

    What is ordered is there at the next look.
    """

    started_with: DeploymentConfig
    refuses: str = ""
    deaf: str = ""
    """Why an ingress does not take what it has prepared."""
    ails: list[list[str]] = field(default_factory=list)
    """What each look at its health finds; the last one stays."""
    stuck_pool: str = ""
    no_room: str = ""
    cpus: float = 1000.0
    """That Ray counts."""
    stillborn: str = ""
    """Why replicas that are to replace others do not start; the next ones do."""
    worse: bool = False
    """Whether half of what runs on new replicas breaks."""
    interrupted: bool = False
    """Whether its operator loses patience when the first order was given."""
    orders: list[dict[str, DeploymentConfig]] = field(default_factory=list)
    """What each deployment was to be built from, by order."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of what runs."""
    code: str = code_version()
    vllm: str = field(default_factory=vllm_version)
    link: int = PROTOCOL_VERSION
    python: str = ""
    """Not empty: the cluster was started by another interpreter than the one that asks."""
    pythons: list[dict[str, str]] = field(default_factory=list)
    """By order, the interpreter of each deployment."""
    signed: bool = False
    overtaken: bool = False
    pools: dict[str, int] = field(default_factory=lambda: {"p": 2, "d": 3})
    told: list[LiveConfig] = field(default_factory=list)
    resized: list[tuple[str, int]] = field(default_factory=list)
    generations: Generations = field(
        default_factory=lambda: Generations(HeadStore(), now_s=lambda: 1e9)
    )
    notes: list[dict[str, object]] = field(default_factory=list)
    tallies: dict[str, RolloutCounts] = field(default_factory=dict)
    waited_s: float = 0.0
    marks: dict[str, BuildRef] = field(default_factory=dict)
    began_with: dict[str, BuildRef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        of_other_code = "" if self.code == code_version() else f" by {self.code}"
        self.marks = {
            name: BuildRef(version=mark.version + of_other_code)
            for name, mark in initial_build_record(self.started_with).build_refs.items()
        }
        self.began_with = dict(self.marks)

    def current(self) -> LiveConfig:
        return self.generations.newest(self.started_with)

    def build_record(self) -> BuildRecord:
        base = self.python and "/usr/bin/python"
        return BuildRecord(
            code=self.code,
            vllm=self.vllm,
            link_protocol=self.link,
            base_python=base or sys.executable,
            build_refs=self.marks,
        )

    def prepare(self, base_generation: int, config: DeploymentConfig) -> Sequence[str]:
        assert base_generation == self.current().generation
        return [self.refuses] if self.refuses else []

    def commit(self, live: LiveConfig, operation: str) -> bool:
        if live.generation == 1:
            self.generations.add_first(self.started_with)
        if self.overtaken:
            self.overtaken = False
            self.generations.add(live)
        return self.generations.add(live, operation=operation)

    def distribute(self, live: LiveConfig) -> Sequence[str]:
        self.told.append(live)
        deaf, self.deaf = self.deaf, ""
        return [deaf] if deaf else []

    def problems(self) -> Sequence[str]:
        return self.ails.pop(0) if len(self.ails) > 1 else [*self.ails, []][0]

    def sizes(self) -> Mapping[str, int]:
        return dict(self.pools)

    def resize(self, pool: str, replicas: int) -> None:
        self.resized.append((pool, replicas))
        if pool == self.stuck_pool:
            self.stuck_pool = ""
            raise RuntimeError("no such deployment")
        self.pools[pool] = replicas

    def replace_blockers(self, config: DeploymentConfig, pools: Sequence[str]) -> Sequence[str]:
        assert pools
        return [self.no_room] if self.no_room else []

    def growth_blockers(self, config: DeploymentConfig) -> Sequence[str]:
        return cpu_shortfall(config, self.current().config, cpus=self.cpus)

    def deploy_builds(self, builds: Builds) -> None:
        self.orders.append({name: build.config for name, build in builds.items()})
        self.pythons.append({name: build.python for name, build in builds.items()})
        self.marks = dict(self.build_record().with_builds(builds).build_refs)
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt

    def fleet_status(self, names: Sequence[str]) -> FleetStatus | None:
        if self.stillborn and self.orders:
            stillborn, self.stillborn = self.stillborn, ""
            return FleetStatus(failure=stillborn)
        ready = frozenset(f"{name}-{self.marks[name].version}" for name in names)
        bad = self.worse and bool(self.orders)
        for name in ready:
            self.tallies.setdefault(name, RolloutCounts(100, 50 if bad else 0, 100, 100))
        return FleetStatus(done=True, ready=ready, tallies=self.tallies)

    def find(self, generation: int) -> DeploymentConfig | None:
        return self.generations.find(generation)

    def history(self) -> Sequence[GenerationRecord]:
        return self.generations.history()

    def set_status(self, generation: int, status: GenerationStatus, reason: str = "") -> None:
        self.generations.set_status(generation, status, reason)

    def record_code_version(self) -> None:
        self.signed = True

    def record_progress(self, progress: Mapping[str, object]) -> None:
        self.notes.append(dict(progress))

    def options(self, **how: object) -> RolloutOptions:
        manner = RolloutOptions(now_s=lambda: self.waited_s, sleep=self._wait)
        return replace(manner, **how)  # type: ignore[arg-type]  # as tests say it

    def apply(self, config: DeploymentConfig, **how: object) -> ApplyResult:
        return apply_config(self, config, self.options(**how))

    def fates(self) -> list[str]:
        return [str(generation.status) for generation in self.history()]

    def _wait(self, seconds: float) -> None:
        self.waited_s += seconds


def test_live_changes_reach_every_process_and_are_stored_under_the_next_number(make: Make) -> None:
    fleet = Fleet(make(), no_room="must not be asked")
    new = make("slo.default.ttft=1s", "tenants.acme.weight=3")
    applied = fleet.apply(new)
    assert applied.generation == 1
    assert (applied.resized, applied.replaced, fleet.orders) == ({}, (), [])
    assert fleet.told == [LiveConfig(generation=1, config=new)]
    assert fleet.current() == LiveConfig(generation=1, config=new)
    assert fleet.apply(make()).generation == 2


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            "slo.default.ttft=1.2s",
            ["baton_time_to_first_token_seconds: +1.2 s", "baton_held_seconds: +1.2 s"],
        ),
        ("admission.queue_timeout=45s", ["baton_held_seconds: +45 s, -2 s"]),
        ("slo.default.ttft=1s", ["baton_held_seconds: +1 s"]),
        ("slo.default.tpot=50ms", []),
        ("router.seed=7", []),
    ],
)
def test_an_apply_says_which_histograms_get_other_edges(
    make: Make, changed: str, told: list[str]
) -> None:
    applied = Fleet(make()).apply(make(changed))
    assert report(applied, "applied")["histograms"] == told


def test_unreadable_histograms_are_left_out(make: Make) -> None:
    off = "observability.metrics.enabled=false"
    applied = Fleet(make(off)).apply(make(off, "slo.default.ttft=1.2s"))
    assert applied.histograms == ()


def test_nothing_new_is_nothing_to_do(make: Make) -> None:
    fleet = Fleet(make())
    assert fleet.apply(make()) == ApplyResult(generation=0)
    assert fleet.told == []


def test_a_change_that_takes_a_restart_is_refused_before_any_process_is_asked(make: Make) -> None:
    fleet = Fleet(make(), refuses="must not be asked")
    with pytest.raises(ApplyRejected, match=r"server.port: 8000 -> 1 \(restart\)"):
        fleet.apply(make("server.port=1", "slo.default.ttft=1s"))
    assert fleet.current().generation == 0


ROLLED = ("pools.d.resources.cpus=2", "pools.d.engine.max_num_seqs=9", "pools.p.replicas.initial=3")
BOTH = ("pools.d.engine.max_num_seqs=9", "pools.p.engine.max_num_seqs=9")


def test_replicas_that_are_built_from_something_else_are_replaced_and_no_others(
    make: Make,
) -> None:
    old, new = make(), make(*ROLLED)
    fleet = Fleet(old, pools={"p": 2, "d": 5})
    applied = fleet.apply(new)
    assert applied.replaced == ("d",)
    (ordered,) = fleet.orders
    assert (ordered["d"], ordered["p"], fleet.pools) == (new, old, {"p": 3, "d": 5})
    assert fleet.fates() == ["started", "applied"]
    assert fleet.apply(new).replaced == ()


def test_pools_are_replaced_one_after_the_other_and_watched_in_between(make: Make) -> None:
    old, new = make(), make(*BOTH)
    fleet = Fleet(old)
    applied = fleet.apply(new, rules=RolloutRules(bake_s=7))
    assert applied.replaced == ("d", "p")
    assert [(order["d"], order["p"]) for order in fleet.orders] == [(new, old), (new, new)]
    assert fleet.waited_s >= 14
    assert [note["state"] for note in fleet.notes][-1] == "done"
    assert len(applied.stage_decisions) == 2


def test_pools_that_could_not_exchange_blocks_meanwhile_are_replaced_together(make: Make) -> None:
    new = make("model.engine.block_size=32")
    fleet = Fleet(make())
    assert fleet.apply(new).replaced == ("d", "p")
    (ordered,) = fleet.orders
    assert ordered["d"] == ordered["p"] == new


def test_pools_do_not_grow_beyond_what_their_cluster_was_started_for(make: Make) -> None:
    fleet = Fleet(make(), cpus=14)  # four and six replicas, and what is beside them
    with pytest.raises(ApplyRejected, match=r"may come to 24 CPUs, and Ray was started with 14: "):
        fleet.apply(make("pools.d.replicas.max=20"))
    assert fleet.current().generation == 0
    assert fleet.told == []
    assert fleet.apply(make("pools.d.replicas.max=9")).generation == 1
    # What it holds already is no reason to refuse anything else, were it started for less.
    assert Fleet(make(), cpus=3).apply(make("slo.default.ttft=1s")).generation == 1
    assert Fleet(make(), cpus=3).apply(make("pools.d.replicas.max=5")).generation == 1


def test_replicas_are_not_replaced_where_there_is_no_room_for_it(make: Make) -> None:
    fleet = Fleet(make(), no_room="no room for pool d")
    with pytest.raises(ApplyRejected, match="no room for pool d"):
        fleet.apply(make(*ROLLED))
    assert (fleet.told, fleet.orders, fleet.current().generation) == ([], [], 0)


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ({"stillborn": "engine: no such option"}, "engine: no such option"),
        ({"worse": True}, "50% of 100 legs broke on new replicas"),
        ({"interrupted": True}, "interrupted"),
    ],
)
def test_failing_replicas_are_reverted_with_the_sizes(
    make: Make, trouble: dict[str, object], why: str
) -> None:
    old = make()
    fleet = Fleet(old, **trouble)  # type: ignore[arg-type]
    with pytest.raises(ApplyRejected, match=rf"rolled back, generation 2 .* {why}"):
        fleet.apply(make(*ROLLED, *BOTH))
    assert len(fleet.orders) == 2, "the second pool was not begun"
    assert set(map(id, fleet.orders[-1].values())) == {id(fleet.orders[0]["p"])}
    assert fleet.marks == fleet.began_with
    assert fleet.pools == {"p": 2, "d": 3}
    assert fleet.current() == LiveConfig(generation=2, config=old)
    assert fleet.fates() == ["started", "reverted", "applied"]


def test_without_rollback_what_is_no_good_stays_and_says_so(make: Make) -> None:
    new = make(*ROLLED)
    fleet = Fleet(make(), worse=True)
    with pytest.raises(ApplyRejected, match="left as it is, generation 1 holds"):
        fleet.apply(new, rollback=False)
    assert fleet.current() == LiveConfig(generation=1, config=new)
    assert (len(fleet.orders), fleet.fates()) == (1, ["started", "not reverted"])


def test_without_waiting_all_changes_are_ordered_and_none_is_evaluated(make: Make) -> None:
    new = make(*BOTH)
    fleet = Fleet(make(), worse=True)
    assert fleet.apply(new, wait=False).stage_decisions == ("not watched",)
    assert [(order["d"], order["p"]) for order in fleet.orders] == [(new, new)]
    assert fleet.waited_s < 1


def test_a_rollback_returns_to_a_good_and_different_generation(make: Make) -> None:
    first, second = make("slo.default.ttft=1s"), make("slo.default.ttft=2s")
    fleet = Fleet(make())
    for config in (first, second):
        fleet.apply(config)
    fleet.deaf = "ingress b: gone"
    with pytest.raises(ApplyRejected):
        fleet.apply(make("slo.default.ttft=9s"))
    assert fleet.fates() == ["started", "applied", "applied", "reverted", "applied"]
    assert fleet.current().config == second
    assert roll_back(fleet, None, fleet.options(operation="rollback")).generation == 5
    assert fleet.current().config == first
    assert roll_back(fleet, 0, fleet.options(operation="rollback")).generation == 6
    assert (fleet.current().config, fleet.history()[-1].operation) == (make(), "rollback")
    with pytest.raises(ApplyRejected, match="generation 9 is not kept"):
        roll_back(fleet, 9, fleet.options())
    with pytest.raises(ApplyRejected, match="no other generation was good"):
        roll_back(Fleet(make()), None, fleet.options())


def test_another_version_of_baton_does_not_touch_the_configuration(make: Make) -> None:
    fleet = Fleet(make(), code="0.0.9")
    with pytest.raises(ApplyRejected, match=r"baton 0\.0\.9 .*runs, and this is"):
        fleet.apply(make("slo.default.ttft=1s"))
    assert (fleet.told, fleet.current().generation) == ([], 0)


@pytest.mark.parametrize(("vllm", "refused"), [("0.0.1", True), ("", False)])
def test_nor_does_one_with_another_vllm_but_one_without_any_may(
    make: Make, vllm: str, *, refused: bool
) -> None:
    fleet = Fleet(make(), vllm=vllm)
    if refused:
        with pytest.raises(ApplyRejected, match=r"with vLLM 0\.0\.1 runs"):
            fleet.apply(make("slo.default.ttft=1s"))
    else:
        assert fleet.apply(make("slo.default.ttft=1s")).generation == 1


def test_one_refusal_and_nothing_has_changed_anywhere(make: Make) -> None:
    fleet = Fleet(make(), refuses="ingress: cannot use 'own:choose'")
    with pytest.raises(ApplyRejected, match="cannot use 'own:choose'"):
        fleet.apply(make("slo.default.ttft=1s", "pools.d.replicas.initial=4"))
    assert (fleet.told, fleet.resized, fleet.current().generation) == ([], [], 0)


def test_of_two_concurrent_applies_one_is_refused(make: Make) -> None:
    fleet = Fleet(make(), overtaken=True)
    with pytest.raises(ApplyRejected, match="generation 1 was applied by another command"):
        fleet.apply(make("slo.default.ttft=1s"))
    assert fleet.told == []


def test_a_dry_run_asks_every_process_and_changes_nothing(make: Make) -> None:
    fleet = Fleet(make())
    new = make("slo.default.ttft=1s", "pools.d.replicas.initial=5")
    applied = fleet.apply(new, dry_run=True)
    assert applied.dry_run
    assert applied.resized == {"d": (3, 5)}
    assert [str(change) for change in applied.changes] == [
        "pools.d.replicas.initial: 3 -> 5",
        "slo.default.ttft: null -> 1s",
    ]
    assert (fleet.told, fleet.resized, fleet.current().generation) == ([], [], 0)
    fleet.refuses = "no"
    with pytest.raises(ApplyRejected):
        fleet.apply(new, dry_run=True)


@pytest.mark.parametrize(
    "trouble", [{"deaf": "ingress b: gone"}, {"stuck_pool": "d"}, {"ails": [[], ["not healthy"]]}]
)
def test_a_failed_change_is_reverted_with_the_sizes(make: Make, trouble: dict[str, object]) -> None:
    fleet = Fleet(make(), **trouble)  # type: ignore[arg-type]
    with pytest.raises(ApplyRejected, match="rolled back, generation 2 is as before"):
        fleet.apply(make("slo.default.ttft=1s", "pools.d.replicas.initial=5"))
    assert fleet.current() == LiveConfig(generation=2, config=make())
    assert fleet.told[-1] == fleet.current()
    assert fleet.pools == {"p": 2, "d": 3}


def test_an_ingress_that_is_healthy_again_soon_is_given_the_time(make: Make) -> None:
    fleet = Fleet(make(), ails=[[], ["busy"], ["busy"], []])
    assert fleet.apply(make("slo.default.ttft=1s")).generation == 1


def test_a_replica_that_was_unhealthy_before_is_no_reason_to_roll_back(make: Make) -> None:
    fleet = Fleet(make(), ails=[["down"]])
    assert fleet.apply(make("slo.default.ttft=1s")).generation == 1


@pytest.mark.parametrize(
    ("sets", "wanted"),
    [
        ([], {}),
        (["slo.default.ttft=1s"], {}),
        (["pools.d.replicas.initial=5"], {"d": 5}),
        (["pools.d.replicas.max=9"], {}),
        (["pools.d.replicas={min: 4, initial: 4}"], {"d": 4}),
        (["pools.d.replicas={min: 1, initial: 3, max: 3}"], {"d": 3}),
        (
            ["pools.d.replicas={min: 4, initial: 5, max: 6}", "autoscaler={policy: static}"],
            {"d": 5},
        ),
        (["pools.d.replicas.initial=5", "autoscaler={}"], {}),
        (["pools.d.replicas.initial=5", "autoscaler={dry_run: true}"], {"d": 5}),
    ],
)
def test_sizes_follow_the_configuration_where_nothing_else_decides(
    make: Make, sets: list[str], wanted: dict[str, int]
) -> None:
    # By hand, the decode pool has been scaled to 4 meanwhile.
    sizes = {"p": 2, "d": 4}
    expected = {pool: count for pool, count in wanted.items() if sizes[pool] != count}
    assert target_sizes(make(), make(*sets), sizes) == expected


def test_a_pool_with_unchanged_counts_is_left_as_it_is(make: Make) -> None:
    by_hand = {"p": 2, "d": 9}
    assert target_sizes(make(), make("slo.default.ttft=1s"), by_hand) == {}
    assert target_sizes(make(), make("pools.d.replicas.max=8"), by_hand) == {"d": 8}


# ------------------------------------------------------------------ the part of one process


@dataclass
class Process:
    """Works by a configuration that it must be able to build something from."""

    at: DeploymentConfig
    built: int = 0

    def build(self, config: DeploymentConfig) -> Switch:
        if config.router.seed == 13:
            raise ValueError("cannot use 13")
        self.built += 1

        async def switch() -> None:
            self.at = config

        return switch


def holder_of(
    config: DeploymentConfig, *, poll_interval_s: float = 5.0
) -> tuple[ConfigParticipant, Process]:
    process = Process(config)
    live = LiveConfig(generation=3, config=config)
    return ConfigParticipant(live, process.build, poll_interval_s=poll_interval_s), process


async def test_preparing_changes_nothing_and_taking_builds_nothing_again(make: Make) -> None:
    old, new = make(), make("router.seed=1")
    holder, process = holder_of(old)
    assert await holder.prepare(3, new) == ""
    assert process.at is old
    assert await holder.commit(LiveConfig(generation=4, config=new)) == 4
    assert (process.at, process.built, holder.live.generation) == (new, 1, 4)


async def test_a_rejected_configuration_is_counted_and_an_outdated_one_is_not(make: Make) -> None:
    holder, _ = holder_of(make())
    await holder.prepare(3, make("router.seed=13"))
    await holder.prepare(2, make("router.seed=1"))
    assert holder.rejected == 1
    with pytest.raises(ValueError, match="cannot use 13"):
        await holder.commit(LiveConfig(generation=4, config=make("router.seed=13")))
    for old in (2, 3):
        assert await holder.commit(LiveConfig(generation=old, config=make("router.seed=13"))) == 3
    await holder.commit(LiveConfig(generation=4, config=make("router.seed=1")))
    assert (holder.rejected, holder.live.generation) == (2, 4)


async def test_a_process_says_why_it_cannot_take_a_configuration_and_logs_it(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    holder, process = holder_of(make())
    assert await holder.prepare(3, make("router.seed=13")) == "ValueError: cannot use 13"
    [event] = [record for record in caplog.records if record.message == "config_rejected"]
    assert getattr(event, FIELDS) == {"generation": 4, "reason": "ValueError: cannot use 13"}
    assert "generation 3 holds here, not 2" in await holder.prepare(2, make("router.seed=1"))
    assert process.built == 0


async def test_the_committed_configuration_counts_and_not_the_prepared_one(make: Make) -> None:
    prepared, told = make("router.seed=1"), make("router.seed=2")
    holder, process = holder_of(make())
    await holder.prepare(3, prepared)
    await holder.commit(LiveConfig(generation=4, config=told))
    assert process.at == told
    await holder.commit(LiveConfig(generation=5, config=prepared))
    assert process.at == prepared


async def test_a_configuration_that_cannot_be_taken_leaves_the_old_one(make: Make) -> None:
    holder, process = holder_of(make())
    with pytest.raises(ValueError, match="cannot use 13"):
        await holder.commit(LiveConfig(generation=4, config=make("router.seed=13")))
    assert (process.at, holder.live.generation) == (make(), 3)
    assert await holder.commit(LiveConfig(generation=5, config=make("router.seed=1"))) == 5


# ------------------------------------------------------------------ what is kept


def test_a_process_that_starts_later_begins_with_the_newest_generation(make: Make) -> None:
    generations = Generations(HeadStore())
    assert generations.newest(make()) == LiveConfig(generation=0, config=make())
    for number in range(1, 12):
        live = LiveConfig(generation=number, config=make(f"router.seed={number}"))
        assert generations.add(live)
        assert generations.newest(make()) == live
        assert generations.newest_number() == number


def test_a_number_is_taken_once(make: Make) -> None:
    generations = Generations(HeadStore())
    first = LiveConfig(generation=1, config=make("router.seed=1"))
    assert generations.add(first)
    assert not generations.add(LiveConfig(generation=1, config=make("router.seed=2")))
    assert generations.newest(make()) == first


def test_old_generations_are_forgotten(make: Make) -> None:
    shelf = HeadStore()
    config = make()
    for number in range(1, 26):
        Generations(shelf).add(LiveConfig(generation=number, config=config))
    assert sorted(shelf.values) == [f"config/{number:010d}" for number in range(6, 26)]


def test_the_result_of_a_generation_is_kept_with_it(make: Make) -> None:
    shelf = HeadStore()
    generations = Generations(shelf, now_s=lambda: 1e9)
    generations.add_first(make())
    generations.add_first(make("router.seed=1"))
    generations.add(LiveConfig(generation=1, config=make("router.seed=2")), operation="rollback")
    started, other = Generations(shelf).history()
    assert (started.generation, started.status, started.at_s) == (0, GenerationStatus.STARTED, None)
    assert (other.operation, other.status, other.at_s) == (
        "rollback",
        GenerationStatus.IN_PROGRESS,
        1e9,
    )
    generations.set_status(1, GenerationStatus.REVERTED, "did not start")
    assert Generations(shelf).history()[1].reason == "did not start"
    assert Generations(shelf).find(0) == make()
    assert b"seed: 2" in shelf.values["config/0000000001"], "text, for other versions to read"


async def test_a_process_without_notice_finds_the_newest_in_the_store(make: Make) -> None:
    generations = Generations(HeadStore())
    for number in (4, 5):
        live = LiveConfig(generation=number, config=make(f"router.seed={number}"))
        generations.add(live)
    holder, process = holder_of(make(), poll_interval_s=0.001)
    holder.follow(generations)
    await until(lambda: holder.live.generation == 5)
    await holder.close()
    assert (process.at.router.seed, process.built) == (5, 1)


async def test_polling_goes_on_after_a_failure(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    generations = Generations(HeadStore())
    generations.add(LiveConfig(generation=4, config=make("router.seed=13")))
    holder, process = holder_of(make(), poll_interval_s=0.001)
    holder.follow(generations)
    await until(lambda: holder.rejected >= 2)
    generations.add(LiveConfig(generation=5, config=make("router.seed=5")))
    await until(lambda: holder.live.generation == 5)
    await holder.close()
    assert process.at.router.seed == 5
    assert caplog.text.count("config_not_followed") == 1, "the same failure is logged once"


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_true():  # noqa: ASYNC110 - it comes from a thread that reads the store
            await asyncio.sleep(0)


def test_each_generation_has_its_author_and_its_changes(
    make: Make,
) -> None:
    store = HeadStore()
    generations = Generations(store, now_s=lambda: 1e9, author=lambda: "ada@node-1")
    first, second = make(), make("router.seed=7")
    store.put(f"note/{STARTED_BY_KEY}", b"bob@head", overwrite=True)
    generations.add_first(first)
    assert generations.add(LiveConfig(generation=1, config=second), operation="apply")
    assert generations.add(LiveConfig(generation=2, config=second), operation="rollback")
    rows = history_rows(generations.history(), generations.find)
    assert [row["author"] for row in rows] == ["bob@head", "ada@node-1", "ada@node-1"]
    assert (rows[0]["changes"], rows[2]["changes"]) == (None, [])
    (change,) = [str(change) for change in shown_changes(diff(first, second))]
    assert rows[1]["changes"] == [change]


def test_a_generation_that_an_earlier_build_wrote_has_no_author(make: Make) -> None:
    store = HeadStore()
    Generations(store).add(LiveConfig(generation=1, config=make()))
    (key,) = store.keys("config/")
    entry = json.loads(store.values[key])
    del entry["author"]
    store.values[key] = json.dumps(entry).encode()
    (record,) = Generations(store).history()
    assert record.author == ""


def test_changes_of_a_generation_that_another_version_wrote_are_not_known(make: Make) -> None:
    store = HeadStore()
    generations = Generations(store)
    for number in (1, 2):
        generations.add(LiveConfig(generation=number, config=make()))
    key = sorted(store.keys("config/"))[1]
    entry = json.loads(store.values[key]) | {"config": "unknown_key: 1"}
    store.values[key] = json.dumps(entry).encode()
    rows = history_rows(Generations(store).history(), Generations(store).find)
    assert [row["changes"] for row in rows] == [None, None]
