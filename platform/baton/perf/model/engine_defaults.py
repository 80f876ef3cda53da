"""vLLM's defaults, by device.

Source: vLLM 0.32 and 0.33, as `vllm serve` and baton start it: vllm/engine/arg_utils.py
(`get_batch_defaults`), vllm/config/cache.py. A test compares these with the installed vLLM.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from baton.perf.hardware.accelerators import Accelerator

GPU_MEMORY_UTILIZATION: Final = 0.92
"""Fraction of a GPU's memory."""
BLOCK_SIZE_TOKENS: Final = 16
"""Some attention backends have larger blocks only."""

_GIB: Final = 2**30
_LARGEST_BYTES: Final = 160 * _GIB
_LARGE_BYTES: Final = 70 * _GIB


class BatchDefaults(NamedTuple):
    """Limits of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


def gpu_batch_defaults(device: Accelerator) -> BatchDefaults:
    """On a GPU."""
    if device.memory_bytes >= _LARGEST_BYTES:
        return BatchDefaults(1024, 16384)
    if device.memory_bytes >= _LARGE_BYTES and "a100" not in device.name.lower():
        return BatchDefaults(1024, 8192)
    return BatchDefaults(256, 2048)


def cpu_batch_defaults(workers: int) -> BatchDefaults:
    """Without GPUs."""
    return BatchDefaults(128 * workers, 2048 * workers)
