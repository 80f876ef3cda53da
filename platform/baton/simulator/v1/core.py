"""An engine on counts: vLLM V1's scheduler without tokens, many decode steps at once.

Theory of operation: a body calls `begin`, lets the seconds pass that it says, and calls `finish`.
Legs go WAITING -> RUNNING -> ENDED, those with blocks to pull
HELD -> WAITING -> TRANSFER -> READY -> RUNNING -> ENDED; out of blocks, the leg admitted last falls
back to WAITING and will recompute (`baton.simulator.v1.scheduler`). A finished PREFILL leg becomes
a lease: its blocks stay in use until pulled, released or expired. Prompts are outlines or token
ids; generated tokens are all 0, and how many there will be is in the leg's payload.

`baton.simulator.v1.steps` has how many steps are taken at once, `baton.simulator.v1.pipeline` how
batches overlap. Every time is an argument, in seconds on the body's clock. What may fail: a pull,
see `pull_failed`.
"""

from __future__ import annotations

from collections.abc import Iterable

import baton
from baton.domain.cache import CacheUpdate
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts, Role
from baton.domain.handoff import Leg, LegFailure, LegOutput, Ticket
from baton.domain.request import FinishReason
from baton.simulator.engine.blocks import expect
from baton.simulator.engine.commands import CancelFetch, FreeSource, Order, SimTicket
from baton.simulator.engine.kv_handles import read_ticket, write_ticket
from baton.simulator.engine.meters import PullMeter
from baton.simulator.v1.memory import V1Memory
from baton.simulator.v1.pipeline import Pipeline
from baton.simulator.v1.runs import Run, RunState
from baton.simulator.v1.scheduler import Scheduler
from baton.simulator.v1.settings import V1Settings
from baton.simulator.v1.steps import Steps


