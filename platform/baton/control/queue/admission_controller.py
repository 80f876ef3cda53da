"""Admission of requests: predictions for a request and its competitors, as input of `decide`.

*Theory of operation.* `evaluate` returns the decision for a placement and changes no state that
matters; `admit`, `enqueue` and `remove` do. It evaluates only requests without a first placement.
An admitted request goes on, even after its replica is lost, and before all that wait. It evaluates
nothing where no class has an objective, or where placement predicts nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.fleet_table import FleetTable
from baton.control.state.admission_terms import PriorityBand
from baton.control.state.request_state import RequestState
from baton.control.state.service_rules import ServiceRules
from baton.domain.fleet import ReplicaView, Role
from baton.domain.handoff import HandoffMode, PlacementDecision, RouteOption
from baton.domain.slo import Slo
from baton.domain.tenant import Tenant
from baton.perf.fitting.decayed_sum import DecayedSum
from baton.policy.admission.decision import (
    AdmissionDecision,
    AdmissionForecast,
    AdmissionOptions,
    AdmissionPolicy,
    AdmissionReason,
    Admit,
    Shed,
    TtftLimit,
    decide,
    decide_without_slo,
    ttft_limit,
)
from baton.policy.admission.decode_forecast import (
    DecodeForecast,
    IncomingRequest,
    decode_forecast,
    predicted_tpot_s,
    pull_queue_s,
)
from baton.policy.admission.fair_queue import FairQueue, QueuedRequest
from baton.policy.placement.device_seconds import decode_device_s, prefill_device_s
from baton.policy.placement.port import PlacementQuery

_FORECAST_TTL_S = 1e-4
"""How long a look at the whole fleet lasts, for each replica: at half a microsecond for one, that
is half a percent of the time at most."""
_MIN_BATCH_FRACTION = 0.25
"""Of the streams that a replica may run, those that a stream is priced beside, at least. Where
tenants have to share the fleet it is full, and the cost on an idle replica says nothing."""
_OVERRUN_QUANTILE = 0.99
"""Of the first tokens that came, those that came no later than the margin."""
_NOT_EVALUATED = Admit(AdmissionReason.NOT_EVALUATED)
_RATE_WINDOW_S = 5.0
"""Loads change within tens of seconds; sums over fewer than a few seconds are noise."""
_PRIOR_WEIGHT_S = 0.5
"""The time for which the guess counts: as soon as half a second was measured, that weighs as much.
"""
_MIN_RATE_FRACTION = 0.02
"""Of the fleet's rate, the least share that higher bands leave: waits stay finite."""
_INFLATION_STEP = 1.1
"""Each request that waited too long makes predictions this much longer ..."""
_INFLATION_DECAY = 0.9998
"""... and each turn in time, this much shorter. With ln 1.1 / -ln 0.9998 = 477 admitted for each
that waited too long, and as many rejected as admitted, 0.2 % of the rejected wait."""
_MISPREDICTION_DECAY = 0.002
"""The part of an unreliability that each turn in time takes away."""
_MAX_WAIT_INFLATION = 2.5
"""A line of two fifths of the available time is still long enough to keep the fleet busy."""
_MAX_AGE_S = 1.0
_MAX_ESTIMATES = 16
_MAX_CLASSES = 1024
"""Tenants times classes that are remembered; with more, the oldest goes."""


class Estimate(NamedTuple):
    """The predicted need of a request when it arrived, were it first in line."""

    at_s: float
    unqueued_ttft_s: float
    engine_queue_s: float
    work_s: float
    """Device-seconds."""


class SheddingClass(NamedTuple):
    """Requests of which one more would be refused."""

    tenant: str
    slo_class: str
    is_default: bool
    """Whether it is the class of those of its tenant who ask for none."""
    retry_after_s: float


class _QueuePosition(NamedTuple):
    """The time of a request's turn."""

    request: QueuedRequest
    """Where it stands in line."""
    wait_s: float


