"""Fits grids to measured kernel times, and writes them for the performance model.

Reads AIConfigurator's tables (parquet) of two engines on four GPUs. Each kernel gets a grid in the
logarithms of its sizes, whose values are fitted to nine tenths of the rows; the error on the other
tenth is kept beside the grid. Writes `platform/baton/perf/hardware/kernel_fits.json`.

    python -m benchmarks.kernel_fits --data FOLDER [--out FILE]

FOLDER holds `perf/aiconfigurator/`.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks._program import quote, say

FITS = Path(__file__).parents[1] / "platform/baton/perf/hardware/kernel_fits.json"
SYSTEMS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "gb200")
TABLES = {"vllm": ("vllm_0.24.0", "vllm_0.14.0"), "sglang": ("sglang_0.5.14",)}
"""Of each engine, newest first."""
_STEPS_PER_OCTAVE = 32
"""Values are stored as whole steps of a 32nd of an octave over a nanosecond, and
each as its difference from the value before it."""
_SMOOTHNESS = 1e-3
"""Weight of a grid's bends: it decides only where no row is near."""
_HELD_BACK = 10
_MAX_ERROR = 0.25
"""A grid that is further off than this on the rows held back is left out: the engine chooses
between kernels by more than these sizes."""
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "fp4",
    "int4_wo": "int4",
    "w4a16_mxfp4": "mxfp4",
}
_MAX_EXPERT_TP = 8
_MAX_EXPERT_EP = 72
_ROUTING = "power_law_1.01"
"""Of the tables' distributions of tokens over experts."""


def _powers(low: int, high: int) -> list[int]:
    return [2**exponent for exponent in range(low, high + 1)]


class _Points(NamedTuple):
    """Measured kernels: their sizes and seconds."""

    sizes: list[tuple[float, ...]]
    seconds: list[float]


Row = Mapping[str, Any]
_GEMM_AXES = (_powers(0, 14), _powers(7, 16), _powers(7, 16))
_PREFILL_AXES = (_powers(4, 14), _powers(0, 13))
_DECODE_AXES = (_powers(0, 14), _powers(1, 17), _powers(0, 4))
_LATENT_DECODE_AXES = (_powers(0, 10), _powers(1, 17), _powers(0, 7))
_REDUCE_AXES = ([2, 4, 8], _powers(8, 30))
_EXPERT_TOKENS = _powers(0, 14)


