"""What a routing decision costs (hashing the prompt, lookup, placement), and what the index costs.

Prints one JSON object. Each case (replicas x entries) runs in a process of its own. Run:
`make bench-router-cost`, or `python -m benchmarks.router_cost --replicas 10 --entries 10000`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from random import Random
from statistics import median
from typing import NamedTuple

import psutil

from baton.control.fleet.fleet_model import FleetModel
from baton.control.fleet.fleet_table import FleetTable
from baton.domain.cache import CacheChange, CacheChangeKind, CacheUpdate
from baton.domain.fleet import Load as LoadReport
from baton.domain.fleet import ReplicaFacts, Role
from baton.policy.placement.port import NoRoute, PlacementQuery
from baton.policy.placement.predicted import PredictedPlacer
from baton.policy.prefix_cache.block_hash import chain_hashes
from baton.policy.prefix_cache.index import PrefixIndex
from benchmarks._program import RESULTS, say
from benchmarks._provenance import provenance
from benchmarks._router_load import (
    BLOCK_TOKENS,
    KINDS,
    MODEL,
    ROOT,
    CacheUpdateFeed,
    Case,
    IndexLoad,
    StoredEvent,
)
from benchmarks._statistics import quantile

LENGTHS = (512, 8192)
REPLICAS = (10, 100, 1000)
ENTRIES = (10_000, 100_000, 1_000_000)
PARTS = ("hash", "lookup", "placement", "note")
"""`note` is what follows a decision: the index predicts what the chosen replicas will hold."""
RESULT = RESULTS / "router_cost.json"
_MIN_ENTRIES_FOR_RSS = 100_000
_DECISION_INTERVAL_S = 0.001
"""Virtual time between decisions: a thousand a second."""
_WARM_UP_DECISIONS = 200

Metrics = dict[str, float]


class DecisionTimes(NamedTuple):
    """What one decision took."""

    parts_s: tuple[float, ...]
    """Wall time of each of `PARTS`."""
    cpu_s: float
    """CPU time of all of them, which others on the machine spoil less."""


def make_facts(replica_id: str, role: Role) -> ReplicaFacts:
    """Facts of a replica in a pool of its role."""
    return ReplicaFacts(
        replica_id=replica_id,
        pool=role.value,
        role=role,
        model=MODEL,
        engine="none",
        engine_version="1",
        block_size_tokens=BLOCK_TOKENS,
        kv_blocks=30_000,
        kv_block_bytes=1 << 20,
        max_len_tokens=1 << 17,
        max_running_requests=256,
        max_batched_tokens=8192,
        layout="one",
        cache_events=True,
    )


class RouterUnderTest:
    """What a coordinator has in order to place requests, and nothing around it."""

    def __init__(self, case: Case) -> None:
        rng = Random(case.seed)  # noqa: S311 - loads, not secrets
        self.now_s = 1000.0
        self.fleet = FleetTable()
        self.index = PrefixIndex(seed=case.seed)
        self.fleet_model = FleetModel(self.fleet, self.index)
        self.placer = PredictedPlacer(seed=case.seed)
        for n, replica_id in enumerate(case.ids):
            facts = make_facts(replica_id, (Role.PREFILL, Role.DECODE)[n % 2])
            self.fleet.add(facts, self.now_s)
            self.fleet_model.on_replica_joined(facts)
            load = LoadReport(
                running_requests=rng.randrange(64),
                queued_tokens=rng.randrange(20_000),
                kv_used_fraction=rng.random(),
            )
            self.fleet.on_load_report(replica_id, load, self.now_s)

    def apply(self, updates: Sequence[tuple[str, CacheUpdate]]) -> Metrics:
        """Take updates in; CPU seconds in all, and of the slowest."""
        apply, now_s, clock = self.index.apply_update, self.now_s, time.process_time
        slowest_s, started_s = 0.0, clock()
        before_s = started_s
        for replica_id, update in updates:
            apply(replica_id, update, now_s)
            after_s = clock()
            slowest_s = max(slowest_s, after_s - before_s)
            before_s = after_s
        return {"cpu_s": before_s - started_s, "slowest_s": slowest_s}

    def decide(self, tokens: tuple[int, ...]) -> DecisionTimes:
        """Decide on one request."""
        clock = time.perf_counter
        self.now_s += _DECISION_INTERVAL_S
        cpu_s = time.process_time()
        began_s = clock()
        hashes = chain_hashes(ROOT, tokens, BLOCK_TOKENS)
        hashed_s = clock()
        hits = self.index.look_up(hashes, self.now_s)
        looked_up_s = clock()
        query = PlacementQuery(prompt_tokens=len(tokens), max_tokens=256, hits=hits)
        decision = self.placer.place(query, self.fleet_model.placement_context(self.now_s))
        placed_s = clock()
        if isinstance(decision, NoRoute):
            sys.exit("no replica would take the benchmark's own request")
        for replica_id in {
            decision.route.decode_replica_id,
            decision.route.prefill_replica_id or decision.route.decode_replica_id,
        }:
            self.index.predict(replica_id, hashes, self.now_s)
        ended_s = clock()
        parts_s = (
            hashed_s - began_s,
            looked_up_s - hashed_s,
            placed_s - looked_up_s,
            ended_s - placed_s,
        )
        return DecisionTimes(parts_s, time.process_time() - cpu_s)


def measure(case: Case, decisions: int, repeats: int) -> Metrics:
    """All figures of one case; keys end in its name, and in the prompt's length if they depend."""
    load, feed = IndexLoad(case), CacheUpdateFeed()
    router = RouterUnderTest(case)
    metrics = measure_index(router, load, feed)
    decision_metrics = {
        f"{key}_{case.name}_{tokens}": value
        for tokens in LENGTHS
        for key, value in measure_decisions(router, load, tokens, decisions, repeats).items()
    }
    metrics |= measure_membership(router, load, feed)
    return decision_metrics | {f"{key}_{case.name}": value for key, value in metrics.items()}


