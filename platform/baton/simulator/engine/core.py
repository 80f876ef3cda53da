"""The simulated engine without its clock: a scheduler with continuous batching over paged KV.

Theory of operation: a body calls `begin_step`, lets `_Step.duration_s` pass, and calls
`finish_step`; between the two it may add, abort, and report pulls. Legs go
WAITING -> RUNNING -> ENDED, those with blocks to pull or to load
WAITING -> TRANSFER -> READY -> RUNNING -> ENDED; out of blocks, the youngest running leg falls back
to WAITING and will recompute. A leg's prompt gets all its blocks when it leaves WAITING, in arrival
order, nobody jumping the queue but those with an adapter that runs; decoding takes a block more
when the last is full. Running legs are served first, then newcomers, until the step's token budget
is used up.

A ticket may cover less than the prompt of the leg that brings it: what it covers is pulled, the
rest computed. A finished PREFILL leg becomes a lease: its blocks stay owned until pulled, released
or expired. What the body has to do outside (pulls, loads, telling a source to free) is in
`pop_commands`. Every time is an argument, in seconds on the body's clock. What may fail: a pull,
see `pull_failed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from baton.simulator.engine.leg_queues import LegQueues
from baton.simulator.engine.leg_timer import LegTimer
from baton.simulator.engine.memory import KvMemory
from baton.simulator.engine.meters import EngineMeters
from baton.simulator.engine.runs import LegRun, LegRunState
from baton.simulator.engine.settings import OnTransferFailure, SimSettings
from baton.simulator.engine.tokens import TokenStream, digest, model_key, pack_tokens


class _Step(NamedTuple):
    """What one step computes."""

    duration_s: float
    started_at_s: float
    prefill_tokens: int
    decode_requests: int
    context_tokens: int
    """What those decoding requests attend to."""
    loading_s: float = 0.0
    """Of its duration, what it took to load adapters."""

    @property
    def tokens(self) -> int:
        """All tokens that the step computes."""
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
        self._queues = LegQueues()
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
        """Queue a leg; None when accepted, else why not. A decode leg brings its ticket, read.

        Without `now_s` nothing is told of its times.
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
        """End a leg that was accepted and asks for what cannot be had; None for any other."""
        invalid_token_id, run = self._settings.invalid_token_id, self._queues.get(leg.leg_id)
        if invalid_token_id is None or run is None or invalid_token_id not in leg.prompt_token_ids:
            return None
        self.abort((leg.leg_id,))
        stop_reason = f"token {invalid_token_id} cannot be had from this model"
        return LegOutput(leg.leg_id, finish=FinishReason.INVALID, stop_reason=stop_reason)

    def abort(self, leg_ids: Iterable[str]) -> None:
        """End legs without a word and free what they hold, at the source too; others are ignored.

        A prefill leg that has finished is not a leg any more but a lease, and stays.
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
        """Choose what to compute next; None when there is nothing that could be."""
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
        """Account for the step under way and return what it produced, in running order."""
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
        """The blocks of a pull are here; ignored when the leg was aborted meanwhile.

        Where the source had not `source_kept` them to the end they may be another prompt's: the leg
        computes its own or, if set so, ends with the returned error.
        """
        run = self._queues.in_transfer(leg_id)
        if run is None or run.kv_handle is None:
            return None
        moved_bytes = blocks * self._settings.kv_block_bytes
        self._meters.record_pull(
            run.kv_handle.engine_id, moved_bytes=moved_bytes, duration_s=duration_s
        )
        self._pull_permits.end(leg_id)
        # No engine sees by its blocks whose they are: it decodes from what it has read.
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
        """A pull did not work; the leg recomputes or, if set so, ends with the returned error."""
        run = self._queues.in_transfer(leg_id)
        if run is None or run.kv_handle is None:
            return None
        self._meters.record_pull_failure(run.kv_handle.engine_id)
        self._pull_permits.end(leg_id)
        return self._on_fetch_failed(run)

    def _on_fetch_failed(self, run: LegRun) -> LegOutput | None:
        """What was to be fetched is not to be had."""
        if self._settings.on_transfer_failure is OnTransferFailure.RECOMPUTE:
            run.token_stream = self._token_stream(run.leg)
            self._queues.on_blocks_arrived(run)
            return None
        self._end_run(run)
        return LegOutput(run.leg.leg_id, finish=FinishReason.ERROR)

    def load_done(self, leg_id: str) -> None:
        """Blocks have come from the host's memory; ignored when the leg was aborted meanwhile."""
        if (run := self._queues.in_transfer(leg_id)) is not None:
            self._memory.on_host_blocks_loaded(run)
            self._queues.on_blocks_arrived(run)

    # ------------------------------------------------------------------ transfers, source side
    def is_leased(self, leg_id: str, now_s: float) -> bool:
        """Whether the blocks of this finished prefill leg are still kept."""
        self.expire_leases(now_s)
        return self._memory.is_leased(leg_id)

    def renew(self, leg_id: str, now_s: float) -> None:
        """Keep a finished prefill leg's blocks for longer; nothing where they are lost."""
        if self.is_leased(leg_id, now_s):
            self._memory.renew(leg_id, now_s)

    def pending_kv_handles(self) -> tuple[SimKvHandle, ...]:
        """What legs wait for that is elsewhere: their leases are to be renewed."""
        return tuple(run.kv_handle for run in self._queues if run.kv_handle is not None)

    def release(self, leg_id: str, now_s: float) -> bool:
        """Free a finished prefill leg's blocks; False when they were no longer kept."""
        was_leased = self.is_leased(leg_id, now_s)
        if was_leased:
            self._memory.release(leg_id)
        return was_leased

    def expire_leases(self, now_s: float) -> None:
        """Free the blocks of leases whose time is up."""
        self._meters.record_expired_leases(self._memory.expire(now_s))

    @property
    def next_expiry_s(self) -> float | None:
        """When to look again though nothing happens; None: no lease ends, no pull is overdue."""
        permit_at_s = self._pull_permits.next_at_s if self._queues.waiting else None
        times = (self._memory.next_expiry_s, permit_at_s)
        return min((at_s for at_s in times if at_s is not None), default=None)

    # ------------------------------------------------------------------ for the body
    def pop_commands(self) -> tuple[EngineCommand, ...]:
        """What the body has to do outside, since this was last called."""
        commands, self._commands = tuple(self._commands), []
        return commands

    def pop_events(self) -> tuple[KvEvent, ...]:
        """What changed in the prefix cache since this was last called."""
        return self._memory.pop_events()

    def load(self) -> Load:
        """The load at this moment, counted."""
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
        """What was pulled from whom."""
        return self._meters.links

    def reset_cache(self) -> bool:
        """Empty the prefix cache, both tiers; False, and nothing, while any block is in use."""
        return self._memory.reset_cache()

    def check_integrity(self) -> None:
        """Assert that blocks and legs are each in exactly one place."""
        self._queues.check_integrity()
        self._adapters.check_integrity()
        self._memory.check_integrity(self._queues)

    # ------------------------------------------------------------------ scheduling
    def _schedule_running(self) -> tuple[list[tuple[LegRun, int]], int]:
        """Work for the legs that already run, oldest first, and the token budget that is left."""
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
        """The next step's; see `baton.engine.vllm.patches.step_budget`."""
        settings = self._settings
        if settings.max_batched_tokens_while_decoding is not None and any(
            run.is_streaming for run in self._queues.running
        ):
            return settings.max_batched_tokens_while_decoding
        return settings.max_batched_tokens

    def _load_adapter(self, run: LegRun) -> float:
        """See to it that a run's adapter is there; how long that takes."""
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
            duration_s + loading_s,
            now_s,
            prefill_tokens,
            decode_requests,
            context_tokens,
            loading_s,
        )

    def _allocate_or_preempt(self, run: LegRun) -> bool:
        """Let a running leg's newest token have a block; False if the leg was preempted instead."""
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
        """Legs that wait, without those that wait for their turn to pull."""
        waiting = self._queues.waiting
        if self._pull_permits.can_begin(now_s):
            return waiting
        return [run for run in waiting if run.kv_handle is None]

    def _start_fetch(self, run: LegRun, now_s: float) -> bool:
        """Order the blocks of a placed leg that are elsewhere; False when all are here.

        The host's memory is nearer than another engine: where it has all that the ticket promises,
        nothing is pulled. Otherwise nothing is loaded.
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
        # A token that is not given only proves that the prompt is done; decode draws it again.
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
        """What stands for a leg's leading tokens, its adapter and its salt."""
        return digest(self._memory.root_hash(leg) + pack_tokens(leg.prompt_token_ids[:tokens]))
