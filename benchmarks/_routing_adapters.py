"""How often a request finds its LoRA adapter loaded where it is placed: 50 adapters over one model.

Requests name adapters by Zipf's law. Each adapter has a system prompt of its own, which is cached
under its name alone. An engine keeps a few adapters loaded, runs fewer of them together, and
computes nothing while it loads one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median

from baton.domain.fleet import Role
from baton.domain.request import Phase, Request
from baton.simulator.engine.settings import SimSettings
from baton.simulator.fleet.fleet import FleetOptions, VirtualFleet
from benchmarks._arrivals import open_loop, poisson_times
from benchmarks._program import say
from benchmarks._routing_policies import VARIANTS, PolicyVariant
from benchmarks._routing_runs import UnfinishedError
from benchmarks._statistics import quantile, round_floats

POLICIES = ("baton", "round_robin", "least_loaded", "llmd")
_SETTLE_S = 1.0
_LIMIT_S = 3600.0

Runs = dict[str, list[dict[str, float]]]
"""Figures by policy and repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is served, and by what."""

    adapters: int = 50
    zipf: float = 1.0
    """The n-th most wanted adapter is wanted n to the power of this times less than the first."""
    requests: int = 3000
    rate_per_s: float = 12.0
    system_tokens: int = 256
    own_tokens: int = 128
    output_tokens: int = 64
    replicas: int = 8
    engine: SimSettings = field(
        default_factory=lambda: SimSettings(
            adapter_slots=8, adapters_per_batch=4, adapter_load_s=0.5
        )
    )


def run_all(setting: Setting, seeds: Sequence[int]) -> Runs:
    """Serve the load with each seed under every policy in turn."""
    runs: Runs = {name: [] for name in POLICIES}
    for seed in seeds:
        requests = draw(setting, seed)
        for name in POLICIES:
            runs[name].append(run(setting, VARIANTS[name], requests, seed))
            say(f"seed {seed}, {name}: {json.dumps(round_floats(runs[name][-1]))}")
    return runs


def draw(setting: Setting, seed: int) -> list[Request]:
    """The requests of one repeat, in order of arrival; when they arrive is settled later."""
    rng = random.Random(f"adapters/{seed}")  # noqa: S311 - a load, not a secret
    names = [f"adapter-{number:02}" for number in range(setting.adapters)]
    wanted = accumulate(1 / rank**setting.zipf for rank in range(1, setting.adapters + 1))
    chosen = rng.choices(names, cum_weights=list(wanted), k=setting.requests)
    system = {name: _tokens(rng, setting.system_tokens) for name in names}
    return [
        Request(
            request_id=f"r{number}",
            prompt_token_ids=system[name] + _tokens(rng, setting.own_tokens),
            max_tokens=setting.output_tokens,
            arrived_at_s=0.0,
            adapter=name,
        )
        for number, name in enumerate(chosen)
    ]


def run(
    setting: Setting, arm: PolicyVariant, requests: Sequence[Request], seed: int
) -> dict[str, float]:
    """Serve the requests under a policy; its figures.

    Raises:
        UnfinishedError: a request did not finish.
    """
    fleet = VirtualFleet(FleetOptions(seed=seed))
    fleet.add_coordinator(arm.make_coordinator(seed))
    for number in range(setting.replicas):
        fleet.add_replica(f"mixed-{number}", setting.engine, role=Role.MIXED, pool="mixed")
    fleet.run(until_s=_SETTLE_S)
    rng = random.Random(f"arrivals/{seed}")  # noqa: S311 - a load, not a secret
    times_s = poisson_times(setting.rate_per_s, len(requests), rng, start_s=_SETTLE_S)
    open_loop(fleet, requests, times_s)
    fleet.run(until_ended=len(requests), until_s=_LIMIT_S)
    finished = sum(record.outcome is Phase.FINISHED for record in fleet.records)
    if finished < len(requests):
        raise UnfinishedError(f"{finished} of {len(requests)} requests finished")
    now_s = fleet.timeline.now_s
    adapter_loads = [replica.engine.load(now_s).adapters for replica in fleet.replicas.values()]
    ttfts_s = [
        record.first_token_at_s - record.arrived_at_s
        for record in fleet.records
        if record.first_token_at_s is not None
    ]
    return {
        "hit_fraction": sum(adapter.hits for adapter in adapter_loads) / len(requests),
        "loads": sum(adapter.loads for adapter in adapter_loads),
        "cached_fraction": sum(record.cached_tokens or 0 for record in fleet.records)
        / sum(record.prompt_tokens for record in fleet.records),
        "ttft_p50_s": quantile(ttfts_s, 0.5),
        "ttft_p99_s": quantile(ttfts_s, 0.99),
    }


def summary(runs: Runs) -> dict[str, object]:
    """Each policy's medians over the repeats, with the least and the most hits beside them."""
    found: dict[str, object] = {}
    for name, repeats in runs.items():
        hits = [repeat["hit_fraction"] for repeat in repeats]
        middle = {key: median(repeat[key] for repeat in repeats) for key in repeats[0]}
        found[name] = middle | {"min_hit_fraction": min(hits), "max_hit_fraction": max(hits)}
    return found


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, 90) for _ in range(count))
