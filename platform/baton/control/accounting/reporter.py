"""A coordinator's report to the controller, made on request: every second or two.

*Theory of operation.* Counts are the accounts' totals since the start; pools come from the fleet
table. Only the time in engine steps is a total kept here, since replicas that leave take theirs
along. A replica's growth is added to its pool when a report is made and when the replica is lost. A
total that has gone back counts from zero. The cost is proportional to replicas and requests in
flight, and zero between reports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from baton.control.accounting.accounts import Accounts
from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.fleet_table import FleetTable
from baton.control.state.request_state import RequestState
from baton.domain.demand import CoordinatorReport, PoolReport
from baton.domain.fleet import ReplicaView, Role
from baton.domain.slo import Slo
from baton.perf.capacity.capacity import Pulls, max_decode_streams, prefill_tokens_per_s
from baton.policy.placement.device_seconds import prefill_device_s

RequestedRates = tuple[tuple[str, float, float], ...]
"""By tenant: its recent requests and tokens per second here."""

_MIN_STEP_S = 1e-9


class _Capacity(NamedTuple):
    """The capacity of one replica of a pool; None: not known."""

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    decode_streams: float | None = None


class _Limits(NamedTuple):
    """Objectives to keep; None: none."""

    ttft_s: float | None
    tpot_s: float | None


class CoordinatorReporter:
    """Puts reports together; see the module."""

    def __init__(
        self,
        fleet: FleetTable,
        fleet_model: FleetModel,
        accounts: Accounts,
        *,
        max_pulls: int | None = None,
    ) -> None:
        """Report on these; `max_pulls` are the concurrent pulls into one replica, None: any."""
        self._fleet = fleet
        self._max_pulls = max_pulls
        self._fleet_model = fleet_model
        self._accounts = accounts
        self._pool_busy_s: dict[str, float] = {}
        """By pool."""
        self._counted_s: dict[str, float] = {}
        """How much of each replica's own total is in its pool's."""

    def on_replica_removed(self, replica_id: str) -> None:
        """A replica is about to be forgotten, or to begin another life: keep what it has done."""
        if (view := self._fleet.get(replica_id)) is not None:
            self._count_busy_time(view)
        self._counted_s.pop(replica_id, None)

    def report(
        self,
        coordinator_id: str,
        now_s: float,
        *,
        requests: Mapping[str, RequestState],
        queued_ids: Collection[str],
        requested_rates: RequestedRates = (),
        drain_s: float = 0.0,
    ) -> CoordinatorReport:
        """Everything, at this moment.

        `queued_ids` are the ids of those that wait here; all of them are admitted within `drain_s`.
        """
        queued_ids = frozenset(queued_ids)
        accounts = self._accounts
        in_flight = requests.values()
        return CoordinatorReport(
            coordinator_id=coordinator_id,
            at_s=now_s,
            demand=accounts.demand(in_flight),
            tallies=accounts.slo_totals.tallies(),
            gpu_usage=accounts.slo_totals.gpu_usage(),
            ttft=accounts.slo_totals.ttft_totals(),
            tpot=accounts.slo_totals.tpot_totals(),
            in_flight=len(requests),
            queued=len(queued_ids),
            slack_s=least_slack_s(in_flight, now_s, queued_ids=queued_ids, drain_s=drain_s),
            pools=self._pool_reports(now_s, _strictest(accounts.active_classes(now_s))),
            queued_gpu_s=self._queued_gpu_s(
                requests[queued_id] for queued_id in queued_ids if queued_id in requests
            ),
            requested_rates=requested_rates,
        )

    # -------------------------------------------------------------- pools

    def _pool_reports(self, now_s: float, limits: _Limits) -> tuple[PoolReport, ...]:
        by_pool: dict[str, list[ReplicaView]] = {name: [] for name in self._pool_busy_s}
        for view in self._fleet.view(now_s).replicas.values():
            self._count_busy_time(view)
            by_pool.setdefault(view.facts.pool, []).append(view)
        return tuple(
            self._pool_report(name, by_pool[name], now_s, limits) for name in sorted(by_pool)
        )

    def _count_busy_time(self, view: ReplicaView) -> None:
        replica_id, pool, total_s = view.replica_id, view.facts.pool, view.load.steps.busy_s
        added_s, counted_s = 0.0, self._counted_s.get(replica_id)
        if counted_s is not None:
            added_s = total_s - counted_s if total_s >= counted_s else total_s
        self._pool_busy_s[pool] = self._pool_busy_s.get(pool, 0.0) + added_s
        if view.load.steps.steps:  # or else it has not reported its earlier steps yet
            self._counted_s[replica_id] = total_s

    def _pool_report(
        self, name: str, views: Sequence[ReplicaView], now_s: float, limits: _Limits
    ) -> PoolReport:
        active = [view for view in views if not view.draining]
        loads = [view.load for view in active]
        roles = [view.facts.role for view in active]
        return PoolReport(
            pool=name,
            prefill=roles.count(Role.PREFILL),
            decode=roles.count(Role.DECODE),
            mixed=roles.count(Role.MIXED),
            draining=len(views) - len(active),
            busy_s=self._pool_busy_s.get(name, 0.0),
            running_requests=float(sum(load.running_requests for load in loads)),
            queued_requests=float(
                sum(load.queued_requests + load.pulling_requests for load in loads)
            ),
            queued_tokens=float(sum(load.queued_tokens for load in loads)),
            kv_used_fraction=sum(load.kv_used_fraction for load in loads) / max(1, len(loads)),
            **self._capacity(active, limits)._asdict(),
            oldest_report_age_s=max(
                (max(0.0, now_s - view.load_received_at_s) for view in active), default=0.0
            ),
            roles=tuple((view.replica_id, view.facts.role) for view in active),
        )

    def _capacity(self, active: Sequence[ReplicaView], limits: _Limits) -> _Capacity:
        """Of one replica, for recent requests; unknown before there were any.

        A pool may do as well as another in a phase that it has not run; that is not for here.
        """
        recent, timings = self._accounts.recent, self._fleet_model.timings
        if not active or not recent.prompt_tokens:
            return _Capacity()
        facts, timing = active[0].facts, timings.of(active[0])
        prefill_rate: float | None = None
        if timings.has_prefill_estimate(facts.pool):
            mean_tokens = max(1.0, recent.uncached_tokens)
            prefill_rate = prefill_tokens_per_s(
                timing,
                mean_uncached_tokens=mean_tokens,
                max_batched_tokens=facts.max_batched_tokens,
                max_running=facts.max_running_requests,
                ttft_s=limits.ttft_s,
            )
        if not timings.has_decode_estimate(facts.pool):
            return _Capacity(prefill_rate)
        context_tokens = recent.prompt_tokens + recent.output_tokens / 2
        streams = max_decode_streams(
            timing,
            tpot_s=limits.tpot_s,
            context_tokens=context_tokens,
            max_running=facts.max_running_requests,
            kv_tokens=facts.kv_blocks * facts.block_size_tokens,
            pulls=self._pulls(facts.role, recent.output_tokens),
        )
        step_s = timing.step_s(running=streams, context_tokens=round(streams * context_tokens))
        return _Capacity(prefill_rate, streams / max(step_s, _MIN_STEP_S), float(streams))

    def _pulls(self, role: Role, output_tokens: float) -> Pulls | None:
        """The bound of a role whose streams begin with a pull; None for others."""
        if self._max_pulls is None or role is not Role.DECODE:
            return None
        return Pulls(at_once=self._max_pulls, output_tokens=output_tokens)

    # -------------------------------------------------------------- who waits

    def _queued_gpu_s(self, requests: Iterable[RequestState]) -> float:
        """The cost of the waiting prompts, on their prefill replicas."""
        queued = tuple(requests)
        eligible = self._fleet.view(0.0).eligible
        prefiller = self._fleet.get(next(iter(eligible.prefill or eligible.decode), ""))
        if not queued or prefiller is None:
            return 0.0
        timing, devices = self._fleet_model.timings.of(prefiller), prefiller.facts.devices
        miss_fraction = 1.0 - self._fleet_model.reuse.hit_fraction
        return sum(
            prefill_device_s(timing, state.prompt_tokens * miss_fraction, devices=devices)
            for state in queued
        )


def least_slack_s(
    in_flight: Iterable[RequestState],
    now_s: float,
    *,
    queued_ids: Collection[str] = (),
    drain_s: float = 0.0,
) -> float | None:
    """The least remaining TTFT slack of a waiting request; None without one.

    A placed request has its predicted time still before it. Held requests go one after the other,
    the most urgent first, the last of them after `drain_s`.
    """
    slacks: list[float] = []
    queued_slacks: list[float] = []
    for state in in_flight:
        objective_s = state.slo.ttft_s
        if objective_s is None or state.first_token_at_s is not None:
            continue
        slack_s = objective_s - (now_s - state.request.arrived_at_s)
        if state.request_id in queued_ids:
            queued_slacks.append(slack_s)
        else:
            slacks.append(slack_s - _predicted_ttft_left_s(state, now_s))
    per_request_s = drain_s / max(1, len(queued_slacks))
    slacks += [
        slack_s - place * per_request_s
        for place, slack_s in enumerate(sorted(queued_slacks), start=1)
    ]
    return min(slacks, default=None)


def _predicted_ttft_left_s(state: RequestState, now_s: float) -> float:
    """The rest of the running placement's prediction; 0 without a prediction."""
    decision = state.decisions[-1] if state.decisions else None
    if decision is None or not decision.options:
        return 0.0
    return max(0.0, decision.at_s + decision.options[0].ttft_s - now_s)


def _strictest(classes: Collection[Slo]) -> _Limits:
    """The shortest objectives of these classes; None for no such objective."""
    return _Limits(
        min((class_.ttft_s for class_ in classes if class_.ttft_s is not None), default=None),
        min((class_.tpot_s for class_ in classes if class_.tpot_s is not None), default=None),
    )
