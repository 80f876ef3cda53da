"""Loads that baton carries: an open loop, many streams, too much, a step, and many prefixes."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from baton.config import load_config, sim_settings
from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.fleet_table import FleetTable
from baton.domain.cache import CacheChange, CacheChangeKind, pack_hashes
from baton.domain.commands import RequestRecord
from baton.domain.fleet import Role
from baton.domain.request import Phase
from baton.policy.admission.decision import AdmissionPolicy
from baton.policy.prefix_cache.block_hash import chain_hashes
from baton.policy.prefix_cache.index import IndexOptions, PrefixIndex
from baton.runtime.process.gc_tuning import freeze_startup_heap
from benchmarks import _slo_overload
from benchmarks._router_load import BLOCK_TOKENS, ROOT, CacheUpdateFeed
from benchmarks._statistics import quantile
from benchmarks.router_cost import make_facts
from tests.chaos.case import (
    Engines,
    Figure,
    Outcome,
    at_least,
    at_most,
    case,
    exactly,
    requested_minutes,
)
from tests.chaos.history import Ending, Exchange, History, check_invariants, endings
from tests.chaos.load import HttpClient, Load, open_loop
from tests.chaos.stage import StageSpec, ray_stage, sim_stage
from tests.chaos.sweep import RunningTotals, run_steady_load
from tests.e2e.deployments import CONFIGS

ONE_REPLICA_PER_POOL = {"pools.prefill.replicas.max": 1, "pools.decode.replicas.max": 1}
"""Settings of the scenario `closed-loop`: one replica that prefills and one that decodes, which do
not become more. The first computes 2,000 prompt tokens a second; the second makes 197 tokens a
second for the 16 streams that it takes."""
CLOSED_LOOP = str(CONFIGS.parent / "benchmarks" / "scenarios" / "closed-loop.yaml")

# ------------------------------------------------------------------ L1

_RATE_PER_S = 50.0
_ADDED_MS = 5.0


@case(
    "L1",
    "open loop, 50 requests a second for 10 minutes: no error; coordinator and links add less "
    "than 5 ms to the first token (p99)",
    engines=Engines.SIMULATED,
    minutes=10.5,
)
def open_loop_for_ten_minutes(_folder: Path) -> Outcome:
    """Two prefill and two decode replicas, every prompt handed over."""
    return asyncio.run(_open_loop(requested_minutes(10.0)))


async def _open_loop(length: dict[str, float]) -> Outcome:
    load = Load(
        rate_per_s=_RATE_PER_S, requests=0, output_tokens=(16, 48), shared_prompts=8, name="L1"
    )
    async with sim_stage(StageSpec()) as stage:
        (ingress,) = stage.ingresses
        totals = RunningTotals(ingress)
        freeze_startup_heap()  # as an ingress does when it has started
        async with totals.collecting():
            await run_steady_load(load, ingress.send, minutes=length["minutes"])
        counters = await stage.wait_idle()
        bounds, note = totals.check_invariants(
            expected_tokens=stage.expected_tokens, counters=counters
        )
    without_times = sum(math.isnan(value) for value in totals.overheads_s)
    overheads_s = [value for value in totals.overheads_s if not math.isnan(value)]
    figures: dict[str, Figure] = {
        **length,
        **totals.endings,
        "requests": sum(totals.endings.values()),
        "resumes": totals.resumes,
        "added to the first token, p50, ms": _ms(quantile(overheads_s, 0.5)),
        "added to the first token, p999, ms": _ms(quantile(overheads_s, 0.999)),
        "added to the first token, most, ms": _ms(max(overheads_s)),
        "load average": psutil.getloadavg()[0],
    }
    return Outcome(
        bounds=(
            *bounds,
            exactly("requests refused", totals.endings.get(Ending.REJECTED, 0), 0),
            exactly("requests of which an engine did not say its times", without_times, 0),
            at_most(
                "added to the first token, p99, ms", _ms(quantile(overheads_s, 0.99)), _ADDED_MS
            ),
        ),
        figures=figures,
        note=note,
    )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


# ------------------------------------------------------------------ L2

_STREAMS = 200
_SLOW_STEPS = {"model.engine.sim.decode_step": "100ms"}
"""So that 200 streams are 2,000 tokens a second, which one ingress on two cores carries beside its
clients: what is looked for are stalls, not the limit."""


@case(
    "L2",
    "200 streams at once over HTTP, HAProxy, vLLM's API server and both pools: no gap longer than "
    "twice the engines' time between tokens",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def many_streams(folder: Path) -> Outcome:
    """They begin within five seconds, and each lasts for half a minute."""
    with ray_stage("sim.yaml", folder, **_SLOW_STEPS) as stage:
        exchanges = asyncio.run(_stream_all(stage.url))
        counters = stage.wait_idle()
    bounds, note = check_invariants(History(exchanges=exchanges, counters=counters))
    step_s = _step_s(_STREAMS // 2)
    gaps_s = [b - a for exchange in exchanges for a, b in exchange.gaps()]
    concurrent = max_concurrent(exchanges)
    return Outcome(
        bounds=(
            *bounds,
            exactly("streams that finished", endings(exchanges).get(Ending.FINISHED, 0), _STREAMS),
            at_least("streams at once", concurrent, _STREAMS),
            at_most("longest gap, ms", _ms(max(gaps_s)), _ms(2 * step_s)),
        ),
        figures={
            "time between tokens of the engines, ms": _ms(step_s),
            "gap, p50, ms": _ms(quantile(gaps_s, 0.5)),
            "gap, p99, ms": _ms(quantile(gaps_s, 0.99)),
            "gap, p9999, ms": _ms(quantile(gaps_s, 0.9999)),
            "gaps": len(gaps_s),
            "tokens": sum(len(exchange.tokens) for exchange in exchanges),
            "load average": psutil.getloadavg()[0],
        },
        note=note,
    )


async def _stream_all(url: str) -> list[Exchange]:
    load = Load(
        rate_per_s=40.0,
        requests=_STREAMS,
        prompt_tokens=(32, 128),
        output_tokens=(300, 300),
        name="L2",
    )
    async with HttpClient(url) as client:
        # The first one warms the way up.
        await open_loop(replace(load, requests=1, output_tokens=(4, 4), name="warm"), client.send)
        return await open_loop(load, client.send)


def _step_s(streams: int) -> float:
    """How long the decode engines of that deployment take for a token of this many streams."""
    sets = tuple(f"{name}={value}" for name, value in _SLOW_STEPS.items())
    config = load_config([CONFIGS / "sim.yaml"], sets=sets).config
    model = config.models[config.model_name]
    settings = sim_settings(config.pools["decode"].engine, model, config.transfer)
    return settings.step_s(prefill_tokens=0, decode_requests=streams)


def max_concurrent(exchanges: Sequence[Exchange]) -> int:
    """How many streams had begun and not ended, at most."""
    starts = [(exchange.times_s[0], 1) for exchange in exchanges if exchange.times_s]
    ends = [(exchange.times_s[-1], -1) for exchange in exchanges if exchange.times_s]
    peak = current = 0
    for _, change in sorted(starts + ends):
        current += change
        peak = max(peak, current)
    return peak


# ------------------------------------------------------------------ L3


@case(
    "L3",
    "twice the capacity of a fleet, five H100 in the simulator: 95 % of admitted requests "
    "meet their objectives, and goodput stays at the plateau",
    engines=Engines.VIRTUAL,
    minutes=1.5,
)
def twice_the_capacity(_folder: Path) -> Outcome:
    """The load of `benchmarks.slo --part overload`, whose plateau is found first."""
    rate_per_s, best, _ = _slo_overload.find_plateau(
        0, _slo_overload.CONVERSATION, _slo_overload.RATES_PER_S, (3, 2)
    )
    trace = _slo_overload.generate_load(2 * rate_per_s, 0)
    records = _slo_overload.run_fleet(trace, AdmissionPolicy.PREDICTED)
    admitted = [record for record in records if record.outcome not in {Phase.SHED, Phase.EVICTED}]
    goodput_fraction = _slo_overload.goodput(records) / best
    return Outcome(
        bounds=(
            at_least(
                "attainment of admitted requests",
                round(_slo_overload.attainment(admitted), 4),
                0.95,
            ),
            at_least("goodput, of that of the plateau", round(goodput_fraction, 3), 0.95),
            exactly("admitted requests that did not finish", _unfinished(admitted), 0),
        ),
        figures={
            "offered, requests/s": 2 * rate_per_s,
            "plateau, requests/s in time": round(best, 2),
            "requests": len(records),
            "admitted": len(admitted),
            "wasted prompt tokens, share": round(_slo_overload.wasted_prefill_fraction(records), 4),
        },
    )


def _unfinished(records: Sequence[RequestRecord]) -> int:
    return sum(record.outcome is not Phase.FINISHED for record in records)


_WARM_UP_S = 10.0
"""As in `_slo_overload`: a fleet that was idle has seen no step of its engines yet, and streams
that all began at once end at once. Invariants hold from the first request on."""


@case(
    "L3-http",
    "twice the capacity of a deployment, over HTTP: from 10 s on, 95 % of admitted requests "
    "meet their objectives; others get 429 or 503 with Retry-After within 50 ms",
    engines=Engines.SIMULATED,
    minutes=2.5,
)
def twice_the_capacity_over_http(folder: Path) -> Outcome:
    """Prompts of 300 tokens at twice the 6.6 a second that either replica can carry."""
    load = Load(
        rate_per_s=13.2,
        requests=1000,
        prompt_tokens=(200, 400),
        output_tokens=(20, 40),
        name="L3",
    )
    with ray_stage(CLOSED_LOOP, folder, **ONE_REPLICA_PER_POOL) as stage:
        exchanges = asyncio.run(_send_all(stage.url, load))
        counters = stage.wait_idle()
    bounds, note = check_invariants(History(exchanges=exchanges, counters=counters))
    after_warm_up = [exchange for exchange in exchanges if exchange.planned_at_s >= _WARM_UP_S]
    rejection_times_s = [
        exchange.ended_at_s - exchange.sent_at_s
        for exchange in after_warm_up
        if exchange.ending is Ending.REJECTED and exchange.ended_at_s is not None
    ]
    met_slo = [
        _meets_slo(exchange) for exchange in after_warm_up if exchange.ending is not Ending.REJECTED
    ]
    return Outcome(
        bounds=(
            *bounds,
            at_least(
                "attainment of admitted requests",
                round(sum(met_slo) / max(1, len(met_slo)), 4),
                0.95,
            ),
            at_least("requests refused", len(rejection_times_s), 1),
            at_most(
                "time to a refusal, p99, ms", _ms(quantile(rejection_times_s or [0.0], 0.99)), 50.0
            ),
        ),
        figures={
            **endings(exchanges),
            "offered, requests/s": load.rate_per_s,
            "time to a refusal, p50, ms": _ms(quantile(rejection_times_s or [0.0], 0.5)),
            "time to a refusal, most, ms": _ms(max(rejection_times_s, default=0.0)),
            "load average": psutil.getloadavg()[0],
        },
        note=note,
    )


def _meets_slo(exchange: Exchange) -> bool:
    """Whether it met the scenario's objectives."""
    from benchmarks.deployed import closed_loop

    ttft_s, tpot_s, _ = closed_loop.objectives()
    if exchange.ending is not Ending.FINISHED:
        return False
    first_s, last_s = exchange.times_s[0], exchange.times_s[-1]
    tpot_actual_s = (last_s - first_s) / max(1, len(exchange.tokens) - 1)
    return first_s - exchange.sent_at_s <= ttft_s and tpot_actual_s <= tpot_s