def measure_index(router: RouterUnderTest, load: IndexLoad, feed: CacheUpdateFeed) -> Metrics:
    """Fill the index, then replace every replica's own blocks once."""
    updates = feed.stored_updates(load.events)
    blocks = sum(len(event.shared_hashes) + len(event.own_hashes) for event in load.events)
    gc.collect()
    before_bytes = _rss_bytes()
    stored = router.apply(updates)
    grown_bytes = _rss_bytes() - before_bytes
    index = router.index
    if index.entries != blocks:
        sys.exit(f"the index keeps {index.entries} of {blocks} pairs")
    metrics = {
        "entries": blocks,
        "unique_blocks": index.unique_blocks(),
        "events_per_s": blocks / stored["cpu_s"],
        "stored_slowest_s": stored["slowest_s"],
    }
    if load.case.entries >= _MIN_ENTRIES_FOR_RSS:
        metrics["bytes_per_entry"] = grown_bytes / blocks
        metrics["bytes_per_unique_block"] = grown_bytes / index.unique_blocks()
    del updates
    metrics |= _measure_churn(router, load, feed, before_bytes)
    return metrics


def _measure_churn(
    router: RouterUnderTest, load: IndexLoad, feed: CacheUpdateFeed, before_bytes: int
) -> Metrics:
    """Every replica's own blocks go and come back; those that are asked for stay as they are."""
    removed_events, new_events = load.events, load.replacement_events()
    removed_s = stored_s = slowest_s = 0.0
    step = 64
    for begin in range(0, len(removed_events), step):
        part = slice(begin, begin + step)
        for updates, is_removal in (
            (feed.removed_updates(removed_events[part]), True),
            (feed.stored_updates(new_events[part]), False),
            (feed.removed_updates(new_events[part]), True),
            (feed.stored_updates(removed_events[part]), False),
        ):
            cost = router.apply(updates)
            removed_s += cost["cpu_s"] * is_removal
            stored_s += cost["cpu_s"] * (not is_removal)
            slowest_s = max(slowest_s, cost["slowest_s"])
    blocks = 2 * sum(len(removed_event.own_hashes) for removed_event in removed_events)
    shared = 2 * sum(len(removed_event.shared_hashes) for removed_event in removed_events)
    metrics = {
        "removals_per_s": blocks / removed_s,
        "churn_events_per_s": (2 * blocks + shared) / (removed_s + stored_s),
        "churn_slowest_s": slowest_s,
    }
    del new_events
    gc.collect()
    if load.case.entries >= _MIN_ENTRIES_FOR_RSS:
        entries = router.index.entries
        metrics["bytes_per_entry_after_churn"] = (_rss_bytes() - before_bytes) / entries
    return metrics


def measure_decisions(
    router: RouterUnderTest, load: IndexLoad, tokens: int, decisions: int, repeats: int
) -> Metrics:
    """Times of decisions on prompts of one length: medians over the repeats."""
    runs = []
    for _ in range(repeats):
        prompts = load.draw_prompts(_WARM_UP_DECISIONS + decisions, tokens)
        times = [(kind, router.decide(prompt)) for kind, prompt in prompts][_WARM_UP_DECISIONS:]
        runs.append(_summarize_times(times))
    medians = {key: median(run[key] for run in runs) for key in runs[0]}
    medians["p50_s_least"] = min(run["p50_s"] for run in runs)
    medians["p50_s_most"] = max(run["p50_s"] for run in runs)
    return medians


