"""Counted engines and a small body in virtual time, for their tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import assert_never

from baton.domain.cache import CacheChangeKind, CacheUpdate, unpack_hashes
from baton.domain.fleet import Load
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegKind, LegOutput
from baton.domain.hashed_prompt import HashedPrompt, TokenIds
from baton.domain.value import evolve
from baton.perf.step_timing import StepBatch
from baton.simulator.engine.commands import CancelFetch, FreeSource, LoadBlocks, StartPull
from baton.simulator.network.timeline import Timeline
from baton.simulator.v1.core import V1Core
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.trace import encode_output_tokens


@dataclass(frozen=True, slots=True)
class LinearStepTiming:
    """Steps that are linear in all that they compute."""

    per_step_s: float = 0.004_13
    per_prefill_token_s: float = 0.000_107
    per_decode_s: float = 0.000_051
    per_context_token_s: float = 0.000_000_3

    def step_s(self, batch: StepBatch) -> float:
        took_s = self.per_step_s + self.per_prefill_token_s * batch.prefill_tokens
        return (
            took_s
            + self.per_decode_s * batch.decode_requests
            + self.per_context_token_s * batch.decode_context_tokens
        )


SETTINGS = V1Settings(
    timing=LinearStepTiming(),
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
    return V1Core(settings, engine_id=engine_id, model="tiny", address=engine_id, multi_step=jumps)


def leg(
    leg_id: str,
    tokens: int = 30,
    output: int = 1,
    *,
    kind: LegKind = LegKind.LOCAL,
    ids: tuple[int, ...] = (),
) -> Leg:
    """A leg with an outline of blocks of 8 tokens; behind `ids`, its text is its own."""
    text_seed = sum(ord(letter) * 31**place for place, letter in enumerate(leg_id))
    return Leg(
        leg_id=leg_id,
        request_id="r",
        kind=kind,
        prompt_token_ids=HashedPrompt(ids, tokens, block_tokens=8, tail_id=text_seed),
        max_tokens=1000,
        payload=encode_output_tokens(output),
    )


def prefill(leg_id: str, tokens: int = 30, ids: tuple[int, ...] = ()) -> Leg:
    return leg(leg_id, tokens, kind=LegKind.PREFILL, ids=ids)


def decode(leg_id: str, prompt: TokenIds, ticket: KvHandle, output: int = 3) -> Leg:
    return evolve(
        leg(leg_id, output=output), kind=LegKind.DECODE, prompt_token_ids=prompt, kv_handle=ticket
    )


def run_until_idle(
    core: V1Core, now_s: float = 0.0, patience_s: float = 1e9
) -> list[tuple[float, LegOutput]]:
    """Compute until there is nothing to do; the outputs and when they came."""
    outputs: list[tuple[float, LegOutput]] = []
    while (took_s := core.begin(now_s, horizon_s=patience_s)) is not None:
        core.check_integrity()
        now_s += took_s
        outputs += [(now_s, output) for output in core.finish(now_s)]
        core.check_integrity()
    return outputs


def run_prefill(core: V1Core, prefill_leg: Leg) -> KvHandle:
    assert core.add(prefill_leg) is None
    ((_, output),) = run_until_idle(core)
    assert output.kv_handle is not None
    return output.kv_handle


class CacheMirror:
    """What a reader of cache updates believes is cached."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.sequence = 0

    def apply(self, update: CacheUpdate | None) -> None:
        if update is None:
            return
        self.sequence += not update.is_snapshot
        assert update.sequence == self.sequence
        for change in update.changes:
            hashes = set(unpack_hashes(change.packed_hashes))
            match change.kind:
                case CacheChangeKind.STORED:
                    assert not hashes & self.blocks
                    self.blocks |= hashes
                case CacheChangeKind.REMOVED:
                    assert hashes <= self.blocks
                    self.blocks -= hashes
                case CacheChangeKind.CLEARED:
                    raise AssertionError("it never forgets everything")


@dataclass(slots=True)
class LegLog:
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


