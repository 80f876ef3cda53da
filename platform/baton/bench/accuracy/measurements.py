"""Reads published measurements: benchmark rows, request logs, profiles, fits."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar

from baton.domain.errors import TraceInvalid, UnknownAccelerator
from baton.perf.hardware.accelerators import Dtype
from baton.perf.hardware.catalogue import find_accelerator
from baton.perf.steps.tables import (
    AttentionGrid,
    AttentionMeasurement,
    InterpolatedTiming,
    InterpolationCurve,
    LayerProfile,
    PolynomialTiming,
)
from baton.simulator.workloads.lines import (
    numbered_lines,
    parse_lines,
    parse_number,
    parse_object,
    parse_tokens,
)

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
"""Names in benchmark rows. Source: NVIDIA AIConfigurator, GEMMQuantMode and MoEQuantMode."""


_MISSING = frozenset({"nan", "none", "null", "n/a"})
"""Text that stands for no value; programs write it where a field is not known."""
_SPECULATION = re.compile(r"specul|spec_(dec|method|tok)|mtp|nextn|eagle|draft", re.IGNORECASE)
"""In names of columns and settings of speculative decoding."""
_SPECULATING_RUN = re.compile(r"[_-](mtp|nextn|eagle)(?!0[_-])\d*[_-]", re.IGNORECASE)
"""In names of runs."""
_WITHOUT_SPECULATION = _MISSING | {"", "0", "0.0", "false", "off", "no"}


class WorkerLayout(NamedTuple):
    """Devices of one worker: `tp` x `pp` x `dp`."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    """Ranks that attend for their own requests and share the experts."""
    ep: int = 1
    """Groups of devices among which experts are divided."""

    @property
    def devices(self) -> int:
        """Of all its ranks."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPools:
    """Workers of a disaggregated run."""

    prefill: WorkerLayout
    prefill_workers: int
    decode: WorkerLayout
    decode_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """Mean latencies of one engine, or of two pools, under `concurrency` clients."""

    line: int
    backend: str
    version: str
    model: str
    system: str
    weights: Dtype | None
    experts: Dtype | None
    disaggregated: bool
    prompt_tokens: int
    output_tokens: int
    tp: int
    pp: int
    concurrency: int
    """Clients; 0 if they are not known."""
    ttft_s: float
    tpot_s: float
    dp: int = 1
    """Ranks of data-parallel attention."""
    ep: int = 1
    """Groups of devices among which experts are divided."""
    pools: MeasuredPools | None = None
    """Of a disaggregated run, if its workers are known; `tp` to `ep` are then the prefill's."""
    problem: str = ""
    """Why nothing can be predicted for it: clients are missing, or a type is not known."""
    run_id: str = ""
    """Column `id`: tells who measured."""

    @property
    def layout(self) -> WorkerLayout:
        """Of the engine."""
        return WorkerLayout(self.tp, self.pp, self.dp, self.ep)

    @property
    def name(self) -> str:
        """For reports."""
        model = self.model.rsplit("/", 1)[-1]
        return (
            f"{self.backend} {model} {self.system} tp{self.tp}"
            f" {self.prompt_tokens}/{self.output_tokens} c{self.concurrency}"
        )


def read_rows(
    lines: Iterable[str], name: str, *, ignore_invalid: bool = False
) -> tuple[list[MeasuredRow], int]:
    """The rows of a CSV of measured latencies, and the number of skipped rows.

    Columns are those of AIConfigurator's InferenceX runs: `_ROW_COLUMNS` and optional columns.

    Raises:
        TraceInvalid: the header lacks a column; a row is invalid, unless `ignore_invalid`.
    """
    return _read_table(lines, name, _ROW_COLUMNS, _parse_row, ignore_invalid=ignore_invalid)


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


