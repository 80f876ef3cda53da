"""Fits grids to measured kernel times, and writes them for the performance model.

Reads AIConfigurator's tables (parquet) of two engines on four GPUs. Each kernel gets a grid in the
logarithms of its sizes, whose values are fitted to nine tenths of the rows; the error on the other
tenth is kept beside the grid. Writes `platform/baton/perf/hardware/kernel_fits.json`.

    python -m benchmarks.kernel_fits --data FOLDER [--out FILE]

FOLDER holds `perf/aiconfigurator/`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from baton.perf.hardware.collectives import other_devices
from baton.perf.hardware.kernel_fits import KernelFits
from baton.perf.model.known_models import find_shape
from baton.perf.model.layer_work import attention_matrices
from baton.perf.model.layers import Attention
from benchmarks._kernel_grids import Axes, Grid, Points, decode, encode, fit_grid
from benchmarks._program import quote, say

FITS = Path(__file__).parents[1] / "platform/baton/perf/hardware/kernel_fits.json"
SAME_CHIP = {"h200_sxm": "h100_sxm"}
"""GPUs with the chip of another and faster memory: a longer time in its tables is noise."""
SYSTEMS = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "gb200")
TABLES = {"vllm": ("vllm_0.24.0", "vllm_0.14.0"), "sglang": ("sglang_0.5.14",)}
"""Of each engine, newest first."""
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


Row = Mapping[str, Any]
_GEMM_ROWS = sorted({*_powers(0, 14), *(2**exponent + 1 for exponent in (4, *range(6, 13)))})
"""A tile more than 128 rows need takes up to twice as long (H200, FP8)."""
_GEMM_AXES = (_GEMM_ROWS, _powers(7, 16), _powers(7, 16))
_PREFILL_AXES = (_powers(4, 14), _powers(0, 13))
_DECODE_AXES = (_powers(0, 14), _powers(1, 17), _powers(0, 4))
_LATENT_DECODE_AXES = (_powers(0, 10), _powers(1, 17), _powers(0, 7))
_REDUCE_AXES = ([2, 4, 8], _powers(8, 30))
_EXPERT_TOKENS = _powers(0, 14)
_STATE_PREFILL_AXES = (_powers(4, 15), _powers(0, 13))
_STATE_DECODE_AXES = (_powers(0, 16),)
_DISPATCH_AXES = (_powers(12, 32),)
_DISPATCH_ENGINE = "sglang"
_WIDE_AXES = (_powers(0, 14), _powers(1, 8))
_WIDE_TABLES = "sglang_0.5.10_wideep"
_DISPATCH_TABLES = "sglang_0.5.12_wideep_deepep"
_DISPATCH_RANKS = {"gb200": 4}
"""Devices of the tables' node; 8 on other systems."""
_DISPATCH_MIN_ACTIVE = 4
"""Experts of a token: with fewer, tokens go to a few devices only."""
_SPARSE_HEADS = _powers(3, 7)
_SPARSE_LENGTHS = [1024, 2048, 2304, 4096, 8192, 2**14, 2**15, 2**16, 2**18]
"""SGLang attends to all tokens of prompts up to 2,048."""
_SPARSE_DECODE_AXES = (
    [1, 4, 16, 64, 256],
    [2, 128, 512, 1024, 2048, 4096, 8192, 2**15, 2**17],
    _SPARSE_HEADS,
)
_SPARSE_MIN_TOKENS = 128
"""Of a prompt in the tables that is read."""
_SPARSE_STEPS = (0, 128, 512, 2048, 8192, 2**15, 2**17)
"""Of the cached tokens before a prompt in the tables, those that are read."""
_SPARSE_TOKENS = 1024
"""Prompts' times are those of this number of tokens."""
_LAUNCH_QUANTILE = 0.02
_LAUNCH_MULTIPLE = 2.5
"""Prompts' modules ran without CUDA graphs: rows within this multiple of the fastest rows show the
host's launches, not the device, and are left out."""
_MIN_SHARE = 0.05
"""Of a module's time, for what remains beside its products."""


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
                at_most = fits.get(f"{SAME_CHIP.get(system)}/{engine}", {})
                fits[f"{system}/{engine}"] = fit_kernels(tables / system, known[0], at_most)
    source = "NVIDIA AIConfigurator (Apache-2.0), kernel tables"
    lines = [
        f'"{name}": {json.dumps(kernels, separators=(",", ":"))}' for name, kernels in fits.items()
    ]
    body = ",\n".join([f'"source": {json.dumps(source)}', *lines])
    options.out.write_text("{\n" + body + "\n}\n")
    errors = {
        f"{name}/{kernel}": grid["held_back_mape"]
        for name, kernels in fits.items()
        for kernel, grid in kernels.items()
    }
    quote({"bytes": options.out.stat().st_size, "held_back_mape": errors})
    return 0


