"""Scenarios with counted engines for tests."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from baton.domain.fleet import Role
from baton.policy.placement.port import Disaggregate
from baton.policy.placement.predicted import PredictedOptions, PredictedPlacer
from baton.simulator.scenario import PoolPlan, Scenario
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.simulator import v1_cores


@dataclass(frozen=True, slots=True)
class LinearStepTiming(v1_cores.LinearStepTiming):
    """A step that costs so much by itself, and so much for each token and each decode."""

    per_step_s: float = 0.005
    per_prefill_token_s: float = 0.000_05
    per_decode_s: float = 0.000_1
    per_context_token_s: float = 1e-7


ENGINE = V1Settings(
    timing=LinearStepTiming(),
    kv_blocks=2000,
    kv_block_bytes=1_000_000,
    transfer_bytes_per_s=10e9,
    transfer_setup_s=0.002,
    lease_s=5.0,
    weights_load_s=3.0,
)


def pool(role: Role, replicas: int, settings: V1Settings = ENGINE) -> PoolPlan:
    return PoolPlan(name=str(role), role=role, replicas=replicas, settings=settings)


def scenario(
    *pools: PoolPlan, disaggregate: Disaggregate = Disaggregate.AUTO, **changes: object
) -> Scenario:
    options = PredictedOptions(disaggregate=disaggregate)
    base = Scenario(pools=pools, placer=lambda: PredictedPlacer(options))
    return replace(base, **changes)  # type: ignore[arg-type]  # tests name them right


def trace(
    count: int,
    *,
    rate_per_s: float = 20.0,
    seed: int = 0,
    groups: int = 0,
    block_tokens: int = 64,
) -> Trace:
    """Requests of a few hundred tokens; those of one group begin with the same four blocks."""
    rng = random.Random(seed)
    at_s, requests = 0.0, []
    for number in range(count):
        at_s += rng.expovariate(rate_per_s)
        prompt, group = rng.randint(1, 600), rng.randrange(max(1, groups))
        shared = tuple(100 * group + block for block in range(4)) if groups else ()
        own = tuple(10**6 + 100 * number + block for block in range(12))
        requests.append(
            TraceRequest(at_s, prompt, rng.randint(1, 80), (shared + own) if groups else ())
        )
    return Trace(name="test", requests=tuple(requests), block_tokens=block_tokens)


def simultaneous_trace(
    count: int, *, prompt_tokens: int, output_tokens: int, at_s: float = 0.0
) -> Trace:
    request = TraceRequest(at_s, prompt_tokens, output_tokens)
    return Trace(name="test", requests=(request,) * count)
