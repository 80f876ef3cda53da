"""Counted engines and a small body in virtual time, for their tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import assert_never

from baton.domain.cache import CacheChangeKind, CacheUpdate, unpack_hashes
from baton.domain.fleet import Load
from baton.domain.handoff import Leg, LegFailure, LegKind, LegOutput, Ticket
from baton.domain.hashed_prompt import Outline, TokenIds
from baton.domain.value import evolve
from baton.perf.step_timing import StepBatch
from baton.simulator.engine.commands import CancelFetch, FreeSource, LoadBlocks, StartPull
from baton.simulator.network.timeline import Timeline
from baton.simulator.v1.core import V1Core
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.trace import output_payload


@dataclass(frozen=True, slots=True)
class Straight:
    """Steps that are linear in all that they compute."""

    step: float = 0.004_13
    token: float = 0.000_107
    decode: float = 0.000_051
    context: float = 0.000_000_3

    def step_s(self, batch: StepBatch) -> float:
        took_s = self.step + self.token * batch.prefill_tokens
        return (
            took_s
            + self.decode * batch.decode_requests
            + self.context * batch.decode_context_tokens
        )


SETTINGS = V1Settings(
    timing=Straight(),
    kv_blocks=200,
    kv_block_bytes=1000,
    block_size_tokens=4,
    max_len_tokens=400,
    max_running_requests=4,
    max_batched_tokens=16,
    lease_s=0.5,
    max_pulls=2,
)


def new_core(
    settings: V1Settings = SETTINGS, engine_id: str = "e0", *, jumps: bool = True
) -> V1Core:
    return V1Core(settings, engine_id=engine_id, model="tiny", address=engine_id, jumps=jumps)


def leg(
    leg_id: str,
    tokens: int = 30,
    output: int = 1,
    *,
    kind: LegKind = LegKind.LOCAL,
    ids: tuple[int, ...] = (),
) -> Leg:
    """A leg with an outline of blocks of 8 tokens; behind `ids`, its text is its own."""
    own = sum(ord(letter) * 31**place for place, letter in enumerate(leg_id))
    return Leg(
        leg_id=leg_id,
        request_id="r",
        kind=kind,
        prompt_token_ids=Outline(ids, tokens, block_tokens=8, own=own),
        max_tokens=1000,
        payload=output_payload(output),
    )


def prefill(leg_id: str, tokens: int = 30, ids: tuple[int, ...] = ()) -> Leg:
    return leg(leg_id, tokens, kind=LegKind.PREFILL, ids=ids)


def decode(leg_id: str, prompt: TokenIds, ticket: Ticket, output: int = 3) -> Leg:
    return evolve(
        leg(leg_id, output=output), kind=LegKind.DECODE, prompt_token_ids=prompt, ticket=ticket
    )


def run_dry(
    core: V1Core, now_s: float = 0.0, patience_s: float = 1e9
) -> list[tuple[float, LegOutput]]:
    """Compute until there is nothing to do; the outputs and when they came."""
    outputs: list[tuple[float, LegOutput]] = []
    while (took_s := core.begin(now_s, patience_s=patience_s)) is not None:
        core.check_integrity()
        now_s += took_s
        outputs += [(now_s, output) for output in core.finish(now_s)]
        core.check_integrity()
    return outputs


def prefilled(core: V1Core, one: Leg) -> Ticket:
    assert core.add(one) is None
    ((_, output),) = run_dry(core)
    assert output.ticket is not None
    return output.ticket


class Mirror:
    """What a reader of cache updates believes is cached."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.sequence = 0

    def take(self, update: CacheUpdate | None) -> None:
        if update is None:
            return
        self.sequence += not update.snapshot
        assert update.sequence == self.sequence
        for change in update.changes:
            hashes = set(unpack_hashes(change.hashes))
            match change.kind:
                case CacheChangeKind.STORED:
                    assert not hashes & self.held
                    self.held |= hashes
                case CacheChangeKind.REMOVED:
                    assert hashes <= self.held
                    self.held -= hashes
                case CacheChangeKind.CLEARED:
                    raise AssertionError("it never forgets everything")


@dataclass(slots=True)
class Story:
    """What became of a leg."""

    outputs: list[tuple[float, int]] = field(default_factory=list)
    cached_tokens: int | None = None
    finished: str | None = None
    aborted: bool = False

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.outputs)

    @property
    def first_at_s(self) -> float:
        return self.outputs[0][0]

    @property
    def last_at_s(self) -> float:
        return self.outputs[-1][0]


