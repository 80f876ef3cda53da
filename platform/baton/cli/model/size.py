"""`baton size`: whether a model fits its devices, and how many requests its KV cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, cast

import typer

from baton.cli.model.calibrate import LoadedCalibration, load_calibration
from baton.cli.model.models import AUTO, parse_dtype, read_model
from baton.cli.options import CalibrationFiles, JsonFlag, Output, resolve_format
from baton.cli.output import OutputFormat, duration_text, print_report, report_errors
from baton.domain.errors import InsufficientMemory
from baton.domain.names.words import count_text

if TYPE_CHECKING:  # imported where they are used: keeps --help fast
    from baton.perf.fitting.error_bands import TimeErrors
    from baton.perf.model.memory import MemoryModel
    from baton.perf.step_timing import StepTiming

_GIGA = 1e9
_MEGA = 1e6
_BLOCK_SIZE_TOKENS = 16
_DEFAULT_CONTEXT_TOKENS = 8192
_MAX_DEVICES_PER_REPLICA = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The arguments, looked up."""

    memory: MemoryModel
    tp: int
    pp: int
    dp: int = 1
    ep: bool = False
    context_tokens: int
    calibration: LoadedCalibration | None = None


_MODEL = typer.Argument(help="A hub id, or the path of a config.json or of its folder.")
_GPU = typer.Option("--gpu", help="The accelerator, as H100 or a100_40gb.")
_DTYPE = typer.Option("--dtype", help="Data type of the weights: bf16, fp8, int4, ...")
_KV_DTYPE = typer.Option("--kv-dtype", help="Data type of the KV cache: bf16, fp8, ...")
_CONTEXT = typer.Option(
    "--context", metavar="TOKENS", min=1, help="Prompt and output of a request."
)
_UTILIZATION = typer.Option(
    "--utilization", min=0.01, max=1.0, help="The share of the memory that the engine may use."
)
_RUNNING = typer.Option("--max-num-seqs", min=1, help="Limit of requests that run at once.")
_RANKS = typer.Option(
    "--dp", min=1, help="Data-parallel ranks, which share experts; no deployment starts them."
)
_EXPERTS = typer.Option("--ep", help="Whole experts on each device (expert parallelism).")
_BATCHED = typer.Option("--max-num-batched-tokens", min=1, help="Limit of tokens in a step.")


def size(  # noqa: PLR0913 - each is an option
    model: Annotated[str, _MODEL],
    *,
    gpu: Annotated[str, _GPU],
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor parallelism.")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Pipeline parallelism.")] = 1,
    dtype: Annotated[str, _DTYPE] = AUTO,
    kv_dtype: Annotated[str, _KV_DTYPE] = AUTO,
    context: Annotated[int | None, _CONTEXT] = None,
    utilization: Annotated[float, _UTILIZATION] = 0.9,
    max_num_seqs: Annotated[int, _RUNNING] = 256,
    max_num_batched_tokens: Annotated[int, _BATCHED] = 8192,
    dp: Annotated[int, _RANKS] = 1,
    ep: Annotated[bool, _EXPERTS] = False,
    calibration: CalibrationFiles = None,
    output: Output = OutputFormat.TEXT,
    as_json: JsonFlag = False,
) -> None:
    """Compute whether a model fits a number of devices.

    And how many requests its KV cache holds.
    """
    output = resolve_format(output, as_json=as_json)
    with report_errors():
        memory = replace(
            _memory_question(model, gpu=gpu, dtype=dtype, kv_dtype=kv_dtype),
            utilization=utilization,
            max_batched_tokens=max_num_batched_tokens,
            max_running_requests=max_num_seqs,
        )
        question = replace(
            _question(memory, tp=tp, pp=pp, context_tokens=context),
            dp=dp,
            ep=ep,
            calibration=load_calibration(tuple(calibration or ())),
        )
        _print_size(question, output)


