"""The counted engine against slow obvious ones: vLLM's rules in blocks, and the token engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from baton.domain.handoff import Leg, LegKind
from baton.engine.sim.engine import encode_kv_handle
from baton.perf.step_timing import StepBatch
from baton.policy.prefix_cache.block_hash import chain_hashes, chain_root
from baton.simulator.engine.core import SimCore
from baton.simulator.engine.settings import SimSettings
from baton.simulator.network.timeline import Timeline
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.trace import encode_output_tokens
from tests.simulator.v1_cores import SETTINGS, VirtualEngine, new_core, with_changes


class ScriptedRequest(NamedTuple):
    """A request: when it comes, what it says and how many tokens it gets."""

    at_s: float
    prompt: tuple[int, ...]
    output: int


# ---------------------------------------------------------------------- vLLM's rules in blocks
@dataclass(eq=False)
class SlowBlock:
    """A block: what others may find in it, how many use it, when it was last given back."""

    name: tuple[int, ...] | None = None
    users: int = 0
    freed: int = 0


@dataclass(eq=False)
class SlowRun:
    asked: ScriptedRequest
    tokens: list[int]
    computed: int = 0
    scheduled: int = 0
    blocks: list[SlowBlock] = field(default_factory=list)
    first_at_s: float | None = None
    last_at_s: float = 0.0
    cached: int | None = None


class SlowEngine:
    """vLLM V1's scheduler on lists of blocks that know the tokens they hold."""

    def __init__(self, config: V1Settings) -> None:
        self.config = config
        self.blocks = [SlowBlock() for _ in range(config.kv_blocks)]
        self.waiting: list[SlowRun] = []
        self.running: list[SlowRun] = []
        self.stamps = count(1)

    def serve(self, requests: list[ScriptedRequest]) -> list[SlowRun]:
        runs = [SlowRun(request, list(request.prompt)) for request in requests]
        to_come, now_s = list(runs), 0.0
        while to_come or self.waiting or self.running:
            while to_come and to_come[0].asked.at_s <= now_s:
                self.waiting.append(to_come.pop(0))
            work = self.schedule()
            if not work:
                if not self.waiting:
                    now_s = to_come[0].asked.at_s
                continue
            now_s += self.config.timing.step_s(self.shape(work))
            for run in work:
                run.computed += run.scheduled
                if run.computed == len(run.tokens):
                    self.emit(run, now_s)
        return runs

    def shape(self, work: list[SlowRun]) -> StepBatch:
        chunks = [run for run in work if len(run.tokens) - run.computed > 1]
        decodes = [run for run in work if run not in chunks]
        return StepBatch(
            prefill_tokens=sum(run.scheduled for run in chunks),
            prefill_requests=len(chunks),
            prefill_pairs=float(
                sum(run.computed + 1 + i for run in chunks for i in range(run.scheduled))
            ),
            prefill_context_tokens=sum(run.computed for run in chunks),
            decode_requests=len(decodes),
            decode_context_tokens=sum(len(run.tokens) for run in decodes),
            finished_prefills=sum(
                run.computed + run.scheduled == len(run.tokens) for run in chunks
            ),
        )

    def emit(self, run: SlowRun, now_s: float) -> None:
        run.tokens.append(0)
        run.last_at_s = now_s
        if run.first_at_s is None:
            run.first_at_s = now_s
        if len(run.tokens) == len(run.asked.prompt) + run.asked.output:
            self.running.remove(run)
            self.free(run)

    def budget(self) -> int:
        streams = any(
            len(run.asked.prompt) < len(run.tokens) == run.computed + 1 for run in self.running
        )
        return (
            streams and self.config.max_batched_tokens_while_decoding
        ) or self.config.max_batched_tokens

    def schedule(self) -> list[SlowRun]:
        budget, work = self.budget(), []
        longest = self.config.long_prefill_tokens
        if longest is None or len(self.running) + len(self.waiting) <= 1:
            longest = budget
        index, preempted = 0, False
        while index < len(self.running) and budget:
            run = self.running[index]
            tokens = min(len(run.tokens) - run.computed, longest, budget)
            while not (fits := self.allocate(run, run.computed + tokens)):
                victim = self.running.pop()
                preempted = True
                self.free(victim)
                self.waiting.insert(0, victim)
                if victim is run:
                    break
            if not fits:
                break
            run.scheduled = tokens
            budget -= tokens
            work.append(run)
            index += 1
        while self.waiting and budget and not preempted:
            if len(self.running) == self.config.max_running_requests:
                break
            run = self.waiting[0]
            hits = self.hits(run)
            free = sum(not block.users for block in self.blocks)
            touched = sum(not block.users for block in hits)
            if self.needed(len(run.tokens)) - len(hits) + touched > free:
                break
            for block in hits:
                block.users += 1
            run.blocks = hits
            run.computed = len(hits) * self.config.block_size_tokens
            run.cached = run.computed if run.cached is None else run.cached
            run.scheduled = min(len(run.tokens) - run.computed, longest, budget)
            assert self.allocate(run, run.computed + run.scheduled)
            self.running.append(self.waiting.pop(0))
            budget -= run.scheduled
            work.append(run)
        return work

    def needed(self, tokens: int) -> int:
        return math.ceil(tokens / self.config.block_size_tokens)

    def hits(self, run: SlowRun) -> list[SlowBlock]:
        size, found = self.config.block_size_tokens, []
        for end in range(size, len(run.tokens), size):  # the last token is never a hit
            same = [block for block in self.blocks if block.name == tuple(run.tokens[:end])]
            if not same:
                break
            found.append(same[0])
        return found

    def allocate(self, run: SlowRun, tokens: int) -> bool:
        free = [block for block in self.blocks if not block.users]
        more = self.needed(tokens) - len(run.blocks)
        if more > len(free):
            return False
        free.sort(key=lambda block: (block.name is not None, block.freed))
        for block in free[: max(0, more)]:
            block.name, block.users = None, 1
            run.blocks.append(block)
        self.name(run, min(tokens, len(run.asked.prompt)))
        return True

    def name(self, run: SlowRun, tokens: int) -> None:
        """Let others find the full blocks; where an equal one is found already, use that."""
        size = self.config.block_size_tokens
        for index in range(tokens // size):
            name = tuple(run.tokens[: (index + 1) * size])
            own = run.blocks[index]
            equal = next((block for block in self.blocks if block.name == name), own)
            if equal is not own:
                equal.users += 1
                own.users = 0
            equal.name = name
            run.blocks[index] = equal

    def free(self, run: SlowRun) -> None:
        self.name(run, run.computed)
        for block in reversed(run.blocks):
            block.users -= 1
            block.freed = next(self.stamps)
        run.blocks, run.computed = [], 0


prompts = st.builds(
    lambda stem, tokens, tail: (*(stem,) * tokens, *tail),
    stem=st.integers(3, 4),
    tokens=st.integers(0, 60),
    tail=st.lists(st.integers(3, 4), min_size=1, max_size=40).map(tuple),
)
asked = st.lists(
    st.tuples(st.floats(0.000_1, 0.15).map(lambda s: s * math.pi / 3), prompts, st.integers(1, 60)),
    min_size=1,
    max_size=14,
)
pressed = st.builds(
    lambda blocks, seats, budget, longest, fewer: with_changes(
        SETTINGS,
        kv_blocks=blocks,
        max_running_requests=seats,
        max_batched_tokens=max(budget, seats),
        long_prefill_tokens=longest,
        max_batched_tokens_while_decoding=fewer and max(min(fewer, budget), seats),
    ),
    blocks=st.integers(40, 90),
    seats=st.integers(1, 6),
    budget=st.integers(4, 80),
    longest=st.sampled_from([None, None, 5]),
    fewer=st.none() | st.integers(4, 80),
)


def in_order(gaps: list[tuple[float, tuple[int, ...], int]]) -> list[ScriptedRequest]:
    at_s, requests = 0.0, []
    for gap_s, prompt, output in gaps:
        at_s += gap_s
        requests.append(ScriptedRequest(at_s, prompt, output))
    return requests


def as_leg(number: int, one: ScriptedRequest) -> Leg:
    return Leg(
        leg_id=f"r{number}",
        request_id="r",
        kind=LegKind.LOCAL,
        prompt_token_ids=one.prompt,
        max_tokens=one.output,
        payload=encode_output_tokens(one.output),
    )


def counted(config: V1Settings, requests: list[ScriptedRequest]) -> VirtualEngine:
    timeline = Timeline()
    body = VirtualEngine(new_core(config), timeline)
    for number, asked_request in enumerate(requests):
        body.send_at(asked_request.at_s, as_leg(number, asked_request))
    timeline.run()
    return body


@hypothesis_settings(max_examples=60)
@given(pressed, asked.map(in_order))
def test_scheduling_is_vllms(config: V1Settings, requests: list[ScriptedRequest]) -> None:
    slow = SlowEngine(config)
    runs = slow.serve(requests)
    body = counted(config, requests)
    for run, story in zip(runs, body.legs.values(), strict=True):
        assert run.first_at_s is not None
        assert story.tokens == run.asked.output
        assert story.cached_tokens == run.cached
        assert math.isclose(story.first_at_s, run.first_at_s, rel_tol=1e-9)
        assert math.isclose(story.last_at_s, run.last_at_s, rel_tol=1e-9)
    size = config.block_size_tokens
    root = chain_root(model="tiny", block_size_tokens=size)
    idle = sorted((block for block in slow.blocks if block.name), key=lambda block: block.freed)
    hashes = [chain_hashes(root, block.name or (), size)[-1] for block in idle]
    assert body.core._memory.blocks.idle_blocks() == hashes


# ---------------------------------------------------------------------- the token engine
@hypothesis_settings(max_examples=60)
@given(st.integers(1, 6), st.integers(6, 80), asked.map(in_order))
def test_with_memory_to_spare_it_is_the_token_engine(
    seats: int, budget: int, requests: list[ScriptedRequest]
) -> None:
    exact = SimSettings(
        block_size_tokens=4,
        kv_blocks=9000,
        max_running_requests=seats,
        max_batched_tokens=budget,
        max_len_tokens=400,
    )
    requests = [  # different prompts: this engine finds blocks a step earlier than that one
        replaced._replace(prompt=(50 + number, *replaced.prompt))
        for number, replaced in enumerate(requests)
    ]
    config = replace(
        SETTINGS,
        timing=AsExact(exact),
        kv_blocks=9000,
        max_running_requests=seats,
        max_batched_tokens=budget,
    )
    firsts, lasts = token_engine(exact, requests)
    stories = counted(config, requests).legs.values()
    for first_s, last_s, story in zip(firsts, lasts, stories, strict=True):
        assert math.isclose(story.first_at_s, first_s, rel_tol=1e-9)
        assert math.isclose(story.last_at_s, last_s, rel_tol=1e-9)


@dataclass(frozen=True)
class AsExact:
    """Steps as the token engine has them."""

    exact: SimSettings

    def step_s(self, batch: StepBatch) -> float:
        return self.exact.step_s(
            prefill_tokens=batch.prefill_tokens, decode_requests=batch.decode_requests
        )


def token_engine(
    exact: SimSettings, requests: list[ScriptedRequest]
) -> tuple[list[float], list[float]]:
    core = SimCore(exact, engine_id="e", model="m", address="a", encode_kv_handle=encode_kv_handle)
    firsts, lasts = [0.0] * len(requests), [0.0] * len(requests)
    now_s, sent = 0.0, 0
    while True:
        while sent < len(requests) and requests[sent].at_s <= now_s:
            core.add(as_leg(sent, requests[sent]))
            sent += 1
        step = core.begin_step(now_s)
        if step is None:
            if sent == len(requests):
                return firsts, lasts
            now_s = requests[sent].at_s
            continue
        now_s += step.duration_s
        for output in core.finish_step(now_s):
            number = int(output.leg_id[1:])
            firsts[number] = firsts[number] or now_s
            lasts[number] = now_s
