"""Communication time within an engine: all-reduce of a tensor group, sends between stages."""

from __future__ import annotations

from typing import NamedTuple

from baton.perf.hardware.accelerators import Accelerator

_LAUNCH_S = 4.5e-6
_LAUNCH_RANK_S = 0.1e-6
_SECOND_PHASE_S = 3e-6
_INVERSE_EFFICIENCY = 1.45
"""Multiple of the time at the rated bandwidth to peers, one direction: 0.95 to 2, least on 8
devices; mean error 11 %. The tables count elements of 16 bits. So read, 1 GB over 8 devices has a
bus bandwidth of 228 GB/s (A100) and 469 GB/s (H100), as NCCL's own tests show. Source:
AIConfigurator's tables of vLLM's custom all-reduce in CUDA graphs and of NCCL beyond, on A100, H100
and H200, 2 to 8 devices."""
_SEND_S = 10e-6
"""Source: AIConfigurator's systems/*.yaml, p2p_latency."""
_SEND_EFFICIENCY = 0.8
"""Source: the same, mem_bw_empirical_scaling_factor; no factor for links is published."""

_DISPATCH_BYTES = 1
_COMBINE_BYTES = 2
_DISPATCH_EFFICIENCY = 0.78
"""Source: DeepEP V1, README: 128 tokens of 7,168 numbers to 8 experts on 16 to 256 devices with
50 GB/s each, 118 to 194 us. Its dispatch takes 13 us, and copies leave a node at this share of the
rated bandwidth: 0 to 9 % off."""

_RING_S = 3.2e-6
_RING_HOP_S = 1.5e-6
_RING_EFFICIENCY = 0.64
"""Of NCCL's ring over PCIe. On 8 RTX PRO 6000 it takes 24 us up to 64 KB, and reaches 41 GB/s of
64 GB/s beyond. On two RTX 4070 Ti SUPER it takes 6.2 us. Source: voipmonitor/rtx6kpro,
hardware/pcie-bandwidth.md; a published run of nccl-tests."""


class CollectiveTime(NamedTuple):
    """Duration of one exchange."""

    launch_s: float
    wire_s: float
    """The part that grows with the payload."""


NO_COLLECTIVE = CollectiveTime(0.0, 0.0)


def all_reduce(payload_bytes: float, ranks: int, accelerator: Accelerator) -> CollectiveTime:
    """To sum `payload_bytes` over `ranks` devices of one node; zero for one device.

    The faster of two algorithms: each device reads all payloads (one phase, small payloads), or
    each sums a part and the parts are gathered (two phases). Over PCIe, a ring in 2 * (ranks - 1)
    hops, as engines use their own kernels over NVLink only.
    """
    if ranks <= 1:
        return NO_COLLECTIVE
    if is_over_pcie(ranks, accelerator):
        rate = accelerator.peer_bytes_per_s * _RING_EFFICIENCY
        launch_s = _RING_S + 2 * (ranks - 1) * _RING_HOP_S
        return CollectiveTime(launch_s, 2 * (ranks - 1) / ranks * payload_bytes / rate)
    wire_s = _INVERSE_EFFICIENCY * payload_bytes / _peer_bytes_per_s(ranks, accelerator)
    one_phase_s = (ranks - 1) * wire_s
    two_phases_s = _SECOND_PHASE_S + 2 * (ranks - 1) / ranks * wire_s
    return CollectiveTime(_LAUNCH_S + _LAUNCH_RANK_S * ranks, min(one_phase_s, two_phases_s))


def is_over_pcie(ranks: int, accelerator: Accelerator) -> bool:
    """Whether these devices of one node reach each other over their link to the host."""
    has_no_own_link = accelerator.peer_bytes_per_s == accelerator.host_bytes_per_s
    return has_no_own_link and ranks <= accelerator.devices_per_node


def other_devices(devices: int, choices: int) -> float:
    """How many devices but one's own have any of `choices` experts, chosen evenly; expected."""
    return (devices - 1) * (1 - (1 - 1 / devices) ** choices)


def network_dispatch_s(copies: float, hidden: int, accelerator: Accelerator) -> float:
    """To send these copies of tokens to experts of other nodes in 8 bits, and back in 16."""
    numbers = copies * hidden * (_DISPATCH_BYTES + _COMBINE_BYTES)
    return numbers / (accelerator.network_bytes_per_s * _DISPATCH_EFFICIENCY)


def send_s(payload_bytes: float, devices: int, accelerator: Accelerator) -> float:
    """To send `payload_bytes` from one pipeline stage to the next of an engine of `devices`."""
    rate = _peer_bytes_per_s(devices, accelerator) * _SEND_EFFICIENCY
    return _SEND_S + payload_bytes / rate


def _peer_bytes_per_s(devices: int, accelerator: Accelerator) -> float:
    if devices > accelerator.devices_per_node:
        return accelerator.network_bytes_per_s
    return accelerator.peer_bytes_per_s
