"""vLLM V1's scheduling rules, on counts.

Theory of operation: running legs come first, in the order of admission. Each gets its missing
tokens (a decode one token, a prompt its next chunk) until the token budget is used up. If a leg
lacks a block, the leg admitted last is preempted: it returns to the head of the queue and
recomputes. This repeats until there is a block or the leg itself is preempted; a step with
preemptions admits no leg.

Otherwise new legs are admitted: first legs with arrived blocks, then by arrival without overtaking.
Admission needs token budget, a sequence slot (max_num_seqs) and room for all known tokens, but
takes only the blocks for this step. A leg with blocks to pull takes all of them beforehand, and
only if the blocks that running prompts still need stay free. A step with streaming legs may have
its own budget (`engine.vllm.patches.step_budget`). Source: vLLM 0.32, v1/core/sched/scheduler.py
`schedule`
and v1/core/kv_cache_manager.py `allocate_slots`, with their defaults (scheduler_reserve_full_isl,
no watermark).

`Scheduling.PREFILL_FIRST`: whole prompts of new legs in steps of their own; decodes in steps
without admissions. Source: vLLM 0.2.6, core/scheduler.py; DistServe, arXiv 2401.09670, §2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum, auto
from itertools import chain as concatenate

from baton.domain.value import Value
from baton.simulator.engine.blocks import expect
from baton.simulator.engine.commands import EngineCommand, FreeSource, SimKvHandle, StartPull
from baton.simulator.v1.memory import V1Memory
from baton.simulator.v1.runs import LegRun, LegRunState
from baton.simulator.v1.settings import Scheduling, V1Settings


class BlockedReason(Enum):
    """Why the last step admitted no more legs."""

    QUEUE_EMPTY = auto()
    BUDGET = auto()
    PREEMPTED = auto()
    """The step preempted a leg for its blocks."""
    SLOTS = auto()
    MEMORY = auto()


class QueueCounts(Value, kw_only=False):
    """Legs by state, and the tokens that they still have to compute."""

    queued: int
    pulling: int
    running: int
    queued_tokens: int


class Scheduler:
    """The queues of one engine, and the choice of its next step's legs."""

    def __init__(
        self, settings: V1Settings, memory: V1Memory, commands: list[EngineCommand]
    ) -> None:
        self.waiting: deque[LegRun] = deque()
        self.ready: deque[LegRun] = deque()
        self.running: list[LegRun] = []
        self.pull_queue: deque[LegRun] = deque()
        self.pulling: dict[str, LegRun] = {}
        self.blocked_reason = BlockedReason.QUEUE_EMPTY
        self.preemptions = 0
        self.only_decodes = False
        """Whether the last step has only running legs, each with one token."""
        self.leading_decodes = 0
        """Leading legs of the last step that are known to decode one token each."""
        self._settings = settings
        self._is_prefill_first = settings.scheduling is Scheduling.PREFILL_FIRST
        self._memory = memory
        self._commands = commands
        self._active_pulls = 0
        self._token_budget = self._max_chunk_tokens = settings.max_batched_tokens
        self._partial_prefills: set[LegRun] = set()
        """Running legs with known tokens left after the step under way."""

    # ------------------------------------------------------------------ in and out
    def add(self, run: LegRun) -> None:
        """Queue a new leg."""
        if not run.needs_pull_slot:
            self.waiting.append(run)
            return
        run.state = LegRunState.PULL_QUEUED
        self.pull_queue.append(run)
        self._admit_pulls()

    def _on_pull_done(self, run: LegRun) -> None:
        del self.pulling[run.leg_id]
        run.kv_handle = None
        run.state = LegRunState.READY
        self.ready.append(run)
        self.release_pull_slot(run)

    def apply_pull_or_abort(self, run: LegRun, local_tokens: int | None) -> None:
        """Apply a pull that left `local_tokens` tokens here, or an abort (None)."""
        if local_tokens is None:
            self.remove(run)
        elif run.state is LegRunState.PULLING:
            self._memory.cache_full_blocks(run, local_tokens)
            # The last token is always computed here: its logits pick the next one.
            run.computed_tokens = min(local_tokens, run.known_tokens - 1)
            self._on_pull_done(run)

    def remove(self, run: LegRun) -> None:
        """End a leg in any state: remove it from its queue and free its blocks."""
        match run.state:
            case LegRunState.PULL_QUEUED:
                self.pull_queue.remove(run)
                run.needs_pull_slot = False  # it never had a slot
            case LegRunState.WAITING:
                self.waiting.remove(run)
            case LegRunState.PULLING:
                del self.pulling[run.leg_id]
            case LegRunState.READY:
                self.ready.remove(run)
            case LegRunState.RUNNING:
                self.running.remove(run)
            case LegRunState.ENDED:
                raise AssertionError(f"leg {run.leg_id} ends twice")
        self._partial_prefills.discard(run)
        run.state = LegRunState.ENDED
        self.release_pull_slot(run)
        self._memory.free(run)

    def remove_ended(self, runs: list[LegRun]) -> None:
        """End running legs, in this order."""
        for run in runs:
            run.state = LegRunState.ENDED
            self._memory.free(run)
        self.running = [run for run in self.running if run.state is LegRunState.RUNNING]

    def release_pull_slot(self, run: LegRun) -> None:
        """Free a leg's pull slot, if it has one, for the next pull."""
        if run.needs_pull_slot:
            run.needs_pull_slot = False
            self._active_pulls -= 1
            self._admit_pulls()

    def all_runs(self) -> Iterator[LegRun]:
        """All legs."""
        for queue in (self.running, self.ready, self.waiting, self.pull_queue):
            yield from queue
        yield from self.pulling.values()

    # ------------------------------------------------------------------ a step
    def schedule(self, now_s: float, *, batch_count: int = 1) -> list[LegRun]:
        """The legs of the step that begins now, in order; sets their `scheduled_tokens`.

        With a `batch_count` of n, at most 1/n of the running legs, and only legs in no batch.
        """
        preemptions_before = self.preemptions
        scheduled = self._schedule_once(now_s, batch_count)
        if not scheduled and self.preemptions > preemptions_before:
            # All legs were preempted: there is room for others now.
            scheduled = self._schedule_once(now_s, batch_count)
        return scheduled

    def _schedule_once(self, now_s: float, batch_count: int) -> list[LegRun]:
        self._token_budget = self._settings.token_budget(self._has_streaming_run)
        running = self.running
        if self._partial_prefills or self.ready or self.waiting:
            self._max_chunk_tokens = self._longest_chunk_tokens()
        if batch_count > 1:
            running = [run for run in running if not run.in_batch][
                : -(-len(running) // batch_count)
            ]
        if self._is_prefill_first:
            return self._schedule_prefill_first(running, now_s)
        if (
            not self._partial_prefills
            and (scheduled := self._schedule_decodes(running)) is not None
        ):
            self.leading_decodes = len(scheduled)
            if self.ready or self.waiting:
                self._admit(scheduled, self._token_budget - self.leading_decodes, now_s)
            else:
                self.blocked_reason = BlockedReason.QUEUE_EMPTY
            self.only_decodes = len(scheduled) == self.leading_decodes
            return scheduled
        self.only_decodes = False
        preemptions_before = self.preemptions
        scheduled, budget = self._schedule_running(running)
        if self.preemptions > preemptions_before:
            self.blocked_reason = BlockedReason.PREEMPTED
        else:
            self._admit(scheduled, budget, now_s)
        return scheduled

    def _has_streaming_run(self) -> bool:
        chunked = self._partial_prefills
        return any(run not in chunked and run.is_streaming for run in self.running)

    def _schedule_prefill_first(self, running: list[LegRun], now_s: float) -> list[LegRun]:
        """The new legs' whole prompts if any fit, else the decodes."""
        admitted: list[LegRun] = []
        self.leading_decodes = 0
        self._admit(admitted, self._token_budget, now_s)
        prompts = [run for run in admitted if run.known_tokens - run.computed_tokens > 1]
        # After admissions, the next step may admit the legs behind them. Recomputed legs have
        # sent their first output, too.
        self.only_decodes = not admitted and all(run.first_output_sent for run in running)
        if prompts:
            return prompts
        decodes = running if admitted and running is self.running else running + admitted
        if (scheduled := self._schedule_decodes(decodes)) is not None:
            return scheduled
        self.only_decodes = False
        self.blocked_reason = BlockedReason.PREEMPTED
        return self._schedule_running(decodes)[0]

    def _schedule_decodes(self, runs: list[LegRun]) -> list[LegRun] | None:
        """Schedule one token for each leg; None if budget or blocks do not suffice for all."""
        if len(runs) > self._token_budget:
            return None
        block_size_tokens, states = self._settings.block_size_tokens, self._settings.request_blocks
        runs_with_full_blocks = [
            run
            for run in runs
            if run.computed_tokens
            == (run.shared_blocks + run.private_blocks - states) * block_size_tokens
        ]
        if runs_with_full_blocks:
            if len(runs_with_full_blocks) > self._memory.blocks.available:
                return None
            self._memory.blocks.allocate(len(runs_with_full_blocks))
            for run in runs_with_full_blocks:
                run.private_blocks += 1
        return runs.copy()

    def _schedule_running(self, runs: list[LegRun]) -> tuple[list[LegRun], int]:
        # Chunked prompts are mostly last: then the legs in front decode.
        decode_count = len(runs) - len(self._partial_prefills)
        only_decodes_in_front = decode_count > 0 and self._partial_prefills.issuperset(
            runs[decode_count:]
        )
        scheduled = (
            self._schedule_decodes(runs[:decode_count]) if only_decodes_in_front else None
        ) or []
        self.leading_decodes = len(scheduled)
        budget = self._token_budget - self.leading_decodes
        for run in runs[self.leading_decodes :]:
            if run.state is not LegRunState.RUNNING or not budget:
                break
            tokens = min(run.known_tokens - run.computed_tokens, self._max_chunk_tokens, budget)
            if not self._allocate_or_preempt(run, run.computed_tokens + tokens):
                break
            self._set_scheduled(run, tokens)
            scheduled.append(run)
            budget -= tokens
        return scheduled, budget

    def _chunk_tokens(self, missing_tokens: int, budget: int) -> int:
        """How many of a leg's missing tokens the next step computes; 0 when it has to wait."""
        if self._is_prefill_first:
            # A prompt longer than the budget has a step of its own.
            fits = missing_tokens <= budget or budget == self._token_budget
            return missing_tokens if fits else 0
        return min(missing_tokens, budget, self._max_chunk_tokens)

    def _longest_chunk_tokens(self) -> int:
        """The longest chunk of one prompt; a lone leg may use the whole budget of its rank."""
        max_chunk_tokens = self._settings.long_prefill_tokens
        rank_tokens = self._token_budget // self._settings.ranks
        if max_chunk_tokens and len(self.running) + len(self.ready) + len(self.waiting) > 1:
            return min(max_chunk_tokens, rank_tokens)
        return rank_tokens

    def _allocate_or_preempt(self, run: LegRun, tokens: int) -> bool:
        """Extend a running leg's blocks to `tokens` tokens; False if it was preempted instead."""
        while not self._memory.try_extend(run, tokens):
            victim = next(other for other in reversed(self.running) if not other.in_batch)
            self.running.remove(victim)
            self._preempt(victim)
            if victim is run:
                return False
        return True

    def _preempt(self, run: LegRun) -> None:
        self.preemptions += 1
        run.timer.preemptions += 1
        self._partial_prefills.discard(run)
        self._memory.free(run)
        run.kv_preloaded = False  # it recomputes its KV here
        run.state = LegRunState.WAITING
        self.waiting.appendleft(run)

    def _set_scheduled(self, run: LegRun, tokens: int) -> None:
        run.scheduled_tokens = tokens
        computed = run.computed_tokens + tokens
        self._memory.cache_full_blocks(run, computed)
        if computed < run.known_tokens:
            self._partial_prefills.add(run)
        else:
            self._partial_prefills.discard(run)

    # ------------------------------------------------------------------ admission
    def _admit(self, scheduled: list[LegRun], budget: int, now_s: float) -> None:
        max_running = self._settings.max_running_requests
        while budget > 0:
            if not (self.ready or self.waiting):
                self.blocked_reason = BlockedReason.QUEUE_EMPTY
                return
            if len(self.running) >= max_running:
                self.blocked_reason = BlockedReason.SLOTS
                return
            run = self._admit_ready(budget) if self.ready else self._admit_waiting(budget)
            if run is None:
                self.blocked_reason = BlockedReason.MEMORY
                return
            if run.state is LegRunState.PULLING:
                continue
            if run.cached_tokens < 0:
                run.cached_tokens = run.computed_tokens
                run.timer.on_scheduled(now_s)
            run.state = LegRunState.RUNNING
            self.running.append(run)
            self._set_scheduled(run, run.scheduled_tokens)
            scheduled.append(run)
            budget -= run.scheduled_tokens
        self.blocked_reason = BlockedReason.BUDGET

    def _admit_ready(self, budget: int) -> LegRun | None:
        run = self.ready[0]
        run.scheduled_tokens = self._chunk_tokens(run.known_tokens - run.computed_tokens, budget)
        if not run.scheduled_tokens or not self._memory.try_extend(
            run, run.computed_tokens + run.scheduled_tokens
        ):
            return None
        return self.ready.popleft()

    def _admit_waiting(self, budget: int) -> LegRun | None:
        """Take the first waiting leg, with blocks for this step or its pull; None without room."""
        run, memory = self.waiting[0], self._memory
        cached_blocks, idle_blocks = memory.lookup(run)
        needed_blocks = memory.blocks_for(run.known_tokens) - cached_blocks + idle_blocks
        kv_handle = run.kv_handle
        needs_pull = kv_handle is not None and kv_handle.blocks > cached_blocks
        if needs_pull:
            needed_blocks += self._reserved_blocks()
        computed_tokens = (
            run.known_tokens - 1
            if run.kv_preloaded
            else cached_blocks * self._settings.block_size_tokens
        )
        tokens = self._chunk_tokens(run.known_tokens - computed_tokens, budget)
        if needed_blocks > memory.blocks.available or not tokens:
            return None
        self.waiting.popleft()
        if kv_handle is not None and needs_pull:
            memory.allocate(run, cached_blocks, kv_handle.tokens)
            self._start_pull(run, kv_handle, kv_handle.blocks - cached_blocks)
            return run
        if kv_handle is not None:
            self._commands.append(FreeSource(kv_handle=kv_handle))
            run.kv_handle = None
            self.release_pull_slot(run)
        memory.allocate(run, cached_blocks, computed_tokens + tokens)
        run.computed_tokens = computed_tokens
        run.scheduled_tokens = tokens
        return run

    def _start_pull(self, run: LegRun, kv_handle: SimKvHandle, blocks: int) -> None:
        run.state = LegRunState.PULLING
        self.pulling[run.leg_id] = run
        self._commands.append(StartPull(leg_id=run.leg_id, kv_handle=kv_handle, blocks=blocks))

    def _reserved_blocks(self) -> int:
        """Blocks that prompts in computation or pull still need for all their tokens."""
        blocks_for = self._memory.blocks_for
        unfinished = concatenate(self._partial_prefills, self.ready, self.pulling.values())
        return sum(max(0, blocks_for(run.known_tokens) - run.blocks) for run in unfinished)

    def _admit_pulls(self) -> None:
        while self.pull_queue and self._active_pulls < self._settings.max_pulls:
            run = self.pull_queue.popleft()
            self._active_pulls += 1
            run.state = LegRunState.WAITING
            self.waiting.append(run)

    def counts(self) -> QueueCounts:
        """Legs by state at this moment."""
        tokens = 0
        if not self._only_decode_now:
            missing_tokens = [run.known_tokens - run.computed_tokens for run in self.running]
            tokens = sum([more for more in missing_tokens if more > 1])
        queued = 0
        for queue in (self.waiting, self.ready, self.pull_queue):
            if queue:
                queued += len(queue)
                tokens += sum([run.tokens_to_compute for run in queue])
        return QueueCounts(queued, len(self.pulling), len(self.running), tokens)

    @property
    def queued(self) -> int:
        """Legs that wait for a slot, or to pull."""
        return len(self.waiting) + len(self.ready) + len(self.pull_queue)

    @property
    def _only_decode_now(self) -> bool:
        """Whether all running legs are known to miss a single token."""
        return self.only_decodes and self._settings.pipeline_stages == 1

    # ------------------------------------------------------------------ for tests
    def check_integrity(self) -> None:
        """Assert that each leg is in the one queue of its state."""
        for state, members in (
            (LegRunState.PULL_QUEUED, self.pull_queue),
            (LegRunState.WAITING, self.waiting),
            (LegRunState.PULLING, self.pulling.values()),
            (LegRunState.READY, self.ready),
            (LegRunState.RUNNING, self.running),
        ):
            misplaced_ids = [run.leg_id for run in members if run.state is not state]
            expect(not misplaced_ids, f"not {state.name}, though among those: {misplaced_ids}")
        ids = [run.leg_id for run in self.all_runs()]
        expect(len(ids) == len(set(ids)), f"a leg is in two places: {ids}")
        pulls = sum(
            run.needs_pull_slot
            for run in self.all_runs()
            if run.state is not LegRunState.PULL_QUEUED
        )
        expect(
            pulls == self._active_pulls <= self._settings.max_pulls,
            f"{self._active_pulls} pull, not {pulls}",
        )
        prompts = [run.leg_id for run in self.running if run.known_tokens - run.computed_tokens > 1]
        expect(not (prompts and self._only_decode_now), f"they do more than decode: {prompts}")
        max_running = self._settings.max_running_requests
        expect(len(self.running) <= max_running, f"{len(self.running)} run in {max_running} slots")
