"""Seconds of measured kernels, by GPU and engine: grids that were fitted to tables.

A grid is linear between its points in the logarithms of sizes and seconds. Beyond its last point,
seconds grow in proportion to the work. A GPU
without tables has the times of its nearest relative, as far as data sheets do not differ.

Source: `kernel_fits.json`, which `python -m benchmarks.kernel_fits` writes; it has the errors of
each grid on the tenth of the rows that took no part in the fit.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import accumulate
from typing import Final, NamedTuple, TypedDict, cast

from baton.perf.hardware.accelerators import Dtype

_FILE: Final = "kernel_fits.json"
_STEPS_PER_OCTAVE: Final = 32
"""Stored values count these over a nanosecond, each from the value before it."""
_RELATIVES: Final[Mapping[str, str]] = {
    "a100_40gb": "a100_sxm",
    "a800_sxm": "a100_sxm",
    "a10": "a100_sxm",
    "l4": "h100_sxm",
    "l40s": "h100_sxm",
    "rtx_4090": "h100_sxm",
    "h100_pcie": "h100_sxm",
    "h100_nvl": "h100_sxm",
    "h800_sxm": "h100_sxm",
    "h20_sxm": "h200_sxm",
    "gh200": "h200_sxm",
    "b300_sxm": "b200_sxm",
    "gb300": "gb200",
    "rtx_5090": "b200_sxm",
    "rtx_pro_6000": "b200_sxm",
}
"""GPUs of the same generation, or of the next with the same types of numbers."""
_ATTENTION_RELATIVES: Final = dict.fromkeys(
    ("l4", "l40s", "rtx_4090", "rtx_5090", "rtx_pro_6000"), "a100_sxm"
)
"""The GPU that runs the same kernels of attention: FlashAttention 2, but not for latents.
Source: vLLM 0.32, `v1/attention/backends/fa_utils.py` (get_flash_attn_version)."""
_GROWTH: Final[Mapping[str, tuple[int, ...]]] = {
    "gemm": (1, 1, 1),
    "prefill": (2, 1),
    "latent_prefill": (2, 1),
    "decode": (1, 1, 1),
    "latent_decode": (1, 1, 1),
    "state_prefill": (1, 1),
    "state_decode": (1,),
    "sparse_prefill": (1, 1),
    "sparse_decode": (1, 1, 1),
    "all_reduce": (0, 1),
    "dispatch": (1,),
    "wide_experts": (1, 0),
    "experts": (1,),
}
"""Powers with which seconds grow beyond the last point of each size."""
_ENGINES: Final[Mapping[str, str]] = {"vllm": "vllm", "sglang": "sglang", "trtllm": "vllm"}
"""TensorRT-LLM's kernels have no tables here; vLLM takes many of the same from FlashInfer."""
_LATENT_ENGINE: Final = "sglang"
"""Whose tables have latent attention without the products around it."""
_SHARED_GRIDS: Final = ("latent_", "sparse_", "dispatch", "wide_experts")
"""Of `_LATENT_ENGINE`, for engines without their own."""
_SPARSE_ENGINES: Final = frozenset({"vllm", "sglang"})
"""Those with tables of sparse attention; others have the grids of `_LATENT_ENGINE`, whose kernels
on B200 and GB200 are TensorRT-LLM's."""
SPARSE_PROMPT_TOKENS: Final = 1024
"""Of prompts, whose sparse attention takes the seconds of `sparse_prefill`."""


class _StoredGrid(TypedDict):
    """As in the file."""

    axes: list[list[int]]
    values: str
    shapes: list[list[int]]
    """Of experts only: the widths of each curve."""


class ExpertWidths(NamedTuple):
    """Sizes of one layer of experts, as an engine shares them out."""

    hidden: int
    width: int
    active: int
    experts: int
    tp: int
    ep: int

    def distance(self, other: ExpertWidths) -> float:
        """In octaves, over all sizes."""
        return sum(abs(math.log2(a / b)) for a, b in zip(self, other, strict=True))


WIDE_EXPERTS: Final = ExpertWidths(hidden=7168, width=2048, active=8, experts=256, tp=1, ep=1)
"""DeepSeek-V3's, which the tables of wide expert parallelism have."""


