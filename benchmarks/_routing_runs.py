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
from benchmarks._routing_policies import Arm
from benchmarks._routing_workloads import Workload
from benchmarks._statistics import quantile

_SETTLE_S = 1.0
"""Before the first request: replicas have joined and said how they are."""
_LIMIT_S = 3600.0


class UnfinishedError(RuntimeError):
    """Requests failed or never ended: the run compares nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a run takes place."""

    workload: Workload
    engine: SimSettings
    seed: int


def run(setting: Setting, arm: Arm, requests: Sequence[Request]) -> dict[str, float]:
    """Run a load under a policy; its figures.

    Raises:
        UnfinishedError: a request did not finish.
    """
    workload, seed = setting.workload, setting.seed
    fleet = VirtualFleet(FleetOptions(seed=seed, share_bandwidth=setting.engine.share_bandwidth))
    fleet.add_coordinator(arm.coordinator(seed))
    for role, replicas in workload.replicas.items():
        for number in range(replicas):
            fleet.add_replica(f"{role}-{number}", setting.engine, role=role, pool=str(role))
    fleet.run(until_s=_SETTLE_S)
    if workload.clients is not None:
        closed_loop(fleet, iter(requests), clients=workload.clients)
    else:
        assert workload.rate_per_s is not None, "a load without clients has a rate"
        rng = random.Random(f"arrivals/{seed}")  # noqa: S311 - a load, not a secret
        times_s = poisson_times(workload.rate_per_s, len(requests), rng, start_s=_SETTLE_S)
        open_loop(fleet, requests, times_s)
    fleet.run(ended=len(requests), until_s=_LIMIT_S)
    unfinished = [one for one in fleet.records if one.outcome is not Phase.FINISHED]
    if unfinished or len(fleet.records) < len(requests):
        ended = len(fleet.records)
        raise UnfinishedError(f"{ended} of {len(requests)} ended, and not well: {unfinished[:2]}")
    return figures(workload, fleet.records)


def figures(workload: Workload, records: Sequence[RequestRecord]) -> dict[str, float]:
    """What a run's records say."""
    by_arrival = sorted(records, key=lambda one: (one.arrived_at_s, one.request_id))
    counted = by_arrival[workload.warm_up_requests :]
    ttfts_s = [_since_arrival(one, one.first_token_at_s) for one in counted]
    begun_at_s, over_at_s = counted[0].arrived_at_s, by_arrival[-1].arrived_at_s
    ended = sum(begun_at_s <= one.ended_at_s < over_at_s for one in records)
    decoders = Counter(one.routes[-1].decode_replica_id for one in records)
    most, least = max(decoders.values()), min(decoders.values())
    decoding = sum(count for role, count in workload.replicas.items() if role != "prefill")
    return {
        "cached_fraction": sum(one.cached_tokens or 0 for one in records)
        / sum(one.prompt_tokens for one in records),
        "ttft_p50_s": quantile(ttfts_s, 0.5),
        "ttft_mean_s": sum(ttfts_s) / len(ttfts_s),
        "ttft_p90_s": quantile(ttfts_s, 0.9),
        "e2e_p50_s": quantile([_since_arrival(one, one.ended_at_s) for one in counted], 0.5),
        "requests_per_s": ended / (over_at_s - begun_at_s),
        "max_over_min": most / least if len(decoders) == decoding else float("inf"),
    }


def _since_arrival(record: RequestRecord, at_s: float | None) -> float:
    assert at_s is not None, f"{record.request_id} finished without a token"
    return at_s - record.arrived_at_s


def saturated_rate(setting: Setting, arm: Arm, requests: Sequence[Request]) -> float:
    """How many requests a second a closed loop gets through."""
    clients = setting.workload.saturating_clients
    closed = replace(setting.workload, clients=clients, saturating_clients=None)
    return run(replace(setting, workload=closed), arm, requests)["requests_per_s"]
