"""The steps of an engine without pipeline stages: one after the other, many at once.

Theory of operation: while no prompt is computed and only the context of the decodes changes,
`begin` starts a *stretch* of several steps. It lasts until the first leg ends, blocks run out, a
lease ends, or the horizon passes. Where steps are linear in the context, the results equal those of
single steps: blocks are allocated when their step begins (`catch_up`). The effects of aborts and
pulls are deferred to `interrupt`, which knows the time.
"""

from __future__ import annotations

from baton.domain.fleet import StepTotals
from baton.domain.value import Value
from baton.simulator.engine.blocks import expect
from baton.simulator.v1.batches import StepMeter, StepRun, decode_steps, one_step
from baton.simulator.v1.memory import V1Memory
from baton.simulator.v1.runs import LegRun, LegRunState
from baton.simulator.v1.scheduler import BlockedReason, Scheduler
from baton.simulator.v1.settings import V1Settings


class FinishedSteps(Value, kw_only=False):
    """Steps that have ended."""

    runs: list[LegRun]
    steps: int
    only_decodes: bool
    """Whether each leg decoded in each of them, and none had its first output."""


class Steps:
    """The steps under way, for `baton.simulator.v1.core`."""

    def __init__(
        self, settings: V1Settings, scheduler: Scheduler, memory: V1Memory, *, multi_step: bool
    ) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._memory = memory
        self._multi_step = multi_step
        self._meter = StepMeter()
        self._runs: list[LegRun] = []
        self._step_run: StepRun | None = None
        self._allocated_steps = 0
        """Steps of the stretch under way that have their blocks."""
        self._deferred_changes: list[tuple[LegRun, int | None]] = []
        self._must_cut_short = False
        """Whether the stretch must end with the step under way."""

    def begin(self, now_s: float, horizon_s: float) -> float | None:
        """Begin the next steps: seconds until they are done, None without work."""
        expect(self._step_run is None, "steps are under way: finish them first")
        scheduled = self._scheduler.schedule(now_s)
        if not scheduled:
            return None
        self._runs = scheduled
        self._allocated_steps = 1
        self._must_cut_short = False
        if self._scheduler.only_decodes:
            step_run = self._begin_decodes(scheduled, now_s, horizon_s)
        else:
            timing, decodes = self._settings.timing, self._scheduler.leading_decodes
            step_run = one_step(scheduled, timing, now_s, decodes=decodes)
        self._step_run = step_run
        return step_run.seconds(step_run.steps)

    def interrupt(self, now_s: float) -> float | None:
        """Seconds until `finish` is due after a change; None outside of steps."""
        step_run = self._step_run
        if step_run is None:
            return None
        if self._deferred_changes or self._must_cut_short:
            done_steps = step_run.steps_done_by(now_s)
            self._allocate_steps(done_steps + 1)
            if self._must_cut_short:
                step_run.steps = done_steps + 1
            self._apply_deferred(done_steps)
        return max(0.0, step_run.started_at_s + step_run.seconds(step_run.steps) - now_s)

    def finish(self, now_s: float) -> FinishedSteps:
        """End the steps under way; the caller gives the legs their tokens."""
        step_run = self._step_run
        if step_run is None:
            raise AssertionError("no step is under way: begin one first")
        if self._deferred_changes:
            self._apply_deferred(step_run.steps - 1)
        self._allocate_steps(step_run.steps)
        self._meter.record_steps(step_run, step_run.steps)
        finished = FinishedSteps(self._runs, step_run.steps, self._scheduler.only_decodes)
        self._runs, self._step_run = [], None
        return finished

    # ------------------------------------------------------------------ what happens meanwhile
    def on_leg_changed(self, run: LegRun, local_tokens: int | None) -> None:
        """Apply a pull that left `local_tokens` tokens here, or an abort (None).

        Inside a stretch, `interrupt` applies it.
        """
        if self._step_run is None or self._step_run.steps == 1:
            self._scheduler.apply_pull_or_abort(run, local_tokens)
            return
        self._deferred_changes.append((run, local_tokens))
        self._must_cut_short |= (
            local_tokens is None or self._scheduler.blocked_reason is not BlockedReason.SLOTS
        )

    def on_leg_queued(self) -> None:
        """Note a new waiting leg: it can change a step only if no other leg waits."""
        self._must_cut_short |= self._scheduler.blocked_reason is BlockedReason.QUEUE_EMPTY

    def on_blocks_freed(self) -> None:
        """Note that a lease has freed blocks."""
        self._must_cut_short |= self._scheduler.blocked_reason is BlockedReason.MEMORY

    def catch_up(self, now_s: float) -> int:
        """Steps of the stretch that have ended by now; allocates the blocks of the next."""
        if self._step_run is None:
            return 0
        done_steps = self._step_run.steps_done_by(now_s)
        self._allocate_steps(done_steps + 1)
        return done_steps

    def deferred_leg_ids(self) -> set[str]:
        """Legs that have changed since the stretch began."""
        return {run.leg_id for run, _ in self._deferred_changes}

    def step_stats(self, now_s: float) -> tuple[float, StepTotals]:
        """The average seconds of a step, and the totals of all steps."""
        step_run, meter = self._step_run, self._meter
        if step_run is None:
            return meter.step_s(), meter.totals()
        done_steps = self.catch_up(now_s)
        return meter.step_s(step_run, done_steps), meter.totals(step_run, done_steps)

    def _apply_deferred(self, done_steps: int) -> None:
        deferred, self._deferred_changes = self._deferred_changes, []
        for run, local_tokens in deferred:
            if run.state is LegRunState.RUNNING:
                run.computed_tokens += done_steps
                run.known_tokens += done_steps
            self._scheduler.apply_pull_or_abort(run, local_tokens)

    # ------------------------------------------------------------------ many steps at once
    def _begin_decodes(self, scheduled: list[LegRun], now_s: float, horizon_s: float) -> StepRun:
        max_steps = (
            min([run.end_tokens - run.known_tokens for run in scheduled]) if self._multi_step else 1
        )
        if max_steps > 1:
            max_steps = self._steps_with_room(scheduled, max_steps)
            if (expiry_s := self._memory.next_expiry_s()) is not None:
                horizon_s = min(horizon_s, expiry_s - now_s)
        return decode_steps(
            len(scheduled),
            sum([run.known_tokens for run in scheduled]),
            self._settings.timing,
            max_steps=max_steps,
            horizon_s=horizon_s,
            now_s=now_s,
        )

    def _steps_with_room(self, runs: list[LegRun], max_steps: int) -> int:
        """How many steps there are blocks for, at most `max_steps`; the first has its blocks."""
        available_blocks, block_size_tokens = (
            self._memory.blocks.available,
            self._settings.block_size_tokens,
        )
        if len(runs) * -(-max_steps // block_size_tokens) <= available_blocks:
            return max_steps
        enough, too_many = 1, max_steps + 1
        while too_many - enough > 1:
            steps = (enough + too_many) // 2
            if sum([self._blocks_missing(run, steps) for run in runs]) <= available_blocks:
                enough = steps
            else:
                too_many = steps
        return enough

    def _blocks_missing(self, run: LegRun, steps: int) -> int:
        return (
            self._memory.blocks_for(run.computed_tokens + steps)
            - run.shared_blocks
            - run.private_blocks
        )

    def _allocate_steps(self, steps: int) -> None:
        if steps <= self._allocated_steps:
            return
        self._allocated_steps = steps
        block_size_tokens, states = self._settings.block_size_tokens, self._settings.request_blocks
        allocated_blocks = 0
        for run in self._runs:
            missing = (
                -(-(run.computed_tokens + steps) // block_size_tokens)
                + states
                - run.shared_blocks
                - run.private_blocks
            )
            if missing > 0:
                run.private_blocks += missing
                allocated_blocks += missing
        if allocated_blocks:
            self._memory.blocks.allocate(allocated_blocks)
