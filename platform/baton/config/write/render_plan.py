"""Writes a plan as a configuration with which a deployment can start."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.config.language.bounds import ClassName
from baton.config.language.units import Unit, format_quantity
from baton.domain.errors import OperatorError
from baton.domain.names.words import count_text
from baton.perf.hardware.accelerators import DTYPE_BYTES, Accelerator, Dtype
from baton.perf.hardware.catalogue import find_accelerator as accelerator_called
from baton.planner.problem import PlanningProblem, SloClass
from baton.planner.result import Candidate, Plan
from baton.planner.shapes.fleets import PlannedPool
from baton.planner.verify import DISAGGREGATE

_REPLICA_CPUS = 4
"""For the processes of one replica's engine."""
_DTYPES = {Dtype.BF16: "bfloat16", Dtype.FP16: "float16", Dtype.FP32: "float32"}
_ONLINE_QUANTIZATION = frozenset({Dtype.FP8})
"""Types to which vLLM can quantize wider weights while it loads them."""
_CONFIG_JSON = "config.json"
_DEFAULT_CLASS = "default"
"""Name of the class of all other requests, which has its own key."""
_RAY_NAMES = frozenset(
    {"A10", "A100", "A800", "B200", "B300", "GB200", "H100", "H20", "H200", "H800", "L4", "L40S"}
)
"""Ray's names of accelerators: the model number in the driver's name. Source: ray 2.60,
ray/_private/accelerators/nvidia_gpu.py."""


def render_plan(
    plan: Plan, candidate: Candidate, *, source: str, stored_dtype: Dtype | None
) -> str:
    """The YAML of a candidate's fleet, for the model at `source` with weights of `stored_dtype`.

    Raises:
        OperatorError: no configuration can express it.
    """
    check_writable(plan.question, source=source, stored_dtype=stored_dtype)
    for pool in candidate.fleet.pools:
        if not pool.engine_shape.is_startable:
            raise OperatorError(
                f"pool {pool.role}: got a data-parallel group ({pool.engine_shape.label}), which no"
                " deployment starts",
                f"start it as 'vllm serve {pool.engine_shape.vllm_arguments}', or plan with --dp 1",
            )
    return "\n".join(_lines(plan, candidate, source=source, stored_dtype=stored_dtype)) + "\n"


def check_writable(question: PlanningProblem, *, source: str, stored_dtype: Dtype | None) -> None:
    """Check that a configuration can express plans for this question.

    Raises:
        OperatorError: it cannot: types of numbers, path of the model, or name of a class.
    """
    _check_weights(question.weights_dtype, stored_dtype)
    _check_kv(question.weights_dtype, question.kv_dtype)
    path = Path(source)
    if path.is_file() and path.name != _CONFIG_JSON:
        raise OperatorError(
            f"{source}: a configuration names a model's folder, in which this would not be found",
            f"call the file {_CONFIG_JSON}, beside the model's weights",
        )
    for class_ in question.classes:
        _check_class(class_.name)


def _check_weights(weights: Dtype, stored_dtype: Dtype | None) -> None:
    if weights == stored_dtype or (
        weights in _DTYPES and (stored_dtype is None or stored_dtype in _DTYPES)
    ):
        return
    if weights in _ONLINE_QUANTIZATION and (stored_dtype is None or stored_dtype in _DTYPES):
        return
    stored_text = (
        "are not known to be stored so" if stored_dtype is None else f"are stored as {stored_dtype}"
    )
    raise OperatorError(
        f"{weights} weights cannot be written: the model's {stored_text}, and vLLM does not"
        " convert them"
        " while it loads them",
        f"name a model whose weights are stored as {weights}, or plan with another --dtype",
    )


def _check_kv(weights: Dtype, kv: Dtype) -> None:
    # By default vLLM stores KV in the type of activations: 16 bits with narrow weights.
    activation_dtype = weights if weights in _DTYPES else Dtype.BF16
    if kv is not Dtype.FP8 and DTYPE_BYTES[kv] != DTYPE_BYTES[activation_dtype]:
        raise OperatorError(
            f"a KV cache of {kv} beside {weights} weights cannot be written: no configuration asks"
            " vLLM for one",
            f"plan with --kv-dtype {activation_dtype} or {Dtype.FP8}",
        )


def _check_class(name: str | None) -> None:
    if name == _DEFAULT_CLASS:
        raise OperatorError(
            f"a class called {name!r} cannot be written: that is the class of all other requests",
            "give its objectives with --ttft and --tpot, or call it something else",
        )
    if name is not None and not re.fullmatch(ClassName.pattern, name):
        raise OperatorError(
            f"a class called {name!r} cannot be written", f"call it by {ClassName.description}"
        )