async def _send_all(url: str, load: Load) -> list[Exchange]:
    async with HttpClient(url) as client:
        await open_loop(replace(load, requests=1, name="warm"), client.send)
        return await open_loop(load, client.send)


# ------------------------------------------------------------------ L5


@case(
    "L5",
    "a step to five times the load on a deployment that scales itself: 95 % meet their "
    "objectives again within a cold start and 10 s",
    engines=Engines.SIMULATED,
    minutes=5.0,
)
def load_step(_folder: Path) -> Outcome:
    """What `make bench-deployed ARGS="--part closed-loop"` measures."""
    from benchmarks.deployed import closed_loop

    figures, _ = closed_loop.run(closed_loop.Load())
    back_s, cold_s = figures["back_s"], figures["cold_start_s"]
    assert isinstance(cold_s, int | float)
    assert back_s is None or isinstance(back_s, int | float)
    numbers = {
        name: value for name, value in figures.items() if isinstance(value, int | float | None)
    }
    return Outcome(
        bounds=(
            exactly("requests that failed", _number(figures["failed"]), 0),
            at_most(
                "until 95 % meet their objectives again, s",
                math.inf if back_s is None else back_s,
                cold_s + 10.0,
            ),
        ),
        figures=numbers,
    )


def _number(value: object) -> float:
    assert isinstance(value, int | float), value
    return value


