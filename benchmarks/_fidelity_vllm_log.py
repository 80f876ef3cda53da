"""Replays the arrivals of a real vLLM engine's log in the simulated one, and compares latencies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from baton.bench.accuracy.measurements import LoggedRequest, layer_profile, read_request_log
from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.model import memory
from baton.perf.model.known_models import find_shape
from baton.perf.step_timing import StepTiming
from baton.perf.steps.roofline import Roofline
from baton.simulator.outcome import mean, quantile
from baton.simulator.single_engine import simulate_engine
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.trace import TraceRequest

FOLDER = Path("perf/llmservingsim")
RUN = FOLDER / "RTXPRO6000_Llama-3.1-8B"
PROFILE = "prof_RTXPRO6000_meta-llama_Llama-3.1-8B_bf16_tp1"
DEVICE = "rtx_pro_6000"
_BLOCK_SIZE_TOKENS = 16


def compute_metrics(data_dir: Path) -> dict[str, float]:
    """Signed relative errors of the means (S against M), and the table printed.

    Raises:
        OSError: the data are not there.
    """
    with (data_dir / RUN / "requests.jsonl").open(encoding="utf-8") as lines:
        log, _ = read_request_log(lines, "requests.jsonl")
    settings = json.loads((data_dir / RUN / "meta.json").read_text(encoding="utf-8"))
    engine_kwargs = settings["engine_kwargs"]
    shape = find_shape(engine_kwargs["model"])
    timings: dict[str, StepTiming] = {
        "vllm_log": Roofline(shape, find_accelerator(DEVICE)),
        "vllm_log_profile": _read_profile(data_dir / FOLDER, shape.layers),
    }
    metrics: dict[str, float] = {"vllm_log_requests": len(log)}
    print(f"{'':20}{'TTFT mean':>11}{'p50':>9}{'p99':>9}{'TPOT mean':>12}{'p50':>9}{'p99':>9}  ms")
    _print_row(
        "measured (M)", [request.ttft_s for request in log], [request.tpot_s for request in log]
    )
    for name, timing in timings.items():
        ttfts, tpots = _replay(log, timing, engine_kwargs)
        _print_row(f"{name} (S)", ttfts, tpots)
        metrics[f"{name}_ttft_mean_error"] = (
            mean(ttfts) / mean([request.ttft_s for request in log]) - 1
        )
        metrics[f"{name}_tpot_mean_error"] = (
            mean(tpots) / mean([request.tpot_s for request in log]) - 1
        )
    return metrics


def _read_profile(folder: Path, layers: int) -> StepTiming:
    dense, attention, per_sequence = (
        (folder / f"{PROFILE}_{table}.csv").read_text(encoding="utf-8").splitlines()
        for table in ("dense", "attention", "per_sequence")
    )
    return layer_profile(dense, attention, per_sequence, layers=layers)


def _replay(
    log: Sequence[LoggedRequest], timing: StepTiming, engine_kwargs: dict[str, object]
) -> tuple[list[float], list[float]]:
    """Times to first tokens and per output token of the simulated engine."""
    model, device = str(engine_kwargs["model"]), find_accelerator(DEVICE)
    max_batched_tokens = int(str(engine_kwargs["max_num_batched_tokens"]))
    max_running_requests = int(str(engine_kwargs["max_num_seqs"]))
    memory_fit = memory.fit(
        find_shape(model),
        device,
        tp=1,
        pp=1,
        weights=Dtype.BF16,
        kv=Dtype.BF16,
        max_batched_tokens=max_batched_tokens,
        max_running_requests=max_running_requests,
    )
    settings = V1Settings(
        timing=timing,
        kv_blocks=memory_fit.kv_blocks(_BLOCK_SIZE_TOKENS),
        kv_block_bytes=int(_BLOCK_SIZE_TOKENS * find_shape(model).kv_token_bytes(Dtype.BF16)),
        block_size_tokens=_BLOCK_SIZE_TOKENS,
        max_running_requests=max_running_requests,
        max_batched_tokens=max_batched_tokens,
        prefix_caching=False,
    )
    requests = [
        TraceRequest(
            logged_request.at_s, logged_request.prompt_tokens, logged_request.output_tokens
        )
        for logged_request in log
    ]
    outcomes = simulate_engine(settings, requests)
    return [outcome.ttft_s for outcome in outcomes], [outcome.tpot_s for outcome in outcomes]


def _print_row(name: str, ttfts: Sequence[float], tpots: Sequence[float]) -> None:
    values_ms = (
        1e3 * figure
        for values in (ttfts, tpots)
        for figure in (mean(values), quantile(values, 0.5), quantile(values, 0.99))
    )
    ttft, ttft_50, ttft_99, tpot, tpot_50, tpot_99 = values_ms
    print(
        f"{name:20}{ttft:11.0f}{ttft_50:9.0f}{ttft_99:9.0f}{tpot:12.2f}{tpot_50:9.2f}{tpot_99:9.2f}"
    )
