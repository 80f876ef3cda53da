"""Membership against Ray Serve's own notifier, in this process, without a cluster."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.serving.ray.membership import Member, Membership, MembershipTiming

common = pytest.importorskip("ray.serve._private.common")
long_poll = pytest.importorskip("ray.serve._private.long_poll")

APP = "app"


@dataclass
class FakeController:
    """The Serve controller's handle: Serve's own notifier behind a call that may fail."""

    host: Any = field(default_factory=long_poll.LongPollHost)
    failure: Exception | None = None
    lookups: int = 0
    looked_up: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def listen_for_change(self) -> FakeController:
        return self

    async def remote(self, versions: dict[Any, int]) -> object:
        async with self.looked_up:
            self.looked_up.notify_all()
        if self.failure is not None:
            raise self.failure
        return await self.host.listen_for_change(dict(versions))

    def find(self) -> FakeController:
        self.lookups += 1
        return self

    async def three_more_lookups(self) -> None:
        seen = self.lookups
        async with asyncio.timeout(5), self.looked_up:
            await self.looked_up.wait_for(lambda: self.lookups >= seen + 3)

    def forget_everything(self) -> None:
        self.host = long_poll.LongPollHost()

    def publish(self, deployment: str, *replica_ids: str) -> None:
        name = common.DeploymentID(name=deployment, app_name=APP)
        replicas = [
            common.RunningReplicaInfo(
                replica_id=common.ReplicaID(unique_id=replica_id, deployment_id=name),
                node_id="node",
                node_ip="10.0.0.1",
                availability_zone=None,
                actor_name=f"SERVE_REPLICA::{APP}#{deployment}#{replica_id}",
                max_ongoing_requests=1,
                replica_metadata={"link": f"tcp://{replica_id}"},
            )
            for replica_id in replica_ids
        ]
        key = (long_poll.LongPollNamespace.DEPLOYMENT_TARGETS, name)
        target = common.DeploymentTargetInfo(is_available=True, running_replicas=replicas)
        self.host.notify_changed({key: target})


@dataclass
class Changes:
    """What `on_change` was called with."""

    views: asyncio.Queue[frozenset[Member]] = field(default_factory=asyncio.Queue)

    async def ids(self) -> set[str]:
        async with asyncio.timeout(5):
            return {member.replica_id for member in await self.views.get()}


@pytest.fixture
def controller() -> FakeController:
    return FakeController()


@pytest.fixture
def told() -> Changes:
    return Changes()


@pytest.fixture
async def membership(controller: FakeController, told: Changes) -> AsyncIterator[Membership]:
    following = Membership(
        app=APP,
        deployments=["prefill", "decode"],
        on_change=told.views.put_nowait,
        timing=MembershipTiming(retry_s=0.01, recheck_s=0.1),
        find_controller=controller.find,
    )
    await following.start()
    yield following
    await following.stop()


async def test_members_carry_what_their_replicas_published(
    controller: FakeController, membership: Membership, told: Changes
) -> None:
    controller.publish("decode", "d1")

    assert await told.ids() == {"d1"}
    (member,) = membership.members
    assert (member.deployment, member.node_ip) == ("decode", "10.0.0.1")
    assert member.metadata == {"link": "tcp://d1"}


async def test_a_change_of_one_deployment_keeps_the_members_of_the_other(
    controller: FakeController, membership: Membership, told: Changes
) -> None:
    controller.publish("decode", "d1", "d2")
    await told.ids()
    controller.publish("prefill", "p1")
    assert await told.ids() == {"d1", "d2", "p1"}
    controller.publish("decode", "d2")
    assert await told.ids() == {"d2", "p1"}
    assert {member.replica_id for member in membership.members} == {"d2", "p1"}


@pytest.mark.usefixtures("membership")
async def test_asking_again_from_scratch_tells_nothing_that_is_known(
    controller: FakeController, told: Changes
) -> None:
    controller.publish("decode", "d1")
    await told.ids()
    await controller.three_more_lookups()
    assert told.views.empty()


async def test_the_last_view_stands_while_the_controller_fails_and_is_mended_after(
    controller: FakeController, membership: Membership, told: Changes
) -> None:
    controller.publish("decode", "d1", "d2")
    await told.ids()
    controller.failure = ConnectionError("the controller is gone")
    await controller.three_more_lookups()
    assert {member.replica_id for member in membership.members} == {"d1", "d2"}
    assert told.views.empty()

    controller.forget_everything()
    controller.publish("decode", "d2")
    controller.failure = None
    assert await told.ids() == {"d2"}


async def test_nothing_is_told_after_stop(
    controller: FakeController, membership: Membership, told: Changes
) -> None:
    controller.publish("decode", "d1")
    await told.ids()
    await membership.stop()
    await membership.stop()
    controller.publish("decode", "d1", "d2")
    await asyncio.sleep(0)
    assert told.views.empty()


async def test_a_failing_listener_does_not_end_the_following(
    controller: FakeController, told: Changes
) -> None:
    calls = 0

    def listener(view: frozenset[Member]) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError("the listener is broken")
        told.views.put_nowait(view)

    following = Membership(
        app=APP,
        deployments=["decode"],
        on_change=listener,
        timing=MembershipTiming(retry_s=0.01, recheck_s=0.1),
        find_controller=controller.find,
    )
    await following.start()
    try:
        controller.publish("decode", "d1")
        assert await told.ids() == {"d1"}
    finally:
        await following.stop()


class LookupFailures(logging.Handler):
    """Counts how often the controller could not be found."""

    def __init__(self) -> None:
        super().__init__()
        self.made = asyncio.Semaphore(0)

    def emit(self, _record: logging.LogRecord) -> None:
        self.made.release()


async def test_lookups_that_hang_take_one_thread_of_all_that_there_are(
    controller: FakeController, told: Changes
) -> None:
    store_is_back, tries = threading.Event(), LookupFailures()

    def hang() -> FakeController:
        store_is_back.wait(5)
        return controller.find()

    following = Membership(
        app="hangs",
        deployments=["decode"],
        on_change=told.views.put_nowait,
        timing=MembershipTiming(retry_s=0.001, lookup_timeout_s=0.002),
        find_controller=hang,
    )
    logger = logging.getLogger("baton.serving.ray.membership")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(tries)
    try:
        await following.start()
        async with asyncio.timeout(5):
            for _ in range(5):
                await tries.made.acquire()
        assert sum("hangs" in thread.name for thread in threading.enumerate()) == 1
        store_is_back.set()
        async with asyncio.timeout(5), controller.looked_up:
            await controller.looked_up.wait_for(lambda: controller.lookups > 0)
    finally:
        logger.removeHandler(tries)
        logger.setLevel(level)
        store_is_back.set()
        await following.stop()
