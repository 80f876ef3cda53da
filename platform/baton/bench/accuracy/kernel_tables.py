"""Reads tables of kernel times (parquet, as AIConfigurator keeps them) and compares the curves.

`pyarrow` is imported when a table is read and not before; without it the error says what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.domain.errors import BadTrace, CannotStart
from baton.perf.fitting.calibration import Conditions, Kind, Observation, Residual
from baton.perf.hardware.accelerators import Accelerator, Dtype
from baton.perf.hardware.collectives import all_reduce
from baton.perf.hardware.efficiency import Efficiency
from baton.perf.model.layer_work import Matrix
from baton.perf.model.shape import ModelShape
from baton.perf.step_timing import StepBatch, chunk_pairs
from baton.perf.steps.roofline import Roofline, StepParts, product_s

_MILLI = 1e-3
_LEAST_WEIGHTS = 2_000_000
_LEAST_SIDE = 512
_MOST_DEPTH = 16_384
_MOST_ROWS = 16_384
"""Products of models one would serve; outside, launches and shapes unlike any model's decide."""
_ELEMENT_BYTES = 2
"""Of all-reduces' sizes, which count elements; see `perf.collectives`."""
_DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16, "fp8": Dtype.FP8}


def read_table(path: Path, columns: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """The rows of a table that has those columns.

    Raises:
        CannotStart: pyarrow is not installed.
        BadTrace: the file is no such table.
        OSError: it cannot be read.
    """
    try:
        from pyarrow import (  # type: ignore[import-untyped]  # it ships no types
            ArrowException,
            parquet,
        )
    except ImportError as missing:
        why = f"{path.name}: reading parquet needs pyarrow: install baton with the extra 'report'"
        raise CannotStart((why,)) from missing
    try:
        table = parquet.read_table(path)
    except ArrowException as wrong:
        raise BadTrace(str(path), 0, f"not a parquet table: {wrong}") from wrong
    absent = [column for column in columns if column not in table.column_names]
    if absent:
        raise BadTrace(str(path), 0, f"no column {', '.join(absent)}")
    for batch in table.to_batches():
        yield from batch.to_pylist()


def products(path: Path, accelerator: Accelerator) -> list[Residual]:
    """Measured matrix products against the curves, of those types that there are curves for."""
    found = []
    for row in read_table(path, ("gemm_dtype", "m", "n", "k", "latency")):
        dtype, m, n, k = _DTYPES.get(row["gemm_dtype"]), row["m"], row["n"], row["k"]
        small = min(n, k) < _LEAST_SIDE or n * k < _LEAST_WEIGHTS
        if dtype is None or small or k > _MOST_DEPTH or m > _MOST_ROWS:
            continue
        matrix = Matrix(inputs=k, outputs=n)
        predicted_s = product_s(accelerator, matrix, m, weights=dtype, inputs=dtype)
        name = f"{row['gemm_dtype']} {m}x{n}x{k}"
        found.append(Residual(name, Kind.KERNEL, row["latency"] * _MILLI, predicted_s))
    return found


def all_reduces(path: Path, accelerator: Accelerator) -> list[Residual]:
    """Measured all-reduces in CUDA graphs against `perf.collectives`."""
    found = []
    for row in read_table(path, ("backend", "num_gpus", "message_size", "latency")):
        if row["backend"] != "vllm_graph":
            continue
        payload = row["message_size"] * _ELEMENT_BYTES
        exchange = all_reduce(payload, row["num_gpus"], accelerator)
        name = f"{row['num_gpus']} x {payload} bytes"
        found.append(Residual(name, Kind.KERNEL, row["latency"] * _MILLI, sum(exchange)))
    return found


def attention(path: Path, accelerator: Accelerator) -> list[Observation]:
    """Measured attention of one layer as observations: prompts when `step` is 0, else decodes."""
    columns = (
        "batch_size isl num_heads num_key_value_heads head_dim kv_cache_dtype step latency op_name"
    )
    found = []
    for row in read_table(path, columns.split()):
        uneven = row["num_heads"] % row["num_key_value_heads"]
        if uneven or row["head_dim"] != _HEAD_DIM or row.get("window_size"):
            continue
        kv = Dtype.FP8 if row["kv_cache_dtype"] == "fp8" else Dtype.BF16
        shape = _layer(row["num_heads"], row["num_key_value_heads"])
        batch = _batch(row)
        parts = Roofline(shape, accelerator, kv=kv, efficiency=_PLAIN).parts(batch)
        found.append(
            Observation(
                name=f"{row['op_name']} {row['batch_size']} x {row['isl']} {kv}",
                kind=Kind.KERNEL,
                measured_s=row["latency"] * _MILLI,
                parts=StepParts(0.0, 0.0, 0.0, parts.attention_s, 0.0, 0.0),
                conditions=Conditions(requests=row["batch_size"], context_tokens=row["isl"]),
            )
        )
    return found


_HEAD_DIM = 128
_PLAIN = Efficiency(attention=1.0)
"""The curves themselves."""


def _batch(row: Mapping[str, Any]) -> StepBatch:
    count, tokens = row["batch_size"], row["isl"]
    if row["op_name"].startswith("context"):
        return StepBatch(
            prefill_tokens=count * tokens,
            prefill_requests=count,
            prefill_pairs=count * chunk_pairs(tokens, 0),
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
