"""Data sheet of an accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Dtype(StrEnum):
    """Storage and arithmetic types of numbers."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    FP4 = "fp4"
    INT4 = "int4"


DTYPE_BYTES: dict[Dtype, float] = {
    Dtype.FP32: 4,
    Dtype.BF16: 2,
    Dtype.FP16: 2,
    Dtype.FP8: 1,
    Dtype.INT8: 1,
    Dtype.FP4: 0.5,
    Dtype.INT4: 0.5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device and its connections: dense figures, as sold."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops_by_dtype: dict[Dtype, float]
    """Dense operations per second; a multiply-add counts as two. A missing type runs as the next
    wider listed type."""
    peer_bytes_per_s: float
    """To devices of the same node, each direction."""
    network_bytes_per_s: float
    """Its share of the node's network interfaces, each direction."""
    devices_per_node: int = 8
    host_bytes_per_s: float = 64e9
    """To host memory, each direction."""
    price_per_hour: float | None = None
    """In US dollars, on demand."""
    source: str = ""

    def flops_of(self, dtype: Dtype) -> float:
        """Operations per second in this type.

        Raises:
            ValueError: neither this type nor a wider one is listed.
        """
        wider = {
            Dtype.FP4: Dtype.FP8,
            Dtype.INT4: Dtype.BF16,
            Dtype.FP8: Dtype.BF16,
            Dtype.INT8: Dtype.BF16,
            Dtype.FP16: Dtype.BF16,
            Dtype.BF16: Dtype.FP32,
        }
        rate = self.flops_by_dtype.get(dtype)
        while rate is None:
            if dtype not in wider:
                raise ValueError(f"{self.name}: no operations per second are known for {dtype}")
            dtype = wider[dtype]
            rate = self.flops_by_dtype.get(dtype)
        return rate
