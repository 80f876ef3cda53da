from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.domain.handoff import KvHandle, Leg, LegFailure, LegKind, LegOutput
from baton.domain.kv_events import BlocksCleared, BlocksRemoved, BlocksStored
from baton.domain.request import FinishReason
from baton.engine.sim import OnTransferFailure, SimSettings, expected_tokens
from baton.engine.sim.engine import decode_kv_handle, encode_kv_handle
from baton.simulator.engine.commands import CancelFetch, FreeSource, LoadBlocks, StartPull
from baton.simulator.engine.core import SimCore

SMALL = SimSettings(
    max_len_tokens=40,
    block_size_tokens=4,
    kv_blocks=14,
    max_running_requests=2,  # so few that legs have to wait for it
    max_waiting_requests=6,
    max_batched_tokens=8,
    lease_s=0.5,
    prefill_tokens_per_s=1000.0,
    eos_probability=0.03,
)
FAILING = replace(SMALL, on_transfer_failure=OnTransferFailure.FAIL)
TIERED = replace(SMALL, max_running_requests=4, host_blocks=9)
# Prompts share beginnings, so that the prefix caches are hit.
STEMS = [tuple(range(3, 39)), tuple(range(40, 76)), tuple(range(3, 20)) + tuple(range(50, 69))]


@dataclass
class LegTrace:
    """What a leg was asked and what came of it."""

    leg: Leg
    outputs: list[LegOutput] = field(default_factory=list)
    aborted: bool = False

    @property
    def ended(self) -> bool:
        return self.aborted or any(output.finish is not None for output in self.outputs)

    def check(self, config: SimSettings) -> None:
        tokens = tuple(token for output in self.outputs for token in output.token_ids)
        prefill = self.leg.kind is LegKind.PREFILL
        expected = expected_tokens(
            self.leg.prompt_token_ids,
            1 if prefill else self.leg.max_tokens,
            model="tiny",
            settings=config,
            min_tokens=1 if prefill else self.leg.min_tokens,
        )
        assert tokens == expected[: len(tokens)]
        assert all(output.finish is None for output in self.outputs[:-1])
        assert all(output.cached_tokens is None for output in self.outputs[1:])
        if not self.outputs or self.outputs[-1].finish is None:
            return
        last = self.outputs[-1]
        assert (last.kv_handle is not None) == prefill
        if last.finish is FinishReason.ERROR:
            assert config.on_transfer_failure is OnTransferFailure.FAIL
            assert tokens == ()
        else:
            assert tokens == expected


class Body:
    """Gives one core time and carries out its orders when told to."""

    def __init__(self, engine_id: str, config: SimSettings) -> None:
        self.config = config
        self.core = SimCore(
            config,
            engine_id=engine_id,
            model="tiny",
            address=engine_id,
            encode_kv_handle=encode_kv_handle,
        )
        self.stories: dict[str, LegTrace] = {}
        self.pulls: dict[str, StartPull] = {}
        self.loads: dict[str, LoadBlocks] = {}
        self.frees: list[FreeSource] = []
        self.cached: dict[str, set[bytes]] = {"gpu": set(), "cpu": set()}
        self.stepping = False

    def add(self, leg: Leg) -> LegFailure | None:
        ticket = None if leg.kv_handle is None else decode_kv_handle(leg.kv_handle)
        failure = self.core.add(leg, ticket)
        if failure is None:
            self.stories[leg.leg_id] = LegTrace(leg)
        return failure

    def begin(self, now_s: float) -> None:
        step = self.core.begin_step(now_s)
        self.stepping = step is not None
        if step is not None:
            assert 0 < step.tokens <= self.config.max_batched_tokens
            assert step.duration_s > 0
        self.absorb()

    def finish(self, now_s: float) -> None:
        self.stepping = False
        for output in self.core.finish_step(now_s):
            self.record_output(output)
        self.absorb()

    def record_output(self, output: LegOutput) -> None:
        story = self.stories[output.leg_id]
        assert not story.ended, f"{output} came after the end of {story}"
        story.outputs.append(output)
        story.check(self.config)

    def abort(self, leg_id: str) -> None:
        story = self.stories[leg_id]
        story.aborted = story.aborted or not story.ended
        self.core.abort([leg_id])
        self.absorb()

    def absorb(self) -> None:
        for order in self.core.pop_commands():
            match order:
                case StartPull():
                    assert order.leg_id not in self.pulls
                    self.pulls[order.leg_id] = order
                case LoadBlocks():
                    assert order.leg_id not in self.loads
                    self.loads[order.leg_id] = order
                case CancelFetch():
                    assert (order.leg_id in self.pulls) != (order.leg_id in self.loads)
                    self.pulls.pop(order.leg_id, None)
                    self.loads.pop(order.leg_id, None)
                case FreeSource():
                    self.frees.append(order)
        for event in self.core.pop_events():
            match event:
                case BlocksStored():
                    somewhere = self.cached["gpu"] | self.cached["cpu"]
                    assert event.parent_hash is None or event.parent_hash in somewhere
                    tier = self.cached[event.tier or "?"]
                    assert not tier & set(event.block_hashes)
                    tier |= set(event.block_hashes)
                case BlocksRemoved():
                    tier = self.cached[event.tier or "?"]
                    assert tier >= set(event.block_hashes)
                    tier -= set(event.block_hashes)
                case BlocksCleared():
                    self.cached = {"gpu": set(), "cpu": set()}


