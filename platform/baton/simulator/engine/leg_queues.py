"""The legs of a simulated engine, each in the one queue that its state says."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton.simulator.engine.blocks import expect
from baton.simulator.engine.runs import Run, RunState


class Counts(NamedTuple):
    """How many legs are where, and the tokens that they still have to compute."""

    queued: int
    pulling: int
    running: int
    queued_tokens: int


class RunBook:
    """Who waits, who is ready to run, who runs; legs in a transfer are in no queue."""

    def __init__(self) -> None:
        self.waiting: deque[Run] = deque()
        self.ready: deque[Run] = deque()
        self.running: list[Run] = []
        self._runs: dict[str, Run] = {}

    def __contains__(self, leg_id: str) -> bool:
        return leg_id in self._runs

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def get(self, leg_id: str) -> Run | None:
        """The live leg with this id; None when it has ended or never was."""
        return self._runs.get(leg_id)

    def in_transfer(self, leg_id: str) -> Run | None:
        """The leg with this id if its blocks are on the way, else None."""
        run = self._runs.get(leg_id)
        return run if run is not None and run.state is RunState.TRANSFER else None

    def add(self, run: Run) -> None:
        """A new leg waits."""
        self._runs[run.leg.leg_id] = run
        self.waiting.append(run)

    def make_ready(self, run: Run) -> None:
        """A leg whose blocks were on the way waits no longer for them."""
        run.ticket = None
        run.state = RunState.READY
        self.ready.append(run)

    def first_fitting(self, queue: Sequence[Run], adapters: int) -> Run | None:
        """The first in line whose adapter is one of at most so many that run; None: nobody's."""
        if not adapters or not queue:
            return queue[0] if queue else None
        running = {run.leg.adapter for run in self.running} - {None}
        if len(running) < adapters:
            return queue[0]
        return next((run for run in queue if run.leg.adapter in {None, *running}), None)

    def run(self, run: Run) -> None:
        """A leg that was taken from its queue runs."""
        run.state = RunState.RUNNING
        self.running.append(run)

    def put_back(self, run: Run) -> None:
        """A running leg waits again, before all others."""
        self.running.remove(run)
        run.computed_tokens = 0
        run.state = RunState.WAITING
        self.waiting.appendleft(run)

    def end(self, run: Run) -> None:
        """A leg is over."""
        del self._runs[run.leg.leg_id]
        match run.state:
            case RunState.WAITING:
                self.waiting.remove(run)
            case RunState.READY:
                self.ready.remove(run)
            case RunState.RUNNING:
                self.running.remove(run)
            case RunState.TRANSFER | RunState.ENDED:
                pass
        run.state = RunState.ENDED

    def counts(self) -> Counts:
        """Where the legs are at this moment."""
        queued = (*self.waiting, *self.ready)
        prefilling = (run for run in self.running if run.missing_tokens > 1)
        return Counts(
            queued=len(queued),
            pulling=sum(run.state is RunState.TRANSFER for run in self._runs.values()),
            running=len(self.running),
            queued_tokens=sum(run.expected_tokens for run in (*queued, *prefilling)),
        )

    def check_integrity(self) -> None:
        """Assert that each leg is in exactly the queue that its state says."""
        runs = list(self._runs.values())
        lists = {
            RunState.WAITING: list(self.waiting),
            RunState.READY: list(self.ready),
            RunState.RUNNING: self.running,
        }
        for state, members in lists.items():
            in_state = {run.leg.leg_id for run in runs if run.state is state}
            listed = [run.leg.leg_id for run in members]
            expect(len(listed) == len(set(listed)), f"{state}: a leg is listed twice: {listed}")
            expect(set(listed) == in_state, f"{state}: listed {listed}, in that state {in_state}")
        expect(all(run.state is not RunState.ENDED for run in runs), "an ended leg is still known")
        expect(not any(run.blocks for run in self.waiting), "a waiting leg holds blocks")
