"""NVIDIA GPUs that this process may use, asked of the driver: no CUDA context is made for it."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")
_TARGET = "VLLM_TARGET_DEVICE"


def present_gpus(driver: Path = _DRIVER) -> int:
    """GPUs of this machine, whoever may use them; builds for CPUs ask the kernel."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return len(list(driver.iterdir())) if driver.is_dir() else 0
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or one that does not answer
        return 0
    try:
        return int(nvml.nvmlDeviceGetCount())
    finally:
        nvml.nvmlShutdown()


def count_gpus(environ: Mapping[str, str], present: Callable[[], int] = present_gpus) -> int:
    """GPUs that a process with these variables may use.

    Source: CUDA Programming Guide, Environment Variables: what follows an entry that names no
    device is not looked at.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return 0
    there = present()
    if visible is None:
        return there
    entries = [one.strip() for one in visible.split(",")]
    return len(list(itertools.takewhile(lambda one: _names_one(one, there), entries)))


def _names_one(entry: str, present: int) -> bool:
    if entry.isdecimal():
        return int(entry) < present
    return present > 0 and entry.startswith(("GPU-", "MIG-"))


def compute_on_cpus(
    environ: MutableMapping[str, str], present: Callable[[], int] = present_gpus
) -> None:
    """Have vLLM, once it is imported, take this process for one on CPUs where it may use no GPU.

    A build for CUDA refuses to make even a configuration where it finds no device, which is all
    that an ingress wants of it.
    """
    if not count_gpus(environ, present):
        environ.setdefault(_TARGET, "cpu")