class LogGrid:
    """Seconds by sizes."""

    __slots__ = ("_axes", "_growth", "_strides", "_values")

    def __init__(
        self,
        axes: Sequence[Sequence[float]],
        values: Sequence[float],
        growth: Sequence[int],
    ) -> None:
        self._growth = growth
        self._axes = [[math.log2(size) for size in axis] for axis in axes]
        self._values = values
        """Logarithms of seconds to the base 2, the last axis fastest."""
        strides = [1]
        for axis in reversed(self._axes[1:]):
            strides.insert(0, strides[0] * len(axis))
        self._strides = strides

    def at(self, *sizes: float) -> float:
        """Seconds at these sizes."""
        corners = [(0, 1.0)]
        beyond = 0.0
        for axis, stride, power, size in zip(
            self._axes, self._strides, self._growth, sizes, strict=True
        ):
            low, share, octaves = _locate(axis, size)
            beyond += power * octaves
            if share:
                corners = [
                    (offset + (low + step) * stride, weight * part)
                    for offset, weight in corners
                    for step, part in ((0, 1.0 - share), (1, share))
                ]
            else:
                corners = [(offset + low * stride, weight) for offset, weight in corners]
        log_s = sum(self._values[offset] * weight for offset, weight in corners)
        seconds: float = 2.0 ** (log_s + beyond)
        return seconds

    def at_two(self, first: float, second: float) -> float:
        """`at` of a grid with two axes, without its lists: placement asks for each prompt."""
        row_axis, column_axis = self._axes
        row, row_share, row_octaves = _locate(row_axis, first)
        column, share, octaves = _locate(column_axis, second)
        values, stride = self._values, self._strides[0]
        low = row * stride + column
        if row_share:
            near, far = 1.0 - row_share, row_share
            if share:
                log_s = (
                    values[low] * (near * (1.0 - share))
                    + values[low + 1] * (near * share)
                    + values[low + stride] * (far * (1.0 - share))
                    + values[low + stride + 1] * (far * share)
                )
            else:
                log_s = values[low] * near + values[low + stride] * far
        elif share:
            log_s = values[low] * (1.0 - share) + values[low + 1] * share
        else:
            log_s = values[low]
        growth = self._growth
        seconds: float = 2.0 ** (log_s + (growth[0] * row_octaves + growth[1] * octaves))
        return seconds


def _locate(axis: Sequence[float], size: float) -> tuple[int, float, float]:
    """The point below a size, the share of the way to the next, and octaves beyond the last."""
    log = math.log2(size) if size > 0 else axis[0]
    if log >= axis[-1]:
        return len(axis) - 1, 0.0, log - axis[-1]
    low = bisect_right(axis, log) - 1
    if low < 0:
        return 0, 0.0, 0.0
    position = low + (log - axis[low]) / (axis[low + 1] - axis[low])
    return int(position), position % 1.0, 0.0


class ExpertGrid:
    """Seconds of a layer's experts by tokens, for each of the measured widths."""

    def __init__(
        self,
        tokens: Sequence[float],
        by_widths: Mapping[ExpertWidths, Sequence[float]],
    ) -> None:
        self._curves = {
            widths: LogGrid([tokens], values, _GROWTH["experts"])
            for widths, values in by_widths.items()
        }

    def nearest(self, widths: ExpertWidths) -> tuple[ExpertWidths, LogGrid]:
        """The measured widths that differ least, and their seconds by tokens."""
        if widths in self._curves:
            return widths, self._curves[widths]
        return min(self._curves.items(), key=lambda item: item[0].distance(widths))


