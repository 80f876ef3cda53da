"""One run of the routing benchmark: a load, a policy, a seed, and the figures that come of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.domain.commands import RequestRecord
from baton.domain.request import Phase, Request
from baton.simulator.engine.settings import SimSettings
from baton.simulator.fleet.fleet import FleetOptions, VirtualFleet
from benchmarks._arrivals import closed_loop, open_loop, poisson_times
from benchmarks._routing_policies import PolicyVariant
from benchmarks._routing_workloads import Workload
from benchmarks._statistics import quantile

_JOIN_LEAD_S = 1.0
"""Before the first request: replicas have joined and reported their state."""
_MAX_RUN_S = 3600.0


class UnfinishedError(RuntimeError):
    """Requests failed or never ended: the run compares nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """Where a run takes place."""

    workload: Workload
    engine: SimSettings
    seed: int


def run(
    setting: RunSetting, variant: PolicyVariant, requests: Sequence[Request]
) -> dict[str, float]:
    """Run a load under a policy; its figures.

    Raises:
        UnfinishedError: a request did not finish.
    """
    workload, seed = setting.workload, setting.seed
    fleet = VirtualFleet(FleetOptions(seed=seed, share_bandwidth=setting.engine.share_bandwidth))
    fleet.add_coordinator(variant.make_coordinator(seed))
    for role, replicas in workload.replicas.items():
        for number in range(replicas):
            fleet.add_replica(f"{role}-{number}", setting.engine, role=role, pool=str(role))
    fleet.run(until_s=_JOIN_LEAD_S)
    if workload.clients is not None:
        closed_loop(fleet, iter(requests), clients=workload.clients)
    else:
        assert workload.rate_per_s is not None, "a load without clients has a rate"
        rng = random.Random(f"arrivals/{seed}")  # noqa: S311 - a load, not a secret
        times_s = poisson_times(workload.rate_per_s, len(requests), rng, start_s=_JOIN_LEAD_S)
        open_loop(fleet, requests, times_s)
    fleet.run(until_ended=len(requests), until_s=_MAX_RUN_S)
    unfinished = [record for record in fleet.records if record.outcome is not Phase.FINISHED]
    if unfinished or len(fleet.records) < len(requests):
        ended = len(fleet.records)
        raise UnfinishedError(f"{ended} of {len(requests)} ended, and not well: {unfinished[:2]}")
    return compute_metrics(workload, fleet.records)


def compute_metrics(workload: Workload, records: Sequence[RequestRecord]) -> dict[str, float]:
    """What a run's records say."""
    by_arrival = sorted(records, key=lambda record: (record.arrived_at_s, record.request_id))
    measured = by_arrival[workload.warm_up_requests :]
    ttfts_s = [_since_arrival(request, request.first_token_at_s) for request in measured]
    window_start_s, window_end_s = measured[0].arrived_at_s, by_arrival[-1].arrived_at_s
    ended = sum(window_start_s <= record.ended_at_s < window_end_s for record in records)
    requests_by_decoder = Counter(record.routes[-1].decode_replica_id for record in records)
    max_requests, min_requests = (
        max(requests_by_decoder.values()),
        min(requests_by_decoder.values()),
    )
    decode_replicas = sum(count for role, count in workload.replicas.items() if role != "prefill")
    return {
        "cached_fraction": sum(record.cached_tokens or 0 for record in records)
        / sum(record.prompt_tokens for record in records),
        "ttft_p50_s": quantile(ttfts_s, 0.5),
        "ttft_mean_s": sum(ttfts_s) / len(ttfts_s),
        "ttft_p90_s": quantile(ttfts_s, 0.9),
        "e2e_p50_s": quantile(
            [_since_arrival(request, request.ended_at_s) for request in measured], 0.5
        ),
        "requests_per_s": ended / (window_end_s - window_start_s),
        "max_over_min": max_requests / min_requests
        if len(requests_by_decoder) == decode_replicas
        else float("inf"),
    }


def _since_arrival(record: RequestRecord, at_s: float | None) -> float:
    assert at_s is not None, f"{record.request_id} finished without a token"
    return at_s - record.arrived_at_s


def saturated_rate(
    setting: RunSetting, variant: PolicyVariant, requests: Sequence[Request]
) -> float:
    """How many requests a second a closed loop gets through."""
    clients = setting.workload.saturating_clients
    closed_loop_workload = replace(setting.workload, clients=clients, saturating_clients=None)
    return run(replace(setting, workload=closed_loop_workload), variant, requests)["requests_per_s"]
