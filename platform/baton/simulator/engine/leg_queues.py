"""The legs of a simulated engine, each in the one queue that its state says."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton.simulator.engine.blocks import expect
from baton.simulator.engine.runs import LegRun, LegRunState


class QueueCounts(NamedTuple):
    """How many legs are where, and the tokens that they still have to compute."""

    queued: int
    pulling: int
    running: int
    queued_tokens: int


class LegQueues:
    """Who waits, who is ready to run, who runs; legs in a transfer are in no queue."""

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
        """The live leg with this id; None when it has ended or never was."""
        return self._runs.get(leg_id)

    def in_transfer(self, leg_id: str) -> LegRun | None:
        """The leg with this id if its blocks are on the way, else None."""
        run = self._runs.get(leg_id)
        return run if run is not None and run.state is LegRunState.FETCHING else None

    def add(self, run: LegRun) -> None:
        """A new leg waits."""
        self._runs[run.leg.leg_id] = run
        self.waiting.append(run)

    def on_blocks_arrived(self, run: LegRun) -> None:
        """A leg whose blocks were on the way waits no longer for them."""
        run.kv_handle = None
        run.state = LegRunState.READY
        self.ready.append(run)

    def first_admissible(self, queue: Sequence[LegRun], max_adapters: int) -> LegRun | None:
        """The first in line whose adapter is one of at most so many that run; None: nobody's."""
        if not max_adapters or not queue:
            return queue[0] if queue else None
        running_adapters = {run.leg.adapter for run in self.running} - {None}
        if len(running_adapters) < max_adapters:
            return queue[0]
        return next((run for run in queue if run.leg.adapter in {None, *running_adapters}), None)

    def start(self, run: LegRun) -> None:
        """A leg that was taken from its queue runs."""
        run.state = LegRunState.RUNNING
        self.running.append(run)

    def requeue_preempted(self, run: LegRun) -> None:
        """A running leg waits again, before all others."""
        self.running.remove(run)
        run.computed_tokens = 0
        run.state = LegRunState.WAITING
        self.waiting.appendleft(run)

    def remove(self, run: LegRun) -> None:
        """A leg is over."""
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

    def counts(self) -> QueueCounts:
        """Where the legs are at this moment."""
        queued = (*self.waiting, *self.ready)
        prefilling = (run for run in self.running if run.missing_tokens > 1)
        return QueueCounts(
            queued=len(queued),
            pulling=sum(run.state is LegRunState.FETCHING for run in self._runs.values()),
            running=len(self.running),
            queued_tokens=sum(run.expected_missing_tokens for run in (*queued, *prefilling)),
        )

    def check_integrity(self) -> None:
        """Assert that each leg is in exactly the queue that its state says."""
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