class TwoCores(RuleBasedStateMachine):
    """A prefill and a decode core; legs, steps, pulls, aborts and time in any order."""

    decode_settings = SMALL

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.source = Body("p0", SMALL)
        self.target = Body("d0", self.decode_settings)
        self.tickets: list[tuple[Leg, KvHandle]] = []
        self.ids = 0

    def leg(self, kind: LegKind, prompt: tuple[int, ...], **rest: object) -> Leg:
        self.ids += 1
        fields = {"max_tokens": 1} | rest
        return Leg(
            leg_id=f"leg-{self.ids}",
            request_id="r",
            kind=kind,
            prompt_token_ids=prompt,
            **fields,  # type: ignore[arg-type]  # the rules pass the right ones
        )

    @rule(
        stem=st.sampled_from(STEMS),
        tokens=st.integers(1, 36),
        tail=st.integers(3, 5),
        limits=st.tuples(st.integers(1, 30), st.integers(0, 3)),
        salt=st.sampled_from([None, "", "tenant"]),
        at_source=st.booleans(),
    )
    def add_local(
        self,
        *,
        stem: tuple[int, ...],
        tokens: int,
        tail: int,
        limits: tuple[int, int],
        salt: str | None,
        at_source: bool,
    ) -> None:
        prompt = (*stem[:tokens], tail)
        rest = {"max_tokens": limits[0], "min_tokens": limits[1], "cache_salt": salt}
        leg = self.leg(LegKind.LOCAL, prompt, **rest)
        failure = (self.source if at_source else self.target).add(leg)
        assert failure in {None, LegFailure.OVERLOADED}

    @rule(stem=st.sampled_from(STEMS), tokens=st.integers(1, 36))
    def add_prefill(self, stem: tuple[int, ...], tokens: int) -> None:
        leg = self.leg(LegKind.PREFILL, stem[:tokens])
        assert self.source.add(leg) in {None, LegFailure.OVERLOADED}

    @precondition(lambda self: self.tickets)
    @rule(
        index=st.integers(0, 20),
        max_tokens=st.integers(1, 30),
        more=st.integers(0, 12),
        resumed=st.integers(0, 3),
    )
    def add_decode(self, index: int, max_tokens: int, more: int, resumed: int) -> None:
        # The same KV handle may come twice: the second pull then fails. With `more`, it is a prefix
        # fetch: it covers the beginning of the prompt only.
        prefill, ticket = self.tickets[index % len(self.tickets)]
        prompt = prefill.prompt_token_ids
        prompt = (*prompt, *(90 for _ in range(min(more, 38 - len(prompt)))))
        prompt += expected_tokens(prompt, resumed, model="tiny", settings=SMALL, min_tokens=resumed)
        leg = self.leg(LegKind.DECODE, prompt, max_tokens=max_tokens, kv_handle=ticket)
        assert self.target.add(leg) in {None, LegFailure.OVERLOADED, LegFailure.REJECTED}

    @rule(at_source=st.booleans())
    def step(self, *, at_source: bool) -> None:
        body = self.source if at_source else self.target
        if body.stepping:
            body.finish(self.now_s)
        else:
            body.begin(self.now_s)
        self.collect_tickets()

    @rule(duration_s=st.sampled_from([0.01, 0.1, 0.3]))
    def let_time_pass(self, duration_s: float) -> None:
        self.now_s += duration_s

    @precondition(lambda self: self.target.pulls)
    @rule(index=st.integers(0, 20), works=st.booleans())
    def end_pull(self, *, index: int, works: bool) -> None:
        order = self.target.pulls.pop(sorted(self.target.pulls)[index % len(self.target.pulls)])
        if works:
            kept = self.source.core.release(order.kv_handle.leg_id, self.now_s)
            output = self.target.core.pull_done(
                order.leg_id, blocks=order.blocks, duration_s=0.01, source_kept=kept
            )
        else:
            output = self.target.core.pull_failed(order.leg_id)
        if output is not None:
            self.target.record_output(output)
        self.target.absorb()

    @precondition(lambda self: self.target.loads)
    @rule(index=st.integers(0, 20))
    def end_load(self, *, index: int) -> None:
        order = self.target.loads.pop(sorted(self.target.loads)[index % len(self.target.loads)])
        assert order.blocks > 0
        self.target.core.load_done(order.leg_id)
        self.target.absorb()

    @rule(at_source=st.booleans())
    def reset_cache(self, *, at_source: bool) -> None:
        body = self.source if at_source else self.target
        unused = body.core.load().kv_used_fraction == 0
        assert body.core.reset_cache() == unused
        body.absorb()
        assert not (unused and any(body.cached.values()))

    @precondition(lambda self: self.target.frees)
    @rule()
    def free_source(self) -> None:
        self.source.core.release(self.target.frees.pop().kv_handle.leg_id, self.now_s)

    @rule(index=st.integers(0, 50), at_source=st.booleans())
    def abort(self, *, index: int, at_source: bool) -> None:
        body = self.source if at_source else self.target
        if body.stories:
            body.abort(list(body.stories)[index % len(body.stories)])

    def collect_tickets(self) -> None:
        self.tickets = [
            (story.leg, output.kv_handle)
            for story in self.source.stories.values()
            for output in story.outputs
            if output.kv_handle is not None
        ]

    @invariant()
    def everything_is_in_one_place(self) -> None:
        for body in (self.source, self.target):
            body.core.check_integrity()
            load = body.core.load()
            live = sum(1 for story in body.stories.values() if not story.ended)
            waiting = load.queued_requests + load.pulling_requests
            assert waiting + load.running_requests == live
            assert load.running_requests <= body.config.max_running_requests
            assert 0 <= load.kv_used_fraction <= 1

    @invariant()
    def events_say_what_is_cached(self) -> None:
        for body in (self.source, self.target):
            assert body.cached["gpu"] == set(body.core._memory._pool._block_of)
            assert body.cached["cpu"] == body.core._memory._host.block_hashes()
            assert len(body.cached["cpu"]) <= body.config.host_blocks

    def teardown(self) -> None:
        """Left alone, with all pulls working or failing, every leg ends and nothing is held."""
        for turn in range(3000):
            bodies = (self.source, self.target)
            if all(story.ended for body in bodies for story in body.stories.values()):
                break
            self.now_s += 0.02
            for at_source in (True, False):
                self.step(at_source=at_source)
            if self.target.pulls:
                self.end_pull(index=0, works=turn % 2 == 0)
            if self.target.loads:
                self.end_load(index=0)
        else:
            raise AssertionError("a leg never ended")
        self.now_s += SMALL.lease_s
        for body in (self.source, self.target):
            if body.stepping:
                body.finish(self.now_s)
            body.core.expire_leases(self.now_s + SMALL.lease_s)
            load = body.core.load()
            assert (load.queued_tokens, load.kv_used_fraction) == (0, 0.0)
        self.everything_is_in_one_place()


class TwoCoresThatFail(TwoCores):
    """The same where a failed pull ends its leg."""

    decode_settings = FAILING


class TwoCoresWithHostMemory(TwoCores):
    """The same where evicted blocks go to the host's memory and come back."""

    decode_settings = TIERED


TestTwoCores = TwoCores.TestCase
TestTwoCores.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
TestTwoCoresWithHostMemory = TwoCoresWithHostMemory.TestCase
TestTwoCoresWithHostMemory.settings = settings(
    max_examples=40, stateful_step_count=60, deadline=None
)
TestTwoCoresThatFail = TwoCoresThatFail.TestCase
TestTwoCoresThatFail.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