# ------------------------------------------------------------------ L6

_PREFIXES = 100_000
_BLOCKS = 32
_REPLICAS = 8
_LOOKUPS = 10_000


@case(
    "L6",
    "100,000 different prefixes of 512 tokens, then as many again twice over: the index's memory "
    "stays bounded, hashing and lookup take less than 1 ms (p99)",
    engines=Engines.NONE,
    minutes=1.0,
)
def many_prefixes(_folder: Path) -> Outcome:
    """No eviction is ever reported: it is as if caches had no end."""
    options = IndexOptions()
    index = PrefixIndex(options)
    fleet_model = FleetModel(FleetTable(), index)
    ids = [f"replica-{n}" for n in range(_REPLICAS)]
    for replica_id in ids:
        fleet_model.on_replica_joined(make_facts(replica_id, Role.MIXED))
    feed, grown_mb, entries = CacheUpdateFeed(), list[float](), list[int]()
    gc.collect()
    start_mb = _rss_mb()
    for batch in range(3):
        for number in range(batch * _PREFIXES, (batch + 1) * _PREFIXES):
            replica_id = ids[number % _REPLICAS]
            packed = pack_hashes(chain_hashes(ROOT, prefix(number), BLOCK_TOKENS))
            change = CacheChange(CacheChangeKind.STORED, packed)
            index.apply_update(replica_id, feed.update(replica_id, change), 1000.0)
        gc.collect()
        grown_mb.append(_rss_mb() - start_mb)
        entries.append(index.entries)
    times_s = _lookups(index)
    return Outcome(
        bounds=(
            at_most("pairs of replica and block", max(entries), options.max_entries),
            at_least("pairs kept of the first 100,000", entries[0], _PREFIXES * _BLOCKS),
            at_most("memory from the second to the third 100,000", grown_mb[2] / grown_mb[1], 1.05),
            at_most("memory, MB", round(grown_mb[2], 1), 400.0),
            at_most("hashing and lookup, p99, ms", _ms(quantile(times_s, 0.99)), 1.0),
        ),
        figures={
            "memory after 100,000, MB": round(grown_mb[0], 1),
            "memory after 200,000, MB": round(grown_mb[1], 1),
            "pairs after 100,000": entries[0],
            "blocks that did not fit": index.counters.dropped_blocks,
            "hashing and lookup, p50, ms": _ms(quantile(times_s, 0.5)),
            "hashing and lookup, most, ms": _ms(max(times_s)),
        },
    )


def prefix(number: int) -> tuple[int, ...]:
    """The prompts differ in their first block, and so in the hash of every other."""
    return (number, *range(1, _BLOCKS * BLOCK_TOKENS))


def _lookups(index: PrefixIndex) -> Sequence[float]:
    """Known and unknown prefixes in turn, spread over all that were ever stored."""
    took_s = array("d")
    for number in range(_LOOKUPS):
        tokens = prefix((number * 7919) % (6 * _PREFIXES))
        began_s = time.perf_counter()
        index.look_up(chain_hashes(ROOT, tokens, BLOCK_TOKENS), 1000.0)
        took_s.append(time.perf_counter() - began_s)
    return took_s


def _rss_mb() -> float:
    return float(psutil.Process().memory_info().rss) / 1e6
