"""Who is computed in the next step: vLLM V1's rules, on counts.

Theory of operation: running legs come first, in the order they were admitted: each gets what it
misses, a decode one token and a prompt its next chunk, until the token budget is used up. One for
which there is no block makes the leg admitted last fall back to the head of the queue, to be
recomputed, until there is one or it has fallen back itself; then nobody is admitted in this step.
Otherwise newcomers are, first those whose blocks have arrived, then first come first served without
overtaking, while there is budget, a seat (max_num_seqs), and room for the whole of their known
tokens; but only blocks for the tokens of this step are taken. A leg whose blocks are to be pulled
takes them all beforehand, and only if what running prompts still need stays free. A step that
streams wait for may have a budget of its own (`engine.vllm.step_budget`).
Source: vLLM 0.32, v1/core/sched/scheduler.py `schedule` and v1/core/kv_cache_manager.py
`allocate_slots`, with their defaults (scheduler_reserve_full_isl, no watermark).

`Scheduling.PREFILL_FIRST` is how it was done before: newcomers' whole prompts in steps of their
own, and decodes in steps in which nobody can be admitted.
Source: vLLM 0.2.6, core/scheduler.py; DistServe, arXiv 2401.09670, §2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum, auto
from itertools import chain as concatenate

from baton.domain.value import Value
from baton.simulator.engine.blocks import expect
from baton.simulator.engine.commands import FreeSource, Order, SimTicket, StartPull
from baton.simulator.v1.memory import V1Memory
from baton.simulator.v1.runs import Run, RunState
from baton.simulator.v1.settings import Scheduling, V1Settings


class Blocked(Enum):
    """Why the last step admitted no more legs."""

    EMPTY = auto()
    """Nobody waits."""
    BUDGET = auto()
    """The step's tokens were used up."""
    PREEMPTED = auto()
    """The step had to take memory from somebody."""
    SEATS = auto()
    MEMORY = auto()


class Counts(Value, kw_only=False):
    """How many legs are where, and the tokens that they still have to compute."""

    queued: int
    pulling: int
    running: int
    queued_tokens: int