def _print_size(question: Question, output: OutputFormat) -> None:
    """Print the size, or for scripts why it does not fit.

    Raises:
        InsufficientMemory: there is too little memory.
    """
    try:
        report = size_report(question)
    except InsufficientMemory as error:
        if output is OutputFormat.JSON:
            print_report(_missize_report(question, error), output)
        raise
    print_report(text_report(report) if output is OutputFormat.TEXT else report, output)


# --------------------------------------------------------------------------- what was asked


def _memory_question(model: str, *, gpu: str, dtype: str, kv_dtype: str) -> MemoryModel:
    from baton.perf.hardware.catalogue import find_accelerator
    from baton.perf.model.memory import MemoryModel

    stored = read_model(
        model,
        weights=parse_dtype(dtype, "--dtype"),
        kv=parse_dtype(kv_dtype, "--kv-dtype"),
    )
    return MemoryModel(
        shape=stored.shape,
        accelerator=find_accelerator(gpu),
        weights_dtype=stored.weights,
        kv_dtype=stored.kv,
    )


def _question(memory: MemoryModel, *, tp: int, pp: int, context_tokens: int | None) -> Question:
    """The question; a context that was given must fit at least once."""
    shape, kv = memory.shape, memory.kv_dtype
    if context_tokens is None:
        context_tokens = min(shape.max_len_tokens, _DEFAULT_CONTEXT_TOKENS)
    else:
        # Layers with a window keep less of it: this length in full takes as many bytes.
        min_kv_tokens = round(shape.kv_bytes(context_tokens, kv) / shape.kv_token_bytes(kv))
        memory = replace(memory, min_kv_tokens=min_kv_tokens)
    return Question(memory=memory, tp=tp, pp=pp, context_tokens=context_tokens)


# --------------------------------------------------------------------------- what is answered


def size_report(question: Question) -> dict[str, object]:
    """The answer in bytes, tokens and seconds.

    Raises:
        InsufficientMemory: there is too little memory.
    """
    memory = question.memory
    memory_fit = memory.fit(question.tp, question.pp, question.dp, ep=question.ep)
    smallest = next(memory.fits(_MAX_DEVICES_PER_REPLICA), memory_fit)
    concurrent_requests = memory_fit.concurrent_requests(question.context_tokens)
    return {
        "fits": True,
        **_inputs(question),
        "left_out": list(memory.shape.left_out),
        "parameters": memory.shape.parameters,
        "active_parameters": memory.shape.active_parameters,
        "device": {
            "usable_bytes": memory_fit.usable_bytes,
            "weights_bytes": memory_fit.weights_bytes,
            "activation_bytes": memory_fit.activation_bytes,
            "runtime_bytes": memory_fit.runtime_bytes,
            "kv_bytes": memory_fit.kv_bytes,
        },
        "kv_token_bytes": memory.shape.kv_token_bytes(memory.kv_dtype),
        "state_bytes": memory.shape.state_bytes,
        "kv_tokens": memory_fit.kv_tokens,
        "kv_blocks": memory_fit.kv_blocks(_BLOCK_SIZE_TOKENS),
        "context_tokens": question.context_tokens,
        "concurrent_requests": concurrent_requests,
        "seconds": _timings(question, concurrent_requests),
        "error_bands": _errors(question).to_dict(),
        "smallest": _split((smallest.split.tp, smallest.split.pp)),
        "max_running_requests": memory.max_running_requests,
        "for_all_running": _for_all_running(question),
        "for_all_running_without_gqa": _without_gqa(question),
    }


def _errors(question: Question) -> TimeErrors:
    """The error bands of predicted times."""
    from baton.perf.fitting.calibration import Conditions
    from baton.perf.fitting.error_bands import calibrated_errors, shipped_errors

    memory, calibration = question.memory, question.calibration
    if calibration is None:
        has_experts = memory.shape.experts is not None
        return shipped_errors(
            memory.accelerator.name, has_experts=has_experts, has_ranks=question.dp > 1
        )
    conditions = Conditions(
        prompt_tokens=question.context_tokens,
        context_tokens=question.context_tokens,
        devices=question.tp * question.dp * question.pp,
    )
    return calibrated_errors(calibration.fit, name=calibration.name, conditions=[conditions])


