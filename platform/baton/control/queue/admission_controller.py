"""Admission of requests: predictions for a request and its rivals, put before `decide`.

*Theory of operation.* `evaluate` turns a placement into a verdict and changes nothing that matters;
`admit`, `enqueue` and `remove` keep the books. Only requests without a first placement are asked
about. An admitted request goes on, even without its replica, and before all that wait. Nothing is
asked where no class has an objective, or where placement predicts nothing.
"""

from __future__ import annotations

from collections import Counter

from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.fleet_table import FleetTable
from baton.control.queue.recent_estimates import Estimate, RecentEstimates
from baton.control.queue.wait_queue import WaitQueue
from baton.control.state.admission_terms import PriorityBand
from baton.control.state.request_state import RequestState
from baton.control.state.service_rules import ServiceRules
from baton.domain.fleet import ReplicaView, Role
from baton.domain.handoff import PlacementDecision, RouteOption
from baton.domain.slo import Slo
from baton.domain.tenant import Tenant
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
)
from baton.policy.admission.fair_queue import QueuedRequest
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


class AdmissionController:
    """Admission of one coordinator."""

    def __init__(
        self, *, fleet: FleetTable, fleet_model: FleetModel, first_token_timeout_s: float
    ) -> None:
        self.wait_queue = WaitQueue()
        self.first_token_timeout_s = first_token_timeout_s
        """The limit of the wait of requests without a TTFT objective, or with an unattainable
        one."""
        self._fleet = fleet
        self._fleet_model = fleet_model
        self._options = AdmissionOptions()
        self._has_objectives = self._is_predictive = False
        self._recent = RecentEstimates()
        self._admitted_by_priority: Counter[int] = Counter()
        """Requests that were let in and have not ended, by priority."""
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
        """Whether a request that would be placed so is let in."""
        if not self._is_predictive or not decision.options or state.placed_at_s is not None:
            return _NOT_EVALUATED
        option = decision.options[0]
        if not self._has_objectives:
            estimate = Estimate(now_s, option.ttft_s - option.queue_s, option.queue_s, 0.0)
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
            "-",
            tenant.name,
            tenant.weight,
            estimate.work_s,
            now_s + limit.limit_s - estimate.unqueued_ttft_s,
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
                self._decode_forecast = self._decode_forecast._replace(
                    prefilling=self._decode_forecast.prefilling + self._fleet.peer_load_factor
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
        assert state.queued_request is not None, "nobody is held who was not asked about"
        self.wait_queue.add(state.band, state.queued_request, now_s)

    def remove(self, state: RequestState, now_s: float) -> None:
        """It has ended."""
        self.wait_queue.remove(state.request_id, now_s)
        if state.placed_at_s is not None:
            self._admitted_by_priority[state.priority] -= 1
            if not self._admitted_by_priority[state.priority]:
                del self._admitted_by_priority[state.priority]

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
            state.request_id, state.tenant.name, state.tenant.weight, work_s, start_deadline_s
        )
        estimate = Estimate(now_s, unqueued_ttft_s, option.queue_s, work_s)
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
