"""An engine on counts: vLLM V1's scheduler without tokens, many decode steps at once.

Theory of operation: a body calls `begin`, lets the seconds pass that it says, and calls `finish`.
Legs go WAITING -> RUNNING -> ENDED, those with blocks to pull
HELD -> WAITING -> TRANSFER -> READY -> RUNNING -> ENDED; out of blocks, the leg admitted last falls
back to WAITING and will recompute (`baton.simulator.v1.scheduler`). A finished PREFILL leg becomes
a lease: its blocks stay in use until pulled, released or expired. Prompts are outlines or token
ids; generated tokens are all 0, and how many there will be is in the leg's payload.

While nobody's prompt is computed and nothing can change but the context of the decodes, `begin`
promises many steps at once (`baton.simulator.v1.stretch`): until the first leg ends, blocks run
out, a lease ends, or patience does. Where steps are linear in the context, all happens as with one
step at a time: blocks are taken when their step begins (`_catch_up`), and what an abort or a pull
changes meanwhile waits for `interrupt`. Every time is an argument, in seconds on the body's clock.
What may fail: a pull, see `pull_failed`.
"""

from __future__ import annotations

from collections.abc import Iterable

import baton
from baton.domain.cache import CacheUpdate
from baton.domain.fleet import LinkTotals, Load, ReplicaFacts, Role
from baton.domain.handoff import Leg, LegFailure, LegOutput, Ticket
from baton.simulator.engine.blocks import expect
from baton.simulator.engine.orders import CancelFetch, FreeSource, Order, SimTicket
from baton.simulator.tickets import read_ticket, write_ticket
from baton.simulator.v1.batches import decode_steps, one_step
from baton.simulator.v1.memory import V1Memory
from baton.simulator.v1.meters import Meters
from baton.simulator.v1.runs import Run, RunState
from baton.simulator.v1.scheduler import Blocked, Scheduler
from baton.simulator.v1.settings import V1Settings
from baton.simulator.v1.stretch import Stretch