class Scheduler:
    """The queues of one engine, and what its next step computes."""

    def __init__(self, settings: V1Settings, memory: V1Memory, orders: list[Order]) -> None:
        self.waiting: deque[Run] = deque()
        self.ready: deque[Run] = deque()
        self.running: list[Run] = []
        self.held: deque[Run] = deque()
        self.transfers: dict[str, Run] = {}
        self.blocked = Blocked.EMPTY
        self.preemptions = 0
        self.only_decodes = False
        """Whether the last choice was the running legs, each a token further, and nobody else."""
        self.decodes = 0
        """How many legs in front of the last choice are known to decode, each a token further."""
        self._settings = settings
        self._memory = memory
        self._orders = orders
        self._pulls = 0
        self._budget = self._longest = settings.max_batched_tokens
        self._chunked: set[Run] = set()
        """Running legs of whose known tokens some are left after the step under way."""

    # ------------------------------------------------------------------ in and out
    def add(self, run: Run) -> None:
        """A new leg waits."""
        if not run.pulls:
            self.waiting.append(run)
            return
        run.state = RunState.HELD
        self.held.append(run)
        self._let_pull()

    def _arrived(self, run: Run) -> None:
        """A leg whose blocks were on the way waits no longer for them."""
        del self.transfers[run.leg_id]
        run.ticket = None
        run.state = RunState.READY
        self.ready.append(run)
        self.pull_over(run)

    def settle(self, run: Run, there: int | None) -> None:
        """A pull left `there` tokens here, or None: the leg was aborted."""
        if there is None:
            self.leave(run)
        elif run.state is RunState.TRANSFER:
            self._memory.publish(run, there)
            # The last token is always computed here: its logits pick the next one.
            run.computed = min(there, run.tokens - 1)
            self._arrived(run)

    def leave(self, run: Run) -> None:
        """A leg is over: take it out of where it is, and free what it holds."""
        match run.state:
            case RunState.HELD:
                self.held.remove(run)
                run.pulls = False  # it never had a place among those that pull
            case RunState.WAITING:
                self.waiting.remove(run)
            case RunState.TRANSFER:
                del self.transfers[run.leg_id]
            case RunState.READY:
                self.ready.remove(run)
            case RunState.RUNNING:
                self.running.remove(run)
            case RunState.ENDED:
                raise AssertionError(f"leg {run.leg_id} ends twice")
        self._chunked.discard(run)
        run.state = RunState.ENDED
        self.pull_over(run)
        self._memory.drop(run)

    def end(self, runs: list[Run]) -> None:
        """Running legs have ended, in this order."""
        for run in runs:
            run.state = RunState.ENDED
            self._memory.drop(run)
        self.running = [run for run in self.running if run.state is RunState.RUNNING]

    def pull_over(self, run: Run) -> None:
        """A leg's pull counts no more, if it had one: the next may pull."""
        if run.pulls:
            run.pulls = False
            self._pulls -= 1
            self._let_pull()

    def everyone(self) -> Iterator[Run]:
        """All legs."""
        for queue in (self.running, self.ready, self.waiting, self.held):
            yield from queue
        yield from self.transfers.values()

    # ------------------------------------------------------------------ a step
    def choose(self, now_s: float, *, share: int = 1) -> list[Run]:
        """Whom the step that begins now computes for, in order; how much is in `Run.scheduled`.

        With a `share` of n, running legs that are in no batch, and of all running ones an n-th.
        """
        before = self.preemptions
        work = self._choose(now_s, share)
        if not work and self.preemptions > before:  # all fell back: there is room for others now
            work = self._choose(now_s, share)
        return work

    def _choose(self, now_s: float, share: int) -> list[Run]:
        self._budget = self._settings.budget(self._anyone_streams)
        self._longest = self._longest_chunk()
        mine = self.running
        if share > 1:
            mine = [run for run in mine if not run.in_batch][: -(-len(mine) // share)]
        if self._settings.scheduling is Scheduling.PREFILL_FIRST:
            return self._prompts_first(mine, now_s)
        if not self._chunked and (work := self._all_decode(mine)) is not None:
            self.decodes = len(work)
            if self.ready or self.waiting:
                self._admit(work, self._budget - self.decodes, now_s)
            else:
                self.blocked = Blocked.EMPTY
            self.only_decodes = len(work) == self.decodes
            return work
        self.only_decodes = False
        preempted = self.preemptions
        work, budget = self._continue_running(mine)
        if self.preemptions > preempted:
            self.blocked = Blocked.PREEMPTED
        else:
            self._admit(work, budget, now_s)
        return work

    def _anyone_streams(self) -> bool:
        chunked = self._chunked
        return any(run not in chunked and run.streams for run in self.running)

    def _prompts_first(self, mine: list[Run], now_s: float) -> list[Run]:
        """Newcomers' whole prompts if any fit into the step, else the decodes."""
        newcomers: list[Run] = []
        self.decodes = 0
        self._admit(newcomers, self._budget, now_s)
        prompts = [run for run in newcomers if run.tokens - run.computed > 1]
        # With newcomers, the next step may take who was behind them. Those that are computed again
        # have been reported, too.
        self.only_decodes = not newcomers and all(run.reported for run in mine)
        if prompts:
            return prompts
        decodes = mine if newcomers and mine is self.running else mine + newcomers
        if (work := self._all_decode(decodes)) is not None:
            return work
        self.only_decodes = False
        self.blocked = Blocked.PREEMPTED
        return self._continue_running(decodes)[0]

    def _all_decode(self, runs: list[Run]) -> list[Run] | None:
        """These legs, all a token further; None when there is not room for all."""
        if len(runs) > self._budget:
            return None
        size = self._settings.block_size_tokens
        full = [run for run in runs if run.computed == (run.held + run.private) * size]
        if full:
            if len(full) > self._memory.blocks.available:
                return None
            self._memory.blocks.take(len(full))
            for run in full:
                run.private += 1
        return runs.copy()

    def _continue_running(self, runs: list[Run]) -> tuple[list[Run], int]:
        # Prompts in chunks are mostly the last ones: those before them need no second look.
        front = len(runs) - len(self._chunked)
        known = front > 0 and self._chunked.issuperset(runs[front:])
        work = (self._all_decode(runs[:front]) if known else None) or []
        self.decodes = len(work)
        budget = self._budget - self.decodes
        for run in runs[self.decodes :]:
            if run.state is not RunState.RUNNING or not budget:
                break
            tokens = min(run.tokens - run.computed, self._longest, budget)
            if not self._make_room(run, run.computed + tokens):
                break
            self._compute(run, tokens)
            work.append(run)
            budget -= tokens
        return work, budget

    def _portion(self, missing: int, budget: int) -> int:
        """How many of a leg's missing tokens the next step computes; 0 when it has to wait."""
        if self._settings.scheduling is Scheduling.PREFILL_FIRST:
            fits = missing <= budget or budget == self._budget
            return missing if fits else 0  # one longer than a step's tokens has a step of its own
        return min(missing, budget, self._longest)

    def _longest_chunk(self) -> int:
        """Of one prompt, in tokens; without others there is nobody to keep waiting."""
        longest = self._settings.long_prefill_tokens
        if longest and len(self.running) + len(self.ready) + len(self.waiting) > 1:
            return longest
        return self._budget

    def _make_room(self, run: Run, tokens: int) -> bool:
        """Let a running leg have blocks for so many tokens; False if it was preempted instead."""
        while not self._memory.grow(run, tokens):
            victim = next(one for one in reversed(self.running) if not one.in_batch)
            self.running.remove(victim)
            self._preempt(victim)
            if victim is run:
                return False
        return True

    def _preempt(self, run: Run) -> None:
        self.preemptions += 1
        run.watch.preemptions += 1
        self._chunked.discard(run)
        self._memory.drop(run)
        run.arrived = False  # what once came from elsewhere has to be computed here
        run.state = RunState.WAITING
        self.waiting.appendleft(run)

    def _compute(self, run: Run, tokens: int) -> None:
        """Note that the next step computes `tokens` tokens of a run that has blocks for them."""
        run.scheduled = tokens
        computed = run.computed + tokens
        self._memory.publish(run, computed)
        if computed < run.tokens:
            self._chunked.add(run)
        else:
            self._chunked.discard(run)

    # ------------------------------------------------------------------ newcomers
    def _admit(self, work: list[Run], budget: int, now_s: float) -> None:
        seats = self._settings.max_running_requests
        while budget > 0:
            if not (self.ready or self.waiting):
                self.blocked = Blocked.EMPTY
                return
            if len(self.running) >= seats:
                self.blocked = Blocked.SEATS
                return
            run = self._admit_ready(budget) if self.ready else self._admit_waiting(budget)
            if run is None:
                self.blocked = Blocked.MEMORY
                return
            if run.state is RunState.TRANSFER:
                continue
            if run.cached_tokens < 0:
                run.cached_tokens = run.computed
                run.watch.scheduled(now_s)
            run.state = RunState.RUNNING
            self.running.append(run)
            self._compute(run, run.scheduled)
            work.append(run)
            budget -= run.scheduled
        self.blocked = Blocked.BUDGET

    def _admit_ready(self, budget: int) -> Run | None:
        run = self.ready[0]
        run.scheduled = self._portion(run.tokens - run.computed, budget)
        if not run.scheduled or not self._memory.grow(run, run.computed + run.scheduled):
            return None
        return self.ready.popleft()

    def _admit_waiting(self, budget: int) -> Run | None:
        """Take the first waiting leg, with its blocks for this step or for its pull; or None."""
        run, memory = self.waiting[0], self._memory
        cached, idle = memory.lookup(run)
        needed = memory.blocks_for(run.tokens) - cached + idle
        ticket = run.ticket
        to_pull = ticket is not None and ticket.blocks > cached
        if to_pull:
            needed += self._promised_blocks()
        computed = run.tokens - 1 if run.arrived else cached * self._settings.block_size_tokens
        tokens = self._portion(run.tokens - computed, budget)
        if needed > memory.blocks.available or not tokens:
            return None
        self.waiting.popleft()
        if ticket is not None and to_pull:
            memory.place(run, cached, ticket.tokens)
            self._start_pull(run, ticket, ticket.blocks - cached)
            return run
        if ticket is not None:
            self._orders.append(FreeSource(ticket=ticket))
            run.ticket = None
            self.pull_over(run)
        memory.place(run, cached, computed + tokens)
        run.computed = computed
        run.scheduled = tokens
        return run

    def _start_pull(self, run: Run, ticket: SimTicket, blocks: int) -> None:
        run.state = RunState.TRANSFER
        self.transfers[run.leg_id] = run
        self._orders.append(StartPull(leg_id=run.leg_id, ticket=ticket, blocks=blocks))

    def _promised_blocks(self) -> int:
        """What prompts that are being computed or pulled still need for all their tokens."""
        blocks_for = self._memory.blocks_for
        unfinished = concatenate(self._chunked, self.ready, self.transfers.values())
        return sum(max(0, blocks_for(run.tokens) - run.blocks) for run in unfinished)

    def _let_pull(self) -> None:
        while self.held and self._pulls < self._settings.max_pulls:
            run = self.held.popleft()
            self._pulls += 1
            run.state = RunState.WAITING
            self.waiting.append(run)

    def counts(self) -> Counts:
        """Where the legs are at this moment."""
        tokens = 0
        if not self._only_decode_now:
            missing = [run.tokens - run.computed for run in self.running]
            tokens = sum([more for more in missing if more > 1])
        queued = len(self.waiting) + len(self.ready) + len(self.held)
        if queued:
            for queue in (self.waiting, self.ready, self.held):
                tokens += sum([run.to_compute for run in queue])
        return Counts(queued, len(self.transfers), len(self.running), tokens)

    @property
    def _only_decode_now(self) -> bool:
        """Whether it is known, without a look, that all running legs miss a single token."""
        return self.only_decodes and self._settings.pipeline_stages == 1

    # ------------------------------------------------------------------ for tests
    def check_integrity(self) -> None:
        """Assert that each leg is in the one place that its state says."""
        for state, members in (
            (RunState.HELD, self.held),
            (RunState.WAITING, self.waiting),
            (RunState.TRANSFER, self.transfers.values()),
            (RunState.READY, self.ready),
            (RunState.RUNNING, self.running),
        ):
            wrong = [run.leg_id for run in members if run.state is not state]
            expect(not wrong, f"not {state.name}, though among those: {wrong}")
        ids = [run.leg_id for run in self.everyone()]
        expect(len(ids) == len(set(ids)), f"a leg is in two places: {ids}")
        pulls = sum(run.pulls for run in self.everyone() if run.state is not RunState.HELD)
        expect(pulls == self._pulls <= self._settings.max_pulls, f"{self._pulls} pull, not {pulls}")
        prompts = [run.leg_id for run in self.running if run.tokens - run.computed > 1]
        expect(not (prompts and self._only_decode_now), f"they do more than decode: {prompts}")
        seats = self._settings.max_running_requests
        expect(len(self.running) <= seats, f"{len(self.running)} run on {seats} seats")