def _parse_row(told: Mapping[str, str], line: int) -> MeasuredRow:
    fields = {name: "" if text.lower() in _MISSING else text for name, text in told.items()}
    ttft_ms, tpot_ms = (_positive(fields, f"silicon_{what}_ms") for what in ("ttft", "tpot"))
    weights_name = fields.get("gemm_quant_mode") or fields.get("precision")
    disaggregated = (fields.get("mode") or "agg").lower() not in {"agg", "aggregated"}
    layout = _parse_layout(fields, "prefill_" if disaggregated else "")
    weights, experts = (
        _DTYPES.get((name or "").lower()) for name in (weights_name, fields.get("moe_quant_mode"))
    )
    pools = _parse_pools(fields, layout) if disaggregated else None
    concurrency = parse_tokens(fields["concurrency"] or 0, "concurrency", minimum=0)
    if pools is not None and not concurrency:
        concurrency = _decoding_clients(fields, pools)
    return MeasuredRow(
        line=line,
        backend=_backend(_required_text(fields, "backend")),
        version=fields.get("backend_version", "").removeprefix("v"),
        model=_required_text(fields, "model_path"),
        system=_system(_required_text(fields, "system")),
        weights=weights,
        experts=experts,
        problem=_problem(fields, weights_name, concurrency),
        disaggregated=disaggregated,
        prompt_tokens=parse_tokens(fields["isl"], "isl", minimum=1),
        output_tokens=parse_tokens(fields["osl"], "osl", minimum=2),
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        ep=layout.ep,
        pools=pools,
        concurrency=concurrency,
        ttft_s=ttft_ms * _MILLI,
        tpot_s=tpot_ms * _MILLI,
        run_id=fields.get("id") or "",
    )


_BACKENDS = {"trt": "trtllm", "trt-llm": "trtllm", "tensorrt-llm": "trtllm"}


def _backend(name: str) -> str:
    """An engine's name, without that of the router before it."""
    plain = name.lower().replace("_", "-").removeprefix("dynamo-")
    return _BACKENDS.get(plain, plain)


def _system(name: str) -> str:
    """The catalogue's name of a GPU; an unknown name stays, and costs its rows."""
    try:
        return find_accelerator(name).name
    except UnknownAccelerator:
        return name


def _speculation(fields: Mapping[str, str]) -> str:
    """The column, part of `silicon_data_source` or id that tells of drafts; empty for none."""
    sources = fields.get("silicon_data_source", "").split(";")
    settings = [item.partition("=")[::2] for item in sources]
    for name, value in (*fields.items(), *settings):
        is_told = _SPECULATION.search(name) is not None
        if is_told and value.strip().lower() not in _WITHOUT_SPECULATION:
            return f"{name.strip()} is {value.strip()!r}"
    run_id = fields.get("id", "")
    return f"id is {run_id!r}" if _SPECULATING_RUN.search(run_id) else ""


def _problem(fields: Mapping[str, str], weights_name: str | None, concurrency: int) -> str:
    if speculation := _speculation(fields):
        return f"{speculation}: rows of speculative decoding are not predicted"
    names = {"gemm_quant_mode": weights_name, "moe_quant_mode": fields.get("moe_quant_mode")}
    for column, name in names.items():
        if name and name.lower() not in _DTYPES:
            known = ", ".join(sorted(_DTYPES))
            return f"{column}: got {name!r}, expected one of {known}"
    return "" if concurrency else "it does not say how many clients there were"


def _parse_layout(fields: Mapping[str, str], prefix: str) -> WorkerLayout:
    """Of the columns with a prefix; zeros stand for values that are not known.

    Attention's devices (`tp` x `dp`) are those of the experts (`moe_tp_size` x `moe_ep_size`).
    """

    def size(column: str) -> int:
        return parse_tokens(fields.get(prefix + column) or 1, prefix + column, minimum=0) or 1

    column = f"{prefix}tp_size"
    tp = parse_tokens(fields.get(column), column, minimum=1)
    dp, ep = size("attention_dp_size"), size("moe_ep_size")
    sharers = ep * size("moe_tp_size")
    if dp > 1 and sharers == tp and tp % dp == 0:
        tp //= dp  # it counts the devices of all ranks, as `--tp` of SGLang does
    if ep > tp * dp and ep % tp == 0:
        dp = ep // tp
    return WorkerLayout(tp, size("pp_size"), dp, ep)


def _parse_pools(fields: Mapping[str, str], prefill: WorkerLayout) -> MeasuredPools | None:
    """None where a number of workers is missing or 0."""
    prefill_workers, decode_workers = (
        parse_tokens(fields.get(f"{pool}_num_workers") or 0, f"{pool}_num_workers")
        for pool in ("prefill", "decode")
    )
    if not prefill_workers or not decode_workers:
        return None
    return MeasuredPools(
        prefill=prefill,
        prefill_workers=prefill_workers,
        decode=_parse_layout(fields, "decode_"),
        decode_workers=decode_workers,
    )


