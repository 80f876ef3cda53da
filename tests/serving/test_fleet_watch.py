"""The link follows the membership: joiners are connected, leavers drain, the dead are forgotten."""

from __future__ import annotations

import logging

import pytest

from baton.domain.errors import LinkFailed
from baton.domain.events import Event, ReplicaDraining, ReplicaJoined, ReplicaLost
from baton.domain.fleet import LossReason
from baton.serving.ingress.model_ingress import FleetWatch
from baton.serving.ray.membership import Member
from tests.fakes.facts import replica_facts


class Links:
    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}

    def connect(self, replica_id: str, address: str) -> None:
        self.addresses[replica_id] = address

    def disconnect(self, replica_id: str) -> None:
        del self.addresses[replica_id]


def member(name: str, **metadata: object) -> Member:
    told = {"replica_id": name, "link": f"tcp://10.0.0.1:{len(name)}"} | metadata
    return Member(replica_id=f"serve-{name}", deployment="pool", metadata=told, node_ip="10.0.0.1")


def watch() -> tuple[FleetWatch, Links, list[Event]]:
    links = Links()
    events: list[Event] = []
    return FleetWatch(links, events.append, now_s=lambda: 0.0), links, events


def joined(name: str) -> ReplicaJoined:
    return ReplicaJoined(facts=replica_facts(name))


def test_a_new_member_is_connected_under_its_own_name() -> None:
    follow, links, events = watch()
    follow.on_members(frozenset({member("a")}))
    assert links.addresses == {"a": "tcp://10.0.0.1:1"}
    assert events == []


def test_a_member_that_has_not_said_where_it_is_is_left_alone() -> None:
    follow, links, _ = watch()
    stranger = Member(replica_id="x", deployment="pool", metadata={}, node_ip="")
    follow.on_members(frozenset({stranger}))
    assert links.addresses == {}


def test_a_member_that_leaves_drains_and_keeps_its_link() -> None:
    follow, links, events = watch()
    follow.on_members(frozenset({member("a"), member("b")}))
    follow.on_link_event(joined("a"))
    follow.on_members(frozenset({member("b")}))
    assert events[1:] == [ReplicaDraining(replica_id="a")]
    assert links.addresses.keys() == {"a", "b"}


def test_a_leaver_is_forgotten_when_its_link_breaks() -> None:
    follow, links, events = watch()
    follow.on_members(frozenset({member("a")}))
    follow.on_link_event(joined("a"))
    follow.on_members(frozenset())
    lost = ReplicaLost(replica_id="a", reason=LossReason.DISCONNECTED)
    follow.on_link_event(lost)
    assert links.addresses == {}
    assert events[-1] == lost


def test_a_returned_member_starts_from_nothing() -> None:
    """Else it would be taken to drain for as long as its link holds, and get no work."""

    class Sessions(Links):
        def __init__(self) -> None:
            super().__init__()
            self.begun: list[str] = []

        def connect(self, replica_id: str, address: str) -> None:
            if replica_id not in self.addresses:
                self.begun.append(replica_id)
            super().connect(replica_id, address)

    links = Sessions()
    follow = FleetWatch(links, lambda _event: None, now_s=lambda: 0.0)
    follow.on_members(frozenset({member("a"), member("b")}))
    for name in "ab":
        follow.on_link_event(joined(name))
    follow.on_members(frozenset({member("b")}))
    follow.on_members(frozenset({member("a"), member("b")}))
    assert sorted(links.begun) == ["a", "a", "b"]
    assert links.addresses.keys() == {"a", "b"}


def test_a_joined_replica_is_known_though_a_consumer_raises() -> None:
    links = Links()

    def stumble(event: Event) -> None:
        if not isinstance(event, ReplicaDraining):
            raise LinkFailed("frontend", "it reads no more")

    follow = FleetWatch(links, stumble, now_s=lambda: 0.0)
    follow.on_members(frozenset({member("a")}))
    with pytest.raises(LinkFailed):
        follow.on_link_event(joined("a"))
    follow.on_members(frozenset())
    assert links.addresses.keys() == {"a"}, "it drains"
    with pytest.raises(LinkFailed):
        follow.on_link_event(ReplicaLost(replica_id="a", reason=LossReason.DISCONNECTED))
    assert links.addresses == {}


def test_a_member_whose_link_breaks_is_tried_again() -> None:
    follow, links, events = watch()
    follow.on_members(frozenset({member("a")}))
    follow.on_link_event(ReplicaLost(replica_id="a", reason=LossReason.UNRESPONSIVE))
    assert links.addresses.keys() == {"a"}
    assert len(events) == 1


def test_a_leaver_whose_link_had_broken_before_is_forgotten_at_once() -> None:
    follow, links, _ = watch()
    follow.on_members(frozenset({member("a")}))
    follow.on_link_event(ReplicaLost(replica_id="a", reason=LossReason.DISCONNECTED))
    follow.on_members(frozenset())
    assert links.addresses == {}


def test_lost_replicas_are_logged_and_unexpected_losses_as_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    follow, _, _ = watch()
    follow.on_members(frozenset({member("a"), member("b")}))
    follow.on_link_event(joined("a"))
    follow.on_link_event(joined("b"))
    follow.on_members(frozenset({member("b")}))
    for name in "ab":
        follow.on_link_event(ReplicaLost(replica_id=name, reason=LossReason.DISCONNECTED))
    said = [(record.getMessage(), record.levelno) for record in caplog.records]
    assert said == [
        ("replica_joined", logging.INFO),
        ("replica_joined", logging.INFO),
        ("replica_draining", logging.INFO),
        ("replica_lost", logging.INFO),
        ("replica_lost", logging.WARNING),
    ]


def test_a_replica_that_was_lost_is_kept_with_when_and_why_and_a_leaver_is_not() -> None:
    times = iter([100.0, 107.5])
    follow = FleetWatch(Links(), lambda _event: None, now_s=lambda: next(times))
    follow.on_members(frozenset({member("a"), member("b")}))
    for name in "ab":
        follow.on_link_event(joined(name))
    reason = "replica a: engine core died; its process ended with signal SIGKILL\nmore"
    follow.on_link_event(ReplicaLost(replica_id="a", reason=LossReason.ENGINE_DEAD, detail=reason))
    follow.on_members(frozenset({member("a")}))
    follow.on_link_event(ReplicaLost(replica_id="b", reason=LossReason.DISCONNECTED))
    assert follow.losses() == [
        {
            "replica_id": "a",
            "age_s": 7.5,
            "reason": "engine_dead",
            "detail": reason.partition("\n")[0],
        }
    ]
