"""Compares tables of kernel times (AIConfigurator's parquet files) with the model's curves.

`pyarrow` is imported when a table is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.domain.errors import PreflightFailed, TraceInvalid
from baton.domain.names.distribution import pip_install
from baton.perf.fitting.calibration import Conditions, Measurement, MeasurementKind, Residual
from baton.perf.hardware.accelerators import Accelerator, Dtype
from baton.perf.hardware.collectives import all_reduce
from baton.perf.hardware.efficiency import Efficiency
from baton.perf.model.layer_work import Matrix
from baton.perf.model.shape import ModelShape
from baton.perf.step_timing import StepBatch, attention_pairs
from baton.perf.steps.kernels import gemm_s
from baton.perf.steps.roofline import Roofline, StepParts

_MILLI = 1e-3
_MIN_WEIGHTS = 2_000_000
_MIN_SIDE = 512
_MAX_DEPTH = 16_384
_MAX_ROWS = 16_384
"""Limits of compared products: others are dominated by launches, or unlike any model's."""
_ELEMENT_BYTES = 2
"""Sizes of all-reduces count elements."""
_DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16, "fp8": Dtype.FP8}


def _read_table(path: Path, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """The rows of a table with these columns, or `PreflightFailed` without pyarrow."""
    try:
        from pyarrow import (  # type: ignore[import-untyped]  # it ships no types
            ArrowException,
            parquet,
        )
    except ImportError as import_error:
        reason = f"{path.name}: reading parquet needs pyarrow: run {pip_install('report')}"
        raise PreflightFailed((reason,)) from import_error
    try:
        table = parquet.read_table(path)
    except ArrowException as error:
        raise TraceInvalid(str(path), 0, f"not a parquet table: {error}") from error
    missing_columns = [column for column in columns if column not in table.column_names]
    if missing_columns:
        raise TraceInvalid(str(path), 0, f"no column {', '.join(missing_columns)}")
    for batch in table.to_batches():
        yield from batch.to_pylist()


def compare_products(path: Path, accelerator: Accelerator) -> list[Residual]:
    """Measured matrix products against the curves, for types with curves.

    Raises:
        PreflightFailed: pyarrow is not installed.
        TraceInvalid: the file is no such table.
    """
    residuals = []
    for row in _read_table(path, ("gemm_dtype", "m", "n", "k", "latency")):
        dtype, m, n, k = _DTYPES.get(row["gemm_dtype"]), row["m"], row["n"], row["k"]
        is_too_small = min(n, k) < _MIN_SIDE or n * k < _MIN_WEIGHTS
        if dtype is None or is_too_small or k > _MAX_DEPTH or m > _MAX_ROWS:
            continue
        matrix = Matrix(inputs=k, outputs=n)
        predicted_s = gemm_s(accelerator, matrix, m, weights=dtype, inputs=dtype)
        name = f"{row['gemm_dtype']} {m}x{n}x{k}"
        residuals.append(
            Residual(
                name=name,
                kind=MeasurementKind.KERNEL,
                measured_s=row["latency"] * _MILLI,
                predicted_s=predicted_s,
            )
        )
    return residuals


def compare_all_reduces(path: Path, accelerator: Accelerator) -> list[Residual]:
    """Measured all-reduces in CUDA graphs against `perf.hardware.collectives`; raises likewise."""
    residuals = []
    for row in _read_table(path, ("backend", "num_gpus", "message_size", "latency")):
        if row["backend"] != "vllm_graph":
            continue
        payload_bytes = row["message_size"] * _ELEMENT_BYTES
        exchange = all_reduce(payload_bytes, row["num_gpus"], accelerator)
        name = f"{row['num_gpus']} x {payload_bytes} bytes"
        residuals.append(
            Residual(
                name=name,
                kind=MeasurementKind.KERNEL,
                measured_s=row["latency"] * _MILLI,
                predicted_s=sum(exchange),
            )
        )
    return residuals


def attention_observations(path: Path, accelerator: Accelerator) -> list[Measurement]:
    """Measured attention of one layer: prefill if `step` is 0, else decode; raises likewise."""
    columns = (
        "batch_size isl num_heads num_key_value_heads head_dim kv_cache_dtype step latency op_name"
    )
    observations = []
    for row in _read_table(path, columns.split()):
        uneven = row["num_heads"] % row["num_key_value_heads"]
        if uneven or row["head_dim"] != _HEAD_DIM or row.get("window_size"):
            continue
        kv = Dtype.FP8 if row["kv_cache_dtype"] == "fp8" else Dtype.BF16
        shape = _layer(row["num_heads"], row["num_key_value_heads"])
        batch = _batch(row)
        parts = Roofline(shape, accelerator, kv=kv, efficiency=_UNCORRECTED).parts(batch)
        observations.append(
            Measurement(
                name=f"{row['op_name']} {row['batch_size']} x {row['isl']} {kv}",
                kind=MeasurementKind.KERNEL,
                measured_s=row["latency"] * _MILLI,
                parts=StepParts(
                    fixed_s=0.0,
                    requests_s=0.0,
                    prefill_s=0.0,
                    gemm_s=0.0,
                    experts_s=0.0,
                    attention_s=parts.attention_s,
                    wire_s=0.0,
                    unscaled_s=0.0,
                ),
                conditions=Conditions(requests=row["batch_size"], context_tokens=row["isl"]),
            )
        )
    return observations


_HEAD_DIM = 128
_UNCORRECTED = Efficiency(attention=1.0)


def _batch(row: Mapping[str, Any]) -> StepBatch:
    count, tokens = row["batch_size"], row["isl"]
    if row["op_name"].startswith("context"):
        return StepBatch(
            prefill_tokens=count * tokens,
            prefill_requests=count,
            prefill_pairs=count * attention_pairs(tokens, 0),
        )
    return StepBatch(decode_requests=count, decode_context_tokens=count * (tokens + row["step"]))


def _layer(heads: int, kv_heads: int) -> ModelShape:
    return ModelShape(
        name="one layer",
        layers=1,
        hidden=heads * _HEAD_DIM,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_HEAD_DIM,
        ffn_width=1,
        vocab=1,
    )