class VirtualEngine:
    """One counted engine in virtual time; pulls take what they are said to."""

    def __init__(self, core: V1Core, timeline: Timeline, pull_s: float = 0.011) -> None:
        self.core = core
        self.timeline = timeline
        self.pull_s = pull_s
        self.sources: dict[str, VirtualEngine] = {}
        self.legs: dict[str, LegLog] = {}
        self.tickets: dict[str, KvHandle] = {}
        self.prompts: dict[str, HashedPrompt] = {}
        self.loads: list[Load] = []
        self.started_steps = 0
        self.mirror = CacheMirror()
        self._timer_id = 0
        self._busy = False
        self._pulls: set[str] = set()
        self._patience_s = 1e9

    def add(self, new_leg: Leg) -> LegFailure | None:
        failure = self.core.add(new_leg)
        if failure is None:
            self.legs[new_leg.leg_id] = LegLog()
            if isinstance(new_leg.prompt_token_ids, HashedPrompt):
                self.prompts[new_leg.leg_id] = new_leg.prompt_token_ids
        self._changed()
        return failure

    def send_at(self, at_s: float, new_leg: Leg) -> None:
        def send() -> None:
            assert self.add(new_leg) is None

        self.timeline.call_at(at_s, send)

    def abort(self, leg_ids: Iterable[str]) -> None:
        leg_ids = tuple(leg_ids)
        for log in map(self.legs.__getitem__, leg_ids):
            log.aborted = log.finished is None
        self.core.abort(leg_ids)
        self._changed()

    def release(self, leg_id: str) -> bool:
        was_leased = self.core.release(leg_id, self.timeline.now_s)
        self._changed()
        return was_leased

    def sample_load(self) -> None:
        self.loads.append(self.core.load(self.timeline.now_s))

    def _changed(self) -> None:
        if self._busy:
            remaining_s = self.core.interrupt(self.timeline.now_s)
            assert remaining_s is not None
            self._finish_after(remaining_s)
        else:
            self._begin()
        self._execute_orders()

    def _begin(self) -> None:
        took_s = self.core.begin(self.timeline.now_s, horizon_s=self._patience_s)
        self.core.check_integrity()
        self._busy = took_s is not None
        if took_s is not None:
            self.started_steps += 1
            self._finish_after(took_s)
        elif (expiry_s := self.core.next_expiry_s()) is not None:
            self.timeline.call_at(expiry_s, lambda: None if self._busy else self._changed())

    def _finish_after(self, remaining_s: float) -> None:
        self._timer_id += 1
        timer_id = self._timer_id
        self.timeline.call_later(
            remaining_s, lambda: self._finish() if timer_id == self._timer_id else None
        )

    def _finish(self) -> None:
        self._busy = False
        for output in self.core.finish(self.timeline.now_s):
            self._on_output(output)
        self.core.check_integrity()
        self._begin()
        self._execute_orders()

    def _on_output(self, output: LegOutput) -> None:
        log = self.legs[output.leg_id]
        assert log.finished is None
        assert not log.aborted
        assert (output.cached_tokens is not None) == (not log.outputs)
        if output.cached_tokens is not None:
            log.cached_tokens = output.cached_tokens
        log.outputs.append((self.timeline.now_s, len(output.token_ids)))
        log.finished = output.finish
        if output.kv_handle is not None:
            self.tickets[output.leg_id] = output.kv_handle

    def _execute_orders(self) -> None:
        for order in self.core.pop_commands():
            match order:
                case StartPull():
                    assert order.leg_id not in self._pulls
                    self._pulls.add(order.leg_id)
                    self._pull(order)
                case CancelFetch():
                    self._pulls.remove(order.leg_id)
                case FreeSource():
                    self.sources[order.kv_handle.address].release(order.kv_handle.leg_id)
                case LoadBlocks():
                    raise AssertionError("there is no host memory")
                case _:
                    assert_never(order)
        self.mirror.apply(self.core.pop_cache_update())
        self.core.check_integrity()

    def _pull(self, order: StartPull) -> None:
        def done() -> None:
            if order.leg_id not in self._pulls:
                return
            self._pulls.remove(order.leg_id)
            kept = self.sources[order.kv_handle.address].release(order.kv_handle.leg_id)
            output = self.core.pull_done(
                order.leg_id, blocks=order.blocks, duration_s=self.pull_s, source_kept=kept
            )
            assert output is None
            self._changed()

        self.timeline.call_later(self.pull_s + 0.000_37 * order.blocks, done)


def with_changes(settings: V1Settings, **changes: object) -> V1Settings:
    """Settings with some of them changed."""
    return replace(settings, **changes)  # type: ignore[arg-type]  # tests pass the right ones
