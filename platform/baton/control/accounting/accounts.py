"""A coordinator's accounts: the cost, the SLO result and the demand of each request.

*Theory of operation.* A leg that has produced output has computed its uncached prompt tokens and
generated its tokens. Their device-seconds are predicted (`policy.placement.device_seconds`) for its
pool. Its decode steps count with the mean batch that the replica's reports show for that time. A
leg without output costs nothing: it may have waited in a queue.

`SloTotals` counts each ended request once. All counts are totals since the start. No decision about
a request reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.fleet_table import FleetTable
from baton.control.fleet.leg_table import DispatchedLeg
from baton.control.state.request_state import RequestState
from baton.domain.commands import RequestRecord
from baton.domain.demand import (
    LATENCY_BUCKET_BOUNDS_S,
    NO_DEMAND,
    AdmissionCount,
    AdmissionOutcome,
    AdmissionPath,
    DemandTotals,
    GpuUsage,
    LatencyTotals,
    Tally,
)
from baton.domain.errors import BatonError, Cause, Rejected
from baton.domain.fleet import ReplicaView
from baton.domain.handoff import Leg, LegKind
from baton.domain.request import Phase
from baton.domain.slo import Slo
from baton.domain.value import evolve
from baton.policy.admission.slo_evaluation import evaluate_slo, excluded, tpot_s, ttft_s
from baton.policy.placement.device_seconds import (
    decode_device_s,
    mean_decode_batch,
    prefill_device_s,
)

_CLASS_ACTIVE_S = 600.0
"""A class is in use for so long after a request of it has ended."""
_MEAN_WINDOW_REQUESTS = 200
"""As many as `perf.fitting.engine_timings` remembers of outputs: means follow the recent mix."""
_OUTCOMES = {
    Phase.SHED: AdmissionOutcome.SHED,
    Phase.EVICTED: AdmissionOutcome.EVICTED,
    Phase.FAILED: AdmissionOutcome.FAILED,
    Phase.CANCELLED: AdmissionOutcome.CANCELLED,
}
OTHER = "other"
"""Tenants beyond the last row."""
_TallyKey = tuple[str, str, str, str]
"""Class, tenant, model, pool."""


@dataclass(slots=True)
class _LegUsage:
    """One running leg."""

    initial_view: ReplicaView
    """Its replica when it began."""
    cached_tokens: int | None = None


class RecentMeans:
    """Means of recently ended requests; all 0 before the first.

    Those that were cancelled with tokens are among them: most have come to a stop string, and
    needed no more than the delivered tokens. A request that left before its first token says less
    of the need of requests than of its wait.
    """

    __slots__ = ("_count", "output_tokens", "prompt_tokens", "uncached_tokens")

    def __init__(self) -> None:
        self._count = 0
        self.prompt_tokens = 0.0
        self.uncached_tokens = 0.0
        self.output_tokens = 0.0

    def update(self, demand: DemandTotals) -> None:
        """Add the demand of one request."""
        self._count = min(self._count + 1, _MEAN_WINDOW_REQUESTS)
        weight = 1.0 / self._count
        self.prompt_tokens += (demand.prompt_tokens - self.prompt_tokens) * weight
        self.uncached_tokens += (demand.uncached_tokens - self.uncached_tokens) * weight
        self.output_tokens += (demand.output_tokens - self.output_tokens) * weight


class AdmissionCounts:
    """Why requests were admitted, at once or after a wait, or rejected.

    Each request counts once, when that is decided. Rows are totals since the start: classes come
    from the configuration, outcomes and causes from enumerations.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, AdmissionOutcome, AdmissionPath | Cause]] = Counter()

    def admitted(self, slo_class: str, *, was_queued: bool) -> None:
        """A request was placed for the first time, after it was held here or not."""
        reason = AdmissionPath.QUEUED if was_queued else AdmissionPath.IMMEDIATE
        self._counts[slo_class, AdmissionOutcome.ADMITTED, reason] += 1

    def rejected(
        self,
        slo_class: str,
        outcome: Phase,
        cause: Cause,
        *,
        is_client_error: bool,
        requests: int = 1,
    ) -> None:
        """Requests have ended without ever having been placed."""
        admission_outcome = AdmissionOutcome.CLIENT_ERROR if is_client_error else _OUTCOMES[outcome]
        self._counts[slo_class, admission_outcome, cause] += requests

    def rows(self) -> tuple[AdmissionCount, ...]:
        """One for each class, outcome and reason that was seen."""
        return tuple(AdmissionCount(*key, requests) for key, requests in self._counts.items())