def fit_kernels(
    folder: Path, prefix: str, at_most: Mapping[str, Grid] | None = None
) -> dict[str, dict[str, Any]]:
    """The grids of one engine on one GPU, by kernel; none has more than the same of `at_most`."""
    fits: dict[str, dict[str, Any]] = {}

    def add(kernel: str, by_name: Mapping[str, Points], axes: Axes, rising: int) -> None:
        for name, points in by_name.items():
            key = f"{kernel}/{name}" if name else kernel
            fits[key] = fit_grid(points, axes, rising=rising, at_most=(at_most or {}).get(key))

    def table(name: str) -> Path:
        return folder / f"{prefix}_{name}_perf.parquet"

    add("gemm", _gemm_points(table("gemm")), _GEMM_AXES, 1)
    add("state_prefill", _state_points(table("gdn"), "context"), _STATE_PREFILL_AXES, 2)
    add("state_decode", _state_points(table("gdn"), "generation"), _STATE_DECODE_AXES, 1)
    add("prefill", _prefill_points(table("context_attention")), _PREFILL_AXES, 2)
    add("decode", _decode_points(table("generation_attention")), _DECODE_AXES, 2)
    add("latent_prefill", _latent_points(table("context_mla")), _PREFILL_AXES, 2)
    latent_decodes = _without_slow_fp8(_latent_points(table("generation_mla"), decodes=True))
    add("latent_decode", latent_decodes, _LATENT_DECODE_AXES, 3)
    products = KernelFits(cast("Any", fits), {})
    for name, points in _sparse_prompts(table("dsa_context_module"), products).items():
        axes = _up_to(_SPARSE_LENGTHS, points), _SPARSE_HEADS
        add("sparse_prefill", {name: points}, axes, 2)
    decodes = _sparse_decodes(table("dsa_generation_module"), products)
    add("sparse_decode", decodes, _SPARSE_DECODE_AXES, 3)
    add("all_reduce", _reduce_points(table("custom_allreduce")), _REDUCE_AXES, 2)
    if prefix.startswith(_DISPATCH_ENGINE):
        add("dispatch", _dispatch_points(folder), _DISPATCH_AXES, 1)
        add("wide_experts", _wide_expert_points(folder), _WIDE_AXES, 1)
    for name, by_shape in _expert_curves(table("moe")).items():
        known = (at_most or {}).get(f"experts/{name}")
        fits[f"experts/{name}"] = _pack_experts(by_shape, known)
    return {name: fit for name, fit in fits.items() if fit["held_back_mape"] <= _MAX_ERROR}


def read_rows(path: Path) -> Iterable[Row]:
    """The rows of a table; none when the engine has no such table."""
    from pyarrow import parquet  # type: ignore[import-untyped]  # it ships no types

    if not path.exists():
        return
    for batch in parquet.read_table(path).to_batches():
        yield from batch.to_pylist()


def _fastest(rows: Iterable[tuple[str, tuple[float, ...], float]]) -> dict[str, Points]:
    """Points by name; of equal sizes the fastest, as engines choose their kernels by speed."""
    best: dict[str, dict[tuple[float, ...], float]] = defaultdict(dict)
    for name, sizes, seconds in rows:
        known = best[name].get(sizes)
        best[name][sizes] = seconds if known is None else min(known, seconds)
    return {name: Points(list(rows), list(rows.values())) for name, rows in best.items()}


