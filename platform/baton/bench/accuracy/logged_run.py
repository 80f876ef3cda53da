"""Compares a logged run of a vLLM engine with the simulated engine under the same arrivals.

Source of the format: casys-kaist/LLMServingSim, bench: `requests.jsonl` and `meta.json`, with the
engine's arguments under `engine_kwargs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.bench.accuracy.measurements import LoggedRequest
from baton.domain.errors import TraceInvalid
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.engine_arguments import IRRELEVANT_ARGUMENTS
from baton.perf.model.memory import MemoryModel
from baton.perf.model.shape import ModelShape
from baton.perf.step_timing import StepTiming
from baton.simulator.outcome import mean, quantile
from baton.simulator.single_engine import simulate_engine
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.trace import TraceRequest

_DEFAULTS = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "block_size": 16,
}
"""Source: vLLM's EngineArgs and SchedulerConfig."""
_READ_ARGUMENTS = frozenset(
    {
        *_DEFAULTS,
        "model",
        "max_model_len",
        "gpu_memory_utilization",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "enable_expert_parallel",
    }
)
_DEFAULT_UTILIZATION = 0.9
"""Source: vLLM's gpu_memory_utilization."""
_DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16, "half": Dtype.FP16, "fp8": Dtype.FP8}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEngine:
    """The relevant arguments of the engine."""

    model: str
    tp: int
    pp: int
    replicas: int
    """Engines that shared the requests: vLLM's data parallelism. Those of a model with experts
    share these, too, and step together."""
    whole_experts: bool
    """Whether a device has whole experts."""
    max_running_requests: int
    max_batched_tokens: int
    max_len_tokens: int | None
    block_size_tokens: int
    utilization: float
    weights: Dtype | None
    """None for `auto`: as the model is stored."""
    kv: Dtype | None
    """None for `auto`: as the activations."""
    not_modelled: tuple[str, ...] = ()
    """Other arguments, which may make a difference."""

    def ranks(self, shape: ModelShape) -> int:
        """Engines that step together: all where the model has experts, else each by itself."""
        return self.replicas if shape.experts is not None else 1


def read_engine(text: str, name: str) -> LoggedEngine:
    """The engine of a `meta.json`; missing arguments have vLLM's defaults.

    Raises:
        TraceInvalid: not JSON, no model, or an invalid argument; with line 0, for the whole file.
    """
    try:
        meta = json.loads(text)
    except ValueError as error:
        raise TraceInvalid(name, 0, f"got {error}, expected JSON") from error
    kwargs = meta.get("engine_kwargs") if isinstance(meta, dict) else None
    if not isinstance(kwargs, dict):
        raise TraceInvalid(
            name, 0, "no object engine_kwargs, expected the engine's arguments there"
        )
    model = kwargs.get("model", meta.get("model"))
    if not isinstance(model, str) or not model:
        raise TraceInvalid(
            name, 0, f"engine_kwargs.model is {model!r}, expected the name of a model"
        )
    counts = {key: _count(kwargs, key, name) for key in _DEFAULTS}
    max_model_len = kwargs.get("max_model_len")
    return LoggedEngine(
        model=model,
        tp=counts["tensor_parallel_size"],
        pp=counts["pipeline_parallel_size"],
        replicas=counts["data_parallel_size"],
        whole_experts=bool(kwargs.get("enable_expert_parallel")),
        max_running_requests=counts["max_num_seqs"],
        max_batched_tokens=counts["max_num_batched_tokens"],
        max_len_tokens=None
        if max_model_len is None
        else _positive_int(max_model_len, "max_model_len", name),
        block_size_tokens=counts["block_size"],
        utilization=_utilization(kwargs, name),
        weights=_dtype(kwargs.get("quantization") or kwargs.get("dtype"), "dtype", name),
        kv=_dtype(kwargs.get("kv_cache_dtype"), "kv_cache_dtype", name),
        not_modelled=tuple(sorted(key for key, value in kwargs.items() if _is_ignored(key, value))),
    )


