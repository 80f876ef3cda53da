"""UCX's settings for engines, where its own are not the best for pulls of KV blocks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

UCX_SETTINGS: Mapping[str, str] = MappingProxyType(
    {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
)
"""Environment variables for an engine's processes; a deployment's own win over them.

Over TCP a remote read is answered in segments, of 8 kB if UCX is left alone: 8,192 of them for 64
MiB. With 256 kB pulls were 1.06 to 2.2 times as fast (M, three runs of two sizes). It costs buffers
of that size, a few for each interface of each of NIXL's workers. RDMA and shared memory do not use
them.

Source: `python -m benchmarks.transfer --sweep tcp`, benchmarks/README.md.
"""