def main() -> int:
    """Fit and write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=FITS)
    options = parser.parse_args()
    tables = options.data / "perf" / "aiconfigurator"
    fits: dict[str, dict[str, dict[str, Any]]] = {}
    for system in SYSTEMS:
        for engine, versions in TABLES.items():
            known = [name for name in versions if any((tables / system).glob(f"{name}_*"))]
            if known:
                say(f"{system}, {known[0]} ...")
                fits[f"{system}/{engine}"] = fit_kernels(tables / system, known[0])
    source = "NVIDIA AIConfigurator (Apache-2.0), kernel tables"
    lines = [f'"{name}": {json.dumps(kernels)}' for name, kernels in fits.items()]
    body = ",\n".join([f'"source": {json.dumps(source)}', *lines])
    options.out.write_text("{\n" + body + "\n}\n")
    errors = {
        f"{name}/{kernel}": grid["held_back_mape"]
        for name, kernels in fits.items()
        for kernel, grid in kernels.items()
    }
    quote({"bytes": options.out.stat().st_size, "held_back_mape": errors})
    return 0


def fit_kernels(folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
    """The grids of one engine on one GPU, by kernel."""
    fits: dict[str, dict[str, Any]] = {}
    for name, points in _gemm_points(folder / f"{prefix}_gemm_perf.parquet").items():
        fits[f"gemm/{name}"] = fit_grid(points, _GEMM_AXES)
    path = folder / f"{prefix}_context_attention_perf.parquet"
    for name, points in _prefill_points(path).items():
        fits[f"prefill/{name}"] = fit_grid(points, _PREFILL_AXES)
    path = folder / f"{prefix}_generation_attention_perf.parquet"
    for name, points in _decode_points(path).items():
        fits[f"decode/{name}"] = fit_grid(points, _DECODE_AXES)
    for name, points in _latent_points(folder / f"{prefix}_context_mla_perf.parquet").items():
        fits[f"latent_prefill/{name}"] = fit_grid(points, _PREFILL_AXES)
    path = folder / f"{prefix}_generation_mla_perf.parquet"
    for name, points in _latent_points(path, decodes=True).items():
        fits[f"latent_decode/{name}"] = fit_grid(points, _LATENT_DECODE_AXES)
    path = folder / f"{prefix}_custom_allreduce_perf.parquet"
    fits["all_reduce"] = fit_grid(_reduce_points(path), _REDUCE_AXES)
    for name, experts in _expert_tables(folder / f"{prefix}_moe_perf.parquet").items():
        fits[f"experts/{name}"] = experts
    return {name: fit for name, fit in fits.items() if fit["held_back_mape"] <= _MAX_ERROR}


def read_rows(path: Path) -> Iterable[Row]:
    """The rows of a table; none when the engine has no such table."""
    from pyarrow import parquet  # type: ignore[import-untyped]  # it ships no types

    if not path.exists():
        return
    for batch in parquet.read_table(path).to_batches():
        yield from batch.to_pylist()


def _fastest(rows: Iterable[tuple[str, tuple[float, ...], float]]) -> dict[str, _Points]:
    """Points by name; of equal sizes the fastest, as engines choose their kernels by speed."""
    best: dict[str, dict[tuple[float, ...], float]] = defaultdict(dict)
    for name, sizes, seconds in rows:
        known = best[name].get(sizes)
        best[name][sizes] = seconds if known is None else min(known, seconds)
    return {name: _Points(list(rows), list(rows.values())) for name, rows in best.items()}


def _gemm_points(path: Path) -> dict[str, _Points]:
    return _fastest(
        (_DTYPES[row["gemm_dtype"]], (row["m"], row["n"], row["k"]), row["latency"] / 1e3)
        for row in read_rows(path)
        if row["gemm_dtype"] in _DTYPES
        and row["m"] <= _GEMM_AXES[0][-1]
        and min(row["n"], row["k"]) >= _GEMM_AXES[1][0]
    )


def _attention_name(row: Row) -> str:
    return f"{row['head_dim']}/{_DTYPES[row['kv_cache_dtype']]}"


def _prefill_points(path: Path) -> dict[str, _Points]:
    """Sizes: tokens of a prompt, and query heads of all prompts."""
    return _fastest(
        (
            _attention_name(row),
            (row["isl"], row["batch_size"] * row["num_heads"]),
            row["latency"] / 1e3,
        )
        for row in read_rows(path)
        if not row.get("window_size")
        and row["isl"] >= _PREFILL_AXES[0][0]
        # Grouped queries only: with a KV head for each, every prompt has other keys to read.
        and row["num_heads"] >= 2 * row["num_key_value_heads"]
    )


def _decode_points(path: Path) -> dict[str, _Points]:
    """Sizes: KV heads of all requests, tokens of a request, and query heads to a KV head."""
    return _fastest(
        (
            _attention_name(row),
            (
                row["batch_size"] * row["num_key_value_heads"],
                row["isl"] + row["step"],
                row["num_heads"] // row["num_key_value_heads"],
            ),
            row["latency"] / 1e3,
        )
        for row in read_rows(path)
        if not row.get("window_size") and row["num_heads"] % row["num_key_value_heads"] == 0
    )


def _latent_points(path: Path, *, decodes: bool = False) -> dict[str, _Points]:
    return _fastest(
        (
            _DTYPES[row["kv_cache_dtype"]],
            (row["batch_size"], row["isl"] + row["step"], row["num_heads"])
            if decodes
            else (row["isl"], row["batch_size"] * row["num_heads"]),
            row["latency"] / 1e3,
        )
        for row in read_rows(path)
        if decodes or row["isl"] >= _PREFILL_AXES[0][0]
    )


def _reduce_points(path: Path) -> _Points:
    """Sizes: devices, and bytes of the payload; of runs in CUDA graphs."""
    rows = _fastest(
        ("", (row["num_gpus"], 2 * row["message_size"]), row["latency"] / 1e3)
        for row in read_rows(path)
        if row["backend"].endswith("_graph")
    )
    return rows[""]


def _expert_tables(path: Path) -> dict[str, dict[str, object]]:
    """Measured times by tokens for each width of experts in the tables."""
    curves: dict[str, dict[tuple[int, ...], dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in read_rows(path):
        name = _DTYPES.get(row["moe_dtype"])
        tp, ep = row["moe_tp_size"], row["moe_ep_size"]
        is_used = row["distribution"] == _ROUTING and tp <= _MAX_EXPERT_TP and ep <= _MAX_EXPERT_EP
        if name is None or not is_used:
            continue
        shape = (row["hidden_size"], row["inter_size"], row["topk"], row["num_experts"], tp, ep)
        curve = curves[name][shape]
        seconds = row["latency"] / 1e3
        curve[row["num_tokens"]] = min(seconds, curve.get(row["num_tokens"], seconds))
    return {name: _pack_experts(by_shape) for name, by_shape in curves.items()}


def _pack_experts(by_shape: Mapping[tuple[int, ...], Mapping[int, float]]) -> dict[str, object]:
    shapes, values, errors = [], [], []
    for shape, curve in sorted(by_shape.items()):
        if len(curve) < len(_EXPERT_TOKENS) // 2:
            continue
        known = sorted(curve)
        xs, ys = np.log2(known), np.log2([curve[tokens] for tokens in known])
        shapes.append(shape)
        grid = np.interp(np.log2(_EXPERT_TOKENS), xs, ys)
        values.append(grid)
        between = [number for number, tokens in enumerate(known) if tokens not in _EXPERT_TOKENS]
        predicted = np.interp(xs, np.log2(_EXPERT_TOKENS), grid)
        errors += [abs(2 ** (predicted[number] - ys[number]) - 1) for number in between]
    return {
        "axes": [_EXPERT_TOKENS],
        "shapes": shapes,
        "values": _encode(np.concatenate(values)),
        "rows": sum(len(curve) for curve in by_shape.values()),
        "held_back_mape": round(float(np.mean(errors)), 4),
    }


def fit_grid(points: _Points, axes: Sequence[Sequence[int]]) -> dict[str, object]:
    """A grid whose multilinear interpolation of logarithms is nearest to the points."""
    logs = np.log2(np.asarray(points.sizes, dtype=float))
    targets = np.log2(np.asarray(points.seconds))
    is_held_back = np.array(
        [zlib.crc32(repr(sizes).encode()) % _HELD_BACK == 0 for sizes in points.sizes]
    )
    log_axes = [np.log2(axis) for axis in axes]
    corners, weights = _interpolation(logs, log_axes)
    fitted = ~is_held_back
    values = _solve(corners[fitted], weights[fitted], targets[fitted], [len(a) for a in axes])
    errors = np.abs(2 ** ((values[corners] * weights).sum(axis=1) - targets) - 1)
    return {
        "axes": [list(axis) for axis in axes],
        "values": _encode(values),
        "rows": len(targets),
        "held_back_mape": round(float(errors[is_held_back].mean()), 4),
    }


def _interpolation(
    logs: np.ndarray[Any, Any], axes: Sequence[np.ndarray[Any, Any]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of each point, the flat indices and weights of its cell's corners."""
    corners = np.zeros((len(logs), 1), dtype=int)
    weights = np.ones((len(logs), 1))
    for number, axis in enumerate(axes):
        x = np.clip(logs[:, number], axis[0], axis[-1])
        low = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
        share = ((x - axis[low]) / (axis[low + 1] - axis[low]))[:, None]
        corners = corners * len(axis) + low[:, None]
        corners = np.hstack([corners, corners + 1])
        weights = np.hstack([weights * (1 - share), weights * share])
    return corners, weights