def _gemm_points(path: Path) -> dict[str, Points]:
    return _fastest(
        (_DTYPES[row["gemm_dtype"]], (row["m"], row["n"], row["k"]), row["latency"] / 1e3)
        for row in read_rows(path)
        if row["gemm_dtype"] in _DTYPES
        and row["m"] <= _GEMM_AXES[0][-1]
        and min(row["n"], row["k"]) >= _GEMM_AXES[1][0]
    )


def _attention_rows(path: Path) -> list[Row]:
    """Rows of full attention by the kernel that most rows of a width of heads and a type have.

    Engines choose others for shapes that this one does not support.
    """
    rows = [row for row in read_rows(path) if not row.get("window_size")]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts[_attention_name(row)][row["kernel_source"]] += 1
    usual = {name: sources.most_common(1)[0][0] for name, sources in counts.items()}
    return [row for row in rows if row["kernel_source"] == usual[_attention_name(row)]]


def _attention_name(row: Row) -> str:
    return f"{row['head_dim']}/{_DTYPES[row['kv_cache_dtype']]}"


def _prefill_points(path: Path) -> dict[str, Points]:
    """Sizes: tokens of a prompt, and query heads of all prompts."""
    return _fastest(
        (
            _attention_name(row),
            (row["isl"], row["batch_size"] * row["num_heads"]),
            row["latency"] / 1e3,
        )
        for row in _attention_rows(path)
        if row["isl"] >= _PREFILL_AXES[0][0]
        # Grouped queries only: with a KV head for each, every prompt has other keys to read.
        and row["num_heads"] >= 2 * row["num_key_value_heads"]
    )


def _decode_points(path: Path) -> dict[str, Points]:
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
        for row in _attention_rows(path)
        if row["num_heads"] % row["num_key_value_heads"] == 0
    )


def _latent_points(path: Path, *, decodes: bool = False) -> dict[str, Points]:
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


def _without_slow_fp8(by_name: dict[str, Points]) -> dict[str, Points]:
    """Without FP8 where it takes longer than BF16, as in the tables of H100 and H200.

    Engines avoid that kernel: their modules of attention take no longer with FP8.
    """
    by_sizes = {name: dict(zip(*points[:2], strict=True)) for name, points in by_name.items()}
    wide, narrow = by_sizes.get("bf16", {}), by_sizes.get("fp8", {})
    both = wide.keys() & narrow.keys()
    is_slow = sum(narrow[sizes] for sizes in both) > sum(wide[sizes] for sizes in both)
    return {name: points for name, points in by_name.items() if name != "fp8" or not is_slow}


def _reduce_points(path: Path) -> dict[str, Points]:
    """Sizes: devices, and bytes of the payload; of runs in CUDA graphs."""
    return _fastest(
        ("", (row["num_gpus"], 2 * row["message_size"]), row["latency"] / 1e3)
        for row in read_rows(path)
        if row["backend"].endswith("_graph")
    )


def _dispatch_points(folder: Path) -> dict[str, Points]:
    """Dispatch to experts and combination of their results, by DeepEP in both of its modes.

    The size is that which leaves a device, in numbers of hidden states: a copy of a token for each
    expert on another device in the mode for low latency, else for each other device with any.
    """
    ranks = _DISPATCH_RANKS.get(folder.name, 8)
    low = _fastest(
        (
            "low_latency",
            (row["num_token"] * row["hidden_size"] * row["num_topk"] * (ranks - 1) / ranks,),
            (row["dispatch_avg_t_us"] + row["combine_avg_t_us"]) / 1e6,
        )
        for row in read_rows(folder / f"{_DISPATCH_TABLES}_ll_perf.parquet")
        if row["num_topk"] >= _DISPATCH_MIN_ACTIVE
    )
    normal = _fastest(
        (
            "normal",
            (row["num_token"] * row["hidden_size"] * other_devices(ranks, row["num_topk"]),),
            (row["dispatch_transmit_us"] + row["combine_transmit_us"]) / 1e6,
        )
        for row in read_rows(folder / f"{_DISPATCH_TABLES}_normal_perf.parquet")
        if row["num_topk"] >= _DISPATCH_MIN_ACTIVE
    )
    return {**low, **normal}