def _decoding_clients(fields: Mapping[str, str], pools: MeasuredPools) -> int:
    """Requests that decode at once, as many as clients; 0 if it is not known.

    The batch is that of a rank. Of the rows on H100, one has both numbers: they agree.
    """
    batch = parse_tokens(fields.get("decode_batch_size") or 0, "decode_batch_size", minimum=0)
    return batch * pools.decode_workers * pools.decode.dp


class LoggedRequest(NamedTuple):
    """One request of an engine's log."""

    at_s: float
    """Arrival, since the first."""
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    """Since the engine queued it."""
    tpot_s: float


def read_request_log(
    lines: Iterable[str], name: str, *, ignore_invalid: bool = False
) -> tuple[list[LoggedRequest], int]:
    """Requests in order of arrival from JSON lines, and the number of skipped lines.

    Source: casys-kaist/LLMServingSim, bench.

    Raises:
        TraceInvalid: a line is invalid, unless `ignore_invalid`; there are none.
    """
    logged, skipped = parse_lines(
        numbered_lines(lines), name, _parse_logged_request, ignore_invalid=ignore_invalid
    )
    if not logged:
        raise TraceInvalid(name, 0, "holds no requests")
    first_s = min(request.at_s for request in logged)
    shifted = [request._replace(at_s=request.at_s - first_s) for request in logged]
    return sorted(shifted, key=lambda request: request.at_s), skipped


def _parse_logged_request(line: str) -> LoggedRequest:
    fields = parse_object(line)
    output_tokens = parse_tokens(fields.get("output_toks"), "output_toks", minimum=1)
    queued_s, first_s, last_s = (
        parse_number(fields.get(what), what)
        for what in ("queued_ts", "first_token_ts", "last_token_ts")
    )
    if not queued_s <= first_s <= last_s:
        raise ValueError("queued_ts, first_token_ts and last_token_ts are out of order")
    return LoggedRequest(
        at_s=parse_number(fields.get("arrival_time"), "arrival_time"),
        prompt_tokens=parse_tokens(fields.get("input_toks"), "input_toks", minimum=1),
        output_tokens=output_tokens,
        ttft_s=first_s - queued_s,
        tpot_s=(last_s - first_s) / (output_tokens - 1) if output_tokens > 1 else 0.0,
    )


# ------------------------------------------------------------------ profiles and fits


def layer_profile(
    dense: Iterable[str], attention: Iterable[str], per_sequence: Iterable[str], *, layers: int
) -> LayerProfile:
    """The layers of a model on one device, from LLMServingSim's three tables.

    Raises:
        TraceInvalid: a table lacks a column, or a row is invalid.
    """
    rows, _ = _read_table(attention, "attention profile", _ATTENTION_COLUMNS, _parse_attention_row)
    return LayerProfile(
        layers=layers,
        dense=_read_curves(dense, "dense profile", "tokens"),
        attention=AttentionGrid(rows),
        per_sequence=_read_curves(per_sequence, "per-sequence profile", "sequences"),
    )


_ATTENTION_COLUMNS = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")


def _parse_attention_row(fields: Mapping[str, str], _line: int) -> AttentionMeasurement:
    chunk, context, decodes, decode_context, micros = (
        parse_number(fields[column], column) for column in _ATTENTION_COLUMNS
    )
    return AttentionMeasurement(
        chunk=chunk,
        context=context,
        decodes=decodes,
        decode_context=decode_context,
        seconds=micros * _MICRO,
    )


def _read_curves(lines: Iterable[str], name: str, x_column: str) -> dict[str, InterpolationCurve]:
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def add_point(fields: Mapping[str, str], _line: int) -> None:
        seconds = parse_number(fields["time_us"], "time_us") * _MICRO
        points[_required_text(fields, "layer")].append(
            (parse_number(fields[x_column], x_column), seconds)
        )

    _read_table(lines, name, ("layer", x_column, "time_us"), add_point)
    return {layer: InterpolationCurve(known) for layer, known in points.items()}


