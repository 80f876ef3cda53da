"""The simulated engine without its clock: continuous batching over paged KV.

Theory of operation: the caller calls `begin_step`, lets `_Step.duration_s` pass, and calls
`finish_step`; in between it may add, abort, and report pulls. Legs go WAITING -> RUNNING -> ENDED.
Legs with blocks to pull or load go WAITING -> FETCHING -> READY -> RUNNING -> ENDED. Out of blocks,
the youngest running leg returns to WAITING and recomputes.

A leg gets blocks for its whole prompt when it leaves WAITING, in arrival order; only legs with a
running adapter may overtake. A decode allocates a block when its last is full. Running legs get
tokens first, then new legs, until the step's token budget is used up.

A KV handle may cover less than the prompt: the rest is computed. A finished PREFILL leg becomes a
lease: its blocks stay owned until they are pulled, released or expired. `pop_commands` has the
caller's work (pulls, loads, messages to a source). All times are arguments, in seconds on the
caller's clock. Only pulls can fail: see `pull_failed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from baton.control.fleet.loaded_adapters import LoadedAdapters
from baton.control.request.pull_permits import PullPermits
from baton.domain.fleet import LinkTotals, Load
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegKind, LegOutput
from baton.domain.kv_events import KvEvent
from baton.domain.request import FinishReason
from baton.simulator.engine.blocks import expect
from baton.simulator.engine.commands import (
    CancelFetch,
    EngineCommand,
    FreeSource,
    LoadBlocks,
    SimKvHandle,
    StartPull,
)
from baton.simulator.engine.leg_timer import LegTimer
from baton.simulator.engine.memory import KvMemory
from baton.simulator.engine.meters import EngineMeters
from baton.simulator.engine.runs import LegRun, LegRunState
from baton.simulator.engine.settings import OnTransferFailure, SimSettings
from baton.simulator.engine.tokens import TokenStream, digest, model_key, pack_tokens


class _QueueCounts(NamedTuple):
    """Legs by state, and the tokens that they still have to compute."""

    queued: int
    pulling: int
    running: int
    queued_tokens: int


class _Step(NamedTuple):
    duration_s: float
    started_at_s: float
    prefill_tokens: int
    decode_requests: int
    context_tokens: int
    """KV tokens that its decodes attend to."""
    loading_s: float = 0.0
    """Part of its duration that loads adapters."""

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_requests


class SimCore:
    """One simulated engine's scheduler and memory."""

    def __init__(
        self,
        settings: SimSettings,
        *,
        engine_id: str,
        model: str,
        address: str,
        encode_kv_handle: Callable[[SimKvHandle], bytes],
    ) -> None:
        self._settings = settings
        self._engine_id = engine_id
        self._model = model
        self._address = address
        self._encode_kv_handle = encode_kv_handle
        self._layout = settings.layout(model)
        self._memory = KvMemory(settings, self._layout)
        self._queues = _LegQueues()
        self._step: _Step | None = None
        self._scheduled: list[tuple[LegRun, int]] = []
        self._commands: list[EngineCommand] = []
        self._meters = EngineMeters()
        self._adapters = LoadedAdapters(settings.adapter_slots)
        self._pull_permits = PullPermits(
            limit=settings.max_pulls, max_pull_s=settings.side_channel_deadline_s
        )

    # ------------------------------------------------------------------ legs in and out
    def add(
        self, leg: Leg, kv_handle: SimKvHandle | None = None, *, now_s: float | None = None
    ) -> LegFailure | None:
        """Queue a leg; None when accepted. `kv_handle` is a decode leg's decoded KV handle.

        Without `now_s`, outputs have no times.
        """
        prompt = leg.prompt_token_ids
        if not prompt or len(prompt) >= self._settings.max_len_tokens:
            return LegFailure.INVALID
        if leg.leg_id in self._queues or self._memory.is_leased(leg.leg_id):
            return LegFailure.REJECTED
        if leg.adapter is not None and not self._settings.adapter_slots:
            return LegFailure.REJECTED
        if kv_handle is not None and not self._is_compatible(kv_handle, leg):
            return LegFailure.KV_LOAD_FAILED
        if len(self._queues.waiting) >= self._settings.max_waiting_requests:
            return LegFailure.OVERLOADED
        max_tokens = 1 if leg.kind is LegKind.PREFILL else leg.max_tokens
        self._queues.add(
            LegRun(
                leg=leg,
                kv_handle=kv_handle,
                tokens=list(prompt),
                end_tokens=min(len(prompt) + max_tokens, self._settings.max_len_tokens),
                token_stream=self._token_stream(leg),
                timer=LegTimer(now_s),
            )
        )
        self._adapters.on_leg_started(leg.adapter)
        return None

    def reject_invalid(self, leg: Leg) -> LegOutput | None:
        """End an accepted leg whose prompt has `invalid_token_id`; None for any other leg."""
        invalid_token_id, run = self._settings.invalid_token_id, self._queues.get(leg.leg_id)
        if invalid_token_id is None or run is None or invalid_token_id not in leg.prompt_token_ids:
            return None
        self.abort((leg.leg_id,))
        stop_reason = f"token {invalid_token_id} cannot be had from this model"
        return LegOutput(leg.leg_id, finish=FinishReason.INVALID, stop_reason=stop_reason)

    def abort(self, leg_ids: Iterable[str]) -> None:
        """End legs without an output and free their blocks, also at the source; ignores other ids.

        A finished prefill leg is a lease and stays.
        """
        for leg_id in leg_ids:
            run = self._queues.get(leg_id)
            if run is None:
                continue
            if run.state is LegRunState.FETCHING:
                self._commands.append(CancelFetch(leg_id=leg_id))
                self._pull_permits.end(leg_id)
            if run.kv_handle is not None:
                self._commands.append(FreeSource(kv_handle=run.kv_handle))
            self._end_run(run)

    # ------------------------------------------------------------------ steps
    def begin_step(self, now_s: float) -> _Step | None:
        """Choose the next step; None without work."""
        expect(self._step is None, "a step is under way: finish it first")
        self.expire_leases(now_s)
        scheduled, budget = self._schedule_running()
        running_count = len(scheduled)
        self._admit(scheduled, budget, now_s)
        loading_s = 0.0
        for run, _ in scheduled[running_count:]:
            run.timer.on_scheduled(now_s)
            loading_s += self._load_adapter(run)
        self._memory.record_evictions()
        if not scheduled:
            return None
        self._scheduled = scheduled
        self._step = self._build_step(scheduled, now_s, loading_s)
        return self._step

    def finish_step(self, now_s: float) -> tuple[LegOutput, ...]:
        """End the step under way and return its outputs, in running order."""
        step = self._step
        if step is None:
            raise AssertionError("no step is under way: begin one first")
        self._meters.record_step(
            now_s - step.started_at_s - step.loading_s,
            prefill_tokens=step.prefill_tokens,
            decode_tokens=step.decode_requests,
            context_tokens=step.context_tokens,
        )
        scheduled, self._scheduled, self._step = self._scheduled, [], None
        outputs = []
        for run, tokens in scheduled:
            if run.state is not LegRunState.RUNNING:
                continue
            run.computed_tokens += tokens
            self._memory.cache_full_blocks(run)
            if not run.missing_tokens:
                outputs.append(self._generate_token(run, now_s))
        return tuple(outputs)

    # ------------------------------------------------------------------ transfers, this side
    def pull_done(
        self, leg_id: str, *, blocks: int, duration_s: float, source_kept: bool
    ) -> LegOutput | None:
        """Record the arrival of pulled blocks; ignored when the leg was aborted meanwhile.

        Without `source_kept` the blocks may be another prompt's. Then the leg recomputes or ends
        with the returned error (`on_transfer_failure`).
        """
        run = self._queues.in_transfer(leg_id)
        if run is None or run.kv_handle is None:
            return None
        moved_bytes = blocks * self._settings.kv_block_bytes
        self._meters.record_pull(
            run.kv_handle.engine_id, moved_bytes=moved_bytes, duration_s=duration_s
        )
        self._pull_permits.end(leg_id)
        # Like a real engine, it decodes from the blocks that it has read.
        if (
            not source_kept
            or self._digest(run.leg, run.kv_handle.tokens) != run.kv_handle.prompt_digest
        ):
            run.token_stream.corrupt()
        if not source_kept:
            self._meters.record_void_pull()
            return self._on_fetch_failed(run)
        # The last token is always computed here: its logits pick the next one.
        fetched_tokens = min(run.kv_handle.tokens, len(run.tokens) - 1)
        run.computed_tokens = max(run.computed_tokens, fetched_tokens)
        self._queues.on_blocks_arrived(run)
        self._memory.cache_full_blocks(run)
        return None

    def pull_failed(self, leg_id: str) -> LegOutput | None:
        """Record a failed pull; the leg recomputes or ends with the returned error."""
        run = self._queues.in_transfer(leg_id)
        if run is None or run.kv_handle is None:
            return None
        self._meters.record_pull_failure(run.kv_handle.engine_id)
        self._pull_permits.end(leg_id)
        return self._on_fetch_failed(run)

    def _on_fetch_failed(self, run: LegRun) -> LegOutput | None:
        if self._settings.on_transfer_failure is OnTransferFailure.RECOMPUTE:
            run.token_stream = self._token_stream(run.leg)
            self._queues.on_blocks_arrived(run)
            return None
        self._end_run(run)
        return LegOutput(run.leg.leg_id, finish=FinishReason.ERROR)

    def load_done(self, leg_id: str) -> None:
        """Record blocks loaded from the host tier; ignored when the leg was aborted meanwhile."""
        if (run := self._queues.in_transfer(leg_id)) is not None:
            self._memory.on_host_blocks_loaded(run)
            self._queues.on_blocks_arrived(run)

    # ------------------------------------------------------------------ transfers, source side
    def is_leased(self, leg_id: str, now_s: float) -> bool:
        """Whether the blocks of this finished prefill leg are still leased."""
        self.expire_leases(now_s)
        return self._memory.is_leased(leg_id)

    def renew(self, leg_id: str, now_s: float) -> None:
        """Extend the lease of a finished prefill leg; does nothing after its end."""
        if self.is_leased(leg_id, now_s):
            self._memory.renew(leg_id, now_s)

    def pending_kv_handles(self) -> tuple[SimKvHandle, ...]:
        """KV handles of blocks that are still to be pulled: their leases need renewal."""
        return tuple(run.kv_handle for run in self._queues if run.kv_handle is not None)

    def release(self, leg_id: str, now_s: float) -> bool:
        """Free a finished prefill leg's blocks; False without a lease."""
        was_leased = self.is_leased(leg_id, now_s)
        if was_leased:
            self._memory.release(leg_id)
        return was_leased

    def expire_leases(self, now_s: float) -> None:
        """Free the blocks of leases that are due."""
        self._meters.record_expired_leases(self._memory.expire(now_s))

    @property
    def next_expiry_s(self) -> float | None:
        """When a lease ends or a pull is overdue; None for never."""
        permit_at_s = self._pull_permits.next_at_s if self._queues.waiting else None
        times = (self._memory.next_expiry_s, permit_at_s)
        return min((at_s for at_s in times if at_s is not None), default=None)

    # ------------------------------------------------------------------ for the body
    def pop_commands(self) -> tuple[EngineCommand, ...]:
        """Commands for the caller since the last call."""
        commands, self._commands = tuple(self._commands), []
        return commands

    def pop_events(self) -> tuple[KvEvent, ...]:
        """Changes of the prefix cache since the last call."""
        return self._memory.pop_events()

    def load(self) -> Load:
        """The load at this moment."""
        counts = self._queues.counts()
        return Load(
            queued_requests=counts.queued,
            running_requests=counts.running,
            queued_tokens=counts.queued_tokens,
            kv_used_fraction=self._memory.used_fraction,
            step_s=self._meters.step_s,
            transfers=self._meters.transfers,
            pulling_requests=counts.pulling,
            steps=self._meters.steps,
            adapters=self._adapters.report(),
        )

    def links(self) -> tuple[LinkTotals, ...]:
        """Totals of pulls, by source."""
        return self._meters.links

    def reset_cache(self) -> bool:
        """Empty both tiers of the prefix cache; False, without a change, while a block is used."""
        return self._memory.reset_cache()

    def check_integrity(self) -> None:
        """Assert that blocks and legs are each in exactly one place."""
        self._queues.check_integrity()
        self._adapters.check_integrity()
        self._memory.check_integrity(self._queues)

    # ------------------------------------------------------------------ scheduling
    def _schedule_running(self) -> tuple[list[tuple[LegRun, int]], int]:
        """Work for the running legs, oldest first, and the remaining token budget."""
        budget = self._token_budget()
        scheduled: list[tuple[LegRun, int]] = []
        for run in tuple(self._queues.running):
            if (
                run.state is not LegRunState.RUNNING
                or not budget
                or not self._allocate_or_preempt(run)
            ):
                break
            tokens = min(run.missing_tokens, budget)
            scheduled.append((run, tokens))
            budget -= tokens
        return scheduled, budget

    def _token_budget(self) -> int:
        """Tokens of the next step; see `baton.engine.vllm.patches.step_budget`."""
        settings = self._settings
        if settings.max_batched_tokens_while_decoding is not None and any(
            run.is_streaming for run in self._queues.running
        ):
            return settings.max_batched_tokens_while_decoding
        return settings.max_batched_tokens

    def _load_adapter(self, run: LegRun) -> float:
        name = run.leg.adapter
        if name is None or self._adapters.touch(name):
            return 0.0
        took_s = self._settings.adapter_load_s / self._settings.speed
        self._adapters.on_loaded(name, took_s)
        return took_s

    def _build_step(
        self, scheduled: Sequence[tuple[LegRun, int]], now_s: float, loading_s: float
    ) -> _Step:
        prefill_tokens = decode_requests = context_tokens = 0
        for run, tokens in scheduled:
            # One missing token is the last of a prompt or of an output: a decode either way.
            if run.missing_tokens == 1:
                decode_requests += 1
                context_tokens += len(run.tokens)
            else:
                prefill_tokens += tokens
        duration_s = self._settings.step_s(
            prefill_tokens=prefill_tokens,
            decode_requests=decode_requests,
            kv_used_fraction=self._memory.used_fraction,
        )
        return _Step(
            duration_s=duration_s + loading_s,
            started_at_s=now_s,
            prefill_tokens=prefill_tokens,
            decode_requests=decode_requests,
            context_tokens=context_tokens,
            loading_s=loading_s,
        )

    def _allocate_or_preempt(self, run: LegRun) -> bool:
        """Allocate a block for a running leg's newest token; False if it was preempted instead."""
        while not self._memory.try_extend(run):
            victim = self._queues.running[-1]
            self._preempt(victim)
            if victim is run:
                return False
        return True

    def _preempt(self, run: LegRun) -> None:
        run.timer.preemptions += 1
        self._memory.free(run)
        self._queues.requeue_preempted(run)

    def _admit(self, scheduled: list[tuple[LegRun, int]], budget: int, now_s: float) -> None:
        queues, max_adapters = self._queues, self._settings.adapters_per_batch
        while budget and len(queues.running) < self._settings.max_running_requests:
            if (run := queues.first_admissible(queues.ready, max_adapters)) is not None:
                queues.ready.remove(run)
            elif (
                run := queues.first_admissible(self._startable(now_s), max_adapters)
            ) and self._memory.try_allocate(run):
                queues.waiting.remove(run)
                if self._start_fetch(run, now_s):
                    continue
            else:
                return
            queues.start(run)
            if run.cached_tokens is None:
                run.cached_tokens = run.computed_tokens
            tokens = min(run.missing_tokens, budget)
            scheduled.append((run, tokens))
            budget -= tokens

    def _startable(self, now_s: float) -> Sequence[LegRun]:
        """Waiting legs, except those that need a pull while `max_pulls` others run."""
        waiting = self._queues.waiting
        if self._pull_permits.can_begin(now_s):
            return waiting
        return [run for run in waiting if run.kv_handle is None]

    def _start_fetch(self, run: LegRun, now_s: float) -> bool:
        """Order the blocks of a placed leg that are elsewhere; False when all are here.

        If the host tier holds all blocks of the KV handle they are loaded, else all are pulled.
        """
        kv_handle = run.kv_handle
        if kv_handle is not None:
            missing_blocks = kv_handle.blocks - run.cached_blocks
            if missing_blocks > run.host_blocks:
                self._pull_permits.begin(run.leg.leg_id, now_s)
                command = StartPull(
                    leg_id=run.leg.leg_id, kv_handle=kv_handle, blocks=missing_blocks
                )
                return self._begin_transfer(run, command)
            run.kv_handle = None
            self._commands.append(FreeSource(kv_handle=kv_handle))
        if not run.host_blocks:
            return False
        self._memory.touch_host_blocks(run)
        return self._begin_transfer(run, LoadBlocks(leg_id=run.leg.leg_id, blocks=run.host_blocks))

    def _begin_transfer(self, run: LegRun, command: EngineCommand) -> bool:
        run.state = LegRunState.FETCHING
        self._commands.append(command)
        return True

    # ------------------------------------------------------------------ tokens and ends
    def _generate_token(self, run: LegRun, now_s: float) -> LegOutput:
        is_prefill = run.leg.kind is LegKind.PREFILL
        # Otherwise the token only ends the prefill, and the decode leg samples it again.
        is_client_token = not is_prefill or run.leg.emits_first_token
        may_end = is_client_token and run.generated_tokens >= run.leg.min_tokens
        token, is_eos = run.token_stream.next_token(may_end=may_end)
        run.tokens.append(token)
        cached_tokens = times = cache = None
        if not run.first_output_sent:
            cached_tokens, times = run.cached_tokens, run.timer.on_first_output(now_s)
            cache = run.cache_use(run.cached_blocks * self._settings.block_size_tokens)
        is_first_output, run.first_output_sent = not run.first_output_sent, True
        finish_reason = None
        if is_eos:
            finish_reason = FinishReason.STOP
        elif len(run.tokens) >= run.end_tokens:
            finish_reason = FinishReason.LENGTH
        kv_handle = None
        if finish_reason is FinishReason.LENGTH and is_prefill:
            kv_handle = self._grant_lease(run, now_s)
        if finish_reason is not None:
            self._end_run(run)
            times = times if is_first_output else run.timer.on_last_output()
        return LegOutput(
            run.leg.leg_id,
            (token,),
            finish_reason,
            kv_handle=kv_handle,
            cached_tokens=cached_tokens,
            times=times,
            cache_use=cache,
        )

    def _grant_lease(self, run: LegRun, now_s: float) -> KvHandle:
        prompt = run.leg.prompt_token_ids
        kv_handle = SimKvHandle(
            engine_id=self._engine_id,
            leg_id=run.leg.leg_id,
            address=self._address,
            layout=self._layout,
            tokens=len(prompt),
            blocks=len(run.blocks),
            prompt_digest=self._digest(run.leg, len(prompt)),
        )
        self._memory.lease(run, now_s)
        return KvHandle(
            tokens=kv_handle.tokens,
            blocks=kv_handle.blocks,
            params=self._encode_kv_handle(kv_handle),
        )

    def _end_run(self, run: LegRun) -> None:
        self._queues.remove(run)
        self._memory.free(run)
        self._adapters.on_leg_ended(run.leg.adapter)

    def _is_compatible(self, kv_handle: SimKvHandle, leg: Leg) -> bool:
        return (
            kv_handle.layout == self._layout
            and 0 < kv_handle.tokens <= len(leg.prompt_token_ids)
            and kv_handle.blocks == self._memory.blocks_for(kv_handle.tokens)
        )

    def _token_stream(self, leg: Leg) -> TokenStream:
        model = model_key(self._model, leg.adapter)
        return TokenStream(model, self._settings, leg.prompt_token_ids)

    def _digest(self, leg: Leg, tokens: int) -> bytes:
        return digest(self._memory.root_hash(leg) + pack_tokens(leg.prompt_token_ids[:tokens]))


