"""What an autoscaler sees of a fluid fleet: the same observation as of any other."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from baton.domain.fleet import Role
from baton.domain.slo import Slo
from baton.policy.scaling.observation import Demand, Observation, PoolObservation, ServiceLevel
from benchmarks._fluid_pools import FluidFleet, FluidPool, Inflow


class _Totals(NamedTuple):
    """Since the beginning."""

    at_s: float = 0.0
    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    good: float = 0.0
    prefill_busy_s: float = 0.0
    decode_busy_s: float = 0.0
    wait_s: float = 0.0
    """Of each request, added up."""


class FluidWatch:
    """Adds up what happens, and says what it was over the last window."""

    def __init__(self, slo: Slo, *, window_s: float, overhead_s: float) -> None:
        """Look at requests with the objectives `slo`, whose TTFT is longer by a constant."""
        self._slo = slo
        self._window_s = window_s
        self._overhead_s = overhead_s
        self._totals = [0.0] * len(_Totals._fields)
        """As in `_Totals`, in that order."""
        self._before: deque[_Totals] = deque([_Totals()])

    def saw(self, inflow: Inflow, good: float, fleet: FluidFleet, step_s: float) -> None:
        """A step has passed."""
        totals = self._totals
        totals[0] += step_s
        totals[1] += inflow[0]
        totals[2] += inflow[1]
        totals[3] += inflow[2]
        totals[4] += good
        totals[5] += fleet.prefill_busy * step_s
        # An engine computes as long as it has one stream.
        totals[6] += min(1.0, fleet.streams) * step_s
        totals[7] += good * fleet.wait_s

    def observation(self, fleet: FluidFleet) -> Observation:
        """What is seen now. Called once a tick."""
        now, before = _Totals(*self._totals), self._before
        while len(before) > 1 and before[1].at_s <= now.at_s - self._window_s:
            before.popleft()
        since = before[0]
        before.append(now)
        window_s = max(1e-9, now.at_s - since.at_s)
        demand = _demand(since, now, window_s)
        busy = (
            (now.prefill_busy_s - since.prefill_busy_s) / window_s,
            (now.decode_busy_s - since.decode_busy_s) / window_s,
        )
        return Observation(
            at_s=now.at_s,
            window_s=window_s,
            demand=demand,
            service=self._service(since, now, window_s, fleet),
            pools={
                name: _pool(name, plan, fleet, demand, busy) for name, plan in fleet.pools.items()
            },
            ttft_s=self._slo.ttft_s,
            tpot_s=self._slo.tpot_s,
            attainment_target=self._slo.attainment_target,
        )

    def _service(
        self, since: _Totals, now: _Totals, window_s: float, fleet: FluidFleet
    ) -> ServiceLevel:
        arrived, good = now.requests - since.requests, now.good - since.good
        refused = max(0.0, arrived - good)
        if arrived <= 0:
            return ServiceLevel()
        waited_s = (now.wait_s - since.wait_s) / good if good else fleet.wait_s
        late_s = max(waited_s, fleet.wait_s)
        ttft_s = self._slo.ttft_s
        waits = ttft_s is not None and fleet.queued_tokens > 0
        return ServiceLevel(
            attainment=min(1.0, good / arrived),
            ttft_mean_s=self._overhead_s + waited_s,
            ttft_p90_s=self._overhead_s + late_s,
            tpot_mean_s=fleet.step_s,
            tpot_p90_s=fleet.step_s,
            rejected_per_s=refused / window_s,
            in_flight=round(fleet.streams),
            min_ttft_slack_s=ttft_s - self._overhead_s - fleet.wait_s if ttft_s and waits else None,
        )


def _demand(since: _Totals, now: _Totals, window_s: float) -> Demand:
    requests = now.requests - since.requests
    prompts = now.prompt_tokens - since.prompt_tokens
    outputs = now.output_tokens - since.output_tokens
    if requests <= 0:
        return Demand()
    return Demand(
        requests_per_s=requests / window_s,
        prompt_tokens_per_s=prompts / window_s,
        output_tokens_per_s=outputs / window_s,
        mean_prompt_tokens=prompts / requests,
        mean_uncached_tokens=prompts / requests,
        mean_output_tokens=outputs / requests,
    )


def _pool(
    name: str, plan: FluidPool, fleet: FluidFleet, demand: Demand, busy: tuple[float, float]
) -> PoolObservation:
    roles = fleet.roles(name)
    ready = sum(roles.values())
    prefilling, decoding = roles[Role.PREFILL], roles[Role.DECODE]
    mixed = roles[Role.MIXED]
    part = decoding / ready if ready else 0.0
    both = mixed / ready if ready else 0.0
    streams = fleet.stream_share * plan.max_streams * (part + both / 2)
    mean_tokens = max(1.0, demand.mean_prompt_tokens)
    queued = fleet.queued_tokens / max(1, prefilling + mixed) * (1 - part)
    computing = fleet.prefill_busy * (1 - part)
    return PoolObservation(
        name=name,
        role=plan.role,
        prefill=prefilling,
        decode=decoding,
        mixed=mixed,
        starting=fleet.starting(name),
        draining=fleet.draining(name),
        gpus_per_replica=plan.gpus_per_replica,
        cold_start_s=plan.cold_start_s,
        prefill_tokens_per_s=plan.prefill_tokens_per_s,
        decode_tokens_per_s=plan.decode_tokens_per_s,
        decode_streams=plan.max_streams,
        utilization_fraction=busy[0] * (1 - part - both) + busy[1] * (part + both),
        running_requests=streams + computing,
        queued_requests=queued / mean_tokens,
        queued_tokens=queued,
        kv_used_fraction=min(1.0, fleet.stream_share) * (part + both),
    )
