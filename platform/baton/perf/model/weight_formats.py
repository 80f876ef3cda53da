"""Formats of stored weights: bits, and the scales that go with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.perf.hardware.accelerators import DTYPE_BYTES, Dtype
from baton.perf.model.layers import Module, Part, StoredWeights

_HALF_BYTES: Final = 2
_BITS_OF_BYTE: Final = 8
BLOCK: Final = 128
"""Width of a block of FP8 weights, where a config does not say it; of a group of integers, too."""
_NVFP4_GROUP: Final = 16
MX_GROUP: Final = 32
STORED_BYTES: dict[Dtype, float] = {
    **DTYPE_BYTES,
    Dtype.INT4: 0.5 + (2 + 0.5) / BLOCK,
    Dtype.FP4: 0.5 + 1 / _NVFP4_GROUP,
}
"""Of a weight with its share of scales. Source: AWQ (2306.00978), groups of 128 with a scale of 16
and a zero point of 4 bits; NVFP4, groups of 16 with a scale of 8 bits (MXFP4: 32)."""
ALWAYS_HALF: Final = frozenset({Part.EMBEDDING, Part.ROUTER, Part.COMPRESSOR})


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How one matrix is stored."""

    dtype: Dtype
    bits: float
    group: int | None = None
    """Inputs that share a scale; None for one scale of a whole matrix or of each output."""
    outputs_of_scale: int = 1
    scale_bytes: float = 0.0
    zero_bits: float = 0.0

    def parameter_bytes(self, module: Module) -> float:
        """Of one parameter, with its share of scales."""
        scaled = min(self.group or module.inputs, module.inputs) * self.outputs_of_scale
        return (self.bits + (self.zero_bits + _BITS_OF_BYTE * self.scale_bytes) / scaled) / (
            _BITS_OF_BYTE
        )

    @property
    def label(self) -> str:
        """As "int4", also where `dtype` has no such member."""
        if self.bits == _BITS_OF_BYTE * DTYPE_BYTES[self.dtype]:
            return str(self.dtype)
        return f"int{self.bits:g}"


BF16: Final = Format(dtype=Dtype.BF16, bits=16)
FP8: Final = Format(dtype=Dtype.FP8, bits=8)
FP8_CHANNEL: Final = Format(dtype=Dtype.FP8, bits=8, scale_bytes=4)
MXFP8: Final = Format(dtype=Dtype.FP8, bits=8, group=MX_GROUP, scale_bytes=1)
MXFP4: Final = Format(dtype=Dtype.FP4, bits=4, group=MX_GROUP, scale_bytes=1)


def nvfp4(group: int | None) -> Format:
    """Four bits by floating point with a scale of 8 bits for each group, else of 16."""
    return Format(dtype=Dtype.FP4, bits=4, group=group or _NVFP4_GROUP, scale_bytes=1)


def fp8_blocks(blocks: object) -> Format:
    """FP8 with a scale of 32 bits for each block of outputs and inputs."""
    sides = list(blocks) if isinstance(blocks, Sequence) else []
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):  # noqa: PLR2004
        return FP8
    outputs, inputs = sides
    return Format(dtype=Dtype.FP8, bits=8, group=inputs, outputs_of_scale=outputs, scale_bytes=4)


def integers(bits: float, group: int | None, *, zero_point: bool = True) -> Format:
    """Packed integers with a scale of 16 bits for each group, else for each output."""
    return Format(
        dtype=Dtype.INT8 if bits > 4 else Dtype.INT4,  # noqa: PLR2004 - the two types of integers
        bits=bits,
        group=group if group is not None and group > 0 else None,
        scale_bytes=_HALF_BYTES,
        zero_bits=bits if zero_point else 0,
    )


def uniform_weights(dtype: Dtype) -> StoredWeights:
    """All matrices in one type, but embeddings, output and routers have at least 16 bits."""
    wide_bytes = max(STORED_BYTES[dtype], DTYPE_BYTES[Dtype.BF16])
    wide = {*ALWAYS_HALF, Part.OUTPUT}
    return StoredWeights(
        dtype=dtype,
        label=str(dtype),
        bytes_by_part={part: wide_bytes if part in wide else STORED_BYTES[dtype] for part in Part},
    )
