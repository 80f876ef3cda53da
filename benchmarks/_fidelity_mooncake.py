"""Mooncake: how its conversation trace is served under four ways to schedule prefills.

The paper has 16 nodes; eight of them prefill. Only that fits its own figure for random scheduling:
without any reuse a prompt takes 1.97 s on average at an MFU of 0.5, with a coefficient of variation
of 2.14, so by Pollaczek and Khinchine a random choice among 16 nodes would mean 5.9 s to the first
token, and among eight 30 s; caches spare some of it, and 19.65 s were measured. Nodes that decode
play no part in the time to the first token and are left out: requests end with it.
"""

from __future__ import annotations

import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from baton.domain.fleet import Role
from baton.perf.catalogue import accelerator
from baton.perf.hardware import Dtype
from baton.perf.known_models import shape_of
from baton.perf.memory import fit
from baton.perf.roofline import Roofline
from baton.policy.predicted import PredictedPlacer
from baton.policy.prefix_index import IndexMode, IndexOptions
from baton.simulator.outcome import mean
from baton.simulator.plans import PoolPlan, Scenario
from baton.simulator.scenario import Run, simulate
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.trace import Trace
from benchmarks._mooncake_fleet import SCHEDULERS, Node, conversation, prompts_only

_PREFILL_NODES = 8
_SEEDS = (0, 1, 2)
_KV_TOKEN_BYTES = 327_680
_CACHE_TOKENS = 3_000_000
"""Of a node: 1 TB of memory. Source: Mooncake (FAST'25) §5.3.2."""
_BYTES_PER_S = 87e9
"""Of a node, over four interfaces of 200 Gbit/s. Source: Mooncake (FAST'25) §5.4."""
_PUBLISHED_S = {
    "random": 19.65,
    "load_balance": 5.27,
    "local_cache": 3.58,
    "global_cache": 3.07,
}
"""Mean time to the first token. Source: Mooncake (FAST'25) §5.2."""


def figures(folder: Path) -> dict[str, float]:
    """Mean TTFT of each scheduler, how they compare, and what a replay of the whole trace takes."""
    trace = prompts_only(conversation(folder))
    found: dict[str, float] = {}
    for name, published_s in _PUBLISHED_S.items():
        runs = [
            simulate(scenario(name, seed, block_tokens=trace.block_tokens), trace)
            for seed in _SEEDS
        ]
        ttft_s = [one.ttft_s for run in runs for one in run.outcomes]
        found[f"mooncake_{name}_ttft_mean_s"] = mean(ttft_s)
        found[f"mooncake_{name}_ttft_mean_s_paper"] = published_s
        found[f"mooncake_{name}_cached_fraction"] = mean([cached_fraction(run) for run in runs])
    return found | compared(found) | replayed(folder)


def compared(found: dict[str, float]) -> dict[str, float]:
    """Whether the order is the paper's, and how much load balance loses to a global cache."""
    means_s = [found[f"mooncake_{name}_ttft_mean_s"] for name in _PUBLISHED_S]
    ratio = means_s[1] / means_s[3]
    return {
        "mooncake_order_as_published": float(means_s == sorted(means_s, reverse=True)),
        "mooncake_load_balance_over_global": ratio,
        "mooncake_load_balance_over_global_paper": _PUBLISHED_S["load_balance"]
        / _PUBLISHED_S["global_cache"],
    }


def cached_fraction(run: Run) -> float:
    """Of all prompt tokens, those that were not computed."""
    cached = sum(one.cached_tokens for one in run.outcomes)
    return cached / sum(one.prompt_tokens for one in run.outcomes)


def scenario(scheduler: str, seed: int, *, block_tokens: int) -> Scenario:
    """The nodes that prefill, under one scheduler."""
    settings = V1Settings(
        timing=Node(),
        kv_blocks=_CACHE_TOKENS // block_tokens,
        kv_block_bytes=_KV_TOKEN_BYTES * block_tokens,
        block_size_tokens=block_tokens,
        max_batched_tokens=8192,
        transfer_bytes_per_s=_BYTES_PER_S,
    )
    return Scenario(
        pools=(PoolPlan(name="node", role=Role.MIXED, replicas=_PREFILL_NODES, settings=settings),),
        placer=lambda: SCHEDULERS[scheduler](seed),
        index=IndexOptions(mode=IndexMode.HYBRID),
        seed=seed,
    )


# -------------------------------------------------------------------- the replay


def replayed(folder: Path) -> dict[str, float]:
    """Wall seconds and memory of a whole replay, in a process of its own that does nothing else."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as own_process:
        return own_process.submit(replay, folder).result()


def replay(folder: Path) -> dict[str, float]:
    """The whole trace, both phases, on 16 instances of eight A100, placed by baton."""
    trace = conversation(folder)
    before_mib = _peak_mib()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    run = simulate(sixteen(trace), trace)
    return {
        "mooncake_replay_s": time.perf_counter() - began_s,
        "mooncake_replay_cpu_s": time.process_time() - cpu_s,
        "mooncake_replay_peak_mib": _peak_mib(),
        "mooncake_replay_before_mib": before_mib,
        "mooncake_replay_ended": float(sum(one.ok for one in run.outcomes)),
        "mooncake_replay_ttft_mean_s": mean([one.ttft_s for one in run.outcomes]),
        "mooncake_replay_tpot_mean_s": mean([one.tpot_s for one in run.outcomes]),
        "mooncake_replay_handoffs": float(run.handoffs),
    }


def sixteen(trace: Trace) -> Scenario:
    """Eight instances that prefill and eight that decode."""
    shape, device = shape_of("meta-llama/Meta-Llama-3-70B"), accelerator("A100")
    memory = fit(shape, device, tp=8, pp=1, weights=Dtype.BF16, kv=Dtype.BF16)
    size = trace.block_tokens
    settings = V1Settings(
        timing=Roofline(shape, device, tp=8),
        kv_blocks=memory.kv_blocks(size),
        kv_block_bytes=_KV_TOKEN_BYTES * size,
        block_size_tokens=size,
        transfer_bytes_per_s=_BYTES_PER_S,
    )
    return Scenario(
        pools=(
            PoolPlan(name="prefill", role=Role.PREFILL, replicas=8, settings=settings),
            PoolPlan(name="decode", role=Role.DECODE, replicas=8, settings=settings),
        ),
        placer=PredictedPlacer,
        index=IndexOptions(mode=IndexMode.HYBRID),
    )


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
