"""When the connections of a large fleet have their turn: spread over a beat, and excused once."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.runtime.link.client import LinkClient
from baton.runtime.link.options import LinkOptions

BEAT_S = 1.0


@dataclass
class ByHand:
    """A loop whose clock is moved by hand, and that runs what is due when it is told to."""

    now_s: float = 100.0
    due_at_s: float = 0.0
    due: Callable[[], None] = field(default=lambda: None)

    def time(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, what: Callable[[], None]) -> asyncio.Handle:
        self.due_at_s, self.due = at_s, what
        return asyncio.Handle(what, (), asyncio.get_running_loop())

    def run(self, *, late_s: float = 0.0) -> None:
        self.now_s = self.due_at_s + late_s
        self.due()


@dataclass
class Seen:
    """A connection that keeps when it had its turn, and whether it was excused."""

    replica_id: str
    turns: list[tuple[float, bool]] = field(default_factory=list)

    def tick(self, now_s: float, *, stalled: bool) -> None:
        self.turns.append((now_s, stalled))


@dataclass
class Fleet:
    """A client with connections that are not there."""

    loop: ByHand
    seen: list[Seen]

    def excuses(self) -> Counter[int]:
        return Counter(sum(stalled for _, stalled in listener.turns) for listener in self.seen)


@pytest.fixture
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    client = LinkClient("c", lambda _event: None, options=LinkOptions(heartbeat_interval_s=BEAT_S))
    client._timer.cancel()
    loop, replicas = ByHand(), [Seen(f"r{number}") for number in range(request.param)]
    whole: Any = client
    real, whole._loop = client._loop, loop
    whole._connections = {replica.replica_id: replica for replica in replicas}
    whole._tick_due_at_s = loop.now_s
    client._tick()
    yield Fleet(loop, replicas)
    whole._loop, whole._connections = real, {}
    await client.close()


@pytest.mark.parametrize("fleet", [1, 32, 33, 100, 1000], indirect=True)
async def test_each_has_one_turn_in_a_beat_and_few_at_a_time(fleet: Fleet) -> None:
    while fleet.loop.due_at_s < 105.0 - 1e-6:
        fleet.loop.run()
    at_once = Counter(at_s for listener in fleet.seen for at_s, _ in listener.turns)
    assert max(at_once.values()) <= 32
    for listener in fleet.seen:
        times = [at_s for at_s, _ in listener.turns]
        assert len(times) == 5
        assert all(b - a == pytest.approx(BEAT_S) for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("fleet", [1, 33, 1000], indirect=True)
async def test_after_a_stall_of_this_process_each_is_excused_for_one_turn(fleet: Fleet) -> None:
    for _ in range(40):
        fleet.loop.run()
    assert fleet.excuses() == {0: len(fleet.seen)}
    fleet.loop.run(late_s=1.5 * BEAT_S)
    for _ in range(100):
        fleet.loop.run()
    assert fleet.excuses() == {1: len(fleet.seen)}


@pytest.mark.parametrize("fleet", [1000], indirect=True)
async def test_a_loop_with_long_turns_beats_as_often(fleet: Fleet) -> None:
    # A round has 32 parts; here each begins two and a half parts late.
    while fleet.loop.due_at_s < 105.0:
        fleet.loop.run(late_s=2.5 * BEAT_S / 32)
    assert {len(listener.turns) for listener in fleet.seen} <= {4, 5, 6}
    assert fleet.excuses() == {0: len(fleet.seen)}
