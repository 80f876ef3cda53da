"""vLLM's CPUs as Ray's GPUs: what has Ray start an engine's workers where there is no GPU.

vLLM refuses Ray's executor on CPUs for want of a name that Ray has for them. Nothing else of it
needs a GPU: who starts the workers, on which nodes, in whose bundles, and how they are told what to
do is the same for both. The nodes say that they have GPUs, which nobody looks at.
"""

from __future__ import annotations

from pathlib import Path

from vllm.platforms.cpu import CpuPlatform


class CpuAsRaysGpu(CpuPlatform):  # type: ignore[misc]
    """Computes on CPUs; a worker takes what Ray counts as a GPU."""

    ray_device_key = "GPU"


def platform() -> str:
    """As vLLM asks for it, by an entry point."""
    return f"{__name__}.{CpuAsRaysGpu.__name__}"


def register(folder: Path) -> None:
    """Have vLLM find the platform in every process that has this folder on its path."""
    dist_info = folder / "cpu_platform-0.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-platform\nVersion: 0\n")
    (dist_info / "entry_points.txt").write_text(
        f"[vllm.platform_plugins]\ncpu_platform = {__name__}:platform\n"
    )
