"""Counted blocks against lists of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.domain.handoff import LegFailure
from baton.simulator.network.timeline import Timeline
from baton.simulator.v1.memory import V1BlockPool
from baton.simulator.v1.settings import Scheduling
from tests.simulator.v1_cores import (
    SETTINGS,
    CacheMirror,
    VirtualEngine,
    decode,
    leg,
    new_core,
    prefill,
    with_changes,
)

CHAINS = [[10, 11, 12, 13, 14], [10, 11, 22, 23, 24], [10, 31, 32, 33, 34], [41, 42, 43, 44, 45]]


class Listed:
    """Which blocks are used by how many, and the idle ones, the next to be evicted first."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.users: dict[int, int] = {}
        self.idle: list[int] = []
        self.private = 0

    @property
    def empty(self) -> int:
        return self.total - len(self.users) - len(self.idle) - self.private

    def use(self, one: int) -> None:
        if one in self.idle:
            self.idle.remove(one)
        self.users[one] = self.users.get(one, 0) + 1

    def allocate(self, blocks: int) -> None:
        for _ in range(blocks - self.empty):
            self.idle.pop(0)
        self.private += blocks

    def cache_full_blocks(self, hashes: list[int]) -> None:
        for hash_ in hashes:
            self.use(hash_)
            self.private -= 1

    def free(self, hashes: list[int], private: int) -> None:
        self.private -= private
        for hash_ in reversed(hashes):
            self.users[hash_] -= 1
            if not self.users[hash_]:
                del self.users[hash_]
                self.idle.append(hash_)


@hypothesis_settings(max_examples=80)
@given(
    st.integers(8, 16),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)), max_size=80),
)
def test_counted_blocks_are_as_listed_ones(total: int, acts: list[tuple[int, int, int]]) -> None:
    blocks, listed, mirror = V1BlockPool(total), Listed(total), CacheMirror()
    runs: list[tuple[list[int], int]] = []
    for which, length, own in acts:
        hashes = CHAINS[which][:length]
        cached, idle = blocks.count_cached(hashes, len(hashes))
        known = listed.users.keys() | set(listed.idle)
        assert cached == next(
            (n for n, value in enumerate(hashes) if value not in known), len(hashes)
        )
        assert idle == sum(hash_ in listed.idle for hash_ in hashes[:cached])
        fresh = length - cached + own
        if fresh + idle <= blocks.available and length:
            blocks.touch(hashes[:cached])
            for hash_ in hashes[:cached]:
                listed.use(hash_)
            for each in (blocks, listed):
                each.allocate(fresh)
            for each in (blocks, listed):
                each.cache_full_blocks(hashes[cached:])
            runs.append((hashes, own))
        elif runs:
            hashes, private = runs.pop(which % len(runs))
            for each in (blocks, listed):
                each.free(hashes, private)
        assert blocks.idle_blocks() == listed.idle
        assert blocks.users() == listed.users
        assert (blocks.empty, blocks.available) == (listed.empty, listed.empty + len(listed.idle))
        assert blocks.used == listed.private + len(listed.users)
        mirror.apply(blocks.pop_update())
        assert mirror.blocks == known_to(listed)


def known_to(listed: Listed) -> set[int]:
    return listed.users.keys() | set(listed.idle)


def test_computing_what_is_cached_gives_the_copy_back() -> None:
    blocks = V1BlockPool(10)
    blocks.allocate(4)
    blocks.cache_full_blocks([1, 2])
    blocks.cache_full_blocks([1, 2])
    assert (blocks.empty, blocks.users()) == (8, {1: 2, 2: 2})
    blocks.free([1, 2], 0)
    blocks.free([1, 2], 0)
    blocks.allocate(2)
    blocks.cache_full_blocks([1, 2])
    assert (blocks.empty, blocks.available, blocks.users()) == (8, 8, {1: 1, 2: 1})


def test_using_the_same_blocks_again_and_again_takes_no_more_memory() -> None:
    blocks = V1BlockPool(10)
    blocks.allocate(5)
    blocks.cache_full_blocks([1, 2, 3, 4, 5])
    for _ in range(100):
        blocks.free([1, 2, 3, 4, 5], 0)
        blocks.touch([1, 2, 3, 4, 5])
    assert sum(len(returned) for _, returned in blocks._eviction_queue) <= 25
    blocks.free([1, 2, 3, 4, 5], 0)
    assert blocks.idle_blocks() == [5, 4, 3, 2, 1]


def test_blocks_that_come_and_go_between_two_updates_are_not_reported() -> None:
    blocks = V1BlockPool(2)
    blocks.allocate(2)
    blocks.cache_full_blocks([1, 2])
    blocks.free([1, 2], 0)
    blocks.allocate(2)
    assert not blocks.has_update
    assert blocks.pop_update() is None


