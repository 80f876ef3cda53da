"""Splitwise: how many machines serve the code load at 130 requests/s within its nine objectives.

Machines take the seconds that Splitwise measured; baselines are placed by its token-jsq, split
fleets by its mixed pool, with as many machines for tokens as it published. A baseline's machine
computes prompts beside decodes, as Splitwise's does, but in chunks of 2,048 tokens, where
Splitwise's lets a longer prompt keep its decodes waiting. In split fleets prompts are whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.domain.fleet import Role
from baton.perf.step_timing import StepTiming
from baton.perf.tables import InterpolatedTiming
from baton.policy.placement import Placer
from baton.simulator.plans import PoolPlan, Scenario
from baton.simulator.reporting import Reporting
from baton.simulator.scenario import simulate
from baton.simulator.v1.settings import Scheduling, V1Settings
from baton.simulator.workloads.trace import Trace
from benchmarks._splitwise_data import InChunks, code_load, machine, slowdowns, worst_of
from benchmarks._splitwise_placers import MixedPool, by_pending_tokens

_RATE_PER_S = 130.0
_REQUESTS = 7800
"""A minute's."""
_A100, _H100 = "a100-80gb", "h100-80gb"
_BLOCK_TOKENS = 16
_KV_TOKEN_BYTES = 327_680
"""Of Llama-2-70B in fp16."""
_KV_BYTES = 640e9 - 140e9
"""What the weights leave of eight GPUs of 80 GB."""
_LINK_BYTES_PER_S = 200 * 1024**3
"""Source: splitwise-sim configs/orchestrator_repo/schedulers/mixed_pool.yml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """One of the fleets that Splitwise compares."""

    name: str
    hardware: str
    published: int
    """Machines. Source: splitwise-sim scripts/run_throughput.sh."""
    token_machines: int = 0
    """Of those; none in a baseline, whose machines do both."""


FLEETS = (
    Fleet(name="hh", hardware=_H100, published=33, token_machines=10),
    Fleet(name="baseline_h100", hardware=_H100, published=51),
    Fleet(name="aa", hardware=_A100, published=64, token_machines=10),
    Fleet(name="baseline_a100", hardware=_A100, published=113),
)


def figures(folder: Path) -> dict[str, float]:
    """The fewest machines of each fleet, and how far off the published numbers they are."""
    load = code_load(folder, rate_per_s=_RATE_PER_S, requests=_REQUESTS)
    alone = machine(folder, _A100)
    found: dict[str, float] = {}
    for fleet in FLEETS:
        found |= of_fleet(fleet, machine(folder, fleet.hardware), load, alone)
    errors = [abs(found[f"splitwise_{fleet.name}_error"]) for fleet in FLEETS]
    return found | {"splitwise_worst_error": max(errors)}


def of_fleet(
    fleet: Fleet, its: InterpolatedTiming, load: Trace, alone: InterpolatedTiming
) -> dict[str, float]:
    """The fewest machines of one fleet; and how the published number of them does."""
    tried: dict[int, float] = {}

    def enough(others: int) -> bool:
        tried[others] = worst(fleet, its, others, load, alone)[0]
        return tried[others] <= 1

    guess = fleet.published - fleet.token_machines
    count = fewest(enough, guess=guess) + fleet.token_machines
    name = f"splitwise_{fleet.name}"
    return {
        f"{name}_machines": count,
        f"{name}_machines_paper": fleet.published,
        f"{name}_error": count / fleet.published - 1,
        f"{name}_slowdown_over_bound_as_published": tried[guess],
    }


def fewest(enough: Callable[[int], bool], *, guess: int) -> int:
    """The smallest count that is enough, where more always are; looked for around a guess."""
    low, high, step = 0, guess, max(1, guess // 8)
    if enough(guess):
        while high - step > low and enough(high - step):
            high -= step
        low = max(low, high - step)
    else:
        low = guess
        while not enough(low + step):
            low += step
        high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def worst(
    fleet: Fleet, its: InterpolatedTiming, others: int, load: Trace, alone: InterpolatedTiming
) -> tuple[float, str]:
    """The worst slowdown over its bound; `others` are the machines that are not for tokens."""
    run = simulate(scenario(fleet, its, others), load)
    return worst_of(slowdowns(run.outcomes, alone))


def scenario(fleet: Fleet, its: InterpolatedTiming, others: int) -> Scenario:
    """A fleet of so many machines, besides those for tokens."""
    pools: list[tuple[Role, int, V1Settings]]
    if fleet.token_machines:
        whole = engine(its, Scheduling.PREFILL_FIRST)
        pools = [(Role.PREFILL, others, whole), (Role.DECODE, fleet.token_machines, whole)]
    else:
        pools = [(Role.MIXED, others, engine(InChunks(its), Scheduling.CHUNKED))]
    placer: Callable[[], Placer] = MixedPool if fleet.token_machines else by_pending_tokens
    return Scenario(
        pools=tuple(
            PoolPlan(name=role.value, role=role, replicas=count, settings=settings)
            for role, count, settings in pools
        ),
        placer=placer,
        priors={},
        reporting=Reporting(beat_s=0.05, always=False),
    )


def engine(timing: StepTiming, scheduling: Scheduling) -> V1Settings:
    """A machine. Source: splitwise-sim configs/start_state: at most 512 requests, 2,048 tokens."""
    return V1Settings(
        timing=timing,
        kv_blocks=int(_KV_BYTES / _KV_TOKEN_BYTES / _BLOCK_TOKENS),
        kv_block_bytes=_KV_TOKEN_BYTES * _BLOCK_TOKENS,
        block_size_tokens=_BLOCK_TOKENS,
        max_running_requests=512,
        max_batched_tokens=2048,
        prefix_caching=False,
        scheduling=scheduling,
        transfer_bytes_per_s=_LINK_BYTES_PER_S,
        transfer_setup_s=0.000_001,
        max_pulls=512,
    )
