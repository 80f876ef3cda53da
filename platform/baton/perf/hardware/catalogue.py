"""Accelerators by the names of people, clouds and drivers, from data sheets.

Operations per second are dense; data sheets often print twice as much, with sparsity. Memory is in
binary units, as devices report it: the "80 GB" of an H100 are 80 GiB. Prices are rounded public
on-demand prices of one device and hour, second half of 2025, at providers of whole nodes (Lambda,
RunPod, CoreWeave). Large clouds ask about twice as much.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from baton.domain.errors import UnknownAccelerator
from baton.perf.hardware.accelerators import Accelerator, Dtype

_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "a100": "a100_sxm",
        "a10080gb": "a100_sxm",
        "a10080g": "a100_sxm",
        "a100sxm80gb": "a100_sxm",
        "a10040g": "a100_40gb",
        "a100sxm40gb": "a100_40gb",
        "a800": "a800_sxm",
        "h100": "h100_sxm",
        "h10080gb": "h100_sxm",
        "h10080g": "h100_sxm",
        "h10080gbhbm3": "h100_sxm",
        "h800": "h800_sxm",
        "h20": "h20_sxm",
        "h200": "h200_sxm",
        "b200": "b200_sxm",
        "b300": "b300_sxm",
        "gb200sxm": "gb200",
        "gb200nvl72": "gb200",
        "gb300sxm": "gb300",
        "gb300nvl72": "gb300",
        "gh20096gb": "gh200",
        "gh200480gb": "gh200",
        "5090": "rtx_5090",
        "geforcertx5090": "rtx_5090",
        "rtx4090": "rtx_4090",
        "geforcertx4090": "rtx_4090",
        "4090": "rtx_4090",
        "rtx6000pro": "rtx_pro_6000",
        "rtxpro6000blackwell": "rtx_pro_6000",
        "instinctmi300x": "mi300x",
        "instinctmi325x": "mi325x",
        "instinctmi355x": "mi355x",
    }
)
_TYPES: Final = (Dtype.FP32, Dtype.BF16, Dtype.FP8, Dtype.INT8, Dtype.FP4)
_Row = tuple[str, float, float, float, float, float, int, float | None, tuple[float, ...], str]
"""Name, GiB of memory, its bytes/s, bytes/s to peers, network and host, devices of a node, price,
1e12 operations/s of each type (0 or left out: not supported), source."""
_PCIE_4 = 32e9
_PCIE_5 = 64e9
_PCIE_6 = 128e9
"""Sixteen lanes, each direction. Source: PCI Express Base Specifications 4.0, 5.0, 6.0."""
_NIC_25 = 25e9
_NIC_50 = 50e9
_NIC_100 = 100e9
"""One interface of 200, 400 or 800 Gbit/s for each device, as in DGX and HGX reference designs."""
_SHARED_NIC = 12.5e9 / 8
"""A node of eight small devices with one interface of 100 Gbit/s, as in clouds."""

# fmt: off
_ROWS: tuple[_Row, ...] = (
    ("a100_40gb", 40, 1.555e12, 300e9, _NIC_25, _PCIE_4, 8, 1.29,
     (19.5, 312, 0, 624),
     "NVIDIA A100 data sheet (SXM4 40 GB); DGX A100 data sheet (8 x 200 Gbit/s)"),
    ("a100_sxm", 80, 2.039e12, 300e9, _NIC_25, _PCIE_4, 8, 1.79,
     (19.5, 312, 0, 624),
     "NVIDIA A100 data sheet (SXM4 80 GB); DGX A100 data sheet (8 x 200 Gbit/s)"),
    ("a800_sxm", 80, 2.039e12, 200e9, _NIC_25 / 2, _PCIE_4, 8, None,
     (19.5, 312, 0, 624),
     "NVIDIA A800 data sheet (NVLink 400 GB/s in both directions together); Mooncake (FAST'25), "
     "testbed: 4 x 200 Gbit/s for 8 devices"),
    ("a10", 24, 600e9, _PCIE_4, _SHARED_NIC, _PCIE_4, 8, 0.75,
     (31.2, 125, 0, 250), "NVIDIA A10 data sheet"),
    ("l40s", 48, 864e9, _PCIE_4, _PCIE_4, _PCIE_4, 8, 0.86,
     (91.6, 362.05, 733, 733),
     "NVIDIA L40S data sheet; an interface of 400 Gbit/s a device, as far as PCIe 4.0 lets it"),
    ("l4", 24, 300e9, _PCIE_4, _SHARED_NIC, _PCIE_4, 8, 0.43,
     (30.3, 121, 242.5, 242.5), "NVIDIA L4 data sheet; AWS g6.48xlarge (8 devices, 100 Gbit/s)"),
    ("rtx_4090", 24, 1.008e12, _PCIE_4, _SHARED_NIC, _PCIE_4, 8, 0.69,
     (82.6, 165.2, 330.3, 660.6),
     "NVIDIA Ada GPU architecture whitepaper, appendix A (tensor cores with FP32 accumulation)"),
    ("h100_sxm", 80, 3.35e12, 450e9, _NIC_50, _PCIE_5, 8, 2.99,
     (67, 989, 1979, 1979), "NVIDIA H100 data sheet (SXM5); DGX H100 data sheet (8 x 400 Gbit/s)"),
    ("h100_pcie", 80, 2.0e12, _PCIE_5, _NIC_25, _PCIE_5, 8, 2.49,
     (51, 756, 1513, 1513),
     "NVIDIA H100 data sheet (PCIe); peers over PCIe, for bridges join pairs only"),
    ("h100_nvl", 94, 3.9e12, _PCIE_5, _NIC_25, _PCIE_5, 8, 2.79,
     (60, 835, 1671, 1671),
     "NVIDIA H100 data sheet (NVL); peers over PCIe, for bridges join pairs only"),
    ("h800_sxm", 80, 3.35e12, 200e9, _NIC_50, _PCIE_5, 8, None,
     (67, 989, 1979, 1979),
     "NVIDIA H800 data sheet (NVLink 400 GB/s in both directions together); DeepSeek-V3 report "
     "(2412.19437), 400 Gbit/s a device"),
    ("gh200", 96, 4.0e12, 450e9, _NIC_50, 450e9, 1, 1.49,
     (67, 989, 1979, 1979),
     "NVIDIA GH200 data sheet (HBM3, 96 GB; NVLink-C2C 900 GB/s in both directions)"),
    ("h20_sxm", 96, 4.0e12, 450e9, _NIC_50, _PCIE_5, 8, None,
     (44, 148, 296, 296), "NVIDIA H20 data sheet"),
    ("h200_sxm", 141, 4.8e12, 450e9, _NIC_50, _PCIE_5, 8, 3.59,
     (67, 989, 1979, 1979), "NVIDIA H200 data sheet (SXM); DGX H200 data sheet (8 x 400 Gbit/s)"),
    ("b200_sxm", 180, 7.7e12, 900e9, _NIC_100, _PCIE_6, 8, 4.99,
     (75, 2250, 4500, 4500, 9000),
     "NVIDIA Blackwell data sheet (HGX B200); one 800 Gbit/s interface a device"),
    ("b300_sxm", 268.59375, 7.75e12, 900e9, _NIC_100, _PCIE_6, 8, 6.5,
     (75, 2250, 4500, 153.5, 14000),
     "NVIDIA Blackwell Ultra data sheet (HGX B300, 62 TB/s for 8); memory as the device reports "
     "it"),
    ("gb200", 185.0302734375, 8e12, 900e9, _NIC_100, 450e9, 72, None,
     (80, 2500, 5000, 5000, 10000),
     "NVIDIA Blackwell data sheet (GB200 NVL72: one NVLink domain of 72, counted as the node; "
     "NVLink-C2C to the host 900 GB/s in both directions); memory as the device reports"),
    ("gb300", 268.59375, 8e12, 900e9, _NIC_100, 450e9, 72, None,
     (80, 2500, 5000, 165, 15000),
     "NVIDIA GB300 NVL72 data sheet (one NVLink domain of 72, counted as the node); memory as "
     "that of the B300"),
    ("rtx_5090", 32, 1.792e12, _PCIE_5, _SHARED_NIC, _PCIE_5, 8, 0.89,
     (104.8, 209.5, 419, 838, 1676),
     "NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A (tensor cores with FP32 "
     "accumulation)"),
    ("rtx_pro_6000", 96, 1.792e12, _PCIE_5, _NIC_50, _PCIE_5, 8, 1.79,
     (125, 503.8, 1007.6, 1007.6, 2015.2),
     "NVIDIA RTX Blackwell PRO architecture whitepaper (RTX PRO 6000, workstation)"),
    ("mi300x", 192, 5.3e12, 448e9, _NIC_50, _PCIE_5, 8, 2.49,
     (163.4, 1307.4, 2614.9, 2614.9),
     "AMD Instinct MI300X data sheet (seven Infinity Fabric links of 64 GB/s each direction)"),
    ("mi325x", 256, 6.0e12, 448e9, _NIC_50, _PCIE_5, 8, None,
     (163.4, 1307.4, 2614.9, 2614.9), "AMD Instinct MI325X data sheet"),
    ("mi355x", 288, 8.0e12, 537.6e9, _NIC_50, _PCIE_5, 8, None,
     (157.3, 2516.6, 5033.2, 5033.2, 10066.3),
     "AMD Instinct MI355X data sheet (seven Infinity Fabric links of 76.8 GB/s each direction)"),
    ("cpu", 256, 307.2e9, 48e9, 12.5e9, 307.2e9, 2, None,
     (6.4, 206, 0, 412),
     "one socket of Intel Xeon Platinum 8480+: 8 channels of DDR5-4800; 56 cores x 2048 BF16 "
     "operations a cycle (AMX) at 1.8 GHz; one UPI 2.0 link of 24 lanes at 16 GT/s"),
)


# fmt: on
def _accelerators() -> Iterator[Accelerator]:
    for name, gib, bytes_per_s, peer, network, host, per_node, price, teraflops, source in _ROWS:
        figures = zip(_TYPES, teraflops, strict=False)
        yield Accelerator(
            name=name,
            memory_bytes=gib * 2.0**30,
            memory_bytes_per_s=bytes_per_s,
            flops_by_dtype={dtype: figure * 1e12 for dtype, figure in figures if figure},
            peer_bytes_per_s=peer,
            network_bytes_per_s=network,
            host_bytes_per_s=host,
            devices_per_node=per_node,
            price_per_hour=price,
            source=source,
        )


CATALOGUE: Mapping[str, Accelerator] = MappingProxyType(
    {accelerator.name: accelerator for accelerator in _accelerators()}
)
"""By name."""


def find_accelerator(name: str) -> Accelerator:
    """The accelerator of a name that baton, vendors, clouds or drivers use.

    Case, blanks, dashes and vendor do not matter: `H100`, `h100_sxm` and `NVIDIA H100 80GB HBM3`
    are the same.

    Raises:
        UnknownAccelerator: the catalogue does not have it.
    """
    match = _BY_NORMALIZED_NAME.get(_normalize_name(name))
    if match is None:
        similar = get_close_matches(_normalize_name(name), _BY_NORMALIZED_NAME, n=3, cutoff=0.5)
        suggestions = list(
            dict.fromkeys(_BY_NORMALIZED_NAME[similar_name].name for similar_name in similar)
        ) or [*CATALOGUE]
        raise UnknownAccelerator(
            f"there is no accelerator {name!r} in the catalogue", f"try {', '.join(suggestions)}"
        )
    return match


def _normalize_name(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|amd|intel)|(server|workstation).*$", "", plain).replace("sxm4", "sxm")


_BY_NORMALIZED_NAME: Mapping[str, Accelerator] = MappingProxyType(
    {_normalize_name(name): accelerator for name, accelerator in CATALOGUE.items()}
    | {alias: CATALOGUE[name] for alias, name in _ALIASES.items()}
)
