"""Reads what others have measured: benchmark rows, request logs, profiles, published fits."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar

from baton.domain.errors import BadTrace
from baton.perf.hardware.accelerators import Dtype
from baton.perf.steps.tables import (
    AttentionRow,
    Curve,
    Grid,
    InterpolatedTiming,
    LayerProfile,
    PolynomialTiming,
)
from baton.simulator.workloads.lines import finite, mapping, numbered, parsed, tokens

T = TypeVar("T")

_MILLI = 1e-3
_MICRO = 1e-6
_DTYPES = {
    "bf16": Dtype.BF16,
    "bfloat16": Dtype.BF16,
    "fp16": Dtype.FP16,
    "float16": Dtype.FP16,
    "fp8": Dtype.FP8,
    "fp8_static": Dtype.FP8,
    "fp8_block": Dtype.FP8,
    "fp8_ootb": Dtype.FP8,
    "int8": Dtype.INT8,
    "int8_wo": Dtype.INT8,
    "sq": Dtype.INT8,
    "fp4": Dtype.FP4,
    "nvfp4": Dtype.FP4,
    "mxfp4": Dtype.FP4,
    "w4a8_mxfp4_mxfp8": Dtype.FP4,
    "w4a16_mxfp4": Dtype.FP4,
    "int4": Dtype.INT4,
    "int4_wo": Dtype.INT4,
    "w4afp8": Dtype.INT4,
}
"""As benchmark rows spell them. Source: NVIDIA AIConfigurator, GEMMQuantMode and MoEQuantMode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One engine in a closed loop: `concurrency` clients, mean latencies."""

    line: int
    backend: str
    version: str
    model: str
    system: str
    weights: Dtype | None
    """None where the row does not say."""
    experts: Dtype | None
    disaggregated: bool
    prompt_tokens: int
    output_tokens: int
    tp: int
    pp: int
    concurrency: int
    ttft_s: float
    tpot_s: float

    @property
    def name(self) -> str:
        """What it is known by in reports."""
        model = self.model.rsplit("/", 1)[-1]
        return (
            f"{self.backend} {model} {self.system} tp{self.tp}"
            f" {self.prompt_tokens}/{self.output_tokens} c{self.concurrency}"
        )


def read_rows(
    lines: Iterable[str], name: str, *, skip_bad: bool = False
) -> tuple[list[MeasuredRow], int]:
    """The rows of a CSV of measured latencies, and how many bad ones were left out.

    Columns as AIConfigurator keeps public InferenceX runs: backend, model_path, system, isl, osl,
    tp_size, concurrency, silicon_ttft_ms, silicon_tpot_ms, and more that are used when there.

    Raises:
        BadTrace: the header lacks a column; a row is bad, unless `skip_bad`.
    """
    return _table(lines, name, _ROW_COLUMNS, _row, skip_bad=skip_bad)


_ROW_COLUMNS = (
    "backend",
    "model_path",
    "system",
    "isl",
    "osl",
    "tp_size",
    "concurrency",
    "silicon_ttft_ms",
    "silicon_tpot_ms",
)


def _row(fields: Mapping[str, str], line: int) -> MeasuredRow:
    ttft_ms, tpot_ms = (_positive(fields, f"silicon_{what}_ms") for what in ("ttft", "tpot"))
    stored = fields.get("gemm_quant_mode") or fields.get("precision")
    return MeasuredRow(
        line=line,
        backend=_word(fields, "backend"),
        version=fields.get("backend_version") or "",
        model=_word(fields, "model_path"),
        system=_word(fields, "system"),
        weights=_dtype(stored, "gemm_quant_mode"),
        experts=_dtype(fields.get("moe_quant_mode"), "moe_quant_mode"),
        disaggregated=(fields.get("mode") or "agg") != "agg",
        prompt_tokens=tokens(fields["isl"], "isl", at_least=1),
        output_tokens=tokens(fields["osl"], "osl", at_least=2),
        tp=tokens(fields["tp_size"], "tp_size", at_least=1),
        pp=tokens(fields.get("pp_size") or 1, "pp_size", at_least=1),
        concurrency=tokens(fields["concurrency"], "concurrency", at_least=1),
        ttft_s=ttft_ms * _MILLI,
        tpot_s=tpot_ms * _MILLI,
    )


def _dtype(word: str | None, what: str) -> Dtype | None:
    if not word:
        return None
    known = _DTYPES.get(word.lower())
    if known is None:
        raise ValueError(f"{what} is {word!r}, wanted one of {', '.join(sorted(_DTYPES))}")
    return known


class LoggedRequest(NamedTuple):
    """One request of a real engine's log."""

    at_s: float
    """Of its arrival, since the first."""
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    """From when the engine queued it."""
    tpot_s: float


