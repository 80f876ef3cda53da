"""Many steps at once are the same story as one at a time, whatever happens meanwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from baton.domain.fleet import Load
from baton.simulator.network.timeline import Timeline
from baton.simulator.v1.settings import Scheduling, V1Settings
from tests.simulator.v1_cores import (
    SETTINGS,
    LegLog,
    VirtualEngine,
    decode,
    leg,
    new_core,
    prefill,
    with_changes,
)


@dataclass(frozen=True)
class Doing:
    """Something that is done to the engines at a time."""

    after_s: float
    what: str
    tokens: int
    output: int
    ids: tuple[int, ...]
    which: int


doings = st.builds(
    Doing,
    after_s=st.floats(0.000_1, 0.3).map(lambda s: s * math.pi / 3),  # never just when a step ends
    what=st.sampled_from(["local", "local", "hand", "hand", "prefix", "abort", "release", "look"]),
    tokens=st.integers(1, 120),
    output=st.integers(1, 60),
    ids=st.lists(st.integers(0, 2), max_size=6).map(tuple),
    which=st.integers(0, 30),
)
sizes = st.builds(
    lambda blocks, seats, budget, first, longest, fewer: with_changes(
        SETTINGS,
        kv_blocks=blocks,
        max_running_requests=seats,
        max_batched_tokens=max(budget, seats),
        scheduling=first,
        long_prefill_tokens=longest,
        max_batched_tokens_while_decoding=None
        if fewer is None or first is Scheduling.PREFILL_FIRST
        else max(min(fewer, budget), seats),
    ),
    blocks=st.integers(12, 90),
    seats=st.integers(1, 6),
    budget=st.integers(4, 80),
    first=st.sampled_from(Scheduling),
    longest=st.sampled_from([None, 5]),
    fewer=st.none() | st.integers(4, 80),
)


def play(
    config: V1Settings, script: list[Doing], *, jumps: bool
) -> tuple[VirtualEngine, VirtualEngine]:
    timeline = Timeline(100.0)
    source = VirtualEngine(
        new_core(with_changes(config, kv_blocks=60), "p0", jumps=jumps), timeline
    )
    target = VirtualEngine(new_core(config, "d0", jumps=jumps), timeline)
    target.sources["p0"] = source
    at_s = 100.0
    for number, doing in enumerate(script):
        at_s += doing.after_s
        timeline.call_at(at_s, partial(_do, source, target, number, doing))
    timeline.run(until_s=at_s + 500)
    return source, target


def _do(source: VirtualEngine, target: VirtualEngine, number: int, doing: Doing) -> None:
    name = f"leg{number}"
    match doing.what:
        case "local":
            body = source if doing.which % 3 else target
            body.add(leg(name, doing.tokens, doing.output, ids=doing.ids))
        case "hand":
            source.add(prefill(name, doing.tokens, doing.ids))
        case "prefix" if source.tickets:
            first = list(source.tickets)[doing.which % len(source.tickets)]
            ticket = source.tickets[first]
            prompt = source.prompts[first].extended(doing.tokens % 30)
            target.add(decode(name, prompt, ticket, doing.output))
        case "abort" if target.legs:
            target.abort([list(target.legs)[doing.which % len(target.legs)]])
        case "release" if source.tickets:
            source.release(list(source.tickets)[doing.which % len(source.tickets)])
        case _:
            source.sample_load()
            target.sample_load()


def _assert_same_load(fast: Load, slow: Load) -> None:
    assert math.isclose(fast.step_s, slow.step_s, rel_tol=1e-6)
    assert math.isclose(fast.steps.busy_s, slow.steps.busy_s, rel_tol=1e-6, abs_tol=1e-9)
    assert _countable(fast) == _countable(slow)


def _countable(load: Load) -> Load:
    return load._replace(step_s=0.0, steps=load.steps._replace(busy_s=0.0), cache_sequence=0)


def _assert_same_log(fast: LegLog, slow: LegLog) -> None:
    assert (fast.finished, fast.cached_tokens) == (slow.finished, slow.cached_tokens)
    assert fast.aborted == slow.aborted
    assert fast.tokens <= slow.tokens if fast.aborted else fast.tokens == slow.tokens
    if fast.outputs:
        assert fast.outputs[0][1] == 1, "the first token has a step of its own"
        assert math.isclose(fast.first_at_s, slow.first_at_s, rel_tol=1e-9)
        assert fast.aborted or math.isclose(fast.last_at_s, slow.last_at_s, rel_tol=1e-9)


def doing(after_s: float, what: str, tokens: int, output: int, ids: tuple[int, ...]) -> Doing:
    return Doing(after_s, what, tokens, output, ids, 1)


# Once a prompt waited until a decode that had just been computed again had ended.
@example(
    with_changes(
        SETTINGS,
        kv_blocks=80,
        max_running_requests=3,
        max_batched_tokens=56,
        scheduling=Scheduling.PREFILL_FIRST,
    ),
    [
        doing(0.308, "local", 115, 53, (1, 1)),
        doing(0.129, "hand", 77, 1, ()),
        doing(0.119, "hand", 87, 1, (1, 1, 2, 0, 2)),
    ],
)
# A leg waits for the blocks of a lease beside a long decode; the release ends the stretch.
@example(
    SETTINGS,
    [
        doing(0.01, "hand", 100, 1, ()),
        doing(0.08, "local", 30, 60, (1,)),
        doing(0.05, "local", 120, 5, (2,)),
        doing(0.06, "release", 1, 1, ()),
    ],
)
@hypothesis_settings(max_examples=60)
@given(sizes, st.lists(doings, min_size=1, max_size=30))
def test_many_steps_at_once_are_as_one_at_a_time(config: V1Settings, script: list[Doing]) -> None:
    fast, slow = play(config, script, jumps=True), play(config, script, jumps=False)
    for quick, single in zip(fast, slow, strict=True):
        assert quick.legs.keys() == single.legs.keys()
        for leg_id, story in quick.legs.items():
            _assert_same_log(story, single.legs[leg_id])
        for ours, theirs in zip(quick.loads, single.loads, strict=True):
            _assert_same_load(ours, theirs)
        assert quick.core._memory.blocks.idle_blocks() == single.core._memory.blocks.idle_blocks()
        assert quick.mirror.blocks == set(quick.core._memory.blocks.idle_blocks())
        assert quick.started_steps <= single.started_steps
        quick.sample_load()
        load = quick.loads[-1]
        busy = (load.queued_requests, load.running_requests, load.pulling_requests)
        assert (busy, load.queued_tokens, load.kv_used_fraction) == ((0, 0, 0), 0, 0.0)


def test_a_long_answer_alone_is_a_handful_of_events() -> None:
    def begun(*, jumps: bool) -> int:
        timeline = Timeline()
        body = VirtualEngine(
            new_core(with_changes(SETTINGS, max_len_tokens=2000, kv_blocks=900), jumps=jumps),
            timeline,
        )
        body.add(leg("a", 10, 1000))
        timeline.run()
        assert body.legs["a"].tokens == 1000
        return body.started_steps

    assert begun(jumps=False) == 1000
    assert begun(jumps=True) == 2
