"""Demand and results of requests: every ended request counted once, in a bounded number of rows.

*Theory of operation.* A coordinator tells of each request that ended (`ended`), with its judgement,
and of each ended leg its computed tokens (`add_gpu_s`). All counts are totals since the start. Rows
are by class, tenant, model and pool. Classes, models and pools come from the configuration. Tenants
beyond `max_rows` are counted together under `OTHER`, so that clients cannot fill the memory with
names. Demand is counted for requests that have ended; the expected demand of running requests is
are expected to need is added when a report is made (`control.accounting.reporter`).
"""

from __future__ import annotations

from bisect import bisect_left

from baton.domain.commands import RequestRecord
from baton.domain.demand import (
    LATENCY_BUCKET_BOUNDS_S,
    NO_DEMAND,
    DemandTotals,
    GpuUsage,
    LatencyTotals,
    Tally,
)
from baton.domain.request import Phase
from baton.policy.admission.slo_evaluation import excluded, tpot_s, ttft_s

OTHER = "other"
"""Tenants beyond the last row."""
TallyKey = tuple[str, str, str, str]
"""Class, tenant, model, pool."""


class _Row:
    """A `Tally` that can still grow."""

    __slots__ = (
        "by_outcome",
        "cached_tokens",
        "client_errors",
        "evaluated",
        "excluded",
        "good",
        "gpu_s",
        "itl_met",
        "output_tokens",
        "prompt_tokens",
        "tpot_met",
        "ttft_met",
    )

    def __init__(self) -> None:
        self.evaluated = self.excluded = self.client_errors = self.good = 0
        self.ttft_met = self.tpot_met = self.itl_met = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.gpu_s = 0.0
        self.by_outcome: dict[Phase, int] = {}

    def add(self, record: RequestRecord, *, is_client_error: bool, was_placed: bool) -> None:
        """Count a request in exactly one of three ways: judged, excused, barred."""
        if is_client_error:
            self.client_errors += 1
            return
        slo_result = record.slo_result
        self.by_outcome[record.outcome] = self.by_outcome.get(record.outcome, 0) + 1
        if excluded(record, slo_result):
            self.excluded += 1
        else:
            self.evaluated += 1
            self.good += slo_result.is_good
            self.ttft_met += slo_result.ttft_met
            self.tpot_met += slo_result.tpot_met
            self.itl_met += slo_result.itl_met
        if was_placed:
            self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens or 0
        self.output_tokens += record.output_tokens
        self.gpu_s += record.gpu_s

    def tally(self, key: TallyKey) -> Tally:
        count = self.by_outcome.get
        return Tally(
            *key,
            evaluated=self.evaluated,
            excluded=self.excluded,
            client_errors=self.client_errors,
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


class _LatencyHistogram:
    """A histogram over `LATENCY_BUCKET_BOUNDS_S`, and the sum."""

    __slots__ = ("_buckets", "_requests", "_sum_s")

    def __init__(self) -> None:
        self._requests = 0
        self._sum_s = 0.0
        self._buckets = [0] * (len(LATENCY_BUCKET_BOUNDS_S) + 1)

    def add(self, latency_s: float) -> None:
        self._requests += 1
        self._sum_s += latency_s
        self._buckets[bisect_left(LATENCY_BUCKET_BOUNDS_S, latency_s)] += 1

    def totals(self) -> LatencyTotals:
        return LatencyTotals(self._requests, self._sum_s, tuple(self._buckets))


class SloTotals:
    """The totals of one coordinator."""

    def __init__(self, *, max_rows: int = 4096) -> None:
        self._max_rows = max_rows
        self._rows: dict[TallyKey, _Row] = {}
        self._gpu_s: dict[tuple[str, str], float] = {}
        self._ttft = _LatencyHistogram()
        self._tpot = _LatencyHistogram()
        self._demand = NO_DEMAND

    def record_request(
        self,
        record: RequestRecord,
        decode_pool: str,
        model: str,
        *,
        is_client_error: bool = False,
        demand: DemandTotals = NO_DEMAND,
    ) -> None:
        """Count a request that has ended; `decode_pool` is empty when it was never placed.

        `is_client_error`: it was refused for its tenant's or client's fault, so it says nothing of
        how well the fleet serves. `demand` is its actual demand.
        """
        key = (record.slo.name, record.tenant, model, decode_pool)
        self._row(key).add(record, is_client_error=is_client_error, was_placed=bool(decode_pool))
        if (latency_s := ttft_s(record)) is not None:
            self._ttft.add(latency_s)
        if (latency_s := tpot_s(record)) is not None:
            self._tpot.add(latency_s)
        self._demand = sum_demand(self._demand, demand)

    def add_gpu_s(self, tenant: str, pool: str, gpu_s: float) -> None:
        """Add device-seconds of a pool to a tenant's."""
        key = (tenant, pool)
        if key not in self._gpu_s and len(self._gpu_s) >= self._max_rows:
            key = (OTHER, pool)
        self._gpu_s[key] = self._gpu_s.get(key, 0.0) + gpu_s

    @property
    def demand(self) -> DemandTotals:
        """The demand of ended requests."""
        return self._demand

    def tallies(self) -> tuple[Tally, ...]:
        """One for each class, tenant, model and pool that was seen."""
        return tuple(row.tally(key) for key, row in self._rows.items())

    def gpu_usage(self) -> tuple[GpuUsage, ...]:
        """One for each tenant and pool that was seen."""
        return tuple(GpuUsage(*key, gpu_s) for key, gpu_s in self._gpu_s.items())

    def ttft_totals(self) -> LatencyTotals:
        """Times to first token, of all who got one."""
        return self._ttft.totals()

    def tpot_totals(self) -> LatencyTotals:
        """Times per output token, of all who got at least two."""
        return self._tpot.totals()

    def check_integrity(self) -> None:
        """Raise AssertionError when rows contradict themselves."""
        for key, row in self._rows.items():
            ended = sum(row.by_outcome.values())
            assert row.evaluated + row.excluded == ended, (
                f"{key}: {ended} ended, not all are judged"
            )
            least_met = min(row.ttft_met, row.tpot_met, row.itl_met)
            assert row.good <= least_met <= row.evaluated, f"{key}: more are good than met all"

    def _row(self, key: TallyKey) -> _Row:
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= self._max_rows:
                key = (key[0], OTHER, *key[2:])
            row = self._rows.setdefault(key, _Row())
        return row


def sum_demand(first: DemandTotals, second: DemandTotals) -> DemandTotals:
    """The sum of two."""
    return DemandTotals(
        first.requests + second.requests,
        first.prompt_tokens + second.prompt_tokens,
        first.uncached_tokens + second.uncached_tokens,
        first.output_tokens + second.output_tokens,
    )