def _wide_expert_points(folder: Path) -> dict[str, Points]:
    """DeepSeek-V3's experts in FP8 behind a dispatch. Sizes: tokens of a device, and devices.

    Of equal sizes the faster of the kernels for prompts and for decodes. The latter's tables end at
    128 tokens of a device; its time is taken to double with these up to 1,024.
    """
    tables = {
        phase: {
            (row["num_tokens"] // row["moe_ep_size"], row["moe_ep_size"]): row["latency"] / 1e3
            for row in read_rows(folder / f"{_WIDE_TABLES}_{phase}_moe_perf.parquet")
            if row["distribution"] == _ROUTING and row["num_tokens"] >= row["moe_ep_size"]
        }
        for phase in ("context", "generation")
    }
    decodes = tables["generation"]
    beyond = {
        (multiple * tokens, ranks): multiple * seconds
        for (tokens, ranks), seconds in decodes.items()
        for multiple in (2, 4, 8)
        if (2 * tokens, ranks) not in decodes
    }
    times = (*tables["context"].items(), *decodes.items(), *beyond.items())
    return _fastest(("", sizes, seconds) for sizes, seconds in times)


def _expert_curves(path: Path) -> dict[str, dict[tuple[int, ...], dict[int, float]]]:
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
    return curves


# ------------------------------------------------------------------ states


def _state_points(path: Path, phase: str) -> dict[str, Points]:
    """Gated delta nets: the convolution and the rule together, of states in 32 bits.

    Sizes: tokens of a prompt, and heads of all prompts; or heads of all requests.
    """
    kinds: dict[bool, dict[tuple[int, int, int, int], float]] = {True: {}, False: {}}
    for row in read_rows(path):
        if row["phase"] == phase:
            is_convolution = row["kernel_source"].startswith("causal_conv1d")
            heads = row["num_k_heads"], row["num_v_heads"]
            key = (row["seq_len"], row["batch_size"], *heads)
            known = kinds[is_convolution].get(key, row["latency"])
            kinds[is_convolution][key] = min(known, row["latency"])
    is_prompt = phase == "context"
    return _fastest(
        (
            "",
            (length, requests * heads) if is_prompt else (requests * heads,),
            (latency + kinds[True][length, requests, key_heads, heads]) / 1e3,
        )
        for (length, requests, key_heads, heads), latency in kinds[False].items()
        if (length, requests, key_heads, heads) in kinds[True]
    )


# ------------------------------------------------------------------ sparse attention


class _Module(NamedTuple):
    """A measured module of sparse attention."""

    requests: int
    tokens: int
    """Of each request."""
    cached: int
    heads: int
    weights: str
    seconds: float
    products_s: float
    """Of its products, by the grids of products."""

    @property
    def beside_s(self) -> float:
        return max(self.seconds - self.products_s, _MIN_SHARE * self.seconds)


def _sparse_prompts(path: Path, products: KernelFits) -> dict[str, Points]:
    """What modules of sparse attention take beside their products: indexer, choice, attention.

    Of DeepSeek-V3.2 and GLM-5, whose indexers differ, for `_SPARSE_TOKENS` of prompts. Sizes:
    tokens that the last token attends to, and heads.
    """
    points: dict[str, Points] = {}
    for name, modules in _sparse_modules(path, products).items():
        slow = _limited_by_device(modules)
        shares = [_SPARSE_TOKENS / (module.requests * module.tokens) for module in slow]
        points[name] = Points(
            [(module.tokens + 2 * module.cached, module.heads) for module in slow],
            [share * module.beside_s for share, module in zip(shares, slow, strict=True)],
            [share * module.seconds for share, module in zip(shares, slow, strict=True)],
        )
    return points


def _sparse_decodes(path: Path, products: KernelFits) -> dict[str, Points]:
    """The same of decodes. Sizes: requests, context and heads."""
    points: dict[str, Points] = {}
    for name, modules in _sparse_modules(path, products).items():
        few = [module for module in modules if module.requests <= _SPARSE_DECODE_AXES[0][-1]]
        points[name] = Points(
            [(module.requests, module.cached + 1, module.heads) for module in few],
            [module.beside_s for module in few],
            [module.seconds for module in few],
        )
    return points


def _up_to(axis: Sequence[int], points: Points) -> list[int]:
    """The part of a first axis that the points reach."""
    most = max(sizes[0] for sizes in points.sizes)
    return [size for size in axis if size <= most]


def _sparse_modules(path: Path, products: KernelFits) -> dict[str, list[_Module]]:
    """Modules by the type of their KV cache."""
    found: dict[str, list[_Module]] = defaultdict(list)

    @cache
    def products_s(model: str, dtype: str, heads: int, rows: int) -> float | None:
        grid = products.gemm({"fp8_block": "fp8"}.get(dtype, _DTYPES[dtype]))
        hidden, attention = _sparse_shape(model)
        matrices = attention_matrices(attention, hidden, max(1, attention.heads // heads))
        if grid is None:
            return None
        return sum(grid.at(rows, matrix.outputs, matrix.inputs) for matrix in matrices)

    for row in read_rows(path):
        model, heads = row["model"].removesuffix("-FP8"), row["num_heads"]
        is_prompt = row["op_name"] == "dsa_context_module"
        is_read = row["op_name"] == "dsa_generation_module" or (
            is_prompt and row["step"] in _SPARSE_STEPS and row["isl"] >= _SPARSE_MIN_TOKENS
        )
        if not is_read or model not in _SPARSE_MODELS or heads < _SPARSE_HEADS[0]:
            continue
        known_s = products_s(model, row["gemm_type"], heads, row["batch_size"] * row["isl"])
        if known_s is not None:
            sizes = row["batch_size"], row["isl"], row["step"], heads
            module = _Module(*sizes, row["gemm_type"], row["latency"] / 1e3, known_s)
            found[_DTYPES[row["kv_cache_dtype"]]].append(module)
    return found


_SPARSE_MODELS = ("deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5")


@cache
def _sparse_shape(model: str) -> tuple[int, Attention]:
    shape = find_shape(model)
    for layer in shape.layer_counts():
        if layer.attention is not None and layer.attention.indexer is not None:
            return shape.hidden, layer.attention
    raise ValueError(f"{model}: got no layer with an indexer, expected one")


def _limited_by_device(modules: Sequence[_Module]) -> list[_Module]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for module in modules:
        seconds[module.weights].append(module.seconds)
    launch_s = {weights: np.quantile(some, _LAUNCH_QUANTILE) for weights, some in seconds.items()}
    return [
        module
        for module in modules
        if module.seconds > _LAUNCH_MULTIPLE * launch_s[module.weights]
        and module.requests * module.tokens >= 2 * _SPARSE_TOKENS
    ]


def _pack_experts(
    by_shape: Mapping[tuple[int, ...], Mapping[int, float]], at_most: Grid | None
) -> dict[str, object]:
    shapes, values, errors = [], [], []
    most: dict[tuple[int, ...], Any] = {}
    if at_most is not None:
        curves = decode(at_most["values"]).reshape(-1, len(_EXPERT_TOKENS))
        most = dict(zip(map(tuple, at_most["shapes"]), curves, strict=True))
    for shape, curve in sorted(by_shape.items()):
        if len(curve) < len(_EXPERT_TOKENS) // 2:
            continue
        known = sorted(curve)
        xs, ys = np.log2(known), np.log2([curve[tokens] for tokens in known])
        shapes.append(list(shape))
        grid = np.interp(np.log2(_EXPERT_TOKENS), xs, ys)
        grid = np.minimum(grid, most.get(shape, grid))
        values.append(grid)
        between = [number for number, tokens in enumerate(known) if tokens not in _EXPERT_TOKENS]
        predicted = np.interp(xs, np.log2(_EXPERT_TOKENS), grid)
        errors += [abs(2 ** (predicted[number] - ys[number]) - 1) for number in between]
    return {
        "axes": [_EXPERT_TOKENS],
        "shapes": shapes,
        "values": encode(np.concatenate(values)),
        "rows": sum(len(curve) for curve in by_shape.values()),
        "held_back_mape": round(float(np.mean(errors)), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