def _solve(
    corners: np.ndarray[Any, Any],
    weights: np.ndarray[Any, Any],
    targets: np.ndarray[Any, Any],
    sizes: Sequence[int],
) -> np.ndarray[Any, Any]:
    count = int(np.prod(sizes))
    normal, right = np.zeros((count, count)), np.zeros(count)
    for column in range(corners.shape[1]):
        np.add.at(right, corners[:, column], weights[:, column] * targets)
        for other in range(corners.shape[1]):
            products = weights[:, column] * weights[:, other]
            np.add.at(normal, (corners[:, column], corners[:, other]), products)
    indices = np.arange(count).reshape(sizes)
    for number, size in enumerate(sizes):
        along = np.moveaxis(indices, number, 0)
        for middle in range(1, size - 1):
            triples = [along[middle - 1].ravel(), along[middle].ravel(), along[middle + 1].ravel()]
            for first, a in zip(triples, (1, -2, 1), strict=True):
                for second, b in zip(triples, (1, -2, 1), strict=True):
                    np.add.at(normal, (first, second), _SMOOTHNESS * a * b)
    normal += 1e-9 * np.eye(count)
    solution: np.ndarray[Any, Any] = np.linalg.solve(normal, right)
    return solution


def _encode(values: np.ndarray[Any, Any]) -> str:
    """Base64 of deflated little-endian 16-bit numbers; see `_STEPS_PER_OCTAVE`."""
    steps = np.round((values - np.log2(1e-9)) * _STEPS_PER_OCTAVE)
    differences = np.diff(steps, prepend=0.0).astype("<i2")
    return base64.b64encode(zlib.compress(differences.tobytes(), 9)).decode()


if __name__ == "__main__":
    sys.exit(main())
