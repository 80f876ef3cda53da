"""What a coordinator tells the controller, put together when it is asked: every second or two.

*Theory of operation.* Counts come from the accounts and are totals since the start. Pools come from
the fleet table, as this coordinator sees it now; only the time in engine steps is a total, kept
here, since replicas that leave take their own totals with them: what a replica has counted more
since it was last looked at is added to its pool's, when a report is made and when it is lost. A
replica's total that has gone back is that of another life, and counts from zero.

Takes time proportional to replicas and requests in flight, and none between reports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from baton.control.accounting.accounts import Accounts
from baton.control.fleet.fleet_model import Knowledge
from baton.control.fleet.fleet_table import FleetTable
from baton.control.state.request_state import Entry
from baton.domain.demand import CoordinatorReport, PoolReport
from baton.domain.fleet import ReplicaView, Role
from baton.domain.slo import Slo
from baton.perf.capacity.capacity import decode_streams, prefill_tokens_per_s
from baton.policy.placement.device_seconds import prefill_work_s

WantedRates = tuple[tuple[str, float, float], ...]
"""By tenant: requests and tokens per second that it has asked for here lately."""

_LEAST_STEP_S = 1e-9


class _Capacity(NamedTuple):
    """What one replica of a pool can do; None: not known."""

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    decode_streams: float | None = None


class Reporter:
    """Puts reports together; see the module."""

    def __init__(self, fleet: FleetTable, knowledge: Knowledge, accounts: Accounts) -> None:
        self._fleet = fleet
        self._knowledge = knowledge
        self._accounts = accounts
        self._busy_s: dict[str, float] = {}
        """By pool."""
        self._seen_s: dict[str, float] = {}
        """How much of each replica's own total is in its pool's."""

    def left(self, replica_id: str) -> None:
        """A replica is about to be forgotten, or to begin another life: keep what it has done."""
        if (view := self._fleet.get(replica_id)) is not None:
            self._settle(view)
        self._seen_s.pop(replica_id, None)

    def report(
        self,
        coordinator_id: str,
        now_s: float,
        *,
        entries: Mapping[str, Entry],
        held: Collection[str],
        wanted_rates: WantedRates = (),
        drained_s: float = 0.0,
    ) -> CoordinatorReport:
        """Everything, at this moment.

        `held` are the ids of those that wait here; all of them are let in within `drained_s`.
        """
        held = frozenset(held)
        accounts = self._accounts
        in_flight = entries.values()
        return CoordinatorReport(
            coordinator_id=coordinator_id,
            at_s=now_s,
            demand=accounts.demand(in_flight),
            tallies=accounts.board.tallies(),
            spent=accounts.board.spent(),
            ttft=accounts.board.ttft(),
            tpot=accounts.board.tpot(),
            in_flight=len(entries),
            held=len(held),
            slack_s=least_slack_s(in_flight, now_s, held=held, drained_s=drained_s),
            pools=self._pools(now_s, strictest_tpot_s(accounts.classes(now_s))),
            held_work_s=self._held_work_s(entries[one] for one in held if one in entries),
            wanted_rates=wanted_rates,
        )

    # -------------------------------------------------------------- pools

    def _pools(self, now_s: float, tpot_s: float | None) -> tuple[PoolReport, ...]:
        by_pool: dict[str, list[ReplicaView]] = {name: [] for name in self._busy_s}
        for view in self._fleet.view(now_s).replicas.values():
            self._settle(view)
            by_pool.setdefault(view.facts.pool, []).append(view)
        return tuple(self._pool(name, by_pool[name], now_s, tpot_s) for name in sorted(by_pool))

    def _settle(self, view: ReplicaView) -> None:
        replica_id, pool, total_s = view.replica_id, view.facts.pool, view.load.steps.busy_s
        done_s, seen_s = 0.0, self._seen_s.get(replica_id)
        if seen_s is not None:
            done_s = total_s - seen_s if total_s >= seen_s else total_s
        self._busy_s[pool] = self._busy_s.get(pool, 0.0) + done_s
        if view.load.steps.steps:  # or else it has not said yet what it did before it was known
            self._seen_s[replica_id] = total_s

    def _pool(
        self, name: str, views: Sequence[ReplicaView], now_s: float, tpot_s: float | None
    ) -> PoolReport:
        working = [view for view in views if not view.draining]
        loads = [view.load for view in working]
        roles = [view.facts.role for view in working]
        return PoolReport(
            pool=name,
            prefill=roles.count(Role.PREFILL),
            decode=roles.count(Role.DECODE),
            mixed=roles.count(Role.MIXED),
            draining=len(views) - len(working),
            busy_s=self._busy_s.get(name, 0.0),
            running_requests=float(sum(load.running_requests for load in loads)),
            queued_requests=float(
                sum(load.queued_requests + load.pulling_requests for load in loads)
            ),
            queued_tokens=float(sum(load.queued_tokens for load in loads)),
            kv_used_fraction=sum(load.kv_used_fraction for load in loads) / max(1, len(loads)),
            **self._capacity(working, tpot_s)._asdict(),
            stale_s=max((max(0.0, now_s - view.load_at_s) for view in working), default=0.0),
            roles=tuple((view.replica_id, view.facts.role) for view in working),
        )

    def _capacity(self, working: Sequence[ReplicaView], tpot_s: float | None) -> _Capacity:
        """Of one replica, for requests as they have been lately; unknown before there were any.

        What a pool has not been seen to do it may do as well as another; that is not for here.
        """
        recent, timings = self._accounts.recent, self._knowledge.timings
        if not working or not recent.prompt_tokens:
            return _Capacity()
        facts, timing = working[0].facts, timings.of(working[0])
        prefill: float | None = None
        if timings.knows_prompts(facts.pool):
            mean = max(1.0, recent.uncached_tokens)
            prefill = prefill_tokens_per_s(timing, mean_uncached_tokens=mean)
        if not timings.knows_decoding(facts.pool):
            return _Capacity(prefill)
        context_tokens = recent.prompt_tokens + recent.output_tokens / 2
        streams = decode_streams(
            timing,
            tpot_s=tpot_s,
            context_tokens=context_tokens,
            max_running=facts.max_running_requests,
            kv_tokens=facts.kv_blocks * facts.block_size_tokens,
        )
        step_s = timing.step_s(running=streams, context_tokens=round(streams * context_tokens))
        return _Capacity(prefill, streams / max(step_s, _LEAST_STEP_S), float(streams))

    # -------------------------------------------------------------- who waits

    def _held_work_s(self, held: Iterable[Entry]) -> float:
        """What the prompts of those that wait would take, on whoever prefills."""
        waiting = tuple(held)
        roster = self._fleet.view(0.0).roster
        prefiller = self._fleet.get(next(iter(roster.prefill or roster.decode), ""))
        if not waiting or prefiller is None:
            return 0.0
        timing, devices = self._knowledge.timings.of(prefiller), prefiller.facts.devices
        fresh = 1.0 - self._knowledge.reuse.hit_fraction
        return sum(
            prefill_work_s(timing, len(entry.request.prompt_token_ids) * fresh, devices=devices)
            for entry in waiting
        )


def least_slack_s(
    in_flight: Iterable[Entry], now_s: float, *, held: Collection[str] = (), drained_s: float = 0.0
) -> float | None:
    """What the request has left of its TTFT objective that is worst off; None: nobody waits.

    A request that is placed has what its placement predicted still before it. Those that are held
    go one after the other, whoever must begin soonest first, the last of them after `drained_s`.
    """
    slacks: list[float] = []
    waiting: list[float] = []
    for entry in in_flight:
        objective_s = entry.slo.ttft_s
        if objective_s is None or entry.first_token_at_s is not None:
            continue
        left_s = objective_s - (now_s - entry.request.arrived_at_s)
        if entry.request_id in held:
            waiting.append(left_s)
        else:
            slacks.append(left_s - _to_come_s(entry, now_s))
    turn_s = drained_s / max(1, len(waiting))
    slacks += [left_s - place * turn_s for place, left_s in enumerate(sorted(waiting), start=1)]
    return min(slacks, default=None)


def _to_come_s(entry: Entry, now_s: float) -> float:
    """What is left of what the running placement predicted; 0 when it predicted nothing."""
    decision = entry.decisions[-1] if entry.decisions else None
    if decision is None or not decision.options:
        return 0.0
    return max(0.0, decision.at_s + decision.options[0].ttft_s - now_s)


def strictest_tpot_s(classes: Iterable[Slo]) -> float | None:
    """The shortest time per token that any of these promises; None when none does."""
    return min((one.tpot_s for one in classes if one.tpot_s is not None), default=None)
