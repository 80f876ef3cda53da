"""Engine on counts: vLLM V1's scheduler without tokens, many decode steps at once.

Theory of operation: the caller calls `begin`, lets the returned seconds pass, and calls `finish`.
Legs go WAITING -> RUNNING -> ENDED. Legs with blocks to pull go PULL_QUEUED -> WAITING -> PULLING
-> READY -> RUNNING -> ENDED. Out of blocks, the leg admitted last returns to WAITING and recomputes
(`baton.simulator.v1.scheduler`). A finished PREFILL leg becomes a lease: its blocks stay in use
until they are pulled, released or expired. Prompts are hashed prompts or token ids; all generated
tokens are 0, and the leg's payload holds their number.

All times are arguments, in seconds on the caller's clock. Only pulls can fail: see `pull_failed`.
"""

from __future__ import annotations

from collections.abc import Iterable

import baton
from baton.domain.cache import CacheUpdate
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts, Role
from baton.domain.handoff import KvHandle, Leg, LegFailure, LegOutput
from baton.domain.request import FinishReason
from baton.simulator.engine.blocks import expect
from baton.simulator.engine.commands import (
    CancelFetch,
    EngineCommand,
    FreeSource,
    SimKvHandle,
    decode_kv_handle,
    encode_kv_handle,
)
from baton.simulator.engine.meters import PullMeter
from baton.simulator.engine.port import NO_OCCUPANCY, Occupancy
from baton.simulator.v1.memory import V1Memory
from baton.simulator.v1.pipeline import Pipeline
from baton.simulator.v1.runs import LegRun, LegRunState
from baton.simulator.v1.scheduler import Scheduler
from baton.simulator.v1.settings import V1Settings
from baton.simulator.v1.steps import Steps


