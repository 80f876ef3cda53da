"""Replays the arrivals of a real vLLM engine's log in the simulated one, and compares latencies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from baton.bench.accuracy.measurements import LoggedRequest, layer_profile, read_request_log
from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.catalogue import accelerator
from baton.perf.model import memory
from baton.perf.model.known_models import shape_of
from baton.perf.step_timing import StepTiming
from baton.perf.steps.roofline import Roofline
from baton.simulator.outcome import mean, quantile
from baton.simulator.single_engine import serve
from baton.simulator.v1.settings import V1Settings
from baton.simulator.workloads.trace import TraceRequest

FOLDER = Path("perf/llmservingsim")
RUN = FOLDER / "RTXPRO6000_Llama-3.1-8B"
PROFILE = "prof_RTXPRO6000_meta-llama_Llama-3.1-8B_bf16_tp1"
DEVICE = "rtx_pro_6000"
_BLOCK_SIZE_TOKENS = 16


def figures(data_dir: Path) -> dict[str, float]:
    """Signed relative errors of the means (S against M), and the table printed.

    Raises:
        OSError: the data are not there.
    """
    with (data_dir / RUN / "requests.jsonl").open(encoding="utf-8") as lines:
        log, _ = read_request_log(lines, "requests.jsonl")
    settings = json.loads((data_dir / RUN / "meta.json").read_text(encoding="utf-8"))
    engine = settings["engine_kwargs"]
    shape = shape_of(engine["model"])
    timings: dict[str, StepTiming] = {
        "vllm_log": Roofline(shape, accelerator(DEVICE)),
        "vllm_log_profile": _profile(data_dir / FOLDER, shape.layers),
    }
    found: dict[str, float] = {"vllm_log_requests": len(log)}
    print(f"{'':20}{'TTFT mean':>11}{'p50':>9}{'p99':>9}{'TPOT mean':>12}{'p50':>9}{'p99':>9}  ms")
    _print("measured (M)", [one.ttft_s for one in log], [one.tpot_s for one in log])
    for name, timing in timings.items():
        ttfts, tpots = _replayed(log, timing, engine)
        _print(f"{name} (S)", ttfts, tpots)
        found[f"{name}_ttft_mean_error"] = mean(ttfts) / mean([one.ttft_s for one in log]) - 1
        found[f"{name}_tpot_mean_error"] = mean(tpots) / mean([one.tpot_s for one in log]) - 1
    return found


def _profile(folder: Path, layers: int) -> StepTiming:
    dense, attention, per_sequence = (
        (folder / f"{PROFILE}_{table}.csv").read_text(encoding="utf-8").splitlines()
        for table in ("dense", "attention", "per_sequence")
    )
    return layer_profile(dense, attention, per_sequence, layers=layers)


def _replayed(
    log: Sequence[LoggedRequest], timing: StepTiming, engine: dict[str, object]
) -> tuple[list[float], list[float]]:
    """Times to first tokens and per output token of the simulated engine."""
    model, device = str(engine["model"]), accelerator(DEVICE)
    most_tokens = int(str(engine["max_num_batched_tokens"]))
    most_requests = int(str(engine["max_num_seqs"]))
    fitted = memory.fit(
        shape_of(model),
        device,
        tp=1,
        pp=1,
        weights=Dtype.BF16,
        kv=Dtype.BF16,
        max_batched_tokens=most_tokens,
        max_running_requests=most_requests,
    )
    settings = V1Settings(
        timing=timing,
        kv_blocks=fitted.kv_blocks(_BLOCK_SIZE_TOKENS),
        kv_block_bytes=int(_BLOCK_SIZE_TOKENS * shape_of(model).kv_token_bytes(Dtype.BF16)),
        block_size_tokens=_BLOCK_SIZE_TOKENS,
        max_running_requests=most_requests,
        max_batched_tokens=most_tokens,
        prefix_caching=False,
    )
    asked = [TraceRequest(one.at_s, one.prompt_tokens, one.output_tokens) for one in log]
    outcomes = serve(settings, asked)
    return [one.ttft_s for one in outcomes], [one.tpot_s for one in outcomes]


def _print(name: str, ttfts: Sequence[float], tpots: Sequence[float]) -> None:
    figures_ms = (
        1e3 * figure
        for values in (ttfts, tpots)
        for figure in (mean(values), quantile(values, 0.5), quantile(values, 0.99))
    )
    ttft, ttft_50, ttft_99, tpot, tpot_50, tpot_99 = figures_ms
    print(
        f"{name:20}{ttft:11.0f}{ttft_50:9.0f}{ttft_99:9.0f}{tpot:12.2f}{tpot_50:9.2f}{tpot_99:9.2f}"
    )
