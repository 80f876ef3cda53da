"""The simulated engine without its clock: a scheduler with continuous batching over paged KV.

Theory of operation: a body calls `begin_step`, lets `Step.duration_s` pass, and calls
`finish_step`; between the two it may add, abort, and report pulls. Legs go
WAITING -> RUNNING -> ENDED, those with blocks to pull or to load
WAITING -> TRANSFER -> READY -> RUNNING -> ENDED; out of blocks, the youngest running leg falls back
to WAITING and will recompute. A leg's prompt gets all its blocks when it leaves WAITING, in arrival
order, nobody jumping the queue but those with an adapter that runs; decoding takes a block more
when the last is full. Running legs are served first, then newcomers, until the step's token budget
is used up.

A ticket may cover less than the prompt of the leg that brings it: what it covers is pulled, the
rest computed. A finished PREFILL leg becomes a lease: its blocks stay owned until pulled, released
or expired. What the body has to do outside (pulls, loads, telling a source to free) is in
`take_orders`. Every time is an argument, in seconds on the body's clock. What may fail: a pull, see
`pull_failed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from baton.control.fleet.loaded_adapters import LoadedAdapters
from baton.control.request.pull_permits import PullPermits
from baton.domain.fleet import LinkTotals, Load
from baton.domain.handoff import Leg, LegFailure, LegKind, LegOutput, Ticket
from baton.domain.kv_events import KvEvent
from baton.domain.request import FinishReason
from baton.simulator.engine.blocks import expect
from baton.simulator.engine.commands import (
    CancelFetch,
    FreeSource,
    LoadBlocks,
    Order,
    SimTicket,
    StartPull,
)
from baton.simulator.engine.leg_queues import RunBook
from baton.simulator.engine.leg_timer import Watch
from baton.simulator.engine.memory import KvMemory
from baton.simulator.engine.meters import Meters
from baton.simulator.engine.runs import Run, RunState
from baton.simulator.engine.settings import OnTransferFailure, SimSettings
from baton.simulator.engine.step import Step
from baton.simulator.engine.tokens import TokenStream, digest, pack_tokens, tuned


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
        self._book = RunBook()
        self._step: Step | None = None
        self._work: list[tuple[Run, int]] = []
        self._orders: list[Order] = []
        self._meters = Meters()
        self._adapters = LoadedAdapters(settings.adapter_slots)
        self._permits = PullPermits(
            limit=settings.max_pulls, pull_s=settings.side_channel_deadline_s
        )

    # ------------------------------------------------------------------ legs in and out
    def add(
        self, leg: Leg, ticket: SimTicket | None = None, *, now_s: float | None = None
    ) -> LegFailure | None:
        """Queue a leg; None when accepted, else why not. A decode leg brings its ticket, read.

        Without `now_s` nothing is told of its times.
        """
        prompt = leg.prompt_token_ids
        if not prompt or len(prompt) >= self._settings.max_len_tokens:
            return LegFailure.INVALID
        if leg.leg_id in self._book or self._memory.is_leased(leg.leg_id):
            return LegFailure.REFUSED
        if leg.adapter is not None and not self._settings.adapter_slots:
            return LegFailure.REFUSED
        if ticket is not None and not self._fits(ticket, leg):
            return LegFailure.KV_LOAD_FAILED
        if len(self._book.waiting) >= self._settings.max_waiting_requests:
            return LegFailure.OVERLOADED
        max_tokens = 1 if leg.kind is LegKind.PREFILL else leg.max_tokens
        self._book.add(
            Run(
                leg=leg,
                ticket=ticket,
                tokens=list(prompt),
                limit_tokens=min(len(prompt) + max_tokens, self._settings.max_len_tokens),
                stream=self._stream(leg),
                watch=Watch(now_s),
            )
        )
        self._adapters.leg_came(leg.adapter)
        return None

    def find_wrong(self, leg: Leg) -> LegOutput | None:
        """End a leg that was accepted and asks for what cannot be had; None for any other."""
        wrong, run = self._settings.invalid_token_id, self._book.get(leg.leg_id)
        if wrong is None or run is None or wrong not in leg.prompt_token_ids:
            return None
        self.abort((leg.leg_id,))
        why = f"token {wrong} cannot be had from this model"
        return LegOutput(leg.leg_id, finish=FinishReason.INVALID, stop_reason=why)

    def abort(self, leg_ids: Iterable[str]) -> None:
        """End legs without a word and free what they hold, at the source too; others are ignored.

        A prefill leg that has finished is not a leg any more but a lease, and stays.
        """
        for leg_id in leg_ids:
            run = self._book.get(leg_id)
            if run is None:
                continue
            if run.state is RunState.TRANSFER:
                self._orders.append(CancelFetch(leg_id=leg_id))
                self._permits.end(leg_id)
            if run.ticket is not None:
                self._orders.append(FreeSource(ticket=run.ticket))
            self._end(run)

    # ------------------------------------------------------------------ steps
    def begin_step(self, now_s: float) -> Step | None:
        """Choose what to compute next; None when there is nothing that could be."""
        expect(self._step is None, "a step is under way: finish it first")
        self.expire_leases(now_s)
        work, budget = self._continue_running()
        newcomers = len(work)
        self._admit(work, budget, now_s)
        loading_s = 0.0
        for run, _ in work[newcomers:]:
            run.watch.scheduled(now_s)
            loading_s += self._load_adapter(run)
        self._memory.note_evictions()
        if not work:
            return None
        self._work = work
        self._step = self._shape(work, now_s, loading_s)
        return self._step

    def finish_step(self, now_s: float) -> tuple[LegOutput, ...]:
        """Account for the step under way and return what it produced, in running order."""
        step = self._step
        if step is None:
            raise AssertionError("no step is under way: begin one first")
        self._meters.stepped(
            now_s - step.started_at_s - step.loading_s,
            prefill_tokens=step.prefill_tokens,
            decode_tokens=step.decode_requests,
            context_tokens=step.context_tokens,
        )
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
    def pull_done(self, leg_id: str, *, blocks: int, took_s: float, kept: bool) -> LegOutput | None:
        """The blocks of a pull are here; ignored when the leg was aborted meanwhile.

        Where the source had not `kept` them to the end they may be another prompt's: the leg
        computes its own or, if set so, ends with the returned error.
        """
        run = self._book.in_transfer(leg_id)
        if run is None or run.ticket is None:
            return None
        moved_bytes = blocks * self._settings.kv_block_bytes
        self._meters.pulled(run.ticket.engine_id, moved_bytes=moved_bytes, took_s=took_s)
        self._permits.end(leg_id)
        # No engine sees by its blocks whose they are: it decodes from what it has read.
        if not kept or self._digest(run.leg, run.ticket.tokens) != run.ticket.prompt_digest:
            run.stream.spoil()
        if not kept:
            self._meters.void()
            return self._go_without(run)
        # The last token is always computed here: its logits pick the next one.
        fetched = min(run.ticket.tokens, len(run.tokens) - 1)
        run.computed_tokens = max(run.computed_tokens, fetched)
        self._book.make_ready(run)
        self._memory.remember(run)
        return None

    def pull_failed(self, leg_id: str) -> LegOutput | None:
        """A pull did not work; the leg recomputes or, if set so, ends with the returned error."""
        run = self._book.in_transfer(leg_id)
        if run is None or run.ticket is None:
            return None
        self._meters.pull_failed(run.ticket.engine_id)
        self._permits.end(leg_id)
        return self._go_without(run)

    def _go_without(self, run: Run) -> LegOutput | None:
        """What was to be fetched is not to be had."""
        if self._settings.on_transfer_failure is OnTransferFailure.RECOMPUTE:
            run.stream = self._stream(run.leg)
            self._book.make_ready(run)
            return None
        self._end(run)
        return LegOutput(run.leg.leg_id, finish=FinishReason.ERROR)

    def load_done(self, leg_id: str) -> None:
        """Blocks have come from the host's memory; ignored when the leg was aborted meanwhile."""
        if (run := self._book.in_transfer(leg_id)) is not None:
            self._memory.loaded(run)
            self._book.make_ready(run)

    # ------------------------------------------------------------------ transfers, source side
    def holds(self, leg_id: str, now_s: float) -> bool:
        """Whether the blocks of this finished prefill leg are still kept."""
        self.expire_leases(now_s)
        return self._memory.is_leased(leg_id)

    def renew(self, leg_id: str, now_s: float) -> None:
        """Keep a finished prefill leg's blocks for longer; nothing where they are lost."""
        if self.holds(leg_id, now_s):
            self._memory.renew(leg_id, now_s)

    def awaited(self) -> tuple[SimTicket, ...]:
        """What legs wait for that is elsewhere: their leases are to be renewed."""
        return tuple(run.ticket for run in self._book if run.ticket is not None)

    def release(self, leg_id: str, now_s: float) -> bool:
        """Free a finished prefill leg's blocks; False when they were no longer kept."""
        held = self.holds(leg_id, now_s)
        if held:
            self._memory.release(leg_id)
        return held

    def expire_leases(self, now_s: float) -> None:
        """Free the blocks of leases whose time is up."""
        self._meters.expired(self._memory.expire(now_s))

    @property
    def next_expiry_s(self) -> float | None:
        """When to look again though nothing happens; None: no lease ends, no pull is overdue."""
        permit_at_s = self._permits.next_at_s if self._book.waiting else None
        times = (self._memory.next_expiry_s, permit_at_s)
        return min((at_s for at_s in times if at_s is not None), default=None)

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
        counts = self._book.counts()
        return Load(
            queued_requests=counts.queued,
            running_requests=counts.running,
            queued_tokens=counts.queued_tokens,
            kv_used_fraction=self._memory.used_fraction,
            step_s=self._meters.step_s,
            transfers=self._meters.transfers,
            pulling_requests=counts.pulling,
            steps=self._meters.steps,
            adapters=self._adapters.told(),
        )

    def links(self) -> tuple[LinkTotals, ...]:
        """What was pulled from whom."""
        return self._meters.links

    def reset_cache(self) -> bool:
        """Empty the prefix cache, both tiers; False, and nothing, while any block is in use."""
        return self._memory.reset()

    def check_integrity(self) -> None:
        """Assert that blocks and legs are each in exactly one place."""
        self._book.check_integrity()
        self._adapters.check_integrity()
        self._memory.check_integrity(self._book)

    # ------------------------------------------------------------------ scheduling
    def _continue_running(self) -> tuple[list[tuple[Run, int]], int]:
        """Work for the legs that already run, oldest first, and the token budget that is left."""
        budget = self._budget()
        work: list[tuple[Run, int]] = []
        for run in tuple(self._book.running):
            if run.state is not RunState.RUNNING or not budget or not self._make_room(run):
                break
            tokens = min(run.missing_tokens, budget)
            work.append((run, tokens))
            budget -= tokens
        return work, budget

    def _budget(self) -> int:
        """The next step's; see `baton.engine.vllm.patches.step_budget`."""
        settings = self._settings
        if settings.decode_step_tokens is not None and any(
            run.streams for run in self._book.running
        ):
            return settings.decode_step_tokens
        return settings.max_batched_tokens

    def _load_adapter(self, run: Run) -> float:
        """See to it that a run's adapter is there; how long that takes."""
        name = run.leg.adapter
        if name is None or self._adapters.use(name):
            return 0.0
        took_s = self._settings.adapter_load_s / self._settings.speed
        self._adapters.loaded(name, took_s)
        return took_s

    def _shape(self, work: Sequence[tuple[Run, int]], now_s: float, loading_s: float) -> Step:
        prefill_tokens = decode_requests = context_tokens = 0
        for run, tokens in work:
            # One missing token is the last of a prompt or of an output: a decode either way.
            if run.missing_tokens == 1:
                decode_requests += 1
                context_tokens += len(run.tokens)
            else:
                prefill_tokens += tokens
        duration_s = self._settings.step_s(
            prefill_tokens=prefill_tokens,
            decode_requests=decode_requests,
            kv_used_fraction=self._memory.used_fraction,
        )
        return Step(
            duration_s + loading_s,
            now_s,
            prefill_tokens,
            decode_requests,
            context_tokens,
            loading_s,
        )

    def _make_room(self, run: Run) -> bool:
        """Let a running leg's newest token have a block; False if the leg was preempted instead."""
        while not self._memory.grow(run):
            victim = self._book.running[-1]
            self._preempt(victim)
            if victim is run:
                return False
        return True

    def _preempt(self, run: Run) -> None:
        run.watch.preemptions += 1
        self._memory.drop(run)
        self._book.put_back(run)

    def _admit(self, work: list[tuple[Run, int]], budget: int, now_s: float) -> None:
        book, adapters = self._book, self._settings.adapters_per_batch
        while budget and len(book.running) < self._settings.max_running_requests:
            if (run := book.first_fitting(book.ready, adapters)) is not None:
                book.ready.remove(run)
            elif (
                run := book.first_fitting(self._may_start(now_s), adapters)
            ) and self._memory.place(run):
                book.waiting.remove(run)
                if self._start_fetch(run, now_s):
                    continue
            else:
                return
            book.run(run)
            if run.cached_tokens is None:
                run.cached_tokens = run.computed_tokens
            tokens = min(run.missing_tokens, budget)
            work.append((run, tokens))
            budget -= tokens

    def _may_start(self, now_s: float) -> Sequence[Run]:
        """Legs that wait, without those that wait for their turn to pull."""
        waiting = self._book.waiting
        if self._permits.may_begin(now_s):
            return waiting
        return [run for run in waiting if run.ticket is None]

    def _start_fetch(self, run: Run, now_s: float) -> bool:
        """Order the blocks of a placed leg that are elsewhere; False when all are here.

        The host's memory is nearer than another engine: where it has all that the ticket promises,
        nothing is pulled. Otherwise nothing is loaded.
        """
        ticket = run.ticket
        if ticket is not None:
            missing = ticket.blocks - run.remembered_blocks
            if missing > run.host_blocks:
                self._permits.begin(run.leg.leg_id, now_s)
                order = StartPull(leg_id=run.leg.leg_id, ticket=ticket, blocks=missing)
                return self._wait_for(run, order)
            run.ticket = None
            self._orders.append(FreeSource(ticket=ticket))
        if not run.host_blocks:
            return False
        self._memory.load(run)
        return self._wait_for(run, LoadBlocks(leg_id=run.leg.leg_id, blocks=run.host_blocks))

    def _wait_for(self, run: Run, order: Order) -> bool:
        run.state = RunState.TRANSFER
        self._orders.append(order)
        return True

    # ------------------------------------------------------------------ tokens and ends
    def _emit(self, run: Run, now_s: float) -> LegOutput:
        prefill = run.leg.kind is LegKind.PREFILL
        # A token that is not given only proves that the prompt is done; decode draws it again.
        given = not prefill or run.leg.gives_token
        may_end = given and run.generated_tokens >= run.leg.min_tokens
        token, ended = run.stream.next_token(may_end=may_end)
        run.tokens.append(token)
        cached_tokens = times = cache = None
        if not run.reported:
            cached_tokens, times = run.cached_tokens, run.watch.first_output(now_s)
            cache = run.cache_use(run.remembered_blocks * self._settings.block_size_tokens)
        first, run.reported = not run.reported, True
        finish = None
        if ended:
            finish = FinishReason.STOP
        elif len(run.tokens) >= run.limit_tokens:
            finish = FinishReason.LENGTH
        ticket = None
        if finish is FinishReason.LENGTH and prefill:
            ticket = self._grant_lease(run, now_s)
        if finish is not None:
            self._end(run)
            times = times if first else run.watch.last_output()
        return LegOutput(
            run.leg.leg_id,
            (token,),
            finish,
            ticket=ticket,
            cached_tokens=cached_tokens,
            times=times,
            cache=cache,
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
            prompt_digest=self._digest(run.leg, len(prompt)),
        )
        self._memory.lease(run, now_s)
        return Ticket(tokens=ticket.tokens, blocks=ticket.blocks, params=self._write_ticket(ticket))

    def _end(self, run: Run) -> None:
        self._book.end(run)
        self._memory.drop(run)
        self._adapters.leg_over(run.leg.adapter)

    def _fits(self, ticket: SimTicket, leg: Leg) -> bool:
        return (
            ticket.layout == self._layout
            and 0 < ticket.tokens <= len(leg.prompt_token_ids)
            and ticket.blocks == self._memory.blocks_for(ticket.tokens)
        )

    def _stream(self, leg: Leg) -> TokenStream:
        model = tuned(self._model, leg.adapter)
        return TokenStream(model, self._settings, leg.prompt_token_ids)

    def _digest(self, leg: Leg, tokens: int) -> bytes:
        """What stands for a leg's leading tokens, its adapter and its salt."""
        return digest(self._memory.root_hash(leg) + pack_tokens(leg.prompt_token_ids[:tokens]))