class V1Core:
    """One counted engine: a `baton.simulator.engine.port.VirtualEngine`."""

    def __init__(
        self, settings: V1Settings, *, engine_id: str, model: str, address: str, jumps: bool = True
    ) -> None:
        self._settings = settings
        self._engine_id = engine_id
        self._model = model
        self._address = address
        self._jumps = jumps
        self._orders: list[Order] = []
        self._memory = V1Memory(settings, model)
        self._scheduler = Scheduler(settings, self._memory, self._orders)
        self._meters = Meters()
        self._runs: dict[str, Run] = {}
        self._work: list[Run] = []
        self._stretch: Stretch | None = None
        self._grown = 0
        """Steps of the stretch under way that have their blocks."""
        self._late: list[tuple[Run, int | None]] = []
        """What happened to legs during a stretch of several steps: the tokens that a pull left
        there, or None for an abort. It waits for `interrupt`, which knows the time."""
        self._disturbed = False
        """Whether the stretch under way must end with the step under way."""
        self._longest = min(
            settings.max_len_tokens, settings.kv_blocks * settings.block_size_tokens + 1
        )
        """Tokens that a leg may know: the last one is never computed and needs no block."""

    # ------------------------------------------------------------------ legs in and out
    def add(self, leg: Leg) -> LegFailure | None:
        """Queue a leg; None when accepted, else why not."""
        ticket = None if leg.ticket is None else read_ticket(leg.ticket)
        return self._add(Run(leg, ticket, longest=self._longest))

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
            self._happened(run, None)

    # ------------------------------------------------------------------ steps
    def begin(self, now_s: float, *, patience_s: float) -> float | None:
        """Choose what to compute next: seconds until `finish` is due, None when there is nothing.

        Several steps where nothing can change meanwhile: the last is the one under way when
        `patience_s` is over.
        """
        expect(self._stretch is None, "steps are under way: finish them first")
        self._expire(now_s)
        work = self._scheduler.choose()
        if not work:
            return None
        self._work = work
        self._grown = 1
        self._disturbed = False
        if self._scheduler.only_decodes:
            stretch = self._decodes(work, now_s, patience_s)
        else:
            stretch = one_step(work, self._settings.timing, now_s)
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

    def finish(self, now_s: float) -> tuple[LegOutput, ...]:
        """Account for what `begin` began and return what it produced, in running order."""
        stretch = self._stretch
        if stretch is None:
            raise AssertionError("no step is under way: begin one first")
        if self._late:
            self._settle_late(stretch.steps - 1)
        self._catch_up(stretch.steps)
        self._meters.stepped(stretch, stretch.steps)
        work, self._work, self._stretch = self._work, [], None
        if self._scheduler.only_decodes:
            return self._finish_decodes(work, stretch.steps)
        return self._finish_mixed(work, now_s)

    # ------------------------------------------------------------------ transfers, this side
    def pull_done(self, leg_id: str, *, blocks: int, took_s: float) -> None:
        """The blocks of a pull are here; ignored when the leg was aborted meanwhile."""
        run = self._in_transfer(leg_id)
        if run is None or run.ticket is None:
            return
        moved_bytes = blocks * self._settings.kv_block_bytes
        self._meters.pulled(run.ticket.engine_id, moved_bytes=moved_bytes, took_s=took_s)
        self._happened(run, max(run.ticket.tokens, run.computed))

    def pull_failed(self, leg_id: str) -> LegOutput | None:
        """A pull did not work: the leg computes what it misses, in the blocks it has."""
        run = self._in_transfer(leg_id)
        if run is not None and run.ticket is not None:
            self._meters.pull_failed(run.ticket.engine_id)
            self._happened(run, run.computed)
        return None

    def load_done(self, leg_id: str) -> None:
        """Nothing: this engine keeps no blocks in the host's memory."""

    # ------------------------------------------------------------------ transfers, source side
    def holds(self, leg_id: str, now_s: float) -> bool:
        """Whether the blocks of this finished prefill leg are still kept."""
        self._expire(now_s)
        return self._memory.is_leased(leg_id)

    def release(self, leg_id: str, now_s: float) -> bool:
        """Free a finished prefill leg's blocks; False when they were no longer kept."""
        held = self.holds(leg_id, now_s)
        if held:
            self._catch_up_to(now_s)
            self._memory.release(leg_id)
            self._disturbed |= self._scheduler.blocked is Blocked.MEMORY
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
        done = self._catch_up_to(now_s)
        counts = self._scheduler.counts()
        return Load(
            queued_requests=counts.queued,
            running_requests=counts.running,
            queued_tokens=counts.queued_tokens,
            kv_used_fraction=self._memory.used_fraction,
            step_s=self._meters.step_s(self._stretch, done),
            transfers=self._meters.transfers,
            pulling_requests=counts.pulling,
            steps=self._meters.totals(self._stretch, done),
            cache_sequence=self._memory.blocks.sequence,
        )

    def links(self) -> tuple[LinkTotals, ...]:
        """What was pulled from whom."""
        return self._meters.links

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
        late = {run.leg_id for run, _ in self._late}
        unknown = {run.leg_id for run in runs} ^ self._runs.keys()
        expect(unknown <= late, f"only the queues or only the core know of {sorted(unknown)}")

    # ------------------------------------------------------------------ many steps at once
    def _decodes(self, work: list[Run], now_s: float, patience_s: float) -> Stretch:
        """As many steps of decodes as nothing changes in."""
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
            if sum(self._blocks_missing(run, steps) for run in work) <= room:
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
        self._memory.blocks.take(taken)

    def _catch_up_to(self, now_s: float) -> int:
        """How many steps of the stretch under way have ended; the next one has its blocks then."""
        if self._stretch is None:
            return 0
        done = self._stretch.done_by(now_s)
        self._catch_up(done + 1)
        return done

    # ------------------------------------------------------------------ what happens meanwhile
    def _happened(self, run: Run, there: int | None) -> None:
        """A pull left `there` tokens here, or None: a leg was aborted. Now, or at `interrupt`."""
        if self._stretch is None or self._stretch.steps == 1:
            self._settle(run, there)
            return
        self._late.append((run, there))
        self._disturbed |= there is None or self._scheduler.blocked is not Blocked.SEATS

    def _settle_late(self, done: int) -> None:
        late, self._late = self._late, []
        for run, there in late:
            if run.state is RunState.RUNNING:
                run.computed += done
                run.tokens += done
            self._settle(run, there)

    def _settle(self, run: Run, there: int | None) -> None:
        if there is None:
            self._scheduler.leave(run)
        elif run.state is RunState.TRANSFER:
            self._memory.publish(run, there)
            # The last token is always computed here: its logits pick the next one.
            run.computed = min(there, run.tokens - 1)
            self._scheduler.arrived(run)

    # ------------------------------------------------------------------ tokens and ends
    def _finish_decodes(self, work: list[Run], steps: int) -> tuple[LegOutput, ...]:
        tokens = (0,) * steps
        outputs, ended = [], []
        for run in work:
            if run.state is not RunState.RUNNING:
                continue
            run.computed += steps
            run.tokens += steps
            if run.tokens < run.limit:
                outputs.append(LegOutput(run.leg_id, tokens))
            else:
                outputs.append(LegOutput(run.leg_id, tokens, run.reason))
                ended.append(run)
        self._end(ended)
        return tuple(outputs)

    def _finish_mixed(self, work: list[Run], now_s: float) -> tuple[LegOutput, ...]:
        outputs, ended = [], []
        for run in work:
            if run.state is not RunState.RUNNING:
                continue
            run.computed += run.scheduled
            if run.computed < run.tokens:
                continue
            run.scheduled = 1
            run.tokens += 1
            if run.tokens >= run.limit:
                ended.append(run)
            outputs.append(self._output(run, now_s))
        self._end(ended)
        return tuple(outputs)

    def _output(self, run: Run, now_s: float) -> LegOutput:
        """The next token of a leg, and what comes with the first and with the last."""
        reason = run.reason if run.tokens >= run.limit else None
        if run.reported:
            return LegOutput(run.leg_id, _ONE, reason)
        run.reported = True
        self._scheduler.pull_over(run)
        ticket = self._grant_lease(run, now_s) if run.is_prefill else None
        return LegOutput(run.leg_id, _ONE, reason, ticket=ticket, cached_tokens=run.cached_tokens)

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
            return LegFailure.REFUSED
        if run.leg_id in self._runs or self._memory.is_leased(run.leg_id):
            return LegFailure.REFUSED
        if run.ticket is not None and not self._fits(run, run.ticket):
            return LegFailure.KV_LOAD_FAILED
        if len(self._scheduler.waiting) >= self._settings.max_waiting_requests:
            return LegFailure.OVERLOADED
        self._runs[run.leg_id] = run
        self._scheduler.add(run)
        if run.state is RunState.WAITING:
            self._disturbed |= self._scheduler.blocked is Blocked.EMPTY
        return None

    def _fits(self, run: Run, ticket: SimTicket) -> bool:
        return (
            ticket.layout == self._settings.layout
            and 0 < ticket.tokens <= len(run.prompt)
            and ticket.blocks == self._memory.blocks_for(ticket.tokens)
            and ticket.prompt_digest == self._memory.last_hash(run, ticket.tokens)
        )

    def _in_transfer(self, leg_id: str) -> Run | None:
        run = self._runs.get(leg_id)
        return run if run is not None and run.state is RunState.TRANSFER else None

    def _expire(self, now_s: float) -> None:
        expiry_s = self._memory.next_expiry_s()
        if expiry_s is not None and expiry_s <= now_s:
            self._catch_up_to(now_s)
            self._meters.expired(self._memory.expire(now_s))


_ONE = (0,)