# --------------------------------------------------------------------------- any order of events
SMALL = with_changes(SETTINGS, kv_blocks=40, max_waiting_requests=6)
ids = st.lists(st.integers(0, 1), max_size=8).map(tuple)


class TwoEngines(RuleBasedStateMachine):
    """A prefill and a decode engine; legs, pulls, aborts and time in any order."""

    source_settings = SMALL
    target_settings = SMALL

    def __init__(self) -> None:
        super().__init__()
        self.timeline = Timeline()
        self.source = VirtualEngine(new_core(self.source_settings, "p0"), self.timeline)
        self.target = VirtualEngine(new_core(self.target_settings, "d0"), self.timeline)
        self.target.sources["p0"] = self.source
        self.names = 0

    def name(self) -> str:
        self.names += 1
        return f"leg{self.names}"

    @rule(
        tokens=st.integers(1, 159), output=st.integers(1, 80), shared=ids, at_source=st.booleans()
    )
    def add_local(
        self, *, tokens: int, output: int, shared: tuple[int, ...], at_source: bool
    ) -> None:
        body = self.source if at_source else self.target
        failure = body.add(leg(self.name(), tokens, output, ids=shared))
        assert failure in {None, LegFailure.OVERLOADED}

    @rule(tokens=st.integers(1, 100), shared=ids)
    def add_prefill(self, tokens: int, shared: tuple[int, ...]) -> None:
        assert self.source.add(prefill(self.name(), tokens, shared)) in {
            None,
            LegFailure.OVERLOADED,
        }

    @precondition(lambda self: self.source.tickets)
    @rule(which=st.integers(0, 20), more=st.integers(0, 30), output=st.integers(1, 40))
    def add_decode(self, which: int, more: int, output: int) -> None:
        # The same KV handle may come twice: the second pull then fails.
        first = list(self.source.tickets)[which % len(self.source.tickets)]
        prompt = self.source.prompts[first].extended(more)
        one = decode(self.name(), prompt, self.source.tickets[first], output)
        assert self.target.add(one) in {None, LegFailure.OVERLOADED}

    @rule(which=st.integers(0, 50), at_source=st.booleans())
    def abort(self, *, which: int, at_source: bool) -> None:
        body = self.source if at_source else self.target
        if body.legs:
            body.abort([list(body.legs)[which % len(body.legs)]])

    @precondition(lambda self: self.source.tickets)
    @rule(which=st.integers(0, 50))
    def release(self, which: int) -> None:
        self.source.release(list(self.source.tickets)[which % len(self.source.tickets)])

    @rule(seconds=st.sampled_from([0.000_3, 0.003_1, 0.0297, 0.217]))
    def wait(self, seconds: float) -> None:
        self.timeline.run(until_s=self.timeline.now_s + seconds)

    @invariant()
    def loads_count_everyone(self) -> None:
        for body in (self.source, self.target):
            body.core.check_integrity()
            load = body.core.load(self.timeline.now_s)
            going = [not (other.finished or other.aborted) for other in body.legs.values()]
            alive = load.queued_requests + load.running_requests + load.pulling_requests
            assert sum(going) == alive
            assert 0 <= load.kv_used_fraction <= 1

    def teardown(self) -> None:
        """Left alone, every leg ends and no block stays in use."""
        self.timeline.run(until_s=self.timeline.now_s + 500)
        for body in (self.source, self.target):
            assert all(story.finished or story.aborted for story in body.legs.values())
            load = body.core.load(self.timeline.now_s)
            busy = load.queued_requests + load.running_requests + load.pulling_requests
            assert (busy, load.queued_tokens, load.kv_used_fraction) == (0, 0, 0.0)
            assert body.mirror.blocks == set(body.core._memory.blocks.idle_blocks())
            body.core.check_integrity()


class TwoEnginesInStages(TwoEngines):
    """The same where batches overlap."""

    target_settings = with_changes(SMALL, pipeline_stages=3)


class TwoEnginesPromptsFirst(TwoEngines):
    """The same where prompts are computed whole."""

    target_settings = with_changes(SMALL, scheduling=Scheduling.PREFILL_FIRST, prefix_caching=False)


class TwoEnginesWithStates(TwoEngines):
    """Each request has two blocks more than its tokens need."""

    source_settings = with_changes(SMALL, kv_blocks=42, request_blocks=2)
    target_settings = source_settings


TestTwoEngines = TwoEngines.TestCase
TestTwoEngines.settings = hypothesis_settings(max_examples=20, stateful_step_count=30)
TestTwoEnginesWithStates = TwoEnginesWithStates.TestCase
TestTwoEnginesInStages = TwoEnginesInStages.TestCase
TestTwoEnginesInStages.settings = hypothesis_settings(max_examples=20, stateful_step_count=30)
TestTwoEnginesPromptsFirst = TwoEnginesPromptsFirst.TestCase
TestTwoEnginesPromptsFirst.settings = hypothesis_settings(max_examples=20, stateful_step_count=30)
