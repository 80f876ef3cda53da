"""`baton calibrate LOG`: a vLLM engine's log beside its replay in the simulated engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.cli.model.models import read_model
from baton.cli.output import duration_text
from baton.cli.traces import TraceUnusable
from baton.domain.errors import TraceInvalid

if TYPE_CHECKING:  # imported where they are used: keeps --help fast
    from baton.bench.accuracy.logged_run import LoggedEngine
    from baton.bench.accuracy.measurements import LoggedRequest
    from baton.perf.model.memory import MemoryModel
    from baton.perf.step_timing import StepTiming

_REQUESTS = "requests.jsonl"
_META = "meta.json"
_SUFFIX = ".jsonl"
_TABLES = ("dense", "attention", "per_sequence")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogArgs:
    """Which log, and what it does not say itself."""

    log: Path
    gpu: str
    model: str | None = None
    """Where its shape is read from; None for the name that the log gives."""
    profile: str | None = None
    """What the paths of the device's three tables begin with; None for the roofline."""
    ignore_invalid: bool = False


def is_log(path: Path) -> bool:
    """Whether that is a log of requests, or a folder with one."""
    return path.suffix == _SUFFIX or (path / _REQUESTS).is_file()


def evaluate_log(args: LogArgs) -> dict[str, object]:
    """Latencies as measured and as predicted, and the signed errors of the means.

    Raises:
        TraceUnusable: a file cannot be read; says which line, and what is wrong with it.
        BatonError: the model or the accelerator is not known, or the model does not fit.
    """
    from baton.bench.accuracy.logged_run import logged_latencies, replayed_latencies

    path = args.log / _REQUESTS if args.log.is_dir() else args.log
    log, skipped = _requests(path, ignore_invalid=args.ignore_invalid)
    engine = _engine(path.with_name(_META))
    memory = _memory(engine, args)
    timing = _timing(engine, memory, args.profile)
    measured = logged_latencies(log)
    predicted = replayed_latencies(log, engine, memory, timing)
    if not predicted.ttfts_s:
        why = f"{path}: no request fits an engine of {memory.shape.name} as {_META} describes it"
        raise TraceUnusable(why, f"look at max_model_len in {_META}")
    return {
        "log": str(path),
        "model": memory.shape.name,
        "accelerator": memory.accelerator.name,
        "devices": {"tp": engine.tp, "pp": engine.pp, "replicas": engine.replicas},
        "timing": "layer profile" if args.profile else "roofline",
        "requests": len(log),
        "skipped_lines": skipped,
        "failed": len(log) - len(predicted.ttfts_s),
        "not_modelled": list(engine.not_modelled),
        "measured": measured.summarize(),
        "predicted": predicted.summarize(),
        "ttft_mean_error": _error(measured.ttfts_s, predicted.ttfts_s),
        "tpot_mean_error": _error(measured.tpots_s, predicted.tpots_s),
    }


def log_text_report(report: dict[str, object]) -> dict[str, object]:
    """The report as a person wants it: a table of latencies, measured (M) and simulated (S)."""
    rows = [
        {"": label, **_row(report[key])}
        for label, key in (("measured (M)", "measured"), ("predicted (S)", "predicted"))
    ]
    errors = {
        f"{term} mean, predicted against measured": _percent(report[f"{term.lower()}_mean_error"])
        for term in ("TTFT", "TPOT")
    }
    header = {key: report[key] for key in ("log", "model", "accelerator", "devices", "timing")}
    counts = {k: report[k] for k in ("skipped_lines", "failed", "not_modelled") if report[k]}
    return {**header, "requests": report["requests"], **counts, "latencies": rows, **errors}


def _row(figures: object) -> dict[str, str]:
    assert isinstance(figures, dict), figures
    return {
        f"{term} {which}": duration_text(figures[f"{term.lower()}_s"][which])
        for term in ("TTFT", "TPOT")
        for which in ("mean", "p50", "p90", "p99")
    }


def _percent(error: object) -> str:
    return f"{error:+.1%}" if isinstance(error, float) else "-"


def _error(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Of the mean, signed; None where there is nothing to be compared."""
    if not measured or not predicted or not sum(measured):
        return None
    return (sum(predicted) / len(predicted)) / (sum(measured) / len(measured)) - 1


def _requests(path: Path, *, ignore_invalid: bool) -> tuple[list[LoggedRequest], int]:
    from baton.bench.accuracy.measurements import read_request_log

    remedy = "correct the line, or leave out all that are bad with --skip-bad"
    try:
        with path.open(encoding="utf-8") as lines:
            return read_request_log(lines, str(path), ignore_invalid=ignore_invalid)
    except TraceInvalid as error:
        raise TraceUnusable(str(error), remedy) from error
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error, f"name a {_REQUESTS}, or the folder it is in") from error


def _engine(path: Path) -> LoggedEngine:
    from baton.bench.accuracy.logged_run import read_engine

    try:
        return read_engine(path.read_text(encoding="utf-8"), str(path))
    except TraceInvalid as error:
        raise TraceUnusable(str(error), "correct what the file says of the engine") from error
    except (OSError, UnicodeDecodeError) as error:
        remedy = "put the engine's arguments beside the log: {'engine_kwargs': {'model': ...}}"
        raise _unreadable(path, error, remedy) from error


def _unreadable(path: Path, error: OSError | UnicodeDecodeError, remedy: str) -> TraceUnusable:
    why = getattr(error, "strerror", None) or str(error)
    return TraceUnusable(f"{path}: cannot be read: {why}", remedy)


def _memory(engine: LoggedEngine, args: LogArgs) -> MemoryModel:
    from baton.perf.hardware.accelerators import DTYPE_BYTES, Dtype
    from baton.perf.hardware.catalogue import find_accelerator
    from baton.perf.model.memory import MemoryModel

    shape, stored_dtype = read_model(args.model or engine.model)
    weights = engine.weights or stored_dtype or Dtype.BF16
    default_kv_dtype = weights if DTYPE_BYTES[weights] >= DTYPE_BYTES[Dtype.BF16] else Dtype.BF16
    return MemoryModel(
        shape=shape,
        accelerator=find_accelerator(args.gpu),
        weights_dtype=weights,
        kv_dtype=engine.kv or default_kv_dtype,
        utilization=engine.utilization,
        max_batched_tokens=engine.max_batched_tokens,
        max_running_requests=engine.max_running_requests,
    )


def _timing(engine: LoggedEngine, memory: MemoryModel, profile: str | None) -> StepTiming:
    from baton.perf.steps.roofline import Roofline

    if profile is not None:
        return _profile(profile, memory.shape.layers)
    return Roofline(
        memory.shape,
        memory.accelerator,
        tp=engine.tp,
        pp=engine.pp,
        weights=memory.weights_dtype,
        kv=memory.kv_dtype,
    )


def _profile(prefix: str, layers: int) -> StepTiming:
    from baton.bench.accuracy.measurements import layer_profile

    tables = []
    for table in _TABLES:
        path = Path(f"{prefix}_{table}.csv")
        try:
            tables.append(path.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            remedy = f"give what the paths of {', '.join(_TABLES)}.csv have in common"
            raise _unreadable(path, error, remedy) from error
    try:
        dense, attention, per_sequence = tables
        return layer_profile(dense, attention, per_sequence, layers=layers)
    except (TraceInvalid, ValueError) as error:
        raise TraceUnusable(f"{prefix}: {error}", "correct the table") from error
