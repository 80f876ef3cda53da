"""Two counted engines and anything that may happen to them: nothing is lost and nothing leaks."""

from __future__ import annotations

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.domain.handoff import LegFailure
from baton.simulator.network.timeline import Timeline
from baton.simulator.v1.settings import Scheduling
from tests.simulator.v1_cores import (
    SETTINGS,
    VirtualEngine,
    decode,
    leg,
    new_core,
    prefill,
    with_changes,
)

SMALL = with_changes(SETTINGS, kv_blocks=40, max_waiting_requests=6)
ids = st.lists(st.integers(0, 1), max_size=8).map(tuple)


class TwoEngines(RuleBasedStateMachine):
    """A prefill and a decode engine; legs, pulls, aborts and time in any order."""

    target_settings = SMALL

    def __init__(self) -> None:
        super().__init__()
        self.timeline = Timeline()
        self.source = VirtualEngine(new_core(SMALL, "p0"), self.timeline)
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


TestTwoEngines = TwoEngines.TestCase
TestTwoEngines.settings = hypothesis_settings(max_examples=20, stateful_step_count=30)
TestTwoEnginesInStages = TwoEnginesInStages.TestCase
TestTwoEnginesInStages.settings = hypothesis_settings(max_examples=20, stateful_step_count=30)
TestTwoEnginesPromptsFirst = TwoEnginesPromptsFirst.TestCase
TestTwoEnginesPromptsFirst.settings = hypothesis_settings(max_examples=20, stateful_step_count=30)
