"""What data sheets say of accelerators.

Operations per second are dense (data sheets often print the figure with sparsity, twice as much).
Memory is counted in binary units, as devices report it: the "80 GB" of an H100 are 80 GiB.
Prices are round figures of public on-demand lists of one device and hour in the second half of
2025, of providers that rent whole nodes (Lambda, RunPod, CoreWeave); large clouds ask about twice
as much. They are there so that plans can be compared, and should be replaced by one's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from baton.perf.hardware import Accelerator, Dtype

_GIB = 2.0**30
_TERA = 1e12
_PCIE_4 = 32e9
_PCIE_5 = 64e9
_PCIE_6 = 128e9
"""Sixteen lanes, each direction. Source: PCI Express Base Specifications 4.0, 5.0, 6.0."""
_NIC_25 = 25e9
_NIC_50 = 50e9
_NIC_100 = 100e9
"""One interface of 200, 400 or 800 Gbit/s for each device, as in DGX and HGX reference designs."""
_SHARED_NIC = 12.5e9 / 8
"""A node of eight with one interface of 100 Gbit/s, as clouds build them from small devices."""


def _teraflops(
    *, bf16: float, fp32: float, fp8: float = 0, int8: float = 0, fp4: float = 0
) -> dict[Dtype, float]:
    known = {
        Dtype.FP32: fp32,
        Dtype.BF16: bf16,
        Dtype.FP8: fp8,
        Dtype.INT8: int8,
        Dtype.FP4: fp4,
    }
    return {dtype: figure * _TERA for dtype, figure in known.items() if figure}


_A100_FLOPS = _teraflops(bf16=312, fp32=19.5, int8=624)
_H100_FLOPS = _teraflops(bf16=989, fp32=67, fp8=1979, int8=1979)

_NVIDIA_AMPERE = (
    Accelerator(
        name="a100_40gb",
        memory_bytes=40 * _GIB,
        memory_bytes_per_s=1.555e12,
        flops=_A100_FLOPS,
        peer_bytes_per_s=300e9,
        network_bytes_per_s=_NIC_25,
        host_bytes_per_s=_PCIE_4,
        price_per_hour=1.29,
        source="NVIDIA A100 data sheet (SXM4 40 GB); DGX A100 data sheet (8 x 200 Gbit/s)",
    ),
    Accelerator(
        name="a100_sxm",
        memory_bytes=80 * _GIB,
        memory_bytes_per_s=2.039e12,
        flops=_A100_FLOPS,
        peer_bytes_per_s=300e9,
        network_bytes_per_s=_NIC_25,
        host_bytes_per_s=_PCIE_4,
        price_per_hour=1.79,
        source="NVIDIA A100 data sheet (SXM4 80 GB); DGX A100 data sheet (8 x 200 Gbit/s)",
    ),
    Accelerator(
        name="a800_sxm",
        memory_bytes=80 * _GIB,
        memory_bytes_per_s=2.039e12,
        flops=_A100_FLOPS,
        peer_bytes_per_s=200e9,
        network_bytes_per_s=_NIC_25 / 2,
        host_bytes_per_s=_PCIE_4,
        source="NVIDIA A800 data sheet (NVLink 400 GB/s in both directions together);"
        " Mooncake (FAST'25), testbed: 4 x 200 Gbit/s for 8 devices",
    ),
    Accelerator(
        name="a10",
        memory_bytes=24 * _GIB,
        memory_bytes_per_s=600e9,
        flops=_teraflops(bf16=125, fp32=31.2, int8=250),
        peer_bytes_per_s=_PCIE_4,
        network_bytes_per_s=_SHARED_NIC,
        host_bytes_per_s=_PCIE_4,
        price_per_hour=0.75,
        source="NVIDIA A10 data sheet",
    ),
)

_NVIDIA_ADA = (
    Accelerator(
        name="l40s",
        memory_bytes=48 * _GIB,
        memory_bytes_per_s=864e9,
        flops=_teraflops(bf16=362.05, fp32=91.6, fp8=733, int8=733),
        peer_bytes_per_s=_PCIE_4,
        network_bytes_per_s=_PCIE_4,
        host_bytes_per_s=_PCIE_4,
        price_per_hour=0.86,
        source="NVIDIA L40S data sheet; an interface of 400 Gbit/s a device, as far as PCIe 4.0"
        " lets it",
    ),
    Accelerator(
        name="l4",
        memory_bytes=24 * _GIB,
        memory_bytes_per_s=300e9,
        flops=_teraflops(bf16=121, fp32=30.3, fp8=242.5, int8=242.5),
        peer_bytes_per_s=_PCIE_4,
        network_bytes_per_s=_SHARED_NIC,
        host_bytes_per_s=_PCIE_4,
        price_per_hour=0.43,
        source="NVIDIA L4 data sheet; AWS g6.48xlarge (8 devices, 100 Gbit/s)",
    ),
    Accelerator(
        name="rtx_4090",
        memory_bytes=24 * _GIB,
        memory_bytes_per_s=1.008e12,
        flops=_teraflops(bf16=165.2, fp32=82.6, fp8=330.3, int8=660.6),
        peer_bytes_per_s=_PCIE_4,
        network_bytes_per_s=_SHARED_NIC,
        host_bytes_per_s=_PCIE_4,
        price_per_hour=0.69,
        source="NVIDIA Ada GPU architecture whitepaper, appendix A (tensor cores with FP32"
        " accumulation)",
    ),
)

_NVIDIA_HOPPER = (
    Accelerator(
        name="h100_sxm",
        memory_bytes=80 * _GIB,
        memory_bytes_per_s=3.35e12,
        flops=_H100_FLOPS,
        peer_bytes_per_s=450e9,
        network_bytes_per_s=_NIC_50,
        host_bytes_per_s=_PCIE_5,
        price_per_hour=2.99,
        source="NVIDIA H100 data sheet (SXM5); DGX H100 data sheet (8 x 400 Gbit/s)",
    ),
    Accelerator(
        name="h100_pcie",
        memory_bytes=80 * _GIB,
        memory_bytes_per_s=2.0e12,
        flops=_teraflops(bf16=756, fp32=51, fp8=1513, int8=1513),
        peer_bytes_per_s=_PCIE_5,
        network_bytes_per_s=_NIC_25,
        host_bytes_per_s=_PCIE_5,
        price_per_hour=2.49,
        source="NVIDIA H100 data sheet (PCIe); peers over PCIe, for bridges join pairs only",
    ),
    Accelerator(
        name="h100_nvl",
        memory_bytes=94 * _GIB,
        memory_bytes_per_s=3.9e12,
        flops=_teraflops(bf16=835, fp32=60, fp8=1671, int8=1671),
        peer_bytes_per_s=_PCIE_5,
        network_bytes_per_s=_NIC_25,
        host_bytes_per_s=_PCIE_5,
        price_per_hour=2.79,
        source="NVIDIA H100 data sheet (NVL); peers over PCIe, for bridges join pairs only",
    ),
    Accelerator(
        name="h800_sxm",
        memory_bytes=80 * _GIB,
        memory_bytes_per_s=3.35e12,
        flops=_H100_FLOPS,
        peer_bytes_per_s=200e9,
        network_bytes_per_s=_NIC_50,
        host_bytes_per_s=_PCIE_5,
        source="NVIDIA H800 data sheet (NVLink 400 GB/s in both directions together);"
        " DeepSeek-V3 report (2412.19437), 400 Gbit/s a device",
    ),
    Accelerator(
        name="gh200",
        memory_bytes=96 * _GIB,
        memory_bytes_per_s=4.0e12,
        flops=_H100_FLOPS,
        peer_bytes_per_s=450e9,
        network_bytes_per_s=_NIC_50,
        per_node=1,
        host_bytes_per_s=450e9,
        price_per_hour=1.49,
        source="NVIDIA GH200 data sheet (HBM3, 96 GB; NVLink-C2C 900 GB/s in both directions)",
    ),
    Accelerator(
        name="h20_sxm",
        memory_bytes=96 * _GIB,
        memory_bytes_per_s=4.0e12,
        flops=_teraflops(bf16=148, fp32=44, fp8=296, int8=296),
        peer_bytes_per_s=450e9,
        network_bytes_per_s=_NIC_50,
        host_bytes_per_s=_PCIE_5,
        source="NVIDIA H20 data sheet",
    ),
    Accelerator(
        name="h200_sxm",
        memory_bytes=141 * _GIB,
        memory_bytes_per_s=4.8e12,
        flops=_H100_FLOPS,
        peer_bytes_per_s=450e9,
        network_bytes_per_s=_NIC_50,
        host_bytes_per_s=_PCIE_5,
        price_per_hour=3.59,
        source="NVIDIA H200 data sheet (SXM); DGX H200 data sheet (8 x 400 Gbit/s)",
    ),
)

_NVIDIA_BLACKWELL = (
    Accelerator(
        name="b200_sxm",
        memory_bytes=180 * _GIB,
        memory_bytes_per_s=7.7e12,
        flops=_teraflops(bf16=2250, fp32=75, fp8=4500, int8=4500, fp4=9000),
        peer_bytes_per_s=900e9,
        network_bytes_per_s=_NIC_100,
        host_bytes_per_s=_PCIE_6,
        price_per_hour=4.99,
        source="NVIDIA Blackwell data sheet (HGX B200); one 800 Gbit/s interface a device",
    ),
    Accelerator(
        name="b300_sxm",
        memory_bytes=275_040 * 2.0**20,
        memory_bytes_per_s=7.75e12,
        flops=_teraflops(bf16=2250, fp32=75, fp8=4500, int8=153.5, fp4=14000),
        peer_bytes_per_s=900e9,
        network_bytes_per_s=_NIC_100,
        host_bytes_per_s=_PCIE_6,
        price_per_hour=6.5,
        source="NVIDIA Blackwell Ultra data sheet (HGX B300, 62 TB/s for 8); memory as the device"
        " reports it",
    ),
    Accelerator(
        name="gb200",
        memory_bytes=189_471 * 2.0**20,
        memory_bytes_per_s=8e12,
        flops=_teraflops(bf16=2500, fp32=80, fp8=5000, int8=5000, fp4=10000),
        peer_bytes_per_s=900e9,
        network_bytes_per_s=_NIC_100,
        per_node=72,
        host_bytes_per_s=450e9,
        source="NVIDIA Blackwell data sheet (GB200 NVL72: one NVLink domain of 72, counted as the"
        " node; NVLink-C2C to the host 900 GB/s in both directions); memory as the device reports",
    ),
    Accelerator(
        name="gb300",
        memory_bytes=275_040 * 2.0**20,
        memory_bytes_per_s=8e12,
        flops=_teraflops(bf16=2500, fp32=80, fp8=5000, int8=165, fp4=15000),
        peer_bytes_per_s=900e9,
        network_bytes_per_s=_NIC_100,
        per_node=72,
        host_bytes_per_s=450e9,
        source="NVIDIA GB300 NVL72 data sheet (one NVLink domain of 72, counted as the node);"
        " memory as that of the B300",
    ),
    Accelerator(
        name="rtx_5090",
        memory_bytes=32 * _GIB,
        memory_bytes_per_s=1.792e12,
        flops=_teraflops(bf16=209.5, fp32=104.8, fp8=419, int8=838, fp4=1676),
        peer_bytes_per_s=_PCIE_5,
        network_bytes_per_s=_SHARED_NIC,
        host_bytes_per_s=_PCIE_5,
        price_per_hour=0.89,
        source="NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A (tensor cores with"
        " FP32 accumulation)",
    ),
    Accelerator(
        name="rtx_pro_6000",
        memory_bytes=96 * _GIB,
        memory_bytes_per_s=1.792e12,
        flops=_teraflops(bf16=503.8, fp32=125, fp8=1007.6, int8=1007.6, fp4=2015.2),
        peer_bytes_per_s=_PCIE_5,
        network_bytes_per_s=_NIC_50,
        host_bytes_per_s=_PCIE_5,
        price_per_hour=1.79,
        source="NVIDIA RTX Blackwell PRO architecture whitepaper (RTX PRO 6000, workstation)",
    ),
)

_OTHERS = (
    Accelerator(
        name="mi300x",
        memory_bytes=192 * _GIB,
        memory_bytes_per_s=5.3e12,
        flops=_teraflops(bf16=1307.4, fp32=163.4, fp8=2614.9, int8=2614.9),
        peer_bytes_per_s=448e9,
        network_bytes_per_s=_NIC_50,
        host_bytes_per_s=_PCIE_5,
        price_per_hour=2.49,
        source="AMD Instinct MI300X data sheet (seven Infinity Fabric links of 64 GB/s each"
        " direction)",
    ),
    Accelerator(
        name="mi325x",
        memory_bytes=256 * _GIB,
        memory_bytes_per_s=6.0e12,
        flops=_teraflops(bf16=1307.4, fp32=163.4, fp8=2614.9, int8=2614.9),
        peer_bytes_per_s=448e9,
        network_bytes_per_s=_NIC_50,
        host_bytes_per_s=_PCIE_5,
        source="AMD Instinct MI325X data sheet",
    ),
    Accelerator(
        name="mi355x",
        memory_bytes=288 * _GIB,
        memory_bytes_per_s=8.0e12,
        flops=_teraflops(bf16=2516.6, fp32=157.3, fp8=5033.2, int8=5033.2, fp4=10066.3),
        peer_bytes_per_s=537.6e9,
        network_bytes_per_s=_NIC_50,
        host_bytes_per_s=_PCIE_5,
        source="AMD Instinct MI355X data sheet (seven Infinity Fabric links of 76.8 GB/s each"
        " direction)",
    ),
    Accelerator(
        name="cpu",
        memory_bytes=256 * _GIB,
        memory_bytes_per_s=307.2e9,
        flops=_teraflops(bf16=206, fp32=6.4, int8=412),
        peer_bytes_per_s=48e9,
        network_bytes_per_s=12.5e9,
        per_node=2,
        host_bytes_per_s=307.2e9,
        source="one socket of Intel Xeon Platinum 8480+: 8 channels of DDR5-4800; 56 cores x 2048"
        " BF16 operations a cycle (AMX) at 1.8 GHz; one UPI 2.0 link of 24 lanes at 16 GT/s",
    ),
)

CATALOGUE: Mapping[str, Accelerator] = MappingProxyType(
    {
        one.name: one
        for one in (
            *_NVIDIA_AMPERE,
            *_NVIDIA_ADA,
            *_NVIDIA_HOPPER,
            *_NVIDIA_BLACKWELL,
            *_OTHERS,
        )
    }
)
"""All of them, by name."""
