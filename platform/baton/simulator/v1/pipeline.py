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
from baton.simulator.v1.batches import one_step
from baton.simulator.v1.meters import StepMeter
from baton.simulator.v1.runs import Run
from baton.simulator.v1.scheduler import Scheduler
from baton.simulator.v1.settings import V1Settings
from baton.simulator.v1.step_run import Stretch
from baton.simulator.v1.steps import Done


class _Batch(NamedTuple):
    work: list[Run]
    step: Stretch
    """Its seconds are those that it keeps the engine busy alone: no second counts twice."""
    ends_at_s: float


class Pipeline:
    """What is under way, for `baton.simulator.v1.core`."""

    def __init__(self, settings: V1Settings, scheduler: Scheduler) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._meter = StepMeter()
        self._batches: deque[_Batch] = deque()
        self._entry_at_s = 0.0
        """When the first stage is free."""
        self._ends_at_s = 0.0
        """When the batch that began last ends."""
        self._begun = False
        self._ending = False
        """Whether the next thing to happen is that a batch ends, rather than that one may begin."""
        self._idle = False
        """Whether there was nothing for a batch that could have begun, and nothing came since."""

    def begin(self, now_s: float, patience_s: float) -> float | None:
        """Begin a batch if one may; seconds until the next may, or one ends; None without any."""
        expect(not self._begun, "steps are under way: finish them first")
        self._idle = False
        if self._has_room() and now_s >= self._entry_at_s:
            self._idle = not self._begin_batch(now_s)
        self._begun = bool(self._batches)
        return self._due_s(now_s) if self._begun else None

    def interrupt(self, now_s: float) -> float | None:
        """Seconds until `finish` is due now that something has changed; None outside of steps."""
        if not self._begun:
            return None
        self._idle = False
        return self._due_s(now_s)

    def finish(self, now_s: float) -> Done:
        """End the batch that is due; there may be none. The caller gives the legs their tokens."""
        expect(self._begun, "no step is under way: begin one first")
        self._begun = False
        if not self._ending:
            self._entry_at_s = min(self._entry_at_s, now_s)  # it may be off by rounding
            return Done([], 1, only_decodes=False)
        batch = self._batches.popleft()
        self._meter.stepped(batch.step, 1)
        for run in batch.work:
            run.in_batch = False
        return Done(batch.work, 1, only_decodes=False)

    # ------------------------------------------------------------------ what happens meanwhile
    def happened(self, run: Run, there: int | None) -> None:
        """A pull left `there` tokens here, or None: a leg was aborted."""
        self._scheduler.settle(run, there)

    def came(self) -> None:
        """A leg came to wait: `interrupt` will look."""

    def freed(self) -> None:
        """Blocks became free: likewise."""

    def catch_up(self, now_s: float) -> int:
        """No batch is more than one step, and each has its blocks."""
        return 0

    def late(self) -> set[str]:
        """Nothing waits for `interrupt`."""
        return set()

    def counted(self, now_s: float) -> tuple[float, StepTotals]:
        """The average seconds of a step, and all steps so far."""
        return self._meter.step_s(), self._meter.totals()

    def _has_room(self) -> bool:
        return len(self._batches) < self._settings.pipeline_stages

    def _due_s(self, now_s: float) -> float:
        end_s = self._batches[0].ends_at_s
        self._ending = self._idle or not self._has_room() or end_s <= self._entry_at_s
        return max(0.0, (end_s if self._ending else self._entry_at_s) - now_s)

    def _begin_batch(self, now_s: float) -> bool:
        stages = self._settings.pipeline_stages
        work = self._scheduler.choose(now_s, share=stages)
        if not work:
            return False
        for run in work:
            run.in_batch = True
        step = one_step(work, self._settings.timing, now_s)
        stage_s = step.first_s / stages
        before_s = self._ends_at_s
        self._entry_at_s = now_s + stage_s
        self._ends_at_s = max(now_s + step.first_s, before_s + stage_s)
        step.first_s = self._ends_at_s - max(now_s, before_s)
        self._batches.append(_Batch(work, step, self._ends_at_s))
        return True
