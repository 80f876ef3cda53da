"""A real vLLM engine's run as a benchmark logged it, and the same arrivals in the simulated engine.

Source of the format: casys-kaist/LLMServingSim, bench: `requests.jsonl`, and beside it `meta.json`
with the engine's own arguments under `engine_kwargs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.bench.accuracy.measurements import LoggedRequest
from baton.domain.errors import BadTrace
from baton.perf.hardware.accelerators import Dtype
from baton.perf.model.engine_arguments import IRRELEVANT_ARGUMENTS
from baton.perf.model.memory import MemoryQuestion
from baton.perf.step_timing import StepTiming
from baton.simulator.outcome import mean, quantile
from baton.simulator.single_engine import serve
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
_READ = frozenset(
    {
        *_DEFAULTS,
        "model",
        "max_model_len",
        "gpu_memory_utilization",
        "dtype",
        "quantization",
        "kv_cache_dtype",
    }
)
_UTILIZATION = 0.9
"""Source: vLLM's gpu_memory_utilization."""
_DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16, "half": Dtype.FP16, "fp8": Dtype.FP8}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEngine:
    """What the engine was started with, as far as it matters here."""

    model: str
    tp: int
    pp: int
    replicas: int
    """Engines that shared the requests: vLLM's data parallelism."""
    max_running_requests: int
    max_batched_tokens: int
    max_len_tokens: int | None
    block_size_tokens: int
    utilization: float
    weights: Dtype | None
    """None where it says `auto`: as the model is stored."""
    kv: Dtype | None
    """None where it says `auto`: as the activations."""
    not_modelled: tuple[str, ...] = ()
    """Arguments that the simulated engine is not given, and that may make a difference."""


def read_engine(text: str, name: str) -> LoggedEngine:
    """The engine of a `meta.json`; what it does not say has vLLM's default.

    Raises:
        BadTrace: not JSON, no model, or a figure that makes no sense; line 0, for the whole file.
    """
    try:
        meta = json.loads(text)
    except ValueError as error:
        raise BadTrace(name, 0, f"got {error}, wanted JSON") from error
    kwargs = meta.get("engine_kwargs") if isinstance(meta, dict) else None
    if not isinstance(kwargs, dict):
        raise BadTrace(name, 0, "no object engine_kwargs, wanted the engine's arguments there")
    model = kwargs.get("model", meta.get("model"))
    if not isinstance(model, str) or not model:
        raise BadTrace(name, 0, f"engine_kwargs.model is {model!r}, wanted the name of a model")
    counts = {key: _count(kwargs, key, name) for key in _DEFAULTS}
    if kwargs.get("enable_expert_parallel") and counts["data_parallel_size"] > 1:
        raise BadTrace(name, 0, "experts are shared between engines, which is not modelled")
    longest = kwargs.get("max_model_len")
    return LoggedEngine(
        model=model,
        tp=counts["tensor_parallel_size"],
        pp=counts["pipeline_parallel_size"],
        replicas=counts["data_parallel_size"],
        max_running_requests=counts["max_num_seqs"],
        max_batched_tokens=counts["max_num_batched_tokens"],
        max_len_tokens=None if longest is None else _whole(longest, "max_model_len", name),
        block_size_tokens=counts["block_size"],
        utilization=_share(kwargs, name),
        weights=_dtype(kwargs.get("quantization") or kwargs.get("dtype"), "dtype", name),
        kv=_dtype(kwargs.get("kv_cache_dtype"), "kv_cache_dtype", name),
        not_modelled=tuple(sorted(key for key, one in kwargs.items() if _is_left_out(key, one))),
    )


def _is_left_out(key: str, given: object) -> bool:
    """Whether an argument says something that nobody reads; None and false say nothing."""
    return bool(given) and key not in _READ and key not in IRRELEVANT_ARGUMENTS


def _count(kwargs: Mapping[str, object], key: str, name: str) -> int:
    given = kwargs.get(key)
    return _DEFAULTS[key] if given is None else _whole(given, key, name)


def _whole(given: object, key: str, name: str) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise BadTrace(name, 0, f"engine_kwargs.{key} is {given!r}, wanted a number above 0")
    return given


def _share(kwargs: Mapping[str, object], name: str) -> float:
    given = kwargs.get("gpu_memory_utilization")
    if given is None:
        return _UTILIZATION
    if not isinstance(given, int | float) or not 0 < given <= 1:
        what = f"engine_kwargs.gpu_memory_utilization is {given!r}, wanted more than 0, at most 1"
        raise BadTrace(name, 0, what)
    return float(given)


def _dtype(given: object, key: str, name: str) -> Dtype | None:
    if given is None or given == "auto":
        return None
    plain = str(given).split("_")[0]
    try:
        return _DTYPES.get(plain) or Dtype(plain)
    except ValueError:
        what = f"engine_kwargs.{key} is {given!r}, wanted auto, bfloat16, float16, fp8, ..."
        raise BadTrace(name, 0, what) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Of all requests of a run, in seconds; TPOT of those with more than one token."""

    ttfts_s: Sequence[float]
    tpots_s: Sequence[float]

    def figures(self) -> dict[str, dict[str, float]]:
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
    """As they were measured."""
    return Latencies(
        ttfts_s=[one.ttft_s for one in log],
        tpots_s=[one.tpot_s for one in log if one.output_tokens > 1],
    )


def replayed_latencies(
    log: Sequence[LoggedRequest],
    engine: LoggedEngine,
    memory: MemoryQuestion,
    timing: StepTiming,
) -> Latencies:
    """Of the same arrivals in the simulated engine; in turn, where several shared them.

    A log does not say what prompts have in common, so nothing is taken to be cached.

    Raises:
        DoesNotFit: the model does not fit such devices.
    """
    fitted = memory.fit(engine.tp, engine.pp)
    settings = V1Settings(
        timing=timing,
        kv_blocks=fitted.kv_blocks(engine.block_size_tokens),
        kv_block_bytes=round(memory.shape.kv_bytes(engine.block_size_tokens, memory.kv)),
        block_size_tokens=engine.block_size_tokens,
        max_len_tokens=engine.max_len_tokens or memory.shape.max_len_tokens,
        max_running_requests=engine.max_running_requests,
        max_batched_tokens=engine.max_batched_tokens,
        prefix_caching=False,
        pipeline_stages=engine.pp,
    )
    asked = [TraceRequest(one.at_s, one.prompt_tokens, one.output_tokens) for one in log]
    outcomes = [
        outcome
        for number in range(engine.replicas)
        for outcome in serve(settings, asked[number :: engine.replicas])
    ]
    return Latencies(
        ttfts_s=[one.ttft_s for one in outcomes if one.ok],
        tpots_s=[one.tpot_s for one in outcomes if one.ok and one.output_tokens > 1],
    )
