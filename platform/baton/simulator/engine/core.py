"""The simulated engine without its clock: a scheduler with continuous batching over paged KV.

Theory of operation: a body calls `begin_step`, lets `Step.duration_s` pass, and calls
`finish_step`; between the two it may add, abort, and report pulls. Legs go
WAITING -> RUNNING -> ENDED, decode legs with something to fetch
WAITING -> TRANSFER -> READY -> RUNNING -> ENDED; out of blocks, the youngest running leg falls back
to WAITING and will recompute. A leg's prompt gets all its blocks when it leaves WAITING, in arrival
order, nobody jumping the queue; decoding takes a block more when the last is full. Running legs are
served first, then newcomers, until the step's token budget is used up.

A finished PREFILL leg becomes a lease: its blocks stay owned until pulled, released or expired.
What the body has to do outside (pulls, telling a source to free) is in `take_orders`. Every time is
an argument, in seconds on the body's clock. What may fail: a pull, see `pull_failed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from baton.domain.fleet import Load, TransferTotals
from baton.domain.handoff import Leg, LegFailure, LegKind, LegOutput, Ticket
from baton.domain.kv_events import KvEvent
from baton.domain.request import FinishReason
from baton.simulator.engine.blocks import expect
from baton.simulator.engine.memory import KvMemory
from baton.simulator.engine.orders import CancelPull, FreeSource, Order, SimTicket, StartPull
from baton.simulator.engine.runs import Run, RunState
from baton.simulator.engine.settings import OnTransferFailure, SimSettings
from baton.simulator.engine.tokens import TokenStream, digest, pack_tokens

_STEP_AVERAGE_WEIGHT = 0.2
"""Weight of the newest step in `Load.step_s`: about the last ten steps count."""


class Step(NamedTuple):
    """What one step computes."""

    duration_s: float
    started_at_s: float
    prefill_tokens: int
    decode_requests: int

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
        write_ticket: Callable[[SimTicket], bytes],
    ) -> None:
        self._settings = settings
        self._engine_id = engine_id
        self._model = model
        self._address = address
        self._write_ticket = write_ticket
        self._layout = settings.layout(model)
        self._memory = KvMemory(settings, self._layout)
        self._runs: dict[str, Run] = {}
        self._waiting: deque[Run] = deque()
        self._ready: deque[Run] = deque()
        self._running: list[Run] = []
        self._step: Step | None = None
        self._work: list[tuple[Run, int]] = []
        self._orders: list[Order] = []
        self._step_s = 0.0
        self._transfers = TransferTotals()

    # ------------------------------------------------------------------ legs in and out
    def add(self, leg: Leg, ticket: SimTicket | None = None) -> LegFailure | None:
        """Queue a leg; None when accepted, else why not. A decode leg brings its ticket, read."""
        prompt = leg.prompt_token_ids
        if not prompt or len(prompt) >= self._settings.max_len_tokens:
            return LegFailure.REFUSED
        if leg.leg_id in self._runs or self._memory.is_leased(leg.leg_id):
            return LegFailure.REFUSED
        if ticket is not None and not self._fits(ticket, prompt):
            return LegFailure.KV_LOAD_FAILED
        if len(self._waiting) >= self._settings.max_waiting_requests:
            return LegFailure.OVERLOADED
        max_tokens = 1 if leg.kind is LegKind.PREFILL else leg.max_tokens
        run = Run(
            leg=leg,
            ticket=ticket,
            tokens=list(prompt),
            limit_tokens=min(len(prompt) + max_tokens, self._settings.max_len_tokens),
            stream=TokenStream(self._model, self._settings, prompt),
        )
        self._runs[leg.leg_id] = run
        self._waiting.append(run)
        return None

    def abort(self, leg_ids: Iterable[str]) -> None:
        """End legs without a word and free what they hold, at the source too; others are ignored.

        A prefill leg that has finished is not a leg any more but a lease, and stays.
        """
        for leg_id in leg_ids:
            run = self._runs.get(leg_id)
            if run is None:
                continue
            if run.state is RunState.TRANSFER:
                self._orders.append(CancelPull(leg_id=leg_id))
            if run.ticket is not None:
                self._orders.append(FreeSource(ticket=run.ticket))
            self._end(run)

    # ------------------------------------------------------------------ steps
    def begin_step(self, now_s: float) -> Step | None:
        """Choose what to compute next; None when there is nothing that could be."""
        expect(self._step is None, "a step is under way: finish it first")
        self.expire_leases(now_s)
        work, budget = self._continue_running()
        self._admit(work, budget)
        self._memory.note_evictions()
        if not work:
            return None
        self._work = work
        self._step = self._shape(work, now_s)
        return self._step

    def finish_step(self, now_s: float) -> tuple[LegOutput, ...]:
        """Account for the step under way and return what it produced, in running order."""
        step = self._step
        if step is None:
            raise AssertionError("no step is under way: begin one first")
        took_s = now_s - step.started_at_s
        weight = _STEP_AVERAGE_WEIGHT if self._step_s else 1.0
        self._step_s += weight * (took_s - self._step_s)
        work, self._work, self._step = self._work, [], None
        outputs = []
        for run, tokens in work:
            if run.state is not RunState.RUNNING:
                continue
            run.computed_tokens += tokens
            self._memory.remember(run)
            if not run.missing_tokens:
                outputs.append(self._emit(run, now_s))
        return tuple(outputs)

    # ------------------------------------------------------------------ transfers, this side
    def pull_done(self, leg_id: str, *, blocks: int, took_s: float) -> None:
        """The blocks of a pull are here; ignored when the leg was aborted meanwhile."""
        run = self._in_transfer(leg_id)
        if run is None or run.ticket is None:
            return
        totals = self._transfers
        self._transfers = totals._replace(
            pulls=totals.pulls + 1,
            moved_bytes=totals.moved_bytes + blocks * self._settings.kv_block_bytes,
            busy_s=totals.busy_s + took_s,
        )
        # The last token is always computed here: its logits pick the next one.
        fetched = min(run.ticket.tokens, len(run.tokens) - 1)
        run.computed_tokens = max(run.computed_tokens, fetched)
        self._become_ready(run)
        self._memory.remember(run)

    def pull_failed(self, leg_id: str) -> LegOutput | None:
        """A pull did not work; the leg recomputes or, if set so, ends with the returned error."""
        run = self._in_transfer(leg_id)
        if run is None:
            return None
        self._transfers = self._transfers._replace(failures=self._transfers.failures + 1)
        if self._settings.on_transfer_failure is OnTransferFailure.RECOMPUTE:
            self._become_ready(run)
            return None
        self._end(run)
        return LegOutput(leg_id, finish=FinishReason.ERROR)

    # ------------------------------------------------------------------ transfers, source side
    def holds(self, leg_id: str, now_s: float) -> bool:
        """Whether the blocks of this finished prefill leg are still kept."""
        self.expire_leases(now_s)
        return self._memory.is_leased(leg_id)

    def release(self, leg_id: str, now_s: float) -> bool:
        """Free a finished prefill leg's blocks; False when they were no longer kept."""
        held = self.holds(leg_id, now_s)
        if held:
            self._memory.release(leg_id)
        return held

    def expire_leases(self, now_s: float) -> None:
        """Free the blocks of leases whose time is up."""
        if expired := self._memory.expire(now_s):
            expired += self._transfers.expired_leases
            self._transfers = self._transfers._replace(expired_leases=expired)

    @property
    def next_expiry_s(self) -> float | None:
        """When the oldest lease ends; None without leases."""
        return self._memory.next_expiry_s

    # ------------------------------------------------------------------ for the body
    def take_orders(self) -> tuple[Order, ...]:
        """What the body has to do outside, since this was last called."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def take_events(self) -> tuple[KvEvent, ...]:
        """What changed in the prefix cache since this was last called."""
        return self._memory.take_events()

    def load(self) -> Load:
        """The load at this moment, counted."""
        pulling = sum(run.state is RunState.TRANSFER for run in self._runs.values())
        queued = (*self._waiting, *self._ready)
        prefilling = (run for run in self._running if run.missing_tokens > 1)
        return Load(
            queued_requests=len(queued),
            pulling_requests=pulling,
            running_requests=len(self._running),
            queued_tokens=sum(run.missing_tokens for run in (*queued, *prefilling)),
            kv_used_fraction=self._memory.used_fraction,
            step_s=self._step_s,
            transfers=self._transfers,
        )

    def check_integrity(self) -> None:
        """Assert that blocks and legs are each in exactly one place."""
        runs = list(self._runs.values())
        lists = {
            RunState.WAITING: list(self._waiting),
            RunState.READY: list(self._ready),
            RunState.RUNNING: self._running,
        }
        for state, members in lists.items():
            in_state = {run.leg.leg_id for run in runs if run.state is state}
            listed = [run.leg.leg_id for run in members]
            expect(len(listed) == len(set(listed)), f"{state}: a leg is listed twice: {listed}")
            expect(set(listed) == in_state, f"{state}: listed {listed}, in that state {in_state}")
        expect(all(run.state is not RunState.ENDED for run in runs), "an ended leg is still known")
        expect(not any(run.blocks for run in self._waiting), "a waiting leg holds blocks")
        self._memory.check_integrity(runs)

    # ------------------------------------------------------------------ scheduling
    def _continue_running(self) -> tuple[list[tuple[Run, int]], int]:
        """Work for the legs that already run, oldest first, and the token budget that is left."""
        budget = self._settings.max_batched_tokens
        work: list[tuple[Run, int]] = []
        for run in tuple(self._running):
            if run.state is not RunState.RUNNING or not budget or not self._make_room(run):
                break
            tokens = min(run.missing_tokens, budget)
            work.append((run, tokens))
            budget -= tokens
        return work, budget

    def _shape(self, work: Sequence[tuple[Run, int]], now_s: float) -> Step:
        prefill_tokens = decode_requests = 0
        for run, tokens in work:
            # One missing token is the last of a prompt or of an output: a decode either way.
            if run.missing_tokens == 1:
                decode_requests += 1
            else:
                prefill_tokens += tokens
        duration_s = self._settings.step_s(
            prefill_tokens=prefill_tokens, decode_requests=decode_requests
        )
        return Step(duration_s, now_s, prefill_tokens, decode_requests)

    def _make_room(self, run: Run) -> bool:
        """Let a running leg's newest token have a block; False if the leg was preempted instead."""
        while not self._memory.grow(run):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is run:
                return False
        return True

    def _preempt(self, run: Run) -> None:
        self._running.remove(run)
        self._memory.drop(run)
        run.computed_tokens = 0
        run.state = RunState.WAITING
        self._waiting.appendleft(run)

    def _admit(self, work: list[tuple[Run, int]], budget: int) -> None:
        while budget and len(self._running) < self._settings.max_running_requests:
            if self._ready:
                run = self._ready.popleft()
            elif self._waiting and self._memory.place(self._waiting[0]):
                run = self._waiting.popleft()
                if self._start_pull(run):
                    continue
            else:
                return
            run.state = RunState.RUNNING
            self._running.append(run)
            if run.cached_tokens is None:
                run.cached_tokens = run.computed_tokens
            tokens = min(run.missing_tokens, budget)
            work.append((run, tokens))
            budget -= tokens

    def _start_pull(self, run: Run) -> bool:
        """Order the blocks that a placed leg's ticket promises; False when all are here."""
        ticket = run.ticket
        if ticket is None:
            return False
        missing = ticket.blocks - run.remembered_blocks
        if missing <= 0:
            run.ticket = None
            self._orders.append(FreeSource(ticket=ticket))
            return False
        run.state = RunState.TRANSFER
        self._orders.append(StartPull(leg_id=run.leg.leg_id, ticket=ticket, blocks=missing))
        return True

    def _in_transfer(self, leg_id: str) -> Run | None:
        run = self._runs.get(leg_id)
        return run if run is not None and run.state is RunState.TRANSFER else None

    def _become_ready(self, run: Run) -> None:
        run.ticket = None
        run.state = RunState.READY
        self._ready.append(run)

    # ------------------------------------------------------------------ tokens and ends
    def _emit(self, run: Run, now_s: float) -> LegOutput:
        prefill = run.leg.kind is LegKind.PREFILL
        # A prefill leg's token only proves that the prompt is done; decode draws it again.
        may_end = not prefill and run.generated_tokens >= run.leg.min_tokens
        token, ended = run.stream.next_token(may_end=may_end)
        run.tokens.append(token)
        cached_tokens = None if run.reported else run.cached_tokens
        run.reported = True
        finish = None
        if ended:
            finish = FinishReason.STOP
        elif len(run.tokens) >= run.limit_tokens:
            finish = FinishReason.LENGTH
        ticket = None
        if finish is not None and prefill:
            ticket = self._grant_lease(run, now_s)
        if finish is not None:
            self._end(run)
        return LegOutput(
            run.leg.leg_id, (token,), finish, ticket=ticket, cached_tokens=cached_tokens
        )

    def _grant_lease(self, run: Run, now_s: float) -> Ticket:
        prompt = run.leg.prompt_token_ids
        ticket = SimTicket(
            engine_id=self._engine_id,
            leg_id=run.leg.leg_id,
            address=self._address,
            layout=self._layout,
            tokens=len(prompt),
            blocks=len(run.blocks),
            prompt_digest=digest(pack_tokens(prompt)),
        )
        self._memory.lease(run, now_s)
        return Ticket(tokens=ticket.tokens, blocks=ticket.blocks, params=self._write_ticket(ticket))

    def _end(self, run: Run) -> None:
        del self._runs[run.leg.leg_id]
        match run.state:
            case RunState.WAITING:
                self._waiting.remove(run)
            case RunState.READY:
                self._ready.remove(run)
            case RunState.RUNNING:
                self._running.remove(run)
            case RunState.TRANSFER | RunState.ENDED:
                pass
        run.state = RunState.ENDED
        self._memory.drop(run)

    def _fits(self, ticket: SimTicket, prompt: tuple[int, ...]) -> bool:
        return (
            ticket.layout == self._layout
            and 0 < ticket.tokens <= len(prompt)
            and ticket.blocks == self._memory.blocks_for(ticket.tokens)
            and ticket.prompt_digest == digest(pack_tokens(prompt[: ticket.tokens]))
        )
