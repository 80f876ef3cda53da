"""Whether replicas can be replaced where the cluster is full, and what Ray's errors come to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from ray.exceptions import ActorUnavailableError, RpcError

from baton.config import DeploymentConfig
from baton.domain.errors import ApplyRejected, ClusterFailed
from baton.serving.rollout.live_deployment import (
    LiveDeployment,
    RolloutLease,
    cpu_shortfall,
    fits,
    no_room_reasons,
    resource_requests,
)
from baton.serving.store.config_store import GenerationStatus, LiveConfig
from tests.fakes.head_store import HeadStore
from tests.serving.configs import written
from tests.serving.test_apply import Fleet

BASE = (
    "version: 1\nmodel: {source: tiny, max_len: 4096}\n"
    "pools:\n  p: {role: prefill, resources: {cpus: 2, gpus: 1}}\n"
    "  d: {role: decode, resources: {cpus: 2, gpus: 1, memory: 8GiB}}\n"
)
Make = Callable[..., DeploymentConfig]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return partial(written, tmp_path, BASE)


def test_a_replica_fits_where_nothing_that_it_takes_is_lacking(make: Make) -> None:
    pool = make().pools["d"]
    taken = resource_requests(pool)
    assert taken == {"CPU": 2, "GPU": 1, "memory": 8 * 1024**3}
    assert fits(pool, free=taken)
    for name, amount in taken.items():
        assert not fits(pool, free=taken | {name: amount - 0.5})
        assert not fits(pool, free={other: n for other, n in taken.items() if other != name})


def test_a_pool_without_gpus_needs_none(make: Make) -> None:
    assert fits(make("pools.p.resources.gpus=0").pools["p"], free={"CPU": 2})


def test_a_lone_replica_that_decodes_is_not_replaced_where_no_other_fits(make: Make) -> None:
    config = make("pools.d.engine.max_num_seqs=9")
    (reason,) = no_room_reasons(config, make(), {"p": 1, "d": 1}, ["p", "d"])
    assert reason.startswith("pool d has one replica")
    assert no_room_reasons(config, make(), {"p": 1, "d": 2}, ["p", "d"]) == []


def test_replicas_that_take_more_than_before_need_room_beside(make: Make) -> None:
    more, less = make("pools.d.resources.cpus=3"), make("pools.d.resources.cpus=1")
    (reason,) = no_room_reasons(more, make(), {"p": 2, "d": 2}, ["d"])
    assert reason.startswith("pool d asks for more than before")
    assert no_room_reasons(less, make(), {"p": 2, "d": 2}, ["d"]) == []
    assert no_room_reasons(more, make(), {"p": 2, "d": 2}, []) == []


# ------------------------------------------------------------------ Ray's errors


def time_out(*_: object, **__: object) -> NoReturn:
    raise RpcError("Deadline Exceeded", 4)


def restarting(*_: object, **__: object) -> NoReturn:
    raise ActorUnavailableError("the Serve controller is restarting", b"0" * 16)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveDeployment]:
    """On a cluster whose head is silent, and whose Serve controller is just starting again."""
    monkeypatch.setattr("ray.experimental.internal_kv.internal_kv_get_gcs_client", time_out)
    monkeypatch.setattr("ray.get_actor", restarting)
    with asyncio.Runner() as runner:
        yield LiveDeployment(runner)


def test_the_maximum_of_pools_is_all_their_allowed_replicas(make: Make) -> None:
    more = make("pools.d.replicas.max=3", "pools.p.resources.cpus=4")
    (reason,) = cpu_shortfall(more, make(), cpus=9.5)
    assert "may come to 10 CPUs, and Ray was started with 9.5" in reason
    assert cpu_shortfall(more, make(), cpus=10) == []
    assert cpu_shortfall(more, more, cpus=1) == []
    assert cpu_shortfall(make(), more, cpus=1) == []


@pytest.mark.parametrize(
    "ask",
    [
        lambda running, _live: running.resize("d", 4),
        lambda running, _live: running.sizes(),
        lambda running, live: running.commit(live, "apply"),
        lambda running, _live: running.find(1),
        lambda running, _live: running.history(),
        lambda running, _live: running.build_record(),
        lambda running, _live: running.record_code_version(),
        lambda running, _live: running.exclusive().__enter__(),
    ],
)
def test_every_error_of_ray_is_an_error_of_baton(
    make: Make, running: LiveDeployment, ask: Callable[[LiveDeployment, LiveConfig], object]
) -> None:
    with pytest.raises(ClusterFailed, match=r"RpcError|ActorUnavailableError"):
        ask(running, LiveConfig(generation=2, config=make()))


def test_a_size_that_serve_cannot_take_now_is_reverted(make: Make, running: LiveDeployment) -> None:
    fleet = Fleet(make())
    fleet.resize = running.resize  # type: ignore[method-assign]
    with pytest.raises(ApplyRejected, match=r"rolled back, generation 2 .* ActorUnavailableError"):
        fleet.apply(make("pools.d.replicas={min: 1, initial: 4, max: 6}"))
    assert fleet.fates() == ["started", "reverted", "applied"]
    assert fleet.current().config == make()


def test_failing_progress_reports_stop_nothing(
    running: LiveDeployment, caplog: pytest.LogCaptureFixture
) -> None:
    running.record_progress({"state": "under way"})
    running.set_status(3, GenerationStatus.APPLIED)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "'baton status' will not say how far it is",
        "'baton history' will not say that generation 3 is applied",
    ]


def test_a_process_that_lost_its_lease_changes_nothing(make: Make, running: LiveDeployment) -> None:
    shelf, now_s = HeadStore(), [0.0]
    ours, theirs = (RolloutLease(who, shelf, now_s=lambda: now_s[0]) for who in ("a:1", "b:2"))
    running._lease = ours
    with running.exclusive():
        now_s[0] = 61.0
        assert theirs.acquire() == ""
        live = LiveConfig(generation=2, config=make())
        for change in (
            lambda: running.commit(live, "apply"),
            lambda: running.deploy_builds({}),
            lambda: running.fleet_status(["d"]),
        ):
            with pytest.raises(ApplyRejected, match="b:2 has begun to change what runs"):
                change()
    assert RolloutLease("c:3", shelf, now_s=lambda: now_s[0]).acquire() == "b:2"


def test_a_change_holds_where_the_lease_cannot_be_dropped(
    running: LiveDeployment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = HeadStore()
    running._lease = RolloutLease("a:1", shelf)
    with running.exclusive():
        monkeypatch.setattr(shelf, "get", time_out)
    assert "is kept for another minute" in caplog.text


# -------------------------------------------------------------------- the lease of a rollout


class Wall:
    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


def test_of_two_concurrent_rollouts_one_is_refused() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second = (RolloutLease(who, shelf, now_s=wall) for who in ("a:1", "b:2"))
    assert first.acquire() == ""
    assert second.acquire() == "a:1"
    second.release()
    assert second.acquire() == "a:1", "who does not hold it cannot drop it"
    first.release()
    assert second.acquire() == ""


def test_a_live_holder_keeps_the_lease_and_a_killed_one_loses_it() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second = (RolloutLease(who, shelf, now_s=wall) for who in ("a:1", "b:2"))
    first.acquire()
    for _ in range(40):
        wall.now_s += 10
        first.renew()
    assert second.acquire() == "a:1"
    wall.now_s += 61
    assert second.acquire() == ""
    assert first.acquire() == "b:2"


def test_it_is_renewed_now_and_then_only() -> None:
    shelf, wall = HeadStore(), Wall()
    lease = RolloutLease("a:1", shelf, now_s=wall)
    lease.renew()
    assert shelf.values == {}, "what is not held is not renewed"
    lease.acquire()
    (kept,) = shelf.values.values()
    wall.now_s += 4
    lease.renew()
    assert list(shelf.values.values()) == [kept]


def test_a_holder_that_slept_past_its_lease_neither_renews_nor_drops_anothers() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second, third = (RolloutLease(who, shelf, now_s=wall) for who in ("a:1", "b:2", "c:3"))
    first.acquire()
    wall.now_s += 61
    assert second.acquire() == ""
    for _ in range(2):
        with pytest.raises(ApplyRejected, match="not heard of for 61 s, and b:2 has begun"):
            first.renew()
    first.release()
    assert third.acquire() == "b:2"


def test_a_holder_that_slept_through_another_lease_has_lost_its_own() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second = (RolloutLease(who, shelf, now_s=wall) for who in ("a:1", "b:2"))
    first.acquire()
    wall.now_s += 61
    second.acquire()
    second.release()
    with pytest.raises(ApplyRejected, match="another command has begun"):
        first.renew()
    assert shelf.values == {}


def test_two_holders_of_one_name_are_distinguished() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second = (RolloutLease("pod, process 1", shelf, now_s=wall) for _ in range(2))
    first.acquire()
    wall.now_s += 61
    assert second.acquire() == ""
    with pytest.raises(ApplyRejected):
        first.renew()


def test_a_holder_that_slept_without_a_rival_continues() -> None:
    shelf, wall = HeadStore(), Wall()
    first, second = (RolloutLease(who, shelf, now_s=wall) for who in ("a:1", "b:2"))
    first.acquire()
    wall.now_s += 61
    first.renew()
    assert second.acquire() == "a:1"


class Crowded(HeadStore):
    """Somebody else does something as soon as the next key was written."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], object] = lambda: None

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        written = super().put(key, value, overwrite=overwrite)
        if written:
            then, self.then = self.then, lambda: None
            then()
        return written


def test_of_two_that_find_the_same_old_lease_one_is_refused() -> None:
    shelf, wall = Crowded(), Wall()
    gone, first, second = (RolloutLease(who, shelf, now_s=wall) for who in ("z:0", "a:1", "b:2"))
    gone.acquire()
    wall.now_s += 61

    def deleted_for_the_old_one() -> None:
        shelf.delete("lease/rollout")
        assert second.acquire() == ""

    shelf.then = deleted_for_the_old_one
    assert first.acquire() == "another command"
    first.release()
    wall.now_s += 6
    second.renew()
