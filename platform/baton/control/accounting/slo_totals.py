"""What requests asked for and got: every ended one counted once, in a bounded number of rows.

*Theory of operation.* A coordinator tells of each request that ended (`ended`), with its judgement,
and of each leg that is over what was computed for it (`spend`). All counts are totals since the
start. Rows are by class, tenant, model and pool; classes, models and pools come from the
configuration, and tenants beyond `most_rows` are counted together under `OTHER`, so that nobody can
fill the memory with names. Demand is counted for requests that have ended; what those under way
are expected to need is added when a report is made (`control.reporting`).
"""

from __future__ import annotations

from bisect import bisect_left

from baton.domain.commands import RequestRecord
from baton.domain.demand import EDGES_S, NO_DEMAND, DemandTotals, LatencyTotals, Spent, Tally
from baton.domain.request import Phase
from baton.policy.admission.slo_evaluation import excused, tpot_s, ttft_s

OTHER = "other"
"""Tenants for whom there is no row left."""
Key = tuple[str, str, str, str]
"""Class, tenant, model, pool."""


class _Row:
    """A `Tally` that can still grow."""

    __slots__ = (
        "barred",
        "by_outcome",
        "cached_tokens",
        "excused",
        "good",
        "gpu_s",
        "itl_met",
        "judged",
        "output_tokens",
        "prompt_tokens",
        "tpot_met",
        "ttft_met",
    )

    def __init__(self) -> None:
        self.judged = self.excused = self.barred = self.good = 0
        self.ttft_met = self.tpot_met = self.itl_met = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.gpu_s = 0.0
        self.by_outcome: dict[Phase, int] = {}

    def add(self, record: RequestRecord, *, own_doing: bool, placed: bool) -> None:
        """Count a request in exactly one of three ways: judged, excused, barred."""
        if own_doing:
            self.barred += 1
            return
        judgement = record.judgement
        self.by_outcome[record.outcome] = self.by_outcome.get(record.outcome, 0) + 1
        if excused(record, judgement):
            self.excused += 1
        else:
            self.judged += 1
            self.good += judgement.good
            self.ttft_met += judgement.ttft_met
            self.tpot_met += judgement.tpot_met
            self.itl_met += judgement.itl_met
        if placed:
            self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens or 0
        self.output_tokens += record.output_tokens
        self.gpu_s += record.gpu_s

    def tally(self, key: Key) -> Tally:
        count = self.by_outcome.get
        return Tally(
            *key,
            judged=self.judged,
            excused=self.excused,
            barred=self.barred,
            good=self.good,
            ttft_met=self.ttft_met,
            tpot_met=self.tpot_met,
            itl_met=self.itl_met,
            shed=count(Phase.SHED, 0),
            evicted=count(Phase.EVICTED, 0),
            failed=count(Phase.FAILED, 0),
            cancelled=count(Phase.CANCELLED, 0),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            gpu_s=self.gpu_s,
        )


class _Latencies:
    """A histogram over `EDGES_S`, and the sum."""

    __slots__ = ("_buckets", "_requests", "_sum_s")

    def __init__(self) -> None:
        self._requests = 0
        self._sum_s = 0.0
        self._buckets = [0] * (len(EDGES_S) + 1)

    def add(self, latency_s: float) -> None:
        self._requests += 1
        self._sum_s += latency_s
        self._buckets[bisect_left(EDGES_S, latency_s)] += 1

    def totals(self) -> LatencyTotals:
        return LatencyTotals(self._requests, self._sum_s, tuple(self._buckets))


class Scoreboard:
    """The totals of one coordinator."""

    def __init__(self, *, most_rows: int = 4096) -> None:
        self._most_rows = most_rows
        self._rows: dict[Key, _Row] = {}
        self._spent: dict[tuple[str, str], float] = {}
        self._ttft = _Latencies()
        self._tpot = _Latencies()
        self._demand = NO_DEMAND

    def ended(
        self,
        record: RequestRecord,
        decode_pool: str,
        model: str,
        *,
        own_doing: bool = False,
        demand: DemandTotals = NO_DEMAND,
    ) -> None:
        """Count a request that has ended; `decode_pool` is empty when it was never placed.

        `own_doing`: it was refused for what its tenant or client did, so it says nothing of how
        well the fleet serves. `demand` is what it has turned out to need.
        """
        key = (record.slo.name, record.tenant, model, decode_pool)
        self._row(key).add(record, own_doing=own_doing, placed=bool(decode_pool))
        if (took_s := ttft_s(record)) is not None:
            self._ttft.add(took_s)
        if (took_s := tpot_s(record)) is not None:
            self._tpot.add(took_s)
        self._demand = added(self._demand, demand)

    def spend(self, tenant: str, pool: str, gpu_s: float) -> None:
        """So many device-seconds of a pool went into a tenant's request."""
        key = (tenant, pool)
        if key not in self._spent and len(self._spent) >= self._most_rows:
            key = (OTHER, pool)
        self._spent[key] = self._spent.get(key, 0.0) + gpu_s

    @property
    def demand(self) -> DemandTotals:
        """What requests that have ended needed."""
        return self._demand

    def tallies(self) -> tuple[Tally, ...]:
        """One for each class, tenant, model and pool that was seen."""
        return tuple(row.tally(key) for key, row in self._rows.items())

    def spent(self) -> tuple[Spent, ...]:
        """One for each tenant and pool that was seen."""
        return tuple(Spent(*key, gpu_s) for key, gpu_s in self._spent.items())

    def ttft(self) -> LatencyTotals:
        """Times to first token, of all who got one."""
        return self._ttft.totals()

    def tpot(self) -> LatencyTotals:
        """Times per output token, of all who got at least two."""
        return self._tpot.totals()

    def check_integrity(self) -> None:
        """Raise AssertionError when rows contradict themselves."""
        for key, row in self._rows.items():
            ended = sum(row.by_outcome.values())
            assert row.judged + row.excused == ended, f"{key}: {ended} ended, not all are judged"
            least_met = min(row.ttft_met, row.tpot_met, row.itl_met)
            assert row.good <= least_met <= row.judged, f"{key}: more are good than met all"

    def _row(self, key: Key) -> _Row:
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= self._most_rows:
                key = (key[0], OTHER, *key[2:])
            row = self._rows.setdefault(key, _Row())
        return row


def added(one: DemandTotals, other: DemandTotals) -> DemandTotals:
    """The sum of two."""
    return DemandTotals(
        one.requests + other.requests,
        one.prompt_tokens + other.prompt_tokens,
        one.uncached_tokens + other.uncached_tokens,
        one.output_tokens + other.output_tokens,
    )
