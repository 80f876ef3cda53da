"""Engines with easy numbers, for tests of what a planner does with them."""

from __future__ import annotations

from dataclasses import replace

from baton.perf.hardware.accelerators import Accelerator, Dtype
from baton.planner.problem import AcceleratorOffer, PlanningProblem, SearchEffort, SloClass
from baton.planner.shapes.space import Duty, EngineShape, ShapeCatalogue
from baton.simulator.outcome import Objectives
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.arrivals import UserLoad
from baton.simulator.workloads.trace import Trace, TraceRequest
from tests.perf.shapes import LLAMA_8B
from tests.simulator.v1_cores import LinearStepTiming

GPU = Accelerator(
    name="plain",
    memory_bytes=80e9,
    memory_bytes_per_s=2e12,
    flops_by_dtype={Dtype.BF16: 400e12},
    peer_bytes_per_s=300e9,
    network_bytes_per_s=25e9,
    price_per_hour=2.0,
)
MODEL = replace(LLAMA_8B, name="plain")


TIMING = LinearStepTiming(
    per_step_s=0.008, per_prefill_token_s=50e-6, per_decode_s=50e-6, per_context_token_s=20e-9
)


def instance(
    chunk: int = 2048,
    *,
    tp: int = 1,
    timing: LinearStepTiming | None = None,
    accelerator: Accelerator = GPU,
) -> EngineShape:
    settings = V1Settings(
        timing=timing or TIMING,
        kv_blocks=20_000,
        kv_block_bytes=16 * 131_072,
        max_running_requests=256,
        max_batched_tokens=chunk,
        transfer_bytes_per_s=50e9,
    )
    price = accelerator.price_per_hour
    return EngineShape(
        accelerator=accelerator,
        tp=tp,
        pp=1,
        settings=settings,
        price_per_hour=None if price is None else tp * price,
    )


def shapes(
    timing: LinearStepTiming | None = None, *, chunks: tuple[int, ...] = (2048,)
) -> ShapeCatalogue:
    return ShapeCatalogue(
        shapes_by_duty={
            Duty.PREFILL: (instance(8192, timing=timing),),
            Duty.DECODE: (instance(2048, timing=timing),),
            Duty.BOTH: tuple(instance(chunk, timing=timing) for chunk in chunks),
        }
    )


def evenly_spaced(rate: float, prompt: int, output: int, count: int = 2_000) -> Trace:
    """Requests that are all alike, at even times."""
    return Trace(
        name="even",
        requests=tuple(TraceRequest(n / rate, prompt, output) for n in range(count)),
    )


SMALL = SearchEffort(
    min_requests=60,
    confirmation_requests=120,
    rank_requests=120,
    precision=0.15,
    shapes_per_duty=1,
    max_simulated_replicas=3,
    sensitivity=False,
)


def question(
    trace: Trace,
    *,
    ttft_s: float | None = 0.5,
    tpot_s: float | None = 0.03,
    gpus: int | None = 8,
    rate_per_s: float | None = None,
    users: UserLoad | None = None,
) -> PlanningProblem:
    return PlanningProblem(
        model=MODEL,
        offers=(AcceleratorOffer(accelerator=GPU),),
        traffic=trace,
        classes=(SloClass(objectives=Objectives(ttft_s=ttft_s, tpot_s=tpot_s)),),
        gpus=gpus,
        rate_per_s=rate_per_s,
        users=users,
        effort=SMALL,
    )


def with_classes(base: PlanningProblem, *classes: SloClass) -> PlanningProblem:
    return replace(base, classes=classes)