class Accounts:
    """Costs, SLO results and demand of the requests of one coordinator."""

    def __init__(self, fleet: FleetTable, fleet_model: FleetModel) -> None:
        self.slo_totals = SloTotals()
        self.admission_counts = AdmissionCounts()
        self.recent = RecentMeans()
        self._fleet = fleet
        self._fleet_model = fleet_model
        self._leg_usages: dict[str, _LegUsage] = {}
        self._gpu_s: dict[str, float] = {}
        self._decode_pools: dict[str, str] = {}
        """Where each request in flight decodes, or is to."""
        self._model = ""
        self._classes: dict[str, tuple[Slo, float]] = {}
        """By name: its objectives, and when a request of it has last ended."""

    # -------------------------------------------------------------- what the machine says

    def on_leg_started(self, state: RequestState, leg: Leg, replica_id: str) -> None:
        """A leg of a request was sent to a replica."""
        if state.legs_started == 1:
            was_queued = state.placed_at_s is not None and state.placed_at_s > state.accepted_at_s
            self.admission_counts.admitted(state.slo.name, was_queued=was_queued)
        view = self._fleet.get(replica_id)
        if view is None:
            return
        self._leg_usages[leg.leg_id] = _LegUsage(view)
        decoder = self._fleet.get(state.routes[-1].decode_replica_id)
        self._decode_pools[state.request_id] = (decoder or view).facts.pool
        self._model = view.facts.model

    def on_cached_tokens(self, leg_id: str, tokens: int) -> None:
        """An engine reported how many of a leg's prompt tokens it need not compute."""
        if (usage := self._leg_usages.get(leg_id)) is not None:
            usage.cached_tokens = tokens

    def on_leg_ended(
        self, state: RequestState, dispatched: DispatchedLeg, *, has_output: bool | None = None
    ) -> None:
        """A leg has ended, well or not, or is given up: book what it took.

        Whether it has `has_output` anything shows in its known tokens, but for a prefill leg that
        hands out a KV handle and no token.
        """
        usage = self._leg_usages.pop(dispatched.leg.leg_id, None)
        if usage is None:
            return
        tokens = len(state.generated) - dispatched.leg.resumed_tokens
        if not (tokens or has_output or usage.cached_tokens is not None):
            return
        gpu_s = self._device_s(usage, dispatched, tokens)
        self._gpu_s[state.request_id] = self._gpu_s.get(state.request_id, 0.0) + gpu_s
        self.slo_totals.add_gpu_s(state.tenant.name, usage.initial_view.facts.pool, gpu_s)

    def on_request_ended(
        self,
        state: RequestState,
        outcome: Phase,
        now_s: float,
        *,
        reason: str,
        error: BatonError | None = None,
    ) -> RequestRecord:
        """A request has ended: count it, and return its record with its judgement and its cost."""
        gpu_s = self._gpu_s.pop(state.request_id, 0.0)
        is_client_error = error is not None and error.is_client_error
        pool = self._decode_pools.pop(state.request_id, "")
        record = state.record(
            outcome,
            reason,
            now_s,
            is_client_error=is_client_error,
            gpu_s=gpu_s,
            model=self._model if pool else "",
            pool=pool,
        )
        if state.placed_at_s is None:
            cause = Cause.CLIENT_DISCONNECTED if error is None else error.cause
            self.admission_counts.rejected(
                record.slo.name, record.outcome, cause, is_client_error=is_client_error
            )
        # Only these show the length of an answer; of others it is what was expected.
        is_length_known = record.outcome in {Phase.FINISHED, Phase.CANCELLED}
        output_tokens = record.output_tokens if is_length_known else None
        demand = NO_DEMAND if is_client_error else self._expected_demand(state, output_tokens)
        if record.outcome is Phase.FINISHED or (
            record.outcome is Phase.CANCELLED and record.output_tokens
        ):
            self.recent.update(demand)
        self._classes[record.slo.name] = (record.slo, record.ended_at_s)
        self.slo_totals.record_request(
            record, pool, self._model, is_client_error=is_client_error, demand=demand
        )
        return record

    def on_rejected(
        self, error: Rejected, slo: Slo, *, tenant: str, requests: int, now_s: float
    ) -> None:
        """Requests were refused before they were read: they count like any that are shed at once.

        Their demand is taken to be that of other recent requests.
        """
        record = _rejected_record(error, slo, tenant, now_s)
        is_client_error, recent = error.is_client_error, self.recent
        self.admission_counts.rejected(
            slo.name,
            record.outcome,
            error.cause,
            is_client_error=is_client_error,
            requests=requests,
        )
        demand = NO_DEMAND
        if not is_client_error:
            prompt_tokens, uncached_tokens = round(recent.prompt_tokens), recent.uncached_tokens
            demand = DemandTotals(
                requests=1,
                prompt_tokens=prompt_tokens,
                uncached_tokens=uncached_tokens,
                output_tokens=recent.output_tokens,
            )
        for _ in range(requests):
            self.slo_totals.record_request(
                record, "", self._model, is_client_error=is_client_error, demand=demand
            )
        if not is_client_error:
            self._classes[slo.name] = (slo, now_s)

    # -------------------------------------------------------------- what is asked of it

    def demand(self, in_flight: Iterable[RequestState]) -> DemandTotals:
        """The demand so far, with expectations for running requests."""
        total = self.slo_totals.demand
        for state in in_flight:
            total = _sum_demand(total, self._expected_demand(state))
        return total

    def active_classes(self, now_s: float) -> tuple[Slo, ...]:
        """The objectives of the classes that are in use."""
        return tuple(slo for slo, at_s in self._classes.values() if now_s - at_s <= _CLASS_ACTIVE_S)

    def check_integrity(self, in_flight: Iterable[str], running: Iterable[str]) -> None:
        """Raise AssertionError when the state of an ended request is kept."""
        in_flight_ids = set(in_flight)
        assert self._gpu_s.keys() <= in_flight_ids, "costs of requests that have ended"
        assert self._decode_pools.keys() <= in_flight_ids, "pools of requests that have ended"
        assert self._leg_usages.keys() <= set(running), "meters of legs that do not run"
        self.slo_totals.check_integrity()

    # -------------------------------------------------------------- what things take

    def _device_s(self, usage: _LegUsage, dispatched: DispatchedLeg, tokens: int) -> float:
        before = usage.initial_view
        after = self._fleet.get(dispatched.replica_id) or before
        timing, devices = self._fleet_model.timings.of(before), before.facts.devices
        uncached_tokens = dispatched.tokens
        if usage.cached_tokens is not None:
            uncached_tokens = max(0, len(dispatched.leg.prompt_token_ids) - usage.cached_tokens)
        device_s = prefill_device_s(timing, uncached_tokens, devices=devices)
        if tokens > 0 and dispatched.leg.kind is not LegKind.PREFILL:
            batch = mean_decode_batch(before.load.steps, after.load.steps)
            running, context_tokens = batch or _reported_batch(after)
            device_s += decode_device_s(
                timing, tokens, running=running, context_tokens=context_tokens, devices=devices
            )
        return device_s

    def _expected_demand(
        self, state: RequestState, output_tokens: int | None = None
    ) -> DemandTotals:
        """The expected demand of a request, or its demand where its tokens are known."""
        prompt_tokens = state.prompt_tokens
        if state.cached_tokens is None:
            uncached_tokens = prompt_tokens * (1.0 - self._fleet_model.reuse.hit_fraction)
        else:
            uncached_tokens = float(max(0, prompt_tokens - state.cached_tokens))
        if output_tokens is not None:
            return DemandTotals(
                requests=1,
                prompt_tokens=prompt_tokens,
                uncached_tokens=uncached_tokens,
                output_tokens=float(output_tokens),
            )
        expected_tokens = self._expected_output_tokens(state.request.max_tokens)
        return DemandTotals(
            requests=1,
            prompt_tokens=prompt_tokens,
            uncached_tokens=uncached_tokens,
            output_tokens=max(float(len(state.generated)), expected_tokens),
        )

    def _expected_output_tokens(self, max_tokens: int) -> float:
        """How long an answer will be; 0 before any has ended.

        The clients' limit says little: a fleet would be sized for answers ten times as long.
        """
        timings = self._fleet_model.timings
        if timings.has_output_estimate(max_tokens):
            return timings.expected_output_tokens(max_tokens)
        return min(float(max_tokens), self.recent.output_tokens)