def _is_ignored(key: str, value: object) -> bool:
    """Whether an argument may matter and is not modelled; None and false are no arguments."""
    return bool(value) and key not in _READ_ARGUMENTS and key not in IRRELEVANT_ARGUMENTS


def _count(kwargs: Mapping[str, object], key: str, name: str) -> int:
    value = kwargs.get(key)
    return _DEFAULTS[key] if value is None else _positive_int(value, key, name)


def _positive_int(value: object, key: str, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TraceInvalid(name, 0, f"engine_kwargs.{key} is {value!r}, expected a number above 0")
    return value


def _utilization(kwargs: Mapping[str, object], name: str) -> float:
    value = kwargs.get("gpu_memory_utilization")
    if value is None:
        return _DEFAULT_UTILIZATION
    if not isinstance(value, int | float) or not 0 < value <= 1:
        problem = (
            f"engine_kwargs.gpu_memory_utilization is {value!r}, expected more than 0, at most 1"
        )
        raise TraceInvalid(name, 0, problem)
    return float(value)


def _dtype(value: object, key: str, name: str) -> Dtype | None:
    if value is None or value == "auto":
        return None
    base_name = str(value).split("_")[0]
    try:
        return _DTYPES.get(base_name) or Dtype(base_name)
    except ValueError:
        problem = f"engine_kwargs.{key} is {value!r}, expected auto, bfloat16, float16, fp8, ..."
        raise TraceInvalid(name, 0, problem) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Of all requests of a run, in seconds; TPOT of requests with more than one token."""

    ttfts_s: Sequence[float]
    tpots_s: Sequence[float]

    def summarize(self) -> dict[str, dict[str, float]]:
        """Mean and quantiles of both."""
        return {
            term: {
                "mean": mean(values),
                "p50": quantile(values, 0.5),
                "p90": quantile(values, 0.9),
                "p99": quantile(values, 0.99),
            }
            for term, values in (("ttft_s", self.ttfts_s), ("tpot_s", self.tpots_s))
        }


def logged_latencies(log: Sequence[LoggedRequest]) -> Latencies:
    """The measured latencies."""
    return Latencies(
        ttfts_s=[request.ttft_s for request in log],
        tpots_s=[request.tpot_s for request in log if request.output_tokens > 1],
    )


def replayed_latencies(
    log: Sequence[LoggedRequest],
    engine: LoggedEngine,
    memory: MemoryModel,
    timing: StepTiming,
) -> Latencies:
    """Latencies of the same arrivals in simulated engines, which share them round robin.

    Engines that share experts are simulated as one group, over whose ranks requests are spread
    evenly. Nothing is cached, because a log does not contain prompts.

    Raises:
        InsufficientMemory: the model does not fit such devices.
    """
    shape, kv, ranks = memory.shape, memory.kv_dtype, engine.ranks(memory.shape)
    memory_fit = memory.fit(engine.tp, engine.pp, ranks, ep=engine.whole_experts)
    block_tokens = shape.block_tokens(engine.block_size_tokens, kv, engine.tp)
    settings = V1Settings(
        timing=timing,
        kv_blocks=memory_fit.rank_kv_tokens // block_tokens,
        kv_block_bytes=max(1, round(shape.kv_bytes(block_tokens, kv))),
        block_size_tokens=block_tokens,
        request_blocks=shape.request_blocks(block_tokens, kv),
        max_len_tokens=engine.max_len_tokens or shape.max_len_tokens,
        max_running_requests=engine.max_running_requests,
        max_batched_tokens=engine.max_batched_tokens,
        prefix_caching=False,
        pipeline_stages=engine.pp,
    ).for_ranks(ranks)
    groups = engine.replicas // ranks
    requests = [
        TraceRequest(request.at_s, request.prompt_tokens, request.output_tokens) for request in log
    ]
    outcomes = [
        outcome
        for number in range(groups)
        for outcome in simulate_engine(settings, requests[number::groups])
    ]
    return Latencies(
        ttfts_s=[outcome.ttft_s for outcome in outcomes if outcome.ok],
        tpots_s=[
            outcome.tpot_s for outcome in outcomes if outcome.ok and outcome.output_tokens > 1
        ],
    )
