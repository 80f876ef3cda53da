"""The steps of an engine with pipeline stages: one batch per stage can be under way.

Theory of operation: a batch takes its timing's seconds through all stages and leaves the first
stage after an equal share of them; then the next may begin. Batches end in the order of their
begin, each at least its own share after the previous batch. A leg is in one batch at a time. A
batch takes at most its share of the running legs, so that the other batches have some. `finish` is
due when a batch ends or may begin; it ends at most one batch.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from baton.domain.fleet import StepTotals
from baton.simulator.engine.blocks import expect
from baton.simulator.v1.batches import StepMeter, StepRun, one_step
from baton.simulator.v1.runs import LegRun
from baton.simulator.v1.scheduler import Scheduler
from baton.simulator.v1.settings import V1Settings
from baton.simulator.v1.steps import FinishedSteps


class _Batch(NamedTuple):
    runs: list[LegRun]
    step: StepRun
    """Its seconds are those in which no earlier batch is under way: busy time counts once."""
    ends_at_s: float


class Pipeline:
    """The batches under way, for `baton.simulator.v1.core`; same methods as `Steps`."""

    def __init__(self, settings: V1Settings, scheduler: Scheduler) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._meter = StepMeter()
        self._batches: deque[_Batch] = deque()
        self._next_entry_at_s = 0.0
        """When the first stage is free."""
        self._last_batch_ends_at_s = 0.0
        self._is_stepping = False
        self._next_is_batch_end = False
        """Whether the next event is the end of a batch, not the earliest begin of one."""
        self._nothing_to_begin = False
        """Whether the scheduler had no legs for a new batch, and none came since."""

    def begin(self, now_s: float, horizon_s: float) -> float | None:
        """Begin a batch if one may; seconds until the next event, None without batches."""
        expect(not self._is_stepping, "steps are under way: finish them first")
        self._nothing_to_begin = False
        if self._has_room() and now_s >= self._next_entry_at_s:
            self._nothing_to_begin = not self._begin_batch(now_s)
        self._is_stepping = bool(self._batches)
        return self._due_s(now_s) if self._is_stepping else None

    def interrupt(self, now_s: float) -> float | None:
        """Seconds until `finish` is due after a change; None outside of steps."""
        if not self._is_stepping:
            return None
        self._nothing_to_begin = False
        return self._due_s(now_s)

    def finish(self, now_s: float) -> FinishedSteps:
        """End the batch that is due, if any; the caller gives the legs their tokens."""
        expect(self._is_stepping, "no step is under way: begin one first")
        self._is_stepping = False
        if not self._next_is_batch_end:
            self._next_entry_at_s = min(self._next_entry_at_s, now_s)  # it may be off by rounding
            return FinishedSteps([], 1, only_decodes=False)
        batch = self._batches.popleft()
        self._meter.record_steps(batch.step, 1)
        for run in batch.runs:
            run.in_batch = False
        return FinishedSteps(batch.runs, 1, only_decodes=False)

    # ------------------------------------------------------------------ what happens meanwhile
    def on_leg_changed(self, run: LegRun, local_tokens: int | None) -> None:
        """Apply a pull that left `local_tokens` tokens here, or an abort (None)."""
        self._scheduler.apply_pull_or_abort(run, local_tokens)

    def on_leg_queued(self) -> None:
        """Do nothing: `interrupt` looks at the queue."""

    def on_blocks_freed(self) -> None:
        """Do nothing: `interrupt` looks at the blocks."""

    def catch_up(self, now_s: float) -> int:
        """Return 0: a batch is one step and has its blocks."""
        return 0

    def deferred_leg_ids(self) -> set[str]:
        """Return no ids: no change waits for `interrupt`."""
        return set()

    def step_stats(self, now_s: float) -> tuple[float, StepTotals]:
        """The average seconds of a step, and the totals of all steps."""
        return self._meter.step_s(), self._meter.totals()

    def _has_room(self) -> bool:
        return len(self._batches) < self._settings.pipeline_stages

    def _due_s(self, now_s: float) -> float:
        first_end_at_s = self._batches[0].ends_at_s
        self._next_is_batch_end = (
            self._nothing_to_begin
            or not self._has_room()
            or first_end_at_s <= self._next_entry_at_s
        )
        return max(
            0.0, (first_end_at_s if self._next_is_batch_end else self._next_entry_at_s) - now_s
        )

    def _begin_batch(self, now_s: float) -> bool:
        stages = self._settings.pipeline_stages
        runs = self._scheduler.schedule(now_s, batch_count=stages)
        if not runs:
            return False
        for run in runs:
            run.in_batch = True
        step = one_step(runs, self._settings.timing, now_s)
        stage_s = step.first_step_s / stages
        previous_end_at_s = self._last_batch_ends_at_s
        self._next_entry_at_s = now_s + stage_s
        self._last_batch_ends_at_s = max(now_s + step.first_step_s, previous_end_at_s + stage_s)
        step.first_step_s = self._last_batch_ends_at_s - max(now_s, previous_end_at_s)
        self._batches.append(_Batch(runs, step, self._last_batch_ends_at_s))
        return True
