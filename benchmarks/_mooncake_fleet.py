"""Mooncake's prefill nodes, its four ways to schedule prefills, and the seconds they take.

Source: Qin et al., Mooncake (FAST'25).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from baton.domain.handoff import LegKind
from baton.perf.step_timing import StepBatch
from baton.policy.choosing import Candidate, Chooser, ChooserPlacer
from baton.policy.placement import (
    Disaggregate,
    PlacementQuery,
    Placer,
)
from baton.policy.plain import choose_randomly
from baton.policy.predicted import PredictedPlacer
from baton.simulator.workloads import mooncake
from baton.simulator.workloads.trace import Trace
from benchmarks.policies.mooncake import choose_by_conductor
from benchmarks.policies.terms import pending_prefill_tokens

TICK_S = 3.0
"""The trace's timestamps are multiples of it."""
_LAYERS, _HIDDEN = 80, 8192
_FLOPS = 8 * 312e12
"""Of eight A800, bf16, dense."""
_MFU = 0.5
"""What prefills reach: .42 to .67 on A100 (engine level, fp16, prompts of 2,048 tokens)."""
_BYTES_PER_S = 8 * 2.04e12
_KV_TOKEN_BYTES = 327_680


@dataclass(frozen=True, slots=True)
class Node:
    """Eight A800 with a LLaMA3-70B; a `StepTiming`.

    Prefill takes what its operations take, L (4 n^2 d + 22 n d^2) for n tokens, at an MFU of 0.5; a
    decode step reads the weights and the keys and values at 80 % of the bandwidth.
    Source: Mooncake (FAST'25) §3.2, flops of a prefill with a = 4 and b = 22.
    """

    def step_s(self, batch: StepBatch) -> float:
        """Seconds of one step."""
        # Over chunks of q tokens behind p, the sum of (p + q)^2 - p^2.
        squares = 2 * batch.prefill_pairs - batch.prefill_tokens
        attention = 4 * squares * _HIDDEN
        products = 22 * (batch.prefill_tokens + batch.decode_requests) * _HIDDEN**2
        compute_s = _LAYERS * (attention + products) / (_FLOPS * _MFU)
        weights = 2 * 11 * _LAYERS * _HIDDEN**2
        read = weights + batch.decode_context_tokens * _KV_TOKEN_BYTES
        return max(compute_s, read / (_BYTES_PER_S * 0.8))


def conversation(folder: Path) -> Trace:
    """The conversation trace, spread evenly over its ticks."""
    with (folder / "traces/mooncake/conversation_trace.jsonl").open() as file:
        return mooncake.read(file, "conversation", spread_s=TICK_S)


def prompts_only(trace: Trace) -> Trace:
    """The same prompts, each over with its first token."""
    short = tuple(one._replace(output_tokens=1) for one in trace.requests)
    return Trace(name=trace.name, requests=short, block_tokens=trace.block_tokens)


# -------------------------------------------------------------------- the schedulers


def choose_by_load(
    query: PlacementQuery, kind: LegKind, candidates: Sequence[Candidate], rng: random.Random
) -> int:
    """The fewest tokens to compute; where they are cached does not matter."""
    pending = [pending_prefill_tokens(one.view) for one in candidates]
    return pending.index(min(pending))


def _placer(name: str, chooser: Chooser) -> Callable[[int], Placer]:
    def make(seed: int) -> Placer:
        rng = random.Random(seed)  # noqa: S311 - ties, not secrets
        return ChooserPlacer(name, chooser, disaggregate=Disaggregate.NEVER, rng=rng)

    return make


SCHEDULERS: Mapping[str, Callable[[int], Placer]] = MappingProxyType(
    {
        "random": _placer("random", choose_randomly),
        "load_balance": _placer("load balance", choose_by_load),
        "local_cache": _placer("local cache", choose_by_conductor),
        "global_cache": lambda seed: PredictedPlacer(seed=seed),
    }
)
"""From a seed. With local caches Conductor looks for prefixes on each node, and moves none; with a
global one baton does, which also fetches a prefix where that is predicted to be sooner."""