def _lines(
    plan: Plan, candidate: Candidate, *, source: str, stored_dtype: Dtype | None
) -> Iterator[str]:
    question, fleet = plan.question, candidate.fleet
    yield f"# {fleet.label}: {count_text(fleet.gpus, 'GPU')}."
    yield (
        f"# Simulated: carries {candidate.rate_per_s:.3g} requests/s of {question.traffic.name}"
        " within the objectives."
    )
    yield from _ambiguous_accelerators(fleet.pools)
    yield "version: 1"
    yield ""
    yield "model:"
    yield f"  source: {json.dumps(_model_folder(source))}"
    yield "  engine:"
    yield f"    dtype: {_DTYPES.get(question.weights_dtype, 'auto')}"
    yield f"    block_size: {question.space.block_size_tokens}"
    yield f"    gpu_memory_utilization: {question.space.gpu_memory_utilization:g}"
    yield f"    max_num_seqs: {question.space.max_running_requests}"
    extra = _vllm_arguments(question.weights_dtype, question.kv_dtype, stored_dtype)
    if extra:
        yield f"    extra: {json.dumps(extra)}"
    yield ""
    yield "pools:"
    for pool in fleet.pools:
        yield from _pool_lines(pool)
    yield ""
    yield from _slo_lines(question.classes)
    yield f"router: {{policy: predicted, disaggregate: {DISAGGREGATE[fleet.kind]}}}"


def _ambiguous_accelerators(pools: Sequence[PlannedPool]) -> Iterator[str]:
    """A comment for each accelerator whose name in Ray also means another."""
    for name, instance in {
        pool.engine_shape.accelerator.name: pool.engine_shape for pool in pools
    }.items():
        ray_name = ray_accelerator_name(instance.accelerator)
        if ray_name is not None and (resolved_name := accelerator_called(ray_name).name) != name:
            yield f"# Planned for {name}, which Ray calls {ray_name} as it calls others: it"
            yield (
                "# runs replicas on any of them, and 'baton simulate' takes it for"
                f" {resolved_name}."
            )


def _model_folder(source: str) -> str:
    """The folder of a `config.json`; any other source unchanged."""
    path = Path(source)
    # Absolute, because `.` is not a model's name.
    return str(path.absolute().parent) if path.is_file() else source


def _slo_lines(classes: Sequence[SloClass]) -> Iterator[str]:
    """The plan's objectives, by which the deployment admits and scales."""
    objectives = {class_.name: _format_objectives(class_) for class_ in classes}
    default = objectives.pop(None, "{}")
    if default != "{}" or objectives:
        yield "slo:"
    if default != "{}":
        yield f"  default: {default}"
    if objectives:
        yield "  classes:"
    for name, objective in objectives.items():
        yield f"    {json.dumps(name)}: {objective}"


def _format_objectives(slo_class: SloClass) -> str:
    """Objectives of a class, and the share of requests that must meet these."""
    limits = {"ttft": slo_class.objectives.ttft_s, "tpot": slo_class.objectives.tpot_s}
    fields = [
        f"{name}: {format_quantity(limit, Unit.SECONDS)}"
        for name, limit in limits.items()
        if limit is not None
    ]
    if fields:
        fields.append(f"attainment: {slo_class.attainment:g}")
    return f"{{{', '.join(fields)}}}"


def _vllm_arguments(weights: Dtype, kv: Dtype, stored_dtype: Dtype | None) -> dict[str, str]:
    extra = {}
    if weights in _ONLINE_QUANTIZATION and stored_dtype != weights:
        extra["quantization"] = str(weights)
    if kv is Dtype.FP8:
        extra["kv_cache_dtype"] = "fp8"
    return extra


def _pool_lines(pool: PlannedPool) -> Iterator[str]:
    engine_shape = pool.engine_shape
    name = ray_accelerator_name(engine_shape.accelerator)
    accelerator_text = "" if name is None else f", accelerator: {name}"
    gpus = 0 if engine_shape.accelerator.name == "cpu" else engine_shape.gpus
    yield f"  {pool.role}:"
    yield f"    role: {pool.role}"
    yield f"    replicas: {{min: 1, initial: {pool.replicas}, max: {pool.replicas}}}"
    yield f"    resources: {{cpus: {_REPLICA_CPUS}, gpus: {gpus}{accelerator_text}}}"
    experts = ", ep: true" if engine_shape.ep else ""
    yield f"    parallel: {{tp: {engine_shape.tp}, pp: {engine_shape.pp}{experts}}}"
    yield f"    engine: {{max_num_batched_tokens: {engine_shape.chunk_tokens}}}"


def ray_accelerator_name(accelerator: Accelerator) -> str | None:
    """Ray's name of it; None when unknown, or for CPUs."""
    base_name = accelerator.name.split("_")[0].upper()
    return base_name if base_name in _RAY_NAMES else None