def _reported_batch(view: ReplicaView) -> tuple[float, float]:
    """Streams of a replica and their context, by its last report alone."""
    load, facts = view.load, view.facts
    context_tokens = load.kv_used_fraction * facts.kv_blocks * facts.block_size_tokens
    return max(1, load.running_requests), context_tokens


def _rejected_record(error: Rejected, slo: Slo, tenant: str, now_s: float) -> RequestRecord:
    """The record of a request of which only the sender is known."""
    record = RequestRecord(
        request_id=error.request_id,
        outcome=Phase.SHED,
        reason=error.reason,
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
    return evolve(record, slo_result=evaluate_slo(record, slo))


@dataclass(slots=True)
class _Row:
    """A `Tally` that can still grow."""

    evaluated: int = 0
    excluded: int = 0
    client_errors: int = 0
    good: int = 0
    ttft_met: int = 0
    tpot_met: int = 0
    itl_met: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    gpu_s: float = 0.0
    by_outcome: dict[Phase, int] = field(default_factory=dict)

    def add(self, record: RequestRecord, *, is_client_error: bool, was_placed: bool) -> None:
        """Count a request in exactly one of three ways: evaluated, excluded, client error."""
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

    def tally(self, key: _TallyKey) -> Tally:
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
    """The totals of one coordinator, in rows by class, tenant, model and pool.

    Tenants beyond `max_rows` are counted as `OTHER`, so that clients cannot fill the memory with
    names. Demand is that of ended requests; reports add the expected demand of running requests.
    """

    def __init__(self, *, max_rows: int = 4096) -> None:
        self._max_rows = max_rows
        self._rows: dict[_TallyKey, _Row] = {}
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
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= self._max_rows:
                key = (record.slo.name, OTHER, model, decode_pool)
            row = self._rows.setdefault(key, _Row())
        row.add(record, is_client_error=is_client_error, was_placed=bool(decode_pool))
        if (latency_s := ttft_s(record)) is not None:
            self._ttft.add(latency_s)
        if (latency_s := tpot_s(record)) is not None:
            self._tpot.add(latency_s)
        self._demand = _sum_demand(self._demand, demand)

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
                f"{key}: {ended} ended, not all are evaluated"
            )
            least_met = min(row.ttft_met, row.tpot_met, row.itl_met)
            assert row.good <= least_met <= row.evaluated, f"{key}: more are good than met all"


def _sum_demand(first: DemandTotals, second: DemandTotals) -> DemandTotals:
    """The sum of two."""
    return DemandTotals(
        requests=first.requests + second.requests,
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        uncached_tokens=first.uncached_tokens + second.uncached_tokens,
        output_tokens=first.output_tokens + second.output_tokens,
    )