class V1Core:
    """One counted engine: a `baton.simulator.engine.port.VirtualEngine`."""

    def __init__(
        self, settings: V1Settings, *, engine_id: str, model: str, address: str, jumps: bool = True
    ) -> None:
        self._settings = settings
        self._engine_id = engine_id
        self._model = model
        self._address = address
        self._orders: list[Order] = []
        self._memory = V1Memory(settings, model)
        self._scheduler = Scheduler(settings, self._memory, self._orders)
        self._steps = (
            Steps(settings, self._scheduler, self._memory, jumps=jumps)
            if settings.pipeline_stages == 1
            else Pipeline(settings, self._scheduler)
        )
        self._pulls = PullMeter()
        self._runs: dict[str, Run] = {}
        self._longest = min(
            settings.max_len_tokens, settings.kv_blocks * settings.block_size_tokens + 1
        )
        """Tokens that a leg may know: the last one is never computed and needs no block."""

    # ------------------------------------------------------------------ legs in and out
    def add(self, leg: Leg, *, now_s: float | None = None) -> LegFailure | None:
        """Queue a leg; None when accepted, else why not. Without `now_s` no times are told."""
        ticket = None if leg.ticket is None else read_ticket(leg.ticket)
        return self._add(Run(leg, ticket, longest=self._longest, queued_at_s=now_s))

    def add_with_kv(self, leg: Leg) -> LegFailure | None:
        """Queue a leg whose KV is here as soon as there are blocks for it, all but the last token.

        That is how an engine that only decodes is looked at alone.
        """
        return self._add(Run(leg, None, longest=self._longest, arrived=True))

    def abort(self, leg_ids: Iterable[str]) -> None:
        """End legs without a word and free what they hold, at the source too; others are ignored.

        A prefill leg that has finished is not a leg any more but a lease, and stays.
        """
        for leg_id in leg_ids:
            run = self._runs.pop(leg_id, None)
            if run is None:
                continue
            if run.state is RunState.TRANSFER:
                self._orders.append(CancelFetch(leg_id=leg_id))
            if run.ticket is not None:
                self._orders.append(FreeSource(ticket=run.ticket))
            self._steps.happened(run, None)

    # ------------------------------------------------------------------ steps
    def begin(self, now_s: float, *, patience_s: float) -> float | None:
        """Choose what to compute next: seconds until `finish` is due, None when there is nothing.

        Several steps where nothing can change meanwhile: the last is the one under way when
        `patience_s` is over. They produce nothing before `finish`, however many they are.
        """
        self._expire(now_s)
        return self._steps.begin(now_s, patience_s)

    def interrupt(self, now_s: float) -> float | None:
        """Seconds until `finish` is due now that something has changed; None outside of steps."""
        return self._steps.interrupt(now_s)

    def finish(self, now_s: float) -> tuple[LegOutput, ...]:
        """Account for what `begin` began and return what it produced, in running order."""
        done = self._steps.finish(now_s)
        if done.only_decodes:
            return self._decoded(done.work, done.steps)
        return self._computed(done.work, now_s)

    # ------------------------------------------------------------------ transfers, this side
    def pull_done(self, leg_id: str, *, blocks: int, took_s: float, kept: bool) -> LegOutput | None:
        """The blocks of a pull are here; ignored when the leg was aborted meanwhile.

        Where the source had not `kept` them, the leg computes what it misses.
        """
        run = self._in_transfer(leg_id)
        if run is None or run.ticket is None:
            return None
        moved_bytes = blocks * self._settings.kv_block_bytes
        self._pulls.pulled(run.ticket.engine_id, moved_bytes=moved_bytes, took_s=took_s)
        there = max(run.ticket.tokens, run.computed)
        if not kept:
            self._pulls.void()
            there = run.computed
        self._steps.happened(run, there)
        return None

    def pull_failed(self, leg_id: str) -> LegOutput | None:
        """A pull did not work: the leg computes what it misses, in the blocks it has."""
        run = self._in_transfer(leg_id)
        if run is not None and run.ticket is not None:
            self._pulls.pull_failed(run.ticket.engine_id)
            self._steps.happened(run, run.computed)
        return None

    def load_done(self, leg_id: str) -> None:
        """Nothing: this engine keeps no blocks in the host's memory."""

    # ------------------------------------------------------------------ transfers, source side
    def holds(self, leg_id: str, now_s: float) -> bool:
        """Whether the blocks of this finished prefill leg are still kept."""
        self._expire(now_s)
        return self._memory.is_leased(leg_id)

    def renew(self, leg_id: str, now_s: float) -> None:
        """Keep a finished prefill leg's blocks for longer; nothing where they are lost."""
        if self.holds(leg_id, now_s):
            self._memory.renew(leg_id, now_s)

    def awaited(self) -> tuple[SimTicket, ...]:
        """What legs wait for that is elsewhere: their leases are to be renewed."""
        return tuple(run.ticket for run in self._runs.values() if run.ticket is not None)

    def release(self, leg_id: str, now_s: float) -> bool:
        """Free a finished prefill leg's blocks; False when they were no longer kept."""
        held = self.holds(leg_id, now_s)
        if held:
            self._steps.catch_up(now_s)
            self._memory.release(leg_id)
            self._steps.freed()
        return held

    def next_expiry_s(self) -> float | None:
        """When the oldest lease ends; None without leases."""
        return self._memory.next_expiry_s()

    # ------------------------------------------------------------------ for the body
    def take_orders(self) -> tuple[Order, ...]:
        """What the body has to do outside, since this was last called."""
        if not self._orders:
            return ()
        orders = tuple(self._orders)
        self._orders.clear()
        return orders

    def take_cache_update(self) -> CacheUpdate | None:
        """What changed in the prefix cache since this was last called; None when nothing did."""
        return self._memory.blocks.take_update()

    def cache_snapshot(self) -> CacheUpdate:
        """All that is cached. Call `take_cache_update` first."""
        return self._memory.blocks.snapshot()

    def has_cache_news(self) -> bool:
        """Whether `take_cache_update` would have anything to say."""
        return self._memory.blocks.has_news

    def load(self, now_s: float) -> Load:
        """The load at this moment, counted."""
        step_s, steps = self._steps.counted(now_s)
        counts = self._scheduler.counts()
        blocks = self._memory.blocks
        return Load(
            counts.queued,
            counts.running,
            counts.queued_tokens,
            blocks.used / blocks.total,
            step_s,
            self._pulls.transfers,
            counts.pulling,
            steps,
            blocks.sequence,
        )

    def links(self) -> tuple[LinkTotals, ...]:
        """What was pulled from whom."""
        return self._pulls.links

    def facts(self, *, replica_id: str, side_channel: str) -> ReplicaFacts:
        """What the replica says of itself; which pool it is in, and for what, others know."""
        settings = self._settings
        return ReplicaFacts(
            replica_id=replica_id,
            pool="",
            role=Role.MIXED,
            model=self._model,
            engine="sim",
            engine_version=baton.__version__,
            block_size_tokens=settings.block_size_tokens,
            kv_blocks=settings.kv_blocks,
            kv_block_bytes=settings.kv_block_bytes,
            max_len_tokens=settings.max_len_tokens,
            max_running_requests=settings.max_running_requests,
            max_batched_tokens=settings.max_batched_tokens,
            decode_step_tokens=settings.decode_step_tokens,
            layout=settings.layout,
            side_channel=side_channel,
            cache_events=settings.prefix_caching,
            prefix_fetch=True,
        )

    def check_integrity(self) -> None:
        """Assert that blocks and legs are each in exactly one place."""
        self._scheduler.check_integrity()
        runs = tuple(self._scheduler.everyone())
        self._memory.check_integrity(runs)
        unknown = {run.leg_id for run in runs} ^ self._runs.keys()
        expect(
            unknown <= self._steps.late(),
            f"only the queues or only the core know of {sorted(unknown)}",
        )

    # ------------------------------------------------------------------ tokens and ends
    def _decoded(self, work: list[Run], steps: int) -> tuple[LegOutput, ...]:
        tokens = (0,) * steps
        outputs, ended = [], []
        for run in work:
            if run.state is not RunState.RUNNING:
                continue
            run.computed += steps
            run.tokens += steps
            if run.tokens >= run.limit:
                times = run.watch.last_output()
                outputs.append(LegOutput(run.leg_id, tokens, run.reason, times=times))
                ended.append(run)
            else:
                outputs.append(run.usual if steps == 1 else LegOutput(run.leg_id, tokens))
        self._end(ended)
        return tuple(outputs)

    def _computed(self, work: list[Run], now_s: float) -> tuple[LegOutput, ...]:
        outputs, ended = [], []
        for run in work:
            if run.state is not RunState.RUNNING:
                continue
            computed = run.computed = run.computed + run.scheduled
            if computed < run.tokens:
                continue
            run.scheduled = 1
            tokens = run.tokens = run.tokens + 1
            if tokens < run.limit and run.reported:
                outputs.append(run.usual)
                continue
            if tokens >= run.limit:
                ended.append(run)
            outputs.append(self._output(run, now_s))
        self._end(ended)
        return tuple(outputs)

    def _output(self, run: Run, now_s: float) -> LegOutput:
        """The next token of a leg, and what comes with the first and with the last."""
        reason = run.reason if run.tokens >= run.limit else None
        if run.reported:
            return LegOutput(run.leg_id, _ONE, reason, times=run.watch.last_output())
        run.reported = True
        # A prefill leg whose token was the request's last has nothing to hand on.
        hands_on = run.is_prefill and reason is not FinishReason.STOP
        cache = run.cache_use(run.held * self._settings.block_size_tokens)
        ticket = self._grant_lease(run, now_s) if hands_on else None
        times = run.watch.first_output(now_s)
        return LegOutput(
            run.leg_id,
            _ONE,
            reason,
            ticket=ticket,
            cached_tokens=run.cached_tokens,
            times=times,
            cache=cache,
        )

    def _grant_lease(self, run: Run, now_s: float) -> Ticket:
        tokens = len(run.prompt)
        ticket = SimTicket(
            engine_id=self._engine_id,
            leg_id=run.leg_id,
            address=self._address,
            layout=self._settings.layout,
            tokens=tokens,
            blocks=run.blocks,
            prompt_digest=self._memory.last_hash(run, tokens),
        )
        self._memory.lease(run, now_s)
        return Ticket(tokens=tokens, blocks=ticket.blocks, params=write_ticket(ticket))

    def _end(self, ended: list[Run]) -> None:
        if ended:
            for run in ended:
                del self._runs[run.leg_id]
            self._scheduler.end(ended)

    # ------------------------------------------------------------------ legs
    def _add(self, run: Run) -> LegFailure | None:
        prompt = len(run.prompt)
        if not 0 < prompt < self._longest:
            return LegFailure.INVALID
        if run.leg_id in self._runs or self._memory.is_leased(run.leg_id):
            return LegFailure.REFUSED
        if run.ticket is not None and not self._fits(run, run.ticket):
            return LegFailure.KV_LOAD_FAILED
        if run.ticket is not None:
            # A real engine would decode from another prompt's blocks. Tokens are not told apart
            # here, so that it is found all the same.
            expect(self._memory.same_prompt(run, run.ticket), f"{run.leg_id}: another's blocks")
        if len(self._scheduler.waiting) >= self._settings.max_waiting_requests:
            return LegFailure.OVERLOADED
        self._runs[run.leg_id] = run
        self._scheduler.add(run)
        if run.state is RunState.WAITING:
            self._steps.came()
        return None

    def _fits(self, run: Run, ticket: SimTicket) -> bool:
        return (
            ticket.layout == self._settings.layout
            and 0 < ticket.tokens <= len(run.prompt)
            and ticket.blocks == self._memory.blocks_for(ticket.tokens)
        )

    def _in_transfer(self, leg_id: str) -> Run | None:
        run = self._runs.get(leg_id)
        return run if run is not None and run.state is RunState.TRANSFER else None

    def _expire(self, now_s: float) -> None:
        expiry_s = self._memory.next_expiry_s()
        if expiry_s is not None and expiry_s <= now_s:
            self._steps.catch_up(now_s)
            self._pulls.expired(self._memory.expire(now_s))


_ONE = (0,)
