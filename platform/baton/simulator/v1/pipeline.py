"""The steps of an engine with pipeline stages: as many batches under way as there are stages.

Theory of operation: a batch takes as long through all stages as its timing says, and leaves the
first one after an equal share of that; then the next may begin. Batches end in the order they
began, each at least its own share after the one before. A leg is in one batch at a time, and a
batch takes no more than its share of the running legs, so that the others have some, too. `finish`
is due when a batch ends or may begin; it then ends at most one, perhaps none.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from baton.domain.fleet import StepTotals
from baton.simulator.engine.blocks import expect
from baton.simulator.v1.batches import StepRun, one_step
from baton.simulator.v1.meters import StepMeter
from baton.simulator.v1.runs import LegRun
from baton.simulator.v1.scheduler import Scheduler
from baton.simulator.v1.settings import V1Settings
from baton.simulator.v1.steps import FinishedSteps


class _Batch(NamedTuple):
    runs: list[LegRun]
    step: StepRun
    """Its seconds are those that it keeps the engine busy alone: no second counts twice."""
    ends_at_s: float


class Pipeline:
    """What is under way, for `baton.simulator.v1.core`."""

    def __init__(self, settings: V1Settings, scheduler: Scheduler) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._meter = StepMeter()
        self._batches: deque[_Batch] = deque()
        self._next_entry_at_s = 0.0
        """When the first stage is free."""
        self._last_batch_ends_at_s = 0.0
        """When the batch that began last ends."""
        self._is_stepping = False
        self._next_is_batch_end = False
        """Whether the next thing to happen is that a batch ends, rather than that one may begin."""
        self._nothing_to_begin = False
        """Whether there was nothing for a batch that could have begun, and nothing came since."""

    def begin(self, now_s: float, horizon_s: float) -> float | None:
        """Begin a batch if one may; seconds until the next may, or one ends; None without any."""
        expect(not self._is_stepping, "steps are under way: finish them first")
        self._nothing_to_begin = False
        if self._has_room() and now_s >= self._next_entry_at_s:
            self._nothing_to_begin = not self._begin_batch(now_s)
        self._is_stepping = bool(self._batches)
        return self._due_s(now_s) if self._is_stepping else None

    def interrupt(self, now_s: float) -> float | None:
        """Seconds until `finish` is due now that something has changed; None outside of steps."""
        if not self._is_stepping:
            return None
        self._nothing_to_begin = False
        return self._due_s(now_s)

    def finish(self, now_s: float) -> FinishedSteps:
        """End the batch that is due; there may be none. The caller gives the legs their tokens."""
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
        """A pull left `local_tokens` tokens here, or None: a leg was aborted."""
        self._scheduler.apply_pull_or_abort(run, local_tokens)

    def on_leg_queued(self) -> None:
        """A leg came to wait: `interrupt` will look."""

    def on_blocks_freed(self) -> None:
        """Blocks became free: likewise."""

    def catch_up(self, now_s: float) -> int:
        """No batch is more than one step, and each has its blocks."""
        return 0

    def deferred_leg_ids(self) -> set[str]:
        """Nothing waits for `interrupt`."""
        return set()

    def step_stats(self, now_s: float) -> tuple[float, StepTotals]:
        """The average seconds of a step, and all steps so far."""
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