def _summarize_times(times: Sequence[tuple[str, DecisionTimes]]) -> Metrics:
    decision_s = [sum(spent.parts_s[:3]) for _, spent in times]
    metrics = {
        "p50_s": quantile(decision_s, 0.5),
        "p99_s": quantile(decision_s, 0.99),
        "max_s": max(decision_s),
    }
    cpu_s = [spent.cpu_s for _, spent in times]
    metrics |= {"cpu_p50_s": quantile(cpu_s, 0.5), "cpu_p99_s": quantile(cpu_s, 0.99)}
    for n, part in enumerate(PARTS):
        metrics[f"{part}_p50_s"] = quantile([spent.parts_s[n] for _, spent in times], 0.5)
        metrics[f"{part}_p99_s"] = quantile([spent.parts_s[n] for _, spent in times], 0.99)
    for kind in KINDS:
        of_kind = [sum(spent.parts_s[:3]) for other, spent in times if other == kind]
        metrics[f"p50_{kind}_s"] = quantile(of_kind, 0.5)
    return metrics


def measure_membership(router: RouterUnderTest, load: IndexLoad, feed: CacheUpdateFeed) -> Metrics:
    """A replica's snapshot, and a replica that leaves until nothing of it is left."""
    replica_id = max(
        load.case.ids, key=lambda candidate_id: _count_blocks(load.events, candidate_id)
    )
    replica_events = [event for event in load.events if event.replica_id == replica_id]
    kind = CacheChangeKind.STORED
    changes = [CacheChange(kind, replica_event.packed_hashes) for replica_event in replica_events]
    snapshot = feed.update(replica_id, *changes, snapshot=True)
    snapshot_cpu_s = _measure_cpu_s(
        lambda: router.index.apply_update(replica_id, snapshot, router.now_s)
    )
    blocks = _count_blocks(load.events, replica_id)
    return {
        "snapshot_blocks": blocks,
        "snapshot_blocks_per_s": blocks / snapshot_cpu_s,
        "snapshot_s": snapshot_cpu_s,
        "leave_s": _measure_cpu_s(lambda: router.index.remove_replica(replica_id)),
    } | _measure_sweep(router, load)


def _measure_sweep(router: RouterUnderTest, load: IndexLoad) -> Metrics:
    other = next(id_ for id_ in load.case.ids if router.index.replica_state(id_, router.now_s))
    steps = [
        _measure_cpu_s(lambda: router.index.on_heartbeat(other, 0, router.now_s))
        for _ in range(2000)
    ]
    return {"sweep_step_slowest_s": max(steps), "sweep_s": sum(steps)}


def _count_blocks(events: Sequence[StoredEvent], replica_id: str) -> int:
    return sum(
        len(event.shared_hashes) + len(event.own_hashes)
        for event in events
        if event.replica_id == replica_id
    )


def _measure_cpu_s(action: Callable[[], object]) -> float:
    started_s = time.process_time()
    action()
    return time.process_time() - started_s


def _rss_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def summarize(metrics: Metrics) -> dict[str, object]:
    """What the figures say of growth from the smallest fleet to the largest."""
    growth = {}
    for tokens in LENGTHS:
        at_min_replicas = metrics.get(f"p50_s_{REPLICAS[0]}_1m_{tokens}")
        at_max_replicas = metrics.get(f"p50_s_{REPLICAS[-1]}_1m_{tokens}")
        if at_min_replicas and at_max_replicas:
            growth[f"growth_{REPLICAS[0]}_to_{REPLICAS[-1]}_{tokens}"] = (
                at_max_replicas / at_min_replicas
            )
    return {key: _rounded(value) for key, value in sorted((metrics | growth).items())}


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def main() -> None:
    """Measure every case, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=list(REPLICAS))
    parser.add_argument("--entries", type=int, nargs="+", default=list(ENTRIES))
    parser.add_argument("--decisions", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    load_average_before = os.getloadavg()[0]
    metrics: Metrics = {}
    for entries in options.entries:
        for replicas in options.replicas:
            case = Case(replicas, entries, options.seed)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
                future = executor.submit(measure, case, options.decisions, options.repeats)
                metrics |= future.result()
            p50_s = [f"{metrics[f'p50_s_{case.name}_{n}'] * 1e6:.0f}" for n in LENGTHS]
            say(f"{case.name}: p50 {' and '.join(p50_s)} us")
    result = summarize(metrics) | {
        "lengths": LENGTHS,
        "decisions": options.decisions,
        "repeats": options.repeats,
        "seed": options.seed,
        "load_average_before": load_average_before,
        "load_average_after": os.getloadavg()[0],
    }
    result |= provenance()
    if options.keep:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