def _inputs(question: Question) -> dict[str, object]:
    memory = question.memory
    return {
        "model": memory.shape.name,
        "accelerator": memory.accelerator.name,
        "tp": question.tp,
        "pp": question.pp,
        **({"dp": question.dp} if question.dp > 1 else {}),
        **({"ep": True} if question.ep else {}),
        "weights": memory.weights_label,
        "kv": str(memory.kv_dtype),
    }


def _missize_report(question: Question, error: InsufficientMemory) -> dict[str, object]:
    return {
        "fits": False,
        **_inputs(question),
        "term": error.term,
        "over_bytes": error.excess_bytes,
        "smallest": _split(error.min_parallelism),
        "why": error.reason,
    }


def _split(smallest: tuple[int, int] | None) -> dict[str, int] | None:
    return None if smallest is None else {"tp": smallest[0], "pp": smallest[1]}


def _for_all_running(question: Question) -> dict[str, object] | None:
    """Devices that keep the KV of `max_running_requests` requests; None without a solution."""
    from baton.perf.model.memory import smallest_sizing

    memory = question.memory
    sizing = smallest_sizing(
        memory.fits(_MAX_DEVICES_PER_REPLICA),
        requests=memory.max_running_requests,
        context_tokens=question.context_tokens,
    )
    if sizing is None:
        return None
    split = sizing.fit.split
    return {
        "devices": sizing.devices,
        "replicas": sizing.replicas,
        "tp": split.tp,
        "pp": split.pp,
    }


def _without_gqa(question: Question) -> dict[str, object] | None:
    """The same with keys and values for each query head; None for a model that has them."""
    memory = question.memory
    shape = memory.shape
    if shape.is_hybrid or shape.latent or shape.kv_heads == shape.heads:
        return None
    ungrouped = replace(memory, shape=replace(shape, kv_heads=shape.heads))
    return _for_all_running(replace(question, memory=ungrouped))


def _timings(question: Question, concurrent_requests: float) -> dict[str, object]:
    """Seconds of a prefill alone, and of decode steps for one request and for all."""
    from baton.perf.hardware.efficiency import DEFAULT_EFFICIENCY
    from baton.perf.step_timing import StepBatch
    from baton.perf.steps.roofline import Roofline

    memory, context = question.memory, question.context_tokens
    roofline = Roofline(
        memory.shape,
        memory.accelerator,
        tp=question.tp,
        pp=question.pp,
        dp=question.dp,
        ep=question.tp * question.dp if question.ep else 1,
        efficiency=DEFAULT_EFFICIENCY
        if question.calibration is None
        else question.calibration.fit.efficiency,
        weights=memory.weights_dtype,
        kv=memory.kv_dtype,
    )

    def decode_s(requests: int) -> float:
        batch = StepBatch(decode_requests=requests, decode_context_tokens=requests * context)
        return roofline.step_s(batch)

    most = question.dp * memory.max_running_requests
    running = max(1, min(int(concurrent_requests), most))
    return {
        "prefill_s": prefill_s(roofline, context, memory.max_batched_tokens),
        "decode_step_s": decode_s(1),
        "running": running,
        "full_decode_step_s": decode_s(running),
    }


def prefill_s(timing: StepTiming, tokens: int, max_batched_tokens: int) -> float:
    """Seconds of a chunked prefill that has the engine to itself."""
    from baton.perf.step_timing import StepBatch, attention_pairs

    seconds = 0.0
    for computed_tokens in range(0, tokens, max_batched_tokens):
        chunk = min(max_batched_tokens, tokens - computed_tokens)
        batch = StepBatch(
            prefill_tokens=chunk,
            prefill_requests=1,
            prefill_pairs=attention_pairs(chunk, computed_tokens),
            prefill_context_tokens=computed_tokens,
            finished_prefills=int(computed_tokens + chunk == tokens),
        )
        seconds += timing.step_s(batch)
    return seconds