class KernelFits:
    """All grids of one engine on one GPU."""

    def __init__(self, grids: Mapping[str, _StoredGrid], latent: Mapping[str, _StoredGrid]) -> None:
        self._grids = grids
        self._latent = latent

    @cache  # noqa: B019 - an instance lives as long as the process
    def _grid(self, name: str) -> LogGrid | None:
        grid = self._grids.get(name) or self._latent.get(name)
        if grid is None:
            return None
        return LogGrid(grid["axes"], _decode(grid["values"]), _GROWTH[name.partition("/")[0]])

    @cache  # noqa: B019 - as above
    def _attention(self, kernel: str, head_dim: int, kv: Dtype) -> tuple[LogGrid, float] | None:
        """The grid of the nearest width of heads, and a factor on its seconds."""
        kv_name = _kv_name(kv)
        known = [
            int(name.split("/")[1])
            for name in self._grids
            if name.startswith(kernel + "/") and name.endswith("/" + kv_name)
        ]
        if not known:
            return None
        nearest = min(known, key=lambda width: abs(math.log2(width / head_dim)))
        grid = self._grid(f"{kernel}/{nearest}/{kv_name}")
        return None if grid is None else (grid, head_dim / nearest)

    def gemm(self, dtype: str) -> LogGrid | None:
        """By rows, outputs and inputs of a product whose weights have this type."""
        return self._grid(f"gemm/{dtype}")

    def prefill_attention(self, head_dim: int, kv: Dtype) -> tuple[LogGrid, float] | None:
        """By tokens of a prompt, and query heads of all prompts; with a factor."""
        return self._attention("prefill", head_dim, kv)

    def decode_attention(self, head_dim: int, kv: Dtype) -> tuple[LogGrid, float] | None:
        """By KV heads of all requests, attended tokens, queries to a KV head; with a factor."""
        return self._attention("decode", head_dim, kv)

    def latent_prefill(self, kv: Dtype) -> LogGrid | None:
        """By tokens of a prompt, and heads of all prompts."""
        return self._grid(f"latent_prefill/{_kv_name(kv)}")

    def latent_decode(self, kv: Dtype) -> LogGrid | None:
        """By requests, attended tokens of each, and heads; in BF16 where there is no FP8."""
        return self._grid(f"latent_decode/{_kv_name(kv)}") or self._grid("latent_decode/bf16")

    def sparse_prefill(self, kv: Dtype) -> LogGrid | None:
        """Layers with an indexer, without their products, for `SPARSE_PROMPT_TOKENS` of prompts.

        By attended tokens of a prompt's last token, and heads.
        """
        return self._grid(f"sparse_prefill/{_kv_name(kv)}")

    def sparse_decode(self, kv: Dtype) -> LogGrid | None:
        """The same of decodes: by requests, context of each, and heads."""
        return self._grid(f"sparse_decode/{_kv_name(kv)}")

    def state_prefill(self) -> LogGrid | None:
        """By tokens of a prompt, and heads with 128 x 128 numbers of all prompts."""
        return self._grid("state_prefill")

    def state_decode(self) -> LogGrid | None:
        """By heads of all requests, each with 128 x 128 numbers in 32 bits."""
        return self._grid("state_decode")

    def all_reduce(self) -> LogGrid | None:
        """By devices and bytes of the payload."""
        return self._grid("all_reduce")

    def dispatch(self, mode: str) -> LogGrid | None:
        """Of tokens to experts and back, within a node: by numbers that leave a device.

        The modes are `low_latency`, with a copy for each expert, and `normal`, with one for each
        device.
        """
        return self._grid(f"dispatch/{mode}")

    def wide_experts(self) -> LogGrid | None:
        """Of `WIDE_EXPERTS` in FP8 behind a dispatch: by tokens of a device, and devices."""
        return self._grid("wide_experts")

    @cache  # noqa: B019 - as above
    def experts(self, dtype: str) -> ExpertGrid | None:
        """Of experts whose weights have this type."""
        grid = self._grids.get(f"experts/{dtype}")
        if grid is None:
            return None
        tokens = grid["axes"][0]
        values = _decode(grid["values"])
        return ExpertGrid(
            tokens,
            {
                ExpertWidths(*widths): values[start : start + len(tokens)]
                for start, widths in zip(
                    range(0, len(values), len(tokens)), grid["shapes"], strict=True
                )
            },
        )


def measured_system(accelerator: str) -> str | None:
    """The GPU whose tables stand for an accelerator; None for none."""
    name = _RELATIVES.get(accelerator, accelerator)
    return name if f"{name}/vllm" in _fits_by_name() else None


def kernels_stand_in(accelerator: str, engine: str) -> str | None:
    """Whose kernels stand for those of an engine on an accelerator; None: its own were measured."""
    system, tables = measured_system(accelerator), _ENGINES.get(engine, "vllm")
    if system is None:
        return "no kernels were measured: times are by data sheets"
    if (system, tables) == (accelerator, engine):
        return None
    scaled = "" if system == accelerator else ", scaled by data sheets"
    return f"kernels of {tables} on {system}{scaled}"


def attention_system(accelerator: str) -> str | None:
    """The GPU whose tables of attention stand for an accelerator instead; None for none."""
    return _ATTENTION_RELATIVES.get(accelerator)


@cache
def kernel_fits(accelerator: str, engine: str) -> KernelFits | None:
    """The grids for an engine on an accelerator; None where nothing like it was measured."""
    system = measured_system(accelerator)
    if system is None:
        return None
    fits = _fits_by_name()
    latent = fits.get(f"{system}/{_LATENT_ENGINE}", {})
    own = fits.get(f"{system}/{_ENGINES.get(engine, 'vllm')}", fits[f"{system}/vllm"])
    if engine not in _SPARSE_ENGINES:
        own = {name: grid for name, grid in own.items() if not name.startswith("sparse_")}
    return KernelFits(
        own,
        {name: grid for name, grid in latent.items() if name.startswith(_SHARED_GRIDS)},
    )


@cache
def _fits_by_name() -> Mapping[str, Mapping[str, _StoredGrid]]:
    text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    return cast("Mapping[str, Mapping[str, _StoredGrid]]", json.loads(text))


def _kv_name(kv: Dtype) -> str:
    return "fp8" if kv in {Dtype.FP8, Dtype.INT8, Dtype.FP4, Dtype.INT4} else "bf16"


def _decode(text: str) -> list[float]:
    differences = array("h")
    differences.frombytes(zlib.decompress(base64.b64decode(text)))
    nanosecond = math.log2(1e-9)
    return [nanosecond + steps / _STEPS_PER_OCTAVE for steps in accumulate(differences)]