def splitwise_timing(
    lines: Iterable[str], name: str, *, model: str, hardware: str, tp: int
) -> InterpolatedTiming:
    """The curves of a model on a machine: medians of Splitwise's `perf_model.csv`.

    Raises:
        TraceInvalid: the header lacks a column, a row is invalid, or no row is of this kind.
    """
    prompts: dict[float, list[float]] = defaultdict(list)
    decodes: dict[float, list[float]] = defaultdict(list)

    def add_row(fields: Mapping[str, str], _line: int) -> None:
        kind = (
            fields["model"],
            fields["hardware"],
            int(parse_number(fields["tensor_parallel"], "tp")),
        )
        if kind == (model, hardware, tp):
            batch = parse_number(fields["batch_size"], "batch_size")
            prompt = parse_number(fields["prompt_size"], "prompt_size")
            prompts[batch * prompt].append(_positive(fields, "prompt_time") * _MILLI)
            decodes[batch].append(_positive(fields, "token_time") * _MILLI)

    columns = "model hardware prompt_size batch_size prompt_time token_time tensor_parallel"
    _read_table(lines, name, tuple(columns.split()), add_row)
    if not prompts:
        raise TraceInvalid(
            name, 0, f"has no rows of {model} on {hardware} with tensor_parallel {tp}"
        )
    return InterpolatedTiming(
        prompt=InterpolationCurve((size, median(times)) for size, times in prompts.items()),
        token=InterpolationCurve((size, median(times)) for size, times in decodes.items()),
    )


def distserve_timing(text: str, name: str, *, model: str, tp: int, pp: int) -> PolynomialTiming:
    """DistServe's coefficients of a model at some tensor parallelism, from its JSON.

    Raises:
        TraceInvalid: not JSON, or no such coefficients.
    """
    try:
        coefficients = json.loads(text)[model][str(tp)]
        prefill, small, large = (
            tuple(float(number) for number in coefficients[key])
            for key in ("prefill", "decoding_smallbs", "decoding_largebs")
        )
        threshold = int(coefficients["decoding_large_small_bs_threshold"])
    except (ValueError, KeyError, TypeError) as error:
        raise TraceInvalid(name, 0, f"no coefficients of {model} at tp {tp}: {error!r}") from error
    return PolynomialTiming(
        prefill=_check_three(prefill, name),
        small_batch=_check_three(small, name),
        large_batch=_check_three(large, name),
        large_batch_requests=threshold,
        pipeline_stages=pp,
    )


def _check_three(numbers: tuple[float, ...], name: str) -> tuple[float, float, float]:
    if len(numbers) != 3:  # noqa: PLR2004 - it says so
        raise TraceInvalid(name, 0, f"{len(numbers)} coefficients, expected 3")
    return numbers[0], numbers[1], numbers[2]


# ------------------------------------------------------------------ what tables have in common


def _read_table(
    lines: Iterable[str],
    name: str,
    columns: tuple[str, ...],
    parse: Callable[[Mapping[str, str], int], T],
    *,
    ignore_invalid: bool = False,
) -> tuple[list[T], int]:
    """Results of `parse`, given the fields and line number of a row, and the skipped rows."""
    reader = csv.DictReader(lines)
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise TraceInvalid(name, 1, f"no column {', '.join(missing)}")
    rows: list[T] = []
    skipped = 0
    for fields in reader:
        try:
            rows.append(parse(_check_fields(fields, columns), reader.line_num))
        except ValueError as error:
            if not ignore_invalid:
                raise TraceInvalid(name, reader.line_num, str(error)) from error
            skipped += 1
    return rows, skipped


def _check_fields(fields: Mapping[str | None, object], columns: tuple[str, ...]) -> dict[str, str]:
    """The fields of a row; csv marks surplus fields with the key None."""
    if None in fields:
        raise ValueError("more fields than the header has columns")
    text_fields = {key: text for key, text in fields.items() if key and isinstance(text, str)}
    missing_columns = [column for column in columns if column not in text_fields]
    if missing_columns:
        raise ValueError(f"{missing_columns[0]} is missing: the row is too short")
    return text_fields


def _positive(fields: Mapping[str, str], column: str) -> float:
    number = parse_number(fields[column], column)
    if number <= 0:
        raise ValueError(f"{column} is {number:g}, expected more than 0")
    return number


def _required_text(fields: Mapping[str, str], column: str) -> str:
    if not fields[column]:
        raise ValueError(f"{column} is missing")
    return fields[column]