# --------------------------------------------------------------------------- for people


def text_report(report: Mapping[str, object]) -> dict[str, object]:
    """The report as a person wants it."""
    device = cast("Mapping[str, float]", report["device"])
    context = f"{report['context_tokens']:,} tokens"
    running_text = count_text(cast("int", report["max_running_requests"]), "request")
    left_out = cast("list[str]", report["left_out"])
    return {
        "model": _model_text(report),
        **({"not counted": ", ".join(left_out)} if left_out else {}),
        "devices": f"{_split_text(report)} {report['accelerator']}",
        "memory of each device": {
            "usable": _gigabytes(device["usable_bytes"]),
            "weights": _gigabytes(device["weights_bytes"]),
            "activations": _gigabytes(device["activation_bytes"]),
            "runtime": _gigabytes(device["runtime_bytes"]),
            "KV cache": _gigabytes(device["kv_bytes"]),
        },
        "KV cache": f"{report['kv_tokens']:,} tokens of {report['kv_token_bytes']:,.0f} bytes"
        f" ({report['kv']})",
        **_states_text(report),
        f"requests of {context} at once": f"{report['concurrent_requests']:.1f}",
        **_timings_text(cast("Mapping[str, float]", report["seconds"]), context),
        "error of times": _error_text(report),
        "smallest that fits": _split_text(report["smallest"]),
        f"for {running_text} of {context}": _sizing_text(
            report["for_all_running"], report["for_all_running_without_gqa"]
        ),
    }


def _states_text(report: Mapping[str, object]) -> dict[str, object]:
    """States of layers without keys and values, where there are any."""
    state_bytes = cast("float", report["state_bytes"])
    if not state_bytes:
        return {}
    return {"states": f"{state_bytes / _MEGA:,.1f} MB of each request"}


def _model_text(report: Mapping[str, object]) -> str:
    parameters, active = (
        cast("int", report[key]) / _GIGA for key in ("parameters", "active_parameters")
    )
    active_text = f", {active:.1f} active" if active < parameters else ""
    return (
        f"{report['model']}, {parameters:.1f} billion parameters{active_text}, {report['weights']}"
    )


def _error_text(report: Mapping[str, object]) -> str:
    from baton.perf.fitting.error_bands import TimeErrors  # here: keeps --help fast

    return str(TimeErrors.from_dict(cast("Mapping[str, object]", report["error_bands"])))


def _gigabytes(count_bytes: float) -> str:
    return f"{count_bytes / _GIGA:.2f} GB"


def _split_text(split: object) -> str:
    if not isinstance(split, Mapping):
        return f"none up to {_MAX_DEVICES_PER_REPLICA} devices"
    ranks = f", dp {split['dp']}" if "dp" in split else ""
    experts = ", ep" if "ep" in split else ""
    devices = split["tp"] * split["pp"] * split.get("dp", 1)
    return f"{devices} (tp {split['tp']}, pp {split['pp']}{ranks}{experts})"


def _timings_text(seconds: Mapping[str, float], context: str) -> dict[str, str]:
    one, full = seconds["decode_step_s"], seconds["full_decode_step_s"]
    return {
        f"prefill of {context}": f"{duration_text(seconds['prefill_s'])} (predicted)",
        "decode step": f"{duration_text(one)} for 1 request, {duration_text(full)} for"
        f" {seconds['running']:.0f} (predicted)",
    }


def _sizing_text(sizing: object, without_gqa: object) -> str:
    if not isinstance(sizing, Mapping):
        return f"no replica of up to {_MAX_DEVICES_PER_REPLICA} devices holds one"
    text = f"{count_text(sizing['devices'], 'device')} ({sizing['replicas']} x tp {sizing['tp']}"
    text += f", pp {sizing['pp']})"
    if isinstance(without_gqa, Mapping):
        text += f"; {without_gqa['devices']} if heads did not share keys and values"
    return text