def read_request_log(
    lines: Iterable[str], name: str, *, skip_bad: bool = False
) -> tuple[list[LoggedRequest], int]:
    """Requests in order of arrival from JSON lines, and how many bad ones were left out.

    Source: casys-kaist/LLMServingSim, bench: `arrival_time`, `queued_ts`, `first_token_ts`,
    `last_token_ts`, `input_toks`, `output_toks`.

    Raises:
        BadTrace: a line is bad, unless `skip_bad`; there are none.
    """
    logged, skipped = parsed(numbered(lines), name, _logged, skip_bad=skip_bad)
    if not logged:
        raise BadTrace(name, 0, "holds no requests")
    first_s = min(one.at_s for one in logged)
    since = [one._replace(at_s=one.at_s - first_s) for one in logged]
    return sorted(since, key=lambda one: one.at_s), skipped


def _logged(line: str) -> LoggedRequest:
    fields = mapping(line)
    output = tokens(fields.get("output_toks"), "output_toks", at_least=1)
    queued_s, first_s, last_s = (
        finite(fields.get(what), what) for what in ("queued_ts", "first_token_ts", "last_token_ts")
    )
    if not queued_s <= first_s <= last_s:
        raise ValueError("queued_ts, first_token_ts and last_token_ts are out of order")
    return LoggedRequest(
        at_s=finite(fields.get("arrival_time"), "arrival_time"),
        prompt_tokens=tokens(fields.get("input_toks"), "input_toks", at_least=1),
        output_tokens=output,
        ttft_s=first_s - queued_s,
        tpot_s=(last_s - first_s) / (output - 1) if output > 1 else 0.0,
    )


# ------------------------------------------------------------------ profiles and fits


def layer_profile(
    dense: Iterable[str], attention: Iterable[str], per_sequence: Iterable[str], *, layers: int
) -> LayerProfile:
    """The parts of a model on one device, from LLMServingSim's three tables.

    Raises:
        BadTrace: a table lacks a column, or a row is bad.
    """
    rows, _ = _table(attention, "attention profile", _ATTENTION_COLUMNS, _attention_row)
    return LayerProfile(
        layers=layers,
        dense=_curves(dense, "dense profile", "tokens"),
        attention=Grid(rows),
        per_sequence=_curves(per_sequence, "per-sequence profile", "sequences"),
    )


_ATTENTION_COLUMNS = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")


def _attention_row(fields: Mapping[str, str], _line: int) -> AttentionRow:
    chunk, context, decodes, decode_context, micros = (
        finite(fields[column], column) for column in _ATTENTION_COLUMNS
    )
    return AttentionRow(chunk, context, decodes, decode_context, micros * _MICRO)


def _curves(lines: Iterable[str], name: str, by: str) -> dict[str, Curve]:
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def point(fields: Mapping[str, str], _line: int) -> None:
        seconds = finite(fields["time_us"], "time_us") * _MICRO
        points[_word(fields, "layer")].append((finite(fields[by], by), seconds))

    _table(lines, name, ("layer", by, "time_us"), point)
    return {layer: Curve(known) for layer, known in points.items()}


