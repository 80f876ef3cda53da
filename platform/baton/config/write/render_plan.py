"""From a plan to a configuration that a deployment can be started with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from baton.config.language.bounds import ClassName
from baton.config.language.units import Unit, format_quantity
from baton.domain.errors import OperatorError
from baton.perf.hardware.accelerators import BYTES, Accelerator, Dtype
from baton.perf.hardware.catalogue import accelerator as accelerator_called
from baton.planner.problem import Question, SloClass
from baton.planner.result import Candidate, Plan
from baton.planner.shapes.fleets import Pool
from baton.planner.verify import DISAGGREGATE

_CPUS = 4
"""Of one replica: an engine's processes beside its GPUs."""
_DTYPES = {Dtype.BF16: "bfloat16", Dtype.FP16: "float16", Dtype.FP32: "float32"}
_ON_THE_FLY = frozenset({Dtype.FP8})
"""What vLLM can quantize weights to while it loads them, from wider ones."""
_CONFIG_JSON = "config.json"
_DEFAULT_CLASS = "default"
"""What the class of all requests is called, which has a key of its own."""
_RAY_NAMES = frozenset(
    {"A10", "A100", "A800", "B200", "B300", "GB200", "H100", "H20", "H200", "H800", "L4", "L40S"}
)
"""What Ray calls accelerators: the model's number in what the driver says.
Source: ray 2.60, ray/_private/accelerators/nvidia_gpu.py."""


def emit(plan: Plan, chosen: Candidate, *, source: str, stored: Dtype | None) -> str:
    """The YAML of a candidate's fleet, for the model at `source` whose weights are `stored` so.

    Raises:
        OperatorError: no configuration can say it.
    """
    check_writable(plan.question, source=source, stored=stored)
    return "\n".join(_lines(plan, chosen, source=source, stored=stored)) + "\n"


def check_writable(question: Question, *, source: str, stored: Dtype | None) -> None:
    """Whether what is found for a question can be written as a configuration.

    Raises:
        OperatorError: it cannot: the types of its numbers, its model's path or a class' name.
    """
    _check_weights(question.weights, stored)
    _check_kv(question.weights, question.kv)
    path = Path(source)
    if path.is_file() and path.name != _CONFIG_JSON:
        raise OperatorError(
            f"{source}: a configuration names a model's folder, in which this would not be found",
            f"call the file {_CONFIG_JSON}, beside the model's weights",
        )
    for one in question.classes:
        _check_class(one.name)


def _check_weights(weights: Dtype, stored: Dtype | None) -> None:
    if weights == stored or (weights in _DTYPES and (stored is None or stored in _DTYPES)):
        return
    if weights in _ON_THE_FLY and (stored is None or stored in _DTYPES):
        return
    found = "are not known to be stored so" if stored is None else f"are stored as {stored}"
    raise OperatorError(
        f"{weights} weights cannot be written: the model's {found}, and vLLM does not convert them"
        " while it loads them",
        f"name a model whose weights are stored as {weights}, or plan with another --dtype",
    )


def _check_kv(weights: Dtype, kv: Dtype) -> None:
    # Not told otherwise, vLLM keeps KV in the type of activations: 16 bits beside narrow weights.
    plain = weights if weights in _DTYPES else Dtype.BF16
    if kv is not Dtype.FP8 and BYTES[kv] != BYTES[plain]:
        raise OperatorError(
            f"a KV cache of {kv} beside {weights} weights cannot be written: no configuration asks"
            " vLLM for one",
            f"plan with --kv-dtype {plain} or {Dtype.FP8}",
        )


def _check_class(name: str | None) -> None:
    if name == _DEFAULT_CLASS:
        raise OperatorError(
            f"a class called {name!r} cannot be written: that is the class of all other requests",
            "give its objectives with --ttft and --tpot, or call it something else",
        )
    if name is not None and not re.fullmatch(ClassName.pattern, name):
        raise OperatorError(
            f"a class called {name!r} cannot be written", f"call it by {ClassName.meaning}"
        )


def _lines(plan: Plan, chosen: Candidate, *, source: str, stored: Dtype | None) -> Iterator[str]:
    question, fleet = plan.question, chosen.fleet
    yield f"# {fleet.label}: {fleet.gpus} GPUs."
    yield (
        f"# Simulated: carries {chosen.rate_per_s:.3g} requests/s of {question.traffic.name}"
        " within the objectives."
    )
    yield from _other_accelerators(fleet.pools)
    yield "version: 1"
    yield ""
    yield "model:"
    yield f"  source: {json.dumps(_folder(source))}"
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


def _other_accelerators(pools: Sequence[Pool]) -> Iterator[str]:
    """A remark about each whose name in the configuration is that of another one, too."""
    for name, planned in {pool.instance.accelerator.name: pool.instance for pool in pools}.items():
        named = accelerator_name(planned.accelerator)
        if named is not None and (read := accelerator_called(named).name) != name:
            yield f"# Planned for {name}, which Ray calls {named} as it calls others: it"
            yield f"# runs replicas on any of them, and 'baton simulate' takes it for {read}."


def _folder(source: str) -> str:
    """Of a model that was given as the path of its `config.json`; any other source as it is."""
    path = Path(source)
    # From the root: `.` is the name of no model.
    return str(path.absolute().parent) if path.is_file() else source


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
