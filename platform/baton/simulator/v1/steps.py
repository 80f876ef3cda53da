"""The steps of an engine without pipeline stages: one after the other, many at once.

Theory of operation: while nobody's prompt is computed and nothing can change but the context of the
decodes, `begin` promises many steps at once (a *stretch*): until the first leg ends, blocks run
out, a lease ends, or patience does. Where steps are linear in the context, all happens as with one
step at a time: blocks are taken when their step begins (`catch_up`), and what an abort or a pull
changes meanwhile is `late`, that is, waits for `interrupt`, which knows the time.
"""

from __future__ import annotations

from baton.domain.fleet import StepTotals
from baton.domain.value import Value
from baton.simulator.engine.blocks import expect
from baton.simulator.v1.batches import decode_steps, one_step
from baton.simulator.v1.memory import V1Memory
from baton.simulator.v1.meters import StepMeter
from baton.simulator.v1.runs import Run, RunState
from baton.simulator.v1.scheduler import Blocked, Scheduler
from baton.simulator.v1.settings import V1Settings
from baton.simulator.v1.step_run import Stretch


class Done(Value, kw_only=False):
    """Steps that have ended."""

    work: list[Run]
    steps: int
    only_decodes: bool
    """Whether each of them was a decode that is not its leg's first output."""


class Steps:
    """What is under way, for `baton.simulator.v1.core`."""

    def __init__(
        self, settings: V1Settings, scheduler: Scheduler, memory: V1Memory, *, jumps: bool
    ) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._memory = memory
        self._jumps = jumps
        self._meter = StepMeter()
        self._work: list[Run] = []
        self._stretch: Stretch | None = None
        self._grown = 0
        """Steps of the stretch under way that have their blocks."""
        self._late: list[tuple[Run, int | None]] = []
        self._disturbed = False
        """Whether the stretch under way must end with the step under way."""

    def begin(self, now_s: float, patience_s: float) -> float | None:
        """Choose what to compute next: seconds until that is done, None when there is nothing."""
        expect(self._stretch is None, "steps are under way: finish them first")
        work = self._scheduler.choose(now_s)
        if not work:
            return None
        self._work = work
        self._grown = 1
        self._disturbed = False
        if self._scheduler.only_decodes:
            stretch = self._decodes(work, now_s, patience_s)
        else:
            timing, decodes = self._settings.timing, self._scheduler.decodes
            stretch = one_step(work, timing, now_s, decodes=decodes)
        self._stretch = stretch
        return stretch.seconds(stretch.steps)

    def interrupt(self, now_s: float) -> float | None:
        """Seconds until `finish` is due now that something has changed; None outside of steps."""
        stretch = self._stretch
        if stretch is None:
            return None
        if self._late or self._disturbed:
            done = stretch.done_by(now_s)
            self._catch_up(done + 1)
            if self._disturbed:
                stretch.steps = done + 1
            self._settle_late(done)
        return max(0.0, stretch.started_at_s + stretch.seconds(stretch.steps) - now_s)

    def finish(self, now_s: float) -> Done:
        """End what `begin` began; the caller gives the legs their tokens."""
        stretch = self._stretch
        if stretch is None:
            raise AssertionError("no step is under way: begin one first")
        if self._late:
            self._settle_late(stretch.steps - 1)
        self._catch_up(stretch.steps)
        self._meter.stepped(stretch, stretch.steps)
        done = Done(self._work, stretch.steps, self._scheduler.only_decodes)
        self._work, self._stretch = [], None
        return done

    # ------------------------------------------------------------------ what happens meanwhile
    def happened(self, run: Run, there: int | None) -> None:
        """A pull left `there` tokens here, or None: a leg was aborted. Now, or at `interrupt`."""
        if self._stretch is None or self._stretch.steps == 1:
            self._scheduler.settle(run, there)
            return
        self._late.append((run, there))
        self._disturbed |= there is None or self._scheduler.blocked is not Blocked.SEATS

    def came(self) -> None:
        """A leg came to wait; only where nobody else waits can that change anything."""
        self._disturbed |= self._scheduler.blocked is Blocked.EMPTY

    def freed(self) -> None:
        """Blocks became free that no leg of this engine has had in its steps."""
        self._disturbed |= self._scheduler.blocked is Blocked.MEMORY

    def catch_up(self, now_s: float) -> int:
        """How many steps of the stretch under way have ended; the next one has its blocks then."""
        if self._stretch is None:
            return 0
        done = self._stretch.done_by(now_s)
        self._catch_up(done + 1)
        return done

    def late(self) -> set[str]:
        """The legs that something has happened to since the stretch began."""
        return {run.leg_id for run, _ in self._late}

    def counted(self, now_s: float) -> tuple[float, StepTotals]:
        """The average seconds of a step, and all steps so far."""
        stretch, meter = self._stretch, self._meter
        if stretch is None:
            return meter.step_s(), meter.totals()
        done = self.catch_up(now_s)
        return meter.step_s(stretch, done), meter.totals(stretch, done)

    def _settle_late(self, done: int) -> None:
        late, self._late = self._late, []
        for run, there in late:
            if run.state is RunState.RUNNING:
                run.computed += done
                run.tokens += done
            self._scheduler.settle(run, there)

    # ------------------------------------------------------------------ many steps at once
    def _decodes(self, work: list[Run], now_s: float, patience_s: float) -> Stretch:
        most = min([run.limit - run.tokens for run in work]) if self._jumps else 1
        if most > 1:
            most = self._steps_with_room(work, most)
            if (expiry_s := self._memory.next_expiry_s()) is not None:
                patience_s = min(patience_s, expiry_s - now_s)
        return decode_steps(
            len(work),
            sum([run.tokens for run in work]),
            self._settings.timing,
            most=most,
            patience_s=patience_s,
            now_s=now_s,
        )

    def _steps_with_room(self, work: list[Run], most: int) -> int:
        """How many steps there are blocks for, at most `most`; those for one are taken already."""
        room, size = self._memory.blocks.available, self._settings.block_size_tokens
        if len(work) * -(-most // size) <= room:
            return most
        enough, too_many = 1, most + 1
        while too_many - enough > 1:
            steps = (enough + too_many) // 2
            if sum([self._blocks_missing(run, steps) for run in work]) <= room:
                enough = steps
            else:
                too_many = steps
        return enough

    def _blocks_missing(self, run: Run, steps: int) -> int:
        """Blocks that a decoding leg does not have for so many steps, from where it is."""
        return self._memory.blocks_for(run.computed + steps) - run.held - run.private

    def _catch_up(self, steps: int) -> None:
        """Take the blocks for the first `steps` steps of the stretch under way."""
        if steps <= self._grown:
            return
        self._grown = steps
        size, taken = self._settings.block_size_tokens, 0
        for run in self._work:
            missing = -(-(run.computed + steps) // size) - run.held - run.private
            if missing > 0:
                run.private += missing
                taken += missing
        if taken:
            self._memory.blocks.take(taken)