class V1Core:
    """One counted engine, a `baton.simulator.engine.port.VirtualEngine`."""

    def __init__(
        self,
        settings: V1Settings,
        *,
        engine_id: str,
        model: str,
        address: str,
        multi_step: bool = True,
    ) -> None:
        self._settings = settings
        self._engine_id = engine_id
        self._model = model
        self._address = address
        self._commands: list[EngineCommand] = []
        self._memory = V1Memory(settings, model)
        self._scheduler = Scheduler(settings, self._memory, self._commands)
        self._steps = (
            Steps(settings, self._scheduler, self._memory, multi_step=multi_step)
            if settings.pipeline_stages == 1
            else Pipeline(settings, self._scheduler)
        )
        self._pulls = PullMeter()
        self._runs: dict[str, LegRun] = {}
        self._max_known_tokens = min(
            settings.max_len_tokens,
            (settings.kv_blocks - settings.request_blocks) * settings.block_size_tokens + 1,
        )
        """Tokens that a leg may know: the last is never computed and needs no block."""

    # ------------------------------------------------------------------ legs in and out
    def add(self, leg: Leg, *, now_s: float | None = None) -> LegFailure | None:
        """Queue a leg; None when accepted. Without `now_s`, outputs have no times."""
        kv_handle = None if leg.kv_handle is None else decode_kv_handle(leg.kv_handle)
        return self._add(
            LegRun(leg, kv_handle, max_known_tokens=self._max_known_tokens, queued_at_s=now_s)
        )

    def add_with_kv(self, leg: Leg) -> LegFailure | None:
        """Queue a leg that has the KV of all tokens but the last once there are blocks for it.

        This measures an engine that only decodes.
        """
        return self._add(
            LegRun(leg, None, max_known_tokens=self._max_known_tokens, kv_preloaded=True)
        )

    def abort(self, leg_ids: Iterable[str]) -> None:
        """End legs without an output and free their blocks, also at the source; ignores other ids.

        A finished prefill leg is a lease and stays.
        """
        for leg_id in leg_ids:
            run = self._runs.pop(leg_id, None)
            if run is None:
                continue
            if run.state is LegRunState.PULLING:
                self._commands.append(CancelFetch(leg_id=leg_id))
            if run.kv_handle is not None:
                self._commands.append(FreeSource(kv_handle=run.kv_handle))
            self._steps.on_leg_changed(run, None)

    # ------------------------------------------------------------------ steps
    def begin(self, now_s: float, *, horizon_s: float) -> float | None:
        """Choose the next steps: seconds until `finish` is due, None without work.

        Begins several steps where nothing can change meanwhile; the last is under way at the end of
        `horizon_s`. They have no output before `finish`.
        """
        self._expire(now_s)
        return self._steps.begin(now_s, horizon_s)

    def interrupt(self, now_s: float) -> float | None:
        """Seconds until `finish` is due after a change; None outside of steps."""
        return self._steps.interrupt(now_s)

    def finish(self, now_s: float) -> tuple[LegOutput, ...]:
        """End the steps of `begin` and return their outputs, in running order."""
        finished = self._steps.finish(now_s)
        if finished.only_decodes:
            return self._decode_outputs(finished.runs, finished.steps)
        return self._step_outputs(finished.runs, now_s)

    # ------------------------------------------------------------------ transfers, this side
    def pull_done(
        self, leg_id: str, *, blocks: int, duration_s: float, source_kept: bool
    ) -> LegOutput | None:
        """Record the arrival of pulled blocks; ignored when the leg was aborted meanwhile.

        Unless `source_kept`, the leg computes the missing tokens.
        """
        run = self._run_in_transfer(leg_id)
        if run is None or run.kv_handle is None:
            return None
        moved_bytes = blocks * self._settings.kv_block_bytes
        self._pulls.record_pull(
            run.kv_handle.engine_id, moved_bytes=moved_bytes, duration_s=duration_s
        )
        local_tokens = max(run.kv_handle.tokens, run.computed_tokens)
        if not source_kept:
            self._pulls.record_void_pull()
            local_tokens = run.computed_tokens
        self._steps.on_leg_changed(run, local_tokens)
        return None

    def pull_failed(self, leg_id: str) -> LegOutput | None:
        """Record a failed pull: the leg computes the missing tokens in the blocks it has."""
        run = self._run_in_transfer(leg_id)
        if run is not None and run.kv_handle is not None:
            self._pulls.record_pull_failure(run.kv_handle.engine_id)
            self._steps.on_leg_changed(run, run.computed_tokens)
        return None

    def load_done(self, leg_id: str) -> None:
        """Do nothing: this engine has no host tier."""

    # ------------------------------------------------------------------ transfers, source side
    def is_leased(self, leg_id: str, now_s: float) -> bool:
        """Whether the blocks of this finished prefill leg are still leased."""
        self._expire(now_s)
        return self._memory.is_leased(leg_id)

    def renew(self, leg_id: str, now_s: float) -> None:
        """Extend the lease of a finished prefill leg; does nothing after its end."""
        if self.is_leased(leg_id, now_s):
            self._memory.renew(leg_id, now_s)

    def pending_kv_handles(self) -> tuple[SimKvHandle, ...]:
        """KV handles of blocks that are still to be pulled: their leases need renewal."""
        return tuple(run.kv_handle for run in self._runs.values() if run.kv_handle is not None)

    def release(self, leg_id: str, now_s: float) -> bool:
        """Free a finished prefill leg's blocks; False without a lease."""
        was_leased = self.is_leased(leg_id, now_s)
        if was_leased:
            self._steps.catch_up(now_s)
            self._memory.release(leg_id)
            self._steps.on_blocks_freed()
        return was_leased

    def next_expiry_s(self) -> float | None:
        """When the oldest lease ends; None without leases."""
        return self._memory.next_expiry_s()

    # ------------------------------------------------------------------ for the body
    def pop_commands(self) -> tuple[EngineCommand, ...]:
        """Commands for the caller since the last call."""
        if not self._commands:
            return ()
        commands = tuple(self._commands)
        self._commands.clear()
        return commands

    def pop_cache_update(self) -> CacheUpdate | None:
        """Changes of the prefix cache since the last call; None without any."""
        return self._memory.blocks.pop_update()

    def cache_snapshot(self) -> CacheUpdate:
        """All cached blocks. Call `pop_cache_update` first."""
        return self._memory.blocks.snapshot()

    def has_cache_update(self) -> bool:
        """Whether `pop_cache_update` would return an update."""
        return self._memory.blocks.has_update

    def load(self, now_s: float) -> Load:
        """The load at this moment."""
        step_s, steps = self._steps.step_stats(now_s)
        counts = self._scheduler.counts()
        blocks = self._memory.blocks
        return Load(  # by position, which is faster than by name
            counts.queued,
            counts.running,
            counts.queued_tokens,
            blocks.used / blocks.total,
            step_s,
            self._pulls.transfers,
            counts.pulling,
            steps,
            blocks.sequence,
        )

    def occupancy(self, now_s: float) -> Occupancy:
        """The same requests and blocks as `load` reports, without its totals."""
        scheduler, blocks = self._scheduler, self._memory.blocks
        if not (self._runs or blocks.used):  # as most replicas of a large fleet are
            return NO_OCCUPANCY
        self._steps.catch_up(now_s)
        return Occupancy(
            scheduler.queued,
            len(scheduler.running),
            len(scheduler.pulling),
            blocks.used / blocks.total,
        )

    def links(self) -> tuple[LinkTotals, ...]:
        """Totals of pulls, by source."""
        return self._pulls.links

    def facts(self, *, replica_id: str, side_channel: str) -> ReplicaFacts:
        """The replica's facts; the caller knows pool and role."""
        settings = self._settings
        return ReplicaFacts(
            replica_id=replica_id,
            pool="",
            role=Role.MIXED,
            model=self._model,
            engine="sim",
            engine_version=baton.__version__,
            block_size_tokens=settings.block_size_tokens,
            kv_blocks=settings.kv_blocks,
            kv_block_bytes=settings.kv_block_bytes,
            max_len_tokens=settings.max_len_tokens,
            max_running_requests=settings.max_running_requests,
            max_batched_tokens=settings.max_batched_tokens,
            max_batched_tokens_while_decoding=settings.max_batched_tokens_while_decoding,
            layout=settings.layout,
            side_channel=side_channel,
            cache_events=settings.prefix_caching,
            supports_prefix_fetch=True,
        )

    def check_integrity(self) -> None:
        """Assert that blocks and legs are each in exactly one place."""
        self._scheduler.check_integrity()
        runs = tuple(self._scheduler.all_runs())
        self._memory.check_integrity(runs)
        mismatched_ids = {run.leg_id for run in runs} ^ self._runs.keys()
        expect(
            mismatched_ids <= self._steps.deferred_leg_ids(),
            f"only the queues or only the core know of {sorted(mismatched_ids)}",
        )

    # ------------------------------------------------------------------ tokens and ends
    def _decode_outputs(self, runs: list[LegRun], steps: int) -> tuple[LegOutput, ...]:
        tokens = (0,) * steps
        outputs, ended = [], []
        for run in runs:
            if run.state is not LegRunState.RUNNING:
                continue
            run.computed_tokens += steps
            run.known_tokens += steps
            if run.known_tokens >= run.end_tokens:
                times = run.timer.on_last_output()
                outputs.append(LegOutput(run.leg_id, tokens, run.finish_reason, times=times))
                ended.append(run)
            else:
                outputs.append(run.plain_output if steps == 1 else LegOutput(run.leg_id, tokens))
        self._end_runs(ended)
        return tuple(outputs)

    def _step_outputs(self, runs: list[LegRun], now_s: float) -> tuple[LegOutput, ...]:
        outputs, ended = [], []
        for run in runs:
            if run.state is not LegRunState.RUNNING:
                continue
            computed = run.computed_tokens = run.computed_tokens + run.scheduled_tokens
            if computed < run.known_tokens:
                continue
            run.scheduled_tokens = 1
            tokens = run.known_tokens = run.known_tokens + 1
            if tokens < run.end_tokens and run.first_output_sent:
                outputs.append(run.plain_output)
                continue
            if tokens >= run.end_tokens:
                ended.append(run)
            outputs.append(self._next_output(run, now_s))
        self._end_runs(ended)
        return tuple(outputs)

    def _next_output(self, run: LegRun, now_s: float) -> LegOutput:
        reason = run.finish_reason if run.known_tokens >= run.end_tokens else None
        if run.first_output_sent:
            return LegOutput(run.leg_id, _ONE_TOKEN, reason, times=run.timer.on_last_output())
        run.first_output_sent = True
        # After the request's last token there is nothing to hand off.
        needs_lease = run.is_prefill and reason is not FinishReason.STOP
        cache = run.cache_use(run.shared_blocks * self._settings.block_size_tokens)
        kv_handle = self._grant_lease(run, now_s) if needs_lease else None
        times = run.timer.on_first_output(now_s)
        return LegOutput(
            run.leg_id,
            _ONE_TOKEN,
            reason,
            kv_handle=kv_handle,
            cached_tokens=run.cached_tokens,
            times=times,
            cache_use=cache,
        )

    def _grant_lease(self, run: LegRun, now_s: float) -> KvHandle:
        tokens = len(run.prompt)
        kv_handle = SimKvHandle(
            engine_id=self._engine_id,
            leg_id=run.leg_id,
            address=self._address,
            layout=self._settings.layout,
            tokens=tokens,
            blocks=run.blocks,
            prompt_digest=self._memory.prefix_digest(run, tokens),
        )
        self._memory.lease(run, now_s)
        return KvHandle(tokens=tokens, blocks=kv_handle.blocks, params=encode_kv_handle(kv_handle))

    def _end_runs(self, ended: list[LegRun]) -> None:
        if ended:
            for run in ended:
                del self._runs[run.leg_id]
            self._scheduler.remove_ended(ended)

    # ------------------------------------------------------------------ legs
    def _add(self, run: LegRun) -> LegFailure | None:
        if not 0 < run.known_tokens < self._max_known_tokens:
            return LegFailure.INVALID
        if run.leg_id in self._runs or self._memory.is_leased(run.leg_id):
            return LegFailure.REJECTED
        if run.kv_handle is not None and not self._is_compatible(run, run.kv_handle):
            return LegFailure.KV_LOAD_FAILED
        if run.kv_handle is not None:
            # A real engine would decode from another prompt's blocks without an error.
            expect(
                self._memory.is_same_prompt(run, run.kv_handle),
                f"{run.leg_id}: KV handle of another prompt",
            )
        if len(self._scheduler.waiting) >= self._settings.max_waiting_requests:
            return LegFailure.OVERLOADED
        self._runs[run.leg_id] = run
        self._scheduler.add(run)
        if run.state is LegRunState.WAITING:
            self._steps.on_leg_queued()
        return None

    def _is_compatible(self, run: LegRun, kv_handle: SimKvHandle) -> bool:
        return (
            kv_handle.layout == self._settings.layout
            and 0 < kv_handle.tokens <= len(run.prompt)
            and kv_handle.blocks == self._memory.blocks_for(kv_handle.tokens)
        )

    def _run_in_transfer(self, leg_id: str) -> LegRun | None:
        run = self._runs.get(leg_id)
        return run if run is not None and run.state is LegRunState.PULLING else None

    def _expire(self, now_s: float) -> None:
        expiry_s = self._memory.next_expiry_s()
        if expiry_s is not None and expiry_s <= now_s:
            self._steps.catch_up(now_s)
            self._pulls.record_expired_leases(self._memory.expire(now_s))


_ONE_TOKEN = (0,)
