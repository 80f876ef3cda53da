"""One placement as `baton explain route` tells it, from a simulated fleet with split pools.

The README shows what this prints: the `grouped` load of `benchmarks/scenarios/routing.yaml`, at 14
requests a second, over two prefill and three decode replicas, in virtual time.
"""

from __future__ import annotations

import random
from dataclasses import replace

from baton.cli.explain.explain import report_lines
from baton.domain.fleet import Role
from baton.simulator.fleet.fleet import FleetOptions, VirtualFleet
from baton.telemetry.requests.request_log import request_report
from benchmarks._arrivals import open_loop, poisson_times
from benchmarks._routing_policies import VARIANTS
from benchmarks._routing_workloads import read_scenario

_POOLS = {Role.PREFILL: 2, Role.DECODE: 3}
_RATE_PER_S = 14.0
_REQUESTS = 250
_SEED = 1
_SETTLE_S = 1.0


def explained(request_id: str) -> str:
    """The report of one request of the load."""
    scenario = read_scenario()
    workload = replace(scenario.workloads["grouped"], requests=_REQUESTS)
    engine = scenario.engine_of(workload)
    fleet = VirtualFleet(FleetOptions(seed=_SEED))
    fleet.add_coordinator(VARIANTS["baton"].make_coordinator(_SEED))
    for role, replicas in _POOLS.items():
        for number in range(replicas):
            fleet.add_replica(f"{role}-{number}", engine, role=role, pool=str(role))
    fleet.run(until_s=_SETTLE_S)
    requests = workload.draw_requests(_SEED)
    rng = random.Random(_SEED)  # noqa: S311 - a load, not a secret
    open_loop(fleet, requests, poisson_times(_RATE_PER_S, len(requests), rng, start_s=_SETTLE_S))
    fleet.run(until_ended=len(requests), until_s=3600.0)
    (record,) = (other for other in fleet.records if other.request_id == request_id)
    return "\n".join(report_lines({"requests": [request_report(record)]}))
