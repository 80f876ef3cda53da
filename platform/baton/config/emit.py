"""From a plan to a configuration that a deployment can be started with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from baton.config.units import Unit, format_quantity
from baton.perf.hardware import Accelerator, Dtype
from baton.planner.answer import Candidate, Plan
from baton.planner.fleets import Pool
from baton.planner.question import SloClass
from baton.planner.verify import DISAGGREGATE

_CPUS = 4
"""Of one replica: an engine's processes beside its GPUs."""
_DTYPES = {Dtype.BF16: "bfloat16", Dtype.FP16: "float16", Dtype.FP32: "float32"}
_ON_THE_FLY = frozenset({Dtype.FP8})
"""What vLLM can quantize weights to while it loads them."""
_RAY_NAMES = frozenset(
    {"A10", "A100", "A800", "B200", "B300", "GB200", "H100", "H20", "H200", "H800", "L4", "L40S"}
)
"""What Ray calls accelerators: the model's number in what the driver says.
Source: ray 2.60, ray/_private/accelerators/nvidia_gpu.py."""


def emit(plan: Plan, chosen: Candidate, *, source: str, stored: Dtype | None) -> str:
    """The YAML of a candidate's fleet, for the model at `source` whose weights are `stored` so."""
    return "\n".join(_lines(plan, chosen, source=source, stored=stored)) + "\n"


def _lines(plan: Plan, chosen: Candidate, *, source: str, stored: Dtype | None) -> Iterator[str]:
    question, fleet = plan.question, chosen.fleet
    yield f"# {fleet.label}: {fleet.gpus} GPUs."
    yield (
        f"# Simulated: carries {chosen.rate_per_s:.3g} requests/s of {question.traffic.name}"
        " within the objectives."
    )
    yield "version: 1"
    yield ""
    yield "model:"
    yield f"  source: {json.dumps(source)}"
    yield "  engine:"
    yield f"    dtype: {_DTYPES.get(question.weights, 'auto')}"
    yield f"    block_size: {question.space.block_size_tokens}"
    yield f"    gpu_memory_utilization: {question.space.utilization:g}"
    yield f"    max_num_seqs: {question.space.max_running_requests}"
    extra = _extra(question.weights, question.kv, stored)
    if extra:
        yield f"    extra: {json.dumps(extra)}"
    yield ""
    yield "pools:"
    for pool in fleet.pools:
        yield from _pool(pool)
    yield ""
    yield from _promises(question.classes)
    yield f"router: {{policy: predicted, disaggregate: {DISAGGREGATE[fleet.kind]}}}"


def _promises(classes: Sequence[SloClass]) -> Iterator[str]:
    """What the plan was made for: the deployment admits by it, and scales itself to keep it."""
    promises = {one.name: _promise(one) for one in classes}
    default = promises.pop(None, "{}")
    if default != "{}" or promises:
        yield "slo:"
    if default != "{}":
        yield f"  default: {default}"
    if promises:
        yield "  classes:"
    for name, promise in promises.items():
        yield f"    {json.dumps(name)}: {promise}"


def _promise(one: SloClass) -> str:
    """Its objectives, and the share of requests that is to meet them."""
    limits = {"ttft": one.objectives.ttft_s, "tpot": one.objectives.tpot_s}
    given = [
        f"{name}: {format_quantity(limit, Unit.SECONDS)}"
        for name, limit in limits.items()
        if limit is not None
    ]
    if given:
        given.append(f"attainment: {one.attainment:g}")
    return f"{{{', '.join(given)}}}"


def _extra(weights: Dtype, kv: Dtype, stored: Dtype | None) -> dict[str, str]:
    extra = {}
    if weights in _ON_THE_FLY and stored != weights:
        extra["quantization"] = str(weights)
    if kv is Dtype.FP8:
        extra["kv_cache_dtype"] = "fp8"
    return extra


def _pool(pool: Pool) -> Iterator[str]:
    instance = pool.instance
    name = accelerator_name(instance.accelerator)
    kind = "" if name is None else f", accelerator: {name}"
    gpus = 0 if instance.accelerator.name == "cpu" else instance.gpus
    yield f"  {pool.role}:"
    yield f"    role: {pool.role}"
    yield f"    replicas: {{min: 1, start: {pool.replicas}, max: {pool.replicas}}}"
    yield f"    resources: {{cpus: {_CPUS}, gpus: {gpus}{kind}}}"
    yield f"    parallel: {{tp: {instance.tp}, pp: {instance.pp}}}"
    yield f"    engine: {{max_num_batched_tokens: {instance.chunk_tokens}}}"


def accelerator_name(accelerator: Accelerator) -> str | None:
    """What Ray calls it; None where that is not known, or where it is none."""
    plain = accelerator.name.split("_")[0].upper()
    return plain if plain in _RAY_NAMES else None