def splitwise_timing(
    lines: Iterable[str], name: str, *, model: str, hardware: str, tp: int
) -> InterpolatedTiming:
    """The curves of one model on one kind of machine: medians of Splitwise's `perf_model.csv`.

    Raises:
        BadTrace: the header lacks a column, a row is bad, or none is of this kind.
    """
    prompts: dict[float, list[float]] = defaultdict(list)
    decodes: dict[float, list[float]] = defaultdict(list)

    def take(fields: Mapping[str, str], _line: int) -> None:
        kind = (fields["model"], fields["hardware"], int(finite(fields["tensor_parallel"], "tp")))
        if kind == (model, hardware, tp):
            batch = finite(fields["batch_size"], "batch_size")
            prompt = finite(fields["prompt_size"], "prompt_size")
            prompts[batch * prompt].append(_positive(fields, "prompt_time") * _MILLI)
            decodes[batch].append(_positive(fields, "token_time") * _MILLI)

    columns = "model hardware prompt_size batch_size prompt_time token_time tensor_parallel"
    _table(lines, name, tuple(columns.split()), take)
    if not prompts:
        raise BadTrace(name, 0, f"has no rows of {model} on {hardware} with tensor_parallel {tp}")
    return InterpolatedTiming(
        prompt=Curve((size, median(times)) for size, times in prompts.items()),
        token=Curve((size, median(times)) for size, times in decodes.items()),
    )


def distserve_timing(text: str, name: str, *, model: str, tp: int, pp: int) -> PolynomialTiming:
    """DistServe's coefficients of a model at some tensor parallelism, from its JSON.

    Raises:
        BadTrace: not JSON, or no coefficients of this kind.
    """
    try:
        known = json.loads(text)[model][str(tp)]
        prefill, small, large = (
            tuple(float(number) for number in known[key])
            for key in ("prefill", "decoding_smallbs", "decoding_largebs")
        )
        threshold = int(known["decoding_large_small_bs_threshold"])
    except (ValueError, KeyError, TypeError) as wrong:
        raise BadTrace(name, 0, f"no coefficients of {model} at tp {tp}: {wrong!r}") from wrong
    return PolynomialTiming(
        prefill=_three(prefill, name),
        small=_three(small, name),
        large=_three(large, name),
        large_from=threshold,
        pipeline_stages=pp,
    )


def _three(numbers: tuple[float, ...], name: str) -> tuple[float, float, float]:
    if len(numbers) != 3:  # noqa: PLR2004 - it says so
        raise BadTrace(name, 0, f"{len(numbers)} coefficients, wanted 3")
    return numbers[0], numbers[1], numbers[2]


# ------------------------------------------------------------------ what tables have in common


def _table(
    lines: Iterable[str],
    name: str,
    columns: tuple[str, ...],
    read: Callable[[Mapping[str, str], int], T],
    *,
    skip_bad: bool = False,
) -> tuple[list[T], int]:
    """What `read` makes of each row of a CSV, which gives it the fields and the line's number."""
    reader = csv.DictReader(lines)
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise BadTrace(name, 1, f"no column {', '.join(missing)}")
    good: list[T] = []
    skipped = 0
    for fields in reader:
        try:
            good.append(read(_whole(fields, columns), reader.line_num))
        except ValueError as wrong:
            if not skip_bad:
                raise BadTrace(name, reader.line_num, str(wrong)) from wrong
            skipped += 1
    return good, skipped


def _whole(fields: Mapping[str | None, object], columns: tuple[str, ...]) -> dict[str, str]:
    """The fields of a row, of which csv says by None which are too many or too few."""
    if None in fields:
        raise ValueError("more fields than the header has columns")
    whole = {key: text for key, text in fields.items() if key and isinstance(text, str)}
    short = [column for column in columns if column not in whole]
    if short:
        raise ValueError(f"{short[0]} is missing: the row is too short")
    return whole


def _positive(fields: Mapping[str, str], what: str) -> float:
    number = finite(fields[what], what)
    if number <= 0:
        raise ValueError(f"{what} is {number:g}, wanted more than 0")
    return number


def _word(fields: Mapping[str, str], what: str) -> str:
    if not fields[what]:
        raise ValueError(f"{what} is missing")
    return fields[what]