class _LegQueues:
    """Waiting, ready and running legs; legs in a transfer are in no queue."""

    def __init__(self) -> None:
        self.waiting: deque[LegRun] = deque()
        self.ready: deque[LegRun] = deque()
        self.running: list[LegRun] = []
        self._runs: dict[str, LegRun] = {}

    def __contains__(self, leg_id: str) -> bool:
        return leg_id in self._runs

    def __iter__(self) -> Iterator[LegRun]:
        return iter(self._runs.values())

    def get(self, leg_id: str) -> LegRun | None:
        """The live leg with this id; None for an ended or unknown leg."""
        return self._runs.get(leg_id)

    def in_transfer(self, leg_id: str) -> LegRun | None:
        """The leg with this id if it waits for a transfer, else None."""
        run = self._runs.get(leg_id)
        return run if run is not None and run.state is LegRunState.FETCHING else None

    def add(self, run: LegRun) -> None:
        """Queue a new leg."""
        self._runs[run.leg.leg_id] = run
        self.waiting.append(run)

    def on_blocks_arrived(self, run: LegRun) -> None:
        """Make a leg ready after its transfer."""
        run.kv_handle = None
        run.state = LegRunState.READY
        self.ready.append(run)

    def first_admissible(self, queue: Sequence[LegRun], max_adapters: int) -> LegRun | None:
        """The first leg with which at most `max_adapters` adapters run; None without such a leg."""
        if not max_adapters or not queue:
            return queue[0] if queue else None
        running_adapters = {run.leg.adapter for run in self.running} - {None}
        if len(running_adapters) < max_adapters:
            return queue[0]
        return next((run for run in queue if run.leg.adapter in {None, *running_adapters}), None)

    def start(self, run: LegRun) -> None:
        """Run a leg that was taken from its queue."""
        run.state = LegRunState.RUNNING
        self.running.append(run)

    def requeue_preempted(self, run: LegRun) -> None:
        """Put a running leg at the head of the waiting queue."""
        self.running.remove(run)
        run.computed_tokens = 0
        run.state = LegRunState.WAITING
        self.waiting.appendleft(run)

    def remove(self, run: LegRun) -> None:
        """End a leg in any state."""
        del self._runs[run.leg.leg_id]
        match run.state:
            case LegRunState.WAITING:
                self.waiting.remove(run)
            case LegRunState.READY:
                self.ready.remove(run)
            case LegRunState.RUNNING:
                self.running.remove(run)
            case LegRunState.FETCHING | LegRunState.ENDED:
                pass
        run.state = LegRunState.ENDED

    def counts(self) -> _QueueCounts:
        """Legs by state at this moment."""
        queued = (*self.waiting, *self.ready)
        prefilling = (run for run in self.running if run.missing_tokens > 1)
        return _QueueCounts(
            queued=len(queued),
            pulling=sum(run.state is LegRunState.FETCHING for run in self._runs.values()),
            running=len(self.running),
            queued_tokens=sum(run.expected_missing_tokens for run in (*queued, *prefilling)),
        )

    def check_integrity(self) -> None:
        """Assert that each leg is in exactly the queue of its state."""
        runs = list(self._runs.values())
        queues = {
            LegRunState.WAITING: list(self.waiting),
            LegRunState.READY: list(self.ready),
            LegRunState.RUNNING: self.running,
        }
        for state, members in queues.items():
            ids_in_state = {run.leg.leg_id for run in runs if run.state is state}
            queued_ids = [run.leg.leg_id for run in members]
            expect(
                len(queued_ids) == len(set(queued_ids)),
                f"{state}: a leg is listed twice: {queued_ids}",
            )
            expect(
                set(queued_ids) == ids_in_state,
                f"{state}: listed {queued_ids}, in that state {ids_in_state}",
            )
        expect(
            all(run.state is not LegRunState.ENDED for run in runs), "an ended leg is still known"
        )
        expect(not any(run.blocks for run in self.waiting), "a waiting leg holds blocks")