class Body:
    """One counted engine in virtual time; pulls take what they are said to."""

    def __init__(self, core: V1Core, timeline: Timeline, pull_s: float = 0.011) -> None:
        self.core = core
        self.timeline = timeline
        self.pull_s = pull_s
        self.sources: dict[str, Body] = {}
        self.stories: dict[str, Story] = {}
        self.tickets: dict[str, Ticket] = {}
        self.prompts: dict[str, Outline] = {}
        self.loads: list[Load] = []
        self.begun = 0
        self.mirror = Mirror()
        self._due = 0
        self._busy = False
        self._pulls: set[str] = set()
        self._patience_s = 1e9

    def add(self, one: Leg) -> LegFailure | None:
        failure = self.core.add(one)
        if failure is None:
            self.stories[one.leg_id] = Story()
            if isinstance(one.prompt_token_ids, Outline):
                self.prompts[one.leg_id] = one.prompt_token_ids
        self._changed()
        return failure

    def send_at(self, at_s: float, one: Leg) -> None:
        def send() -> None:
            assert self.add(one) is None

        self.timeline.at(at_s, send)

    def abort(self, leg_ids: Iterable[str]) -> None:
        leg_ids = tuple(leg_ids)
        for story in map(self.stories.__getitem__, leg_ids):
            story.aborted = story.finished is None
        self.core.abort(leg_ids)
        self._changed()

    def release(self, leg_id: str) -> bool:
        held = self.core.release(leg_id, self.timeline.now_s)
        self._changed()
        return held

    def look(self) -> None:
        self.loads.append(self.core.load(self.timeline.now_s))

    def _changed(self) -> None:
        if self._busy:
            left_s = self.core.interrupt(self.timeline.now_s)
            assert left_s is not None
            self._finish_after(left_s)
        else:
            self._begin()
        self._obey()

    def _begin(self) -> None:
        took_s = self.core.begin(self.timeline.now_s, patience_s=self._patience_s)
        self.core.check_integrity()
        self._busy = took_s is not None
        if took_s is not None:
            self.begun += 1
            self._finish_after(took_s)
        elif (expiry_s := self.core.next_expiry_s()) is not None:
            self.timeline.at(expiry_s, lambda: None if self._busy else self._changed())

    def _finish_after(self, left_s: float) -> None:
        self._due += 1
        due = self._due
        self.timeline.after(left_s, lambda: self._finish() if due == self._due else None)

    def _finish(self) -> None:
        self._busy = False
        for output in self.core.finish(self.timeline.now_s):
            self._hear(output)
        self.core.check_integrity()
        self._begin()
        self._obey()

    def _hear(self, output: LegOutput) -> None:
        story = self.stories[output.leg_id]
        assert story.finished is None
        assert not story.aborted
        assert (output.cached_tokens is not None) == (not story.outputs)
        if output.cached_tokens is not None:
            story.cached_tokens = output.cached_tokens
        story.outputs.append((self.timeline.now_s, len(output.token_ids)))
        story.finished = output.finish
        if output.ticket is not None:
            self.tickets[output.leg_id] = output.ticket

    def _obey(self) -> None:
        for order in self.core.take_orders():
            match order:
                case StartPull():
                    assert order.leg_id not in self._pulls
                    self._pulls.add(order.leg_id)
                    self._pull(order)
                case CancelFetch():
                    self._pulls.remove(order.leg_id)
                case FreeSource():
                    self.sources[order.ticket.address].release(order.ticket.leg_id)
                case LoadBlocks():
                    raise AssertionError("there is no host memory")
                case _:
                    assert_never(order)
        self.mirror.take(self.core.take_cache_update())
        self.core.check_integrity()

    def _pull(self, order: StartPull) -> None:
        def done() -> None:
            if order.leg_id not in self._pulls:
                return
            self._pulls.remove(order.leg_id)
            kept = self.sources[order.ticket.address].release(order.ticket.leg_id)
            output = self.core.pull_done(
                order.leg_id, blocks=order.blocks, took_s=self.pull_s, kept=kept
            )
            assert output is None
            self._changed()

        self.timeline.after(self.pull_s + 0.000_37 * order.blocks, done)


def impatient(settings: V1Settings, **changes: object) -> V1Settings:
    """Settings with some of them changed."""
    return replace(settings, **changes)  # type: ignore[arg-type]  # tests pass the right ones
