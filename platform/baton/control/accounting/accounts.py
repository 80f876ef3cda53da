"""A coordinator's accounts: what each request took, whether it was good, what it needed.

*Theory of operation.* The request machine says when a leg begins (`begun`), what its engine says
was cached (`cached`), when the leg is over in whichever way (`leg_over`), and when the request has
ended (`ended`). A leg that has produced anything has computed its uncached prompt tokens and
generated its tokens; what that takes is predicted (`policy.work`) for the pool that it ran in, its
decode steps with as many streams in them as the replica's reports show for that time. A leg that
has produced nothing is taken to have cost nothing: it may have waited in a queue. `ended` judges,
and returns the record as it is to be kept. Nothing here is asked by a decision about a request, and
a request's tokens are looked at one leg at a time, never one by one.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.control.accounting.admission_counts import DoorCounts
from baton.control.accounting.slo_totals import Scoreboard, added
from baton.control.fleet.fleet_model import Knowledge
from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.leg_table import PlacedLeg
from baton.control.state.request_state import Entry
from baton.domain.commands import RequestRecord
from baton.domain.demand import NO_DEMAND, DemandTotals
from baton.domain.errors import BatonError, Cause, Rejected
from baton.domain.fleet import ReplicaView
from baton.domain.handoff import Leg, LegKind
from baton.domain.request import Phase
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.policy.admission.slo_evaluation import judge
from baton.policy.placement.device_seconds import crowd, decode_work_s, prefill_work_s

_IN_USE_S = 600.0
"""A class is in use for so long after a request of it has ended."""
_MEMORY_REQUESTS = 200
"""As many as `perf.output_lengths` remembers: means follow a mix that moves."""


class _Meter:
    """One running leg."""

    __slots__ = ("before", "cached_tokens")

    def __init__(self, before: ReplicaView) -> None:
        self.before = before
        """Its replica when it began."""
        self.cached_tokens: int | None = None


class RecentMeans:
    """What requests are like that have ended lately; all 0 before the first.

    Those that were cancelled with tokens are among them: most have come to a stop string, and what
    was delivered is what there was to do for them. One that left before its first token says less
    of what requests need than of how long it waited.
    """

    __slots__ = ("_seen", "output_tokens", "prompt_tokens", "uncached_tokens")

    def __init__(self) -> None:
        self._seen = 0
        self.prompt_tokens = 0.0
        self.uncached_tokens = 0.0
        self.output_tokens = 0.0

    def take(self, need: DemandTotals) -> None:
        """Take in what one request has needed."""
        self._seen = min(self._seen + 1, _MEMORY_REQUESTS)
        share = 1.0 / self._seen
        self.prompt_tokens += (need.prompt_tokens - self.prompt_tokens) * share
        self.uncached_tokens += (need.uncached_tokens - self.uncached_tokens) * share
        self.output_tokens += (need.output_tokens - self.output_tokens) * share


class Accounts:
    """Keeps them; see the module."""

    def __init__(self, fleet: FleetTable, knowledge: Knowledge) -> None:
        self.board = Scoreboard()
        self.door = DoorCounts()
        self.recent = RecentMeans()
        self._fleet = fleet
        self._knowledge = knowledge
        self._meters: dict[str, _Meter] = {}
        self._spent_s: dict[str, float] = {}
        self._pools: dict[str, str] = {}
        """Where each request in flight decodes, or is to."""
        self._model = ""
        self._classes: dict[str, tuple[Slo, float]] = {}
        """By name: what it promises, and when a request of it has last ended."""

    # -------------------------------------------------------------- what the machine says

    def begun(self, entry: Entry, leg: Leg, replica_id: str) -> None:
        """A leg of a request was sent to a replica."""
        if entry.legs_begun == 1:
            held = entry.placed_at_s is not None and entry.placed_at_s > entry.taken_in_at_s
            self.door.let_in(entry.slo.name, held=held)
        view = self._fleet.get(replica_id)
        if view is None:
            return
        self._meters[leg.leg_id] = _Meter(view)
        target = self._fleet.get(entry.routes[-1].decode_replica_id)
        self._pools[entry.request_id] = (target or view).facts.pool
        self._model = view.facts.model

    def cached(self, leg_id: str, tokens: int) -> None:
        """An engine said how many of a leg's prompt tokens it need not compute."""
        if (meter := self._meters.get(leg_id)) is not None:
            meter.cached_tokens = tokens

    def leg_over(self, entry: Entry, placed: PlacedLeg, *, produced: bool | None = None) -> None:
        """A leg has ended, well or not, or is given up: book what it took.

        Whether it has `produced` anything shows in what is known of its tokens, but for a prefill
        leg that hands out a ticket and not one token.
        """
        meter = self._meters.pop(placed.leg.leg_id, None)
        if meter is None:
            return
        tokens = len(entry.generated) - placed.leg.resumed_tokens
        if not (tokens or produced or meter.cached_tokens is not None):
            return
        gpu_s = self._work_s(meter, placed, tokens)
        self._spent_s[entry.request_id] = self._spent_s.get(entry.request_id, 0.0) + gpu_s
        self.board.spend(entry.tenant.name, meter.before.facts.pool, gpu_s)

    def ended(
        self,
        entry: Entry,
        outcome: Phase,
        now_s: float,
        *,
        reason: str,
        error: BatonError | None = None,
    ) -> RequestRecord:
        """A request has ended: count it, and return its record with its judgement and its cost."""
        gpu_s = self._spent_s.pop(entry.request_id, 0.0)
        own_doing = error is not None and error.own_doing
        pool = self._pools.pop(entry.request_id, "")
        record = entry.record(outcome, reason, now_s, barred=own_doing, gpu_s=gpu_s)
        record = evolve(record, model=self._model if pool else "", pool=pool)
        if entry.placed_at_s is None:
            cause = Cause.LEFT if error is None else error.cause
            self.door.kept_out(record.slo.name, record.outcome, cause, own_doing=own_doing)
        need = NO_DEMAND if own_doing else self._need(entry, record)
        if record.outcome is Phase.FINISHED or (
            record.outcome is Phase.CANCELLED and record.output_tokens
        ):
            self.recent.take(need)
        self._classes[record.slo.name] = (record.slo, record.ended_at_s)
        self.board.ended(record, pool, self._model, own_doing=own_doing, demand=need)
        return record

    def refused(
        self, error: Rejected, slo: Slo, *, tenant: str, requests: int, now_s: float
    ) -> None:
        """Requests were refused before they were read: they count like any that are shed at once.

        What they would have needed is taken to be what others lately have.
        """
        record = _unread(error, slo, tenant, now_s)
        own_doing, recent = error.own_doing, self.recent
        self.door.kept_out(
            slo.name, record.outcome, error.cause, own_doing=own_doing, requests=requests
        )
        need = NO_DEMAND
        if not own_doing:
            prompt, uncached = round(recent.prompt_tokens), recent.uncached_tokens
            need = DemandTotals(1, prompt, uncached, recent.output_tokens)
        for _ in range(requests):
            self.board.ended(record, "", self._model, own_doing=own_doing, demand=need)
        if not own_doing:
            self._classes[slo.name] = (slo, now_s)

    # -------------------------------------------------------------- what is asked of it

    def demand(self, in_flight: Iterable[Entry]) -> DemandTotals:
        """What has been asked for so far, expectations for what is under way among it."""
        total = self.board.demand
        for entry in in_flight:
            total = added(total, self._expected(entry))
        return total

    def classes(self, now_s: float) -> tuple[Slo, ...]:
        """What those classes promise that are in use."""
        return tuple(slo for slo, at_s in self._classes.values() if now_s - at_s <= _IN_USE_S)

    def check_integrity(self, in_flight: Iterable[str], running: Iterable[str]) -> None:
        """Raise AssertionError when something is kept of what has ended."""
        known = set(in_flight)
        assert self._spent_s.keys() <= known, "costs of requests that have ended"
        assert self._pools.keys() <= known, "pools of requests that have ended"
        assert self._meters.keys() <= set(running), "meters of legs that do not run"
        self.board.check_integrity()

    # -------------------------------------------------------------- what things take

    def _work_s(self, meter: _Meter, placed: PlacedLeg, tokens: int) -> float:
        before = meter.before
        after = self._fleet.get(placed.replica_id) or before
        timing, devices = self._knowledge.timings.of(before), before.facts.devices
        uncached = placed.tokens
        if meter.cached_tokens is not None:
            uncached = max(0, len(placed.leg.prompt_token_ids) - meter.cached_tokens)
        work_s = prefill_work_s(timing, uncached, devices=devices)
        if tokens > 0 and placed.leg.kind is not LegKind.PREFILL:
            seen = crowd(before.load.steps, after.load.steps)
            running, context = seen or _crowd_now(after)
            work_s += decode_work_s(
                timing, tokens, running=running, context_tokens=context, devices=devices
            )
        return work_s

    def _need(self, entry: Entry, record: RequestRecord) -> DemandTotals:
        """What a request that has ended needed, or would have needed had it been served."""
        known = record.outcome in {Phase.FINISHED, Phase.CANCELLED}
        return self._expected(entry, record.output_tokens if known else None)

    def _expected(self, entry: Entry, output_tokens: int | None = None) -> DemandTotals:
        """What a request will need, or has needed where it is known how many tokens it got."""
        prompt = len(entry.request.prompt_token_ids)
        if entry.cached_tokens is None:
            uncached = prompt * (1.0 - self._knowledge.reuse.hit_fraction)
        else:
            uncached = float(max(0, prompt - entry.cached_tokens))
        if output_tokens is not None:
            return DemandTotals(1, prompt, uncached, float(output_tokens))
        likely = self._likely_tokens(entry.request.max_tokens)
        return DemandTotals(1, prompt, uncached, max(float(len(entry.generated)), likely))

    def _likely_tokens(self, max_tokens: int) -> float:
        """How long an answer will be; 0 before any has ended.

        What clients allow for says little: a fleet would be sized for answers ten times as long.
        """
        timings = self._knowledge.timings
        if timings.knows_outputs(max_tokens):
            return timings.expected_output_tokens(max_tokens)
        return min(float(max_tokens), self.recent.output_tokens)


def _crowd_now(view: ReplicaView) -> tuple[float, float]:
    """Streams of a replica and their context, by its last report alone."""
    load, facts = view.load, view.facts
    context = load.kv_used_fraction * facts.kv_blocks * facts.block_size_tokens
    return max(1, load.running_requests), context


def _unread(error: Rejected, slo: Slo, tenant: str, now_s: float) -> RequestRecord:
    """The story of a request of which nothing is known but who sent it."""
    record = RequestRecord(
        request_id=error.request_id,
        outcome=Phase.SHED,
        reason=error.why,
        routes=(),
        decisions=(),
        prompt_tokens=0,
        cached_tokens=None,
        output_tokens=0,
        resumes=0,
        arrived_at_s=now_s,
        first_token_at_s=None,
        last_token_at_s=None,
        ended_at_s=now_s,
        prefill_done_at_s=None,
        handed_off_blocks=0,
        tenant=tenant,
        slo=slo,
    )
    return evolve(record, judgement=judge(record, slo))