class AdmissionController:
    """Admission of one coordinator."""

    def __init__(
        self,
        *,
        fleet: FleetTable,
        fleet_model: FleetModel,
        first_token_timeout_s: float,
        max_pulls: int | None = None,
    ) -> None:
        """Decode replicas pull for `max_pulls` requests at once; None: for any number."""
        self.wait_queue = WaitQueue()
        self.first_token_timeout_s = first_token_timeout_s
        """The limit of the wait of requests without a TTFT objective, or with an unattainable
        one."""
        self._fleet = fleet
        self._fleet_model = fleet_model
        self._max_pulls = max_pulls
        self._options = AdmissionOptions()
        self._has_objectives = self._is_predictive = False
        self._recent = RecentEstimates()
        self._admitted_by_priority: Counter[int] = Counter()
        """Admitted requests that have not ended, by priority."""
        self._decode_forecast = DecodeForecast()
        self._decode_forecast_expires_at_s = float("-inf")

    def configure(self, rules: ServiceRules) -> None:
        """Go by these rules from now on."""
        self._options = rules.admission
        has_slo = any(slo.has_objectives for slo in rules.slos.classes.values())
        self._is_predictive = rules.admission.policy is AdmissionPolicy.PREDICTED
        self._has_objectives = has_slo and self._is_predictive

    def evaluate(
        self, state: RequestState, query: PlacementQuery, decision: PlacementDecision, now_s: float
    ) -> AdmissionDecision:
        """Whether a request with this placement is admitted."""
        if not self._is_predictive or not decision.options or state.placed_at_s is not None:
            return _NOT_EVALUATED
        option = decision.options[0]
        if not self._has_objectives:
            estimate = Estimate(
                at_s=now_s,
                unqueued_ttft_s=option.ttft_s - option.queue_s,
                engine_queue_s=option.queue_s,
                work_s=0.0,
            )
            self._recent.note(state.tenant.name, state.slo.name, estimate)
            return self._evaluate_best_effort(estimate)
        decoder = self._fleet.get(option.decode_replica_id)
        if decoder is None:
            return _NOT_EVALUATED
        unqueued_ttft_s = option.ttft_s - option.queue_s
        if state.queued_request is None:
            self._assign_position(state, query, option, now_s)
        was_queued = state.request_id in self.wait_queue
        queue_wait_s = None if was_queued else self._update_position(state, now_s)
        forecast = AdmissionForecast(
            waited_s=query.waited_s,
            unqueued_ttft_s=unqueued_ttft_s,
            engine_queue_s=option.queue_s,
            queue_wait_s=queue_wait_s,
            was_queued=was_queued,
            misprediction_rate=self.wait_queue.misprediction_rate(state.band),
        )
        if queue_wait_s is None:
            forecast = self._refine_forecast(state, query, decision, decoder, forecast)
        limit = self._request_limit(state, unqueued_ttft_s, now_s)
        return decide(state.slo, forecast, limit, options=self._options)

    def _evaluate_best_effort(self, estimate: Estimate) -> AdmissionDecision:
        """Admission without objectives; but no request is to time out in an engine's queue, either.

        The margin for errors is half of the time at most: nearer timeouts need no closer look.
        """
        ttft_s = estimate.unqueued_ttft_s + estimate.engine_queue_s
        if ttft_s <= self.first_token_timeout_s / 2:
            return _NOT_EVALUATED
        limit = self._class_limit(Slo(ttft_s=self.first_token_timeout_s), estimate.unqueued_ttft_s)
        return decide_without_slo(
            ttft_s, queue_s=estimate.engine_queue_s, first_token_timeout_s=limit.limit_s
        )

    def recent_classes(self, now_s: float) -> list[tuple[str, str]]:
        """Names of tenants and classes of which something has come of late."""
        return self._recent.recent_classes(now_s) if self._is_predictive else []

    def would_shed(self, tenant: Tenant, slo: Slo, now_s: float) -> Shed | None:
        """The answer to one more request of a class, as light as recent requests; None: admitted.

        Counts nothing, for nothing has arrived.
        """
        estimate = self._recent.lightest(tenant.name, slo.name, now_s)
        if estimate is None or not self._is_predictive:
            return None
        if not self._has_objectives:
            best_effort = self._evaluate_best_effort(estimate)
            return best_effort if isinstance(best_effort, Shed) else None
        limit = self._class_limit(slo, estimate.unqueued_ttft_s)
        band = PriorityBand(slo.priority + tenant.priority, limit.is_attainable)
        candidate = QueuedRequest(
            request_id="-",
            flow=tenant.name,
            weight=tenant.weight,
            work_s=estimate.work_s,
            start_deadline_s=now_s + limit.limit_s - estimate.unqueued_ttft_s,
        )
        position = self.wait_queue.position(
            band, candidate, replicas=self._prefill_replica_count, now_s=now_s
        )
        forecast = AdmissionForecast(
            waited_s=0.0,
            unqueued_ttft_s=estimate.unqueued_ttft_s,
            engine_queue_s=estimate.engine_queue_s,
            queue_wait_s=None if position is None else position.wait_s,
            misprediction_rate=self.wait_queue.misprediction_rate(band),
        )
        decision = decide(slo, forecast, limit, options=self._options)
        return decision if isinstance(decision, Shed) else None

    def admit(self, state: RequestState, now_s: float) -> None:
        """It is about to be placed; for the first time, or again."""
        if state.placed_at_s is None:
            self._admitted_by_priority[state.priority] += 1
            if now_s < self._decode_forecast_expires_at_s:  # or else it is not used any more
                forecast, legs = self._decode_forecast, self._fleet.peer_load_factor
                self._decode_forecast = forecast._replace(
                    prefilling=forecast.prefilling + legs,
                    sent_prompts=forecast.sent_prompts + legs,
                )
            if state.queued_request is not None:
                self.wait_queue.admit(
                    state.band,
                    state.queued_request,
                    replicas=self._prefill_replica_count,
                    now_s=now_s,
                )

    def enqueue(self, state: RequestState, now_s: float) -> None:
        """It waits for its turn."""
        assert state.queued_request is not None, "a request is queued without an admission decision"
        self.wait_queue.add(state.band, state.queued_request, now_s)

    def remove(self, state: RequestState, now_s: float) -> None:
        """It has ended."""
        self.wait_queue.remove(state.request_id, now_s)
        if state.placed_at_s is not None:
            priority = state.priority
            self._admitted_by_priority[priority] -= 1
            if not self._admitted_by_priority[priority]:
                del self._admitted_by_priority[priority]

    def victim(self, state: RequestState) -> str | None:
        """The request that must go so that this request may wait; None without any."""
        return self.wait_queue.victim(PriorityBand(state.priority, state.band.is_attainable))

    def evictable_count(self, priority: int) -> int:
        """How many of those who wait would make room for one of this priority."""
        return self.wait_queue.count_below(PriorityBand(priority, is_attainable=True))

    def drain_s(self) -> float:
        """How long until all waiting requests have had their turns; 0 without any."""
        return self.wait_queue.drain_s(replicas=self._prefill_replica_count)

    # -------------------------------------------------------------- what is put before it

    def _assign_position(
        self, state: RequestState, query: PlacementQuery, option: RouteOption, now_s: float
    ) -> None:
        """Say where in the line a request belongs; it keeps its place from then on."""
        unqueued_ttft_s = option.ttft_s - option.queue_s
        limit = self._request_limit(state, unqueued_ttft_s, now_s)
        state.band = PriorityBand(state.priority, limit.is_attainable)
        work_s = self._device_s(query, option)
        start_deadline_s = now_s - query.waited_s + limit.limit_s - unqueued_ttft_s
        if (no_replica_s := state.total_replica_wait_s(now_s)) > 0:
            start_deadline_s = now_s - query.waited_s - no_replica_s  # before those that came since
        state.queued_request = QueuedRequest(
            request_id=state.request_id,
            flow=state.tenant.name,
            weight=state.tenant.weight,
            work_s=work_s,
            start_deadline_s=start_deadline_s,
        )
        estimate = Estimate(
            at_s=now_s,
            unqueued_ttft_s=unqueued_ttft_s,
            engine_queue_s=option.queue_s,
            work_s=work_s,
        )
        self._recent.note(state.tenant.name, state.slo.name, estimate)

    def _request_limit(
        self, state: RequestState, unqueued_ttft_s: float, now_s: float
    ) -> TtftLimit:
        """When its first token must come, not counting its wait for a replica.

        Its objective has passed by then: from when there is a replica it waits for its turn as long
        as a request without a TTFT objective.
        """
        class_limit = self._class_limit(state.slo, unqueued_ttft_s)
        if state.total_replica_wait_s(now_s) <= 0:
            return class_limit
        limit_s = max(class_limit.queued_limit_s, self.first_token_timeout_s + unqueued_ttft_s)
        return TtftLimit(limit_s, is_attainable=True, queued_limit_s=limit_s)

    def _class_limit(self, slo: Slo, unqueued_ttft_s: float) -> TtftLimit:
        return ttft_limit(
            slo,
            unqueued_ttft_s,
            overrun_s=self._fleet_model.ttft_overruns.quantile_s(_OVERRUN_QUANTILE),
            options=self._options,
            queue_timeout_s=self.first_token_timeout_s,
        )

    def _update_position(self, state: RequestState, now_s: float) -> float | None:
        """Its place among those who wait, and how long until its turn; None: it comes first."""
        assert state.queued_request is not None, "its place is found before its turn"
        position = self.wait_queue.position(
            state.band, state.queued_request, replicas=self._prefill_replica_count, now_s=now_s
        )
        if position is None:
            return None
        state.queued_request = position.request
        return position.wait_s

    def _device_s(self, query: PlacementQuery, option: RouteOption) -> float:
        """Device-seconds of a request: of its prompt where that is computed, of its stream."""
        timings, fleet = self._fleet_model.timings, self._fleet
        decoder = fleet.get(option.decode_replica_id)
        prefiller = decoder
        if option.prefill_replica_id is not None:
            prefiller = fleet.get(option.prefill_replica_id)
        device_s = 0.0
        if prefiller is not None:
            device_s = prefill_device_s(
                timings.of(prefiller),
                query.prompt_tokens - option.hit_tokens,
                devices=prefiller.facts.devices,
            )
        if decoder is not None:
            output_tokens = timings.expected_output_tokens(query.max_tokens)
            max_running = decoder.facts.max_running_requests
            running = max(
                decoder.load.running_requests + 1, round(max_running * _MIN_BATCH_FRACTION)
            )
            device_s += decode_device_s(
                timings.of(decoder),
                output_tokens,
                running=running,
                context_tokens=running * (query.prompt_tokens + output_tokens / 2),
                devices=decoder.facts.devices,
            )
        return device_s

    def _refine_forecast(
        self,
        state: RequestState,
        query: PlacementQuery,
        decision: PlacementDecision,
        decoder: ReplicaView,
        forecast: AdmissionForecast,
    ) -> AdmissionForecast:
        """The predictions that matter only to the first request in line."""
        option, timing = decision.options[0], self._fleet_model.timings.of(decoder)
        if option.queue_s > self._options.max_engine_queue_delay_s:
            running = decoder.load.running_requests if option.prefill_replica_id is None else 0
            forecast = forecast._replace(
                current_step_s=timing.step_s(running=running + 1) / 2,
                has_idle_alternative=any(
                    other.queue_s <= self._options.max_engine_queue_delay_s
                    for other in decision.options
                ),
            )
        if self._max_pulls is not None and option.mode is HandoffMode.PULL:
            forecast = forecast._replace(
                pull_queue_s=pull_queue_s(
                    self._current_decode_forecast(decision.at_s),
                    timing,
                    horizon_s=option.queue_s + option.adapter_load_s + option.prefill_s,
                    transfer_s=option.transfer_s,
                    max_pulls=self._max_pulls,
                )
            )
        if (tpot_s := state.slo.tpot_s) is not None:
            now_s = decision.at_s
            incoming = IncomingRequest(
                horizon_s=option.ttft_s,
                prompt_tokens=query.prompt_tokens,
                output_tokens=self._fleet_model.timings.expected_output_tokens(query.max_tokens),
                prefill_time_fraction=self._fleet_model.timings.prefill_time_fraction(
                    decoder, now_s
                ),
            )
            fleet_forecast = self._current_decode_forecast(now_s)
            if decoder.facts.role is Role.PREFILL and self._fleet.view(now_s).eligible.decode:
                # It stays where its prompt is computed: the decode pool does not matter to it.
                fleet_forecast = DecodeForecast(
                    replicas=1, streams=decoder.inflight_streams * self._fleet.peer_load_factor
                )
            forecast = forecast._replace(tpot_s=predicted_tpot_s(fleet_forecast, incoming, timing))
            if forecast.tpot_s > tpot_s * (1 - self._options.slo_safety_margin_fraction):
                alone_step_s = timing.step_s(running=1, context_tokens=query.prompt_tokens)
                forecast = forecast._replace(unloaded_tpot_s=alone_step_s)
        if option.expected_misses:
            forecast = forecast._replace(
                streams_broken=self._caused_misses(state, option, forecast)
            )
        return forecast

    def _caused_misses(
        self, state: RequestState, option: RouteOption, forecast: AdmissionForecast
    ) -> float:
        """Of the misses that its placement predicts, those of others that it must not cause."""
        slo, misses = state.slo, option.expected_misses
        if slo.ttft_s is not None and forecast.waited_s + option.ttft_s > slo.ttft_s:
            misses -= 1  # its own first token
        if slo.tpot_s is not None and misses >= 1 and forecast.tpot_s > slo.tpot_s:
            misses -= 1  # its own pace
        peers = sum(
            n for priority, n in self._admitted_by_priority.items() if priority >= state.priority
        )
        return max(0.0, misses) * peers / max(1, self._admitted_by_priority.total())

    def _current_decode_forecast(self, now_s: float) -> DecodeForecast:
        """A look at the whole fleet, or the last look, with later admissions."""
        if now_s >= self._decode_forecast_expires_at_s:
            self._decode_forecast = decode_forecast(self._fleet.view(now_s))
            self._decode_forecast_expires_at_s = now_s + _FORECAST_TTL_S * len(self._fleet)
        return self._decode_forecast

    @property
    def _prefill_replica_count(self) -> int:
        """How many replicas take prompts."""
        eligible = self._fleet.view(0.0).eligible
        return len(eligible.prefill or eligible.decode)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books disagree."""
        self.wait_queue.check_integrity()
        assert all(count > 0 for count in self._admitted_by_priority.values()), (
            "more have ended than came"
        )


class WaitQueue:
    """The requests that wait for their turns.

    Theory of operation. A *band* is a priority, and in it requests that can still meet their
    objectives before those that cannot. Higher bands come first. Inside a band tenants share by
    weight, and inside a tenant the earliest deadline comes first (`policy.admission.fair_queue`).

    The wait is predicted from the work ahead and the recent rate of work, in device-seconds per
    second and replica, minus the later work of higher bands. Before any measurement that rate is 1.
    Where the first request waits for streams to end, turns come later than predicted. Predictions
    are then inflated until hardly any request waits too long. A request that waits too long makes
    its band *unreliable* for a while.

    The owner bounds the queue, and asks for a `victim` when it is full. Each request that is added
    leaves by `admit` or `remove`.
    """

    def __init__(self) -> None:
        self._bands: dict[PriorityBand, FairQueue] = {}
        self._band_of: dict[str, PriorityBand] = {}
        self._served_work = DecayedSum(_RATE_WINDOW_S)
        """Work that left for the fleet, per replica, while requests waited ..."""
        self._busy_time = DecayedSum(_RATE_WINDOW_S)
        """... and for how long they did: both on a clock that stops while the queue is empty.
        """
        self._arrived_work: dict[PriorityBand, DecayedSum] = {}
        """Admitted or queued work, by band."""
        self._wait_inflation: dict[PriorityBand, float] = {}
        """How much longer than predicted turns are taken to last; 1 by default."""
        self._misprediction_rates: dict[PriorityBand, float] = {}
        """How unreliable predictions for waiting requests are, from 0, which is not stored, to
        1."""
        self.head_blocked_on_decode = False
        """Whether who is first was last seen to wait for streams to end, not for prompts."""
        self._busy_clock_s = 0.0
        self._updated_at_s = 0.0

    def __len__(self) -> int:
        return len(self._band_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._band_of

    def __bool__(self) -> bool:
        return bool(self._band_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._band_of)

    # -------------------------------------------------------------- who waits

    def add(self, band: PriorityBand, request: QueuedRequest, now_s: float) -> None:
        """Add a request to the queue."""
        self._advance_clock(now_s)
        if band not in self._bands:
            self._bands[band] = FairQueue()
            self._bands = dict(sorted(self._bands.items(), reverse=True))
        self._bands[band].push(request)
        self._band_of[request.request_id] = band
        self._note_arrival(band, request.work_s, now_s)

    def head(self) -> str | None:
        """The first request of all; None when the queue is empty."""
        for queue in self._bands.values():
            if (request := queue.head()) is not None:
                return request.request_id
        return None

    def admit(
        self, band: PriorityBand, request: QueuedRequest, *, replicas: int, now_s: float
    ) -> None:
        """Note that a request goes to the fleet, whether it had to wait or not."""
        self._advance_clock(now_s)
        if self._band_of:
            self._served_work.add(request.work_s / max(1, replicas), self._busy_clock_s)
        queued_band = self._band_of.pop(request.request_id, None)
        if queued_band is not None:
            self._bands[queued_band].serve(request.request_id)
            if queued_band in self._wait_inflation:
                self._wait_inflation[queued_band] = max(
                    1.0, self._wait_inflation[queued_band] * _INFLATION_DECAY
                )
            if queued_band in self._misprediction_rates:
                self._misprediction_rates[queued_band] = max(
                    0.0, self._misprediction_rates[queued_band] - _MISPREDICTION_DECAY
                )
            return
        self._note_arrival(band, request.work_s, now_s)
        if band in self._bands:
            self._bands[band].serve_immediately(request)

    def record_timeout(self, request_id: str) -> None:
        """Note that a waiting request's turn will not come in time, though that was predicted."""
        band = self._band_of.get(request_id)
        if band is None:
            return
        self._misprediction_rates[band] = 1.0
        if self.head_blocked_on_decode:
            inflation = self._wait_inflation.get(band, 1.0) * _INFLATION_STEP
            self._wait_inflation[band] = min(_MAX_WAIT_INFLATION, inflation)

    def remove(self, request_id: str, now_s: float) -> None:
        """Take out a request that does not go to the fleet; unknown requests are ignored."""
        band = self._band_of.get(request_id)
        if band is not None:
            self._advance_clock(now_s)
            del self._band_of[request_id]
            self._bands[band].remove(request_id)

    def victim(self, band: PriorityBand) -> str | None:
        """The newest request of the lowest band below this band; None if none is lower."""
        for lowest_band in reversed(self._bands):
            newest = self._bands[lowest_band].newest_id()
            if newest is not None:
                return newest if lowest_band < band else None
        return None

    def count_below(self, band: PriorityBand) -> int:
        """How many wait of lower bands than this."""
        return sum(len(line) for other, line in self._bands.items() if other < band)

    # -------------------------------------------------------------- how long it takes

    def position(
        self, band: PriorityBand, request: QueuedRequest, *, replicas: int, now_s: float
    ) -> _QueuePosition | None:
        """The turn of a request that comes now; None: it would be first."""
        queues = [line for other, line in self._bands.items() if len(line) and other >= band]
        if not queues:
            return None
        rate = self._service_rate(band, replicas=replicas, now_s=now_s)
        work_ahead = sum([line.queued_work_s for line in queues])
        own_queue = self._bands.get(band)
        if own_queue is not None and len(own_queue):
            request = own_queue.assign_position(request, now_s=now_s, rate=rate)
            work_ahead -= own_queue.queued_work_s
            work_ahead += own_queue.work_ahead_s(
                request.flow, weight=request.weight, begin_by_s=request.start_deadline_s
            )
        return _QueuePosition(request, work_ahead / rate * self._wait_inflation.get(band, 1.0))

    def misprediction_rate(self, band: PriorityBand) -> float:
        """How unreliable predictions for waiting requests of a band are, from 0 to 1."""
        return self._misprediction_rates.get(band, 0.0)

    def drain_s(self, *, replicas: int) -> float:
        """How long until all who wait now have had their turns."""
        work = self.queued_work_s
        return (
            work / self._service_rate(None, replicas=replicas, now_s=self._updated_at_s)
            if work
            else 0.0
        )

    @property
    def queued_work_s(self) -> float:
        """Device-seconds of all who wait."""
        return sum(line.queued_work_s for line in self._bands.values())

    def _service_rate(self, band: PriorityBand | None, *, replicas: int, now_s: float) -> float:
        """Device-seconds per second for a band and those below it; None: for all of them."""
        self._advance_clock(now_s)
        served_work, busy_s = (
            self._served_work.value(self._busy_clock_s),
            self._busy_time.value(self._busy_clock_s),
        )
        rate = max(1, replicas) * (_PRIOR_WEIGHT_S + served_work) / (_PRIOR_WEIGHT_S + busy_s)
        if band is None:
            return rate
        higher_band_rate = sum(
            [came.rate(now_s) for other, came in self._arrived_work.items() if other > band]
        )
        return max(rate - higher_band_rate, _MIN_RATE_FRACTION * rate)

    def _note_arrival(self, band: PriorityBand, work: float, now_s: float) -> None:
        if band not in self._arrived_work:
            self._arrived_work[band] = DecayedSum(_RATE_WINDOW_S)
        self._arrived_work[band].add(work, now_s)

    def _advance_clock(self, now_s: float) -> None:
        elapsed_s = now_s - self._updated_at_s
        self._updated_at_s = now_s
        if self._band_of and elapsed_s > 0:
            self._busy_clock_s += elapsed_s
            self._busy_time.add(elapsed_s, self._busy_clock_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when bands and those who wait disagree."""
        assert sum(len(line) for line in self._bands.values()) == len(self._band_of), "miscounted"
        for line in self._bands.values():
            line.check_integrity()


class RecentEstimates:
    """The last requests of each tenant and class: whether one more would be admitted.

    A gate that rejects before it reads a request does not know its prompt. The lightest recent
    request stands for it: if even that would be rejected, nearly all would. Estimates expire within
    a second. So a gate that rejects still admits a few requests per second, which show when there
    is room again.
    """

    def __init__(self) -> None:
        self._by_class: dict[tuple[str, str], deque[Estimate]] = {}

    def note(self, tenant: str, slo_class: str, estimate: Estimate) -> None:
        """A request has arrived."""
        estimates = self._by_class.get((tenant, slo_class))
        if estimates is None:
            if len(self._by_class) >= _MAX_CLASSES:
                del self._by_class[next(iter(self._by_class))]
            estimates = self._by_class[tenant, slo_class] = deque(maxlen=_MAX_ESTIMATES)
        estimates.append(estimate)

    def recent_classes(self, now_s: float) -> list[tuple[str, str]]:
        """Tenants and classes of which something came of late."""
        since_s = now_s - _MAX_AGE_S
        return [name for name, kind in self._by_class.items() if kind and kind[-1].at_s >= since_s]

    def lightest(self, tenant: str, slo_class: str, now_s: float) -> Estimate | None:
        """The lightest recent estimate, as of now; None without a recent one."""
        estimates = self._by_class.get((tenant, slo_class))
        while estimates and estimates[0].at_s < now_s - _MAX_AGE_S:
            estimates.popleft()
        if not estimates:
            return None
        lightest = min(estimates, key=lambda estimate: estimate.unqueued_ttft_s)
        latest = estimates[-1]
        # An engine's queue is the same for all, and moves on.
        queue_s = max(0.0, latest.engine_queue_s - (now_s - latest.at_s))
        return lightest._replace(at_s=now_s, engine_queue_s=queue_s)
