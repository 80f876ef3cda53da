"""NVIDIA GPUs that this process may use, queried from the driver without a CUDA context."""

from __future__ import annotations

import fcntl
import importlib
import itertools
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
_TARGET_VARIABLE = "VLLM_TARGET_DEVICE"
_RETRY_INTERVAL_S = 0.1


def count_present_gpus(driver: Path = _DRIVER_FOLDER) -> int:
    """GPUs of this machine, usable or not; builds for CPUs ask the kernel."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return len(list(driver.iterdir())) if driver.is_dir() else 0
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or no answer from it
        return 0
    try:
        return len(_uuids(nvml))
    finally:
        nvml.nvmlShutdown()


def _uuids(nvml: Any) -> list[str]:  # noqa: ANN401 - a module without types
    """Of the GPUs, or of the slices of a GPU with MIG."""
    uuids = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        try:
            is_mig = nvml.nvmlDeviceGetMigMode(gpu)[0] == nvml.NVML_DEVICE_MIG_ENABLE
        except (nvml.NVMLError, AttributeError):  # a GPU or a driver without MIG
            is_mig = False
        mig_indexes = range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)) if is_mig else ()
        for mig_index in mig_indexes:
            with suppress(nvml.NVMLError):  # fewer exist than the maximum
                mig_device = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, mig_index)
                uuids.append(_decode(nvml.nvmlDeviceGetUUID(mig_device)))
        if not is_mig:
            uuids.append(_decode(nvml.nvmlDeviceGetUUID(gpu)))
    return uuids


def _decode(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def mig_devices(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of devices for Ray to assign, if any is a slice of a GPU; else none.

    By default a CUDA program sees only the first slice, and Ray counts GPUs.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        device_names = [part.strip() for part in visible.split(",")]
    else:
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception:  # noqa: BLE001 - a vendor's library, which may be incomplete
            return ()
        try:
            device_names = _uuids(nvml)
        finally:
            nvml.nvmlShutdown()
    return (
        tuple(device_names)
        if any(device_name.startswith("MIG-") for device_name in device_names)
        else ()
    )


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA that the driver supports, as (13, 0); None if unknown."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - a vendor's library, which may be incomplete
        return None
    try:
        version = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    return version // 1000, version % 1000 // 10


def driver_problem(torch: str | None, driver: tuple[int, int] | None) -> str | None:
    """Why the driver cannot run this torch; None if it can, or if that is unknown.

    Source: CUDA Compatibility, minor version compatibility: a driver runs programs built for any
    CUDA of its major version.
    """
    build = re.search(r"\+cu(\d+)(\d)$", torch or "")
    if build is None or driver is None or driver[0] >= int(build[1]):
        return None
    required = f"{build[1]}.{build[2]}"
    return (
        f"the GPU's driver supports CUDA {driver[0]}.{driver[1]}, and torch {torch} is built for"
        f" {required}; install a driver for CUDA {required} (580 or newer for 13.0)"
    )


def count_gpus(
    environ: Mapping[str, str], count_present: Callable[[], int] = count_present_gpus
) -> int:
    """GPUs that a process with these variables may use.

    Source: CUDA Programming Guide, Environment Variables: entries after an invalid one are ignored.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return 0
    present_count = count_present()
    if visible is None:
        return present_count
    entries = [part.strip() for part in visible.split(",")]
    return len(
        list(itertools.takewhile(lambda entry: _is_valid_entry(entry, present_count), entries))
    )


def _is_valid_entry(entry: str, gpu_count: int) -> bool:
    if entry.isdecimal():
        return int(entry) < gpu_count
    return gpu_count > 0 and entry.startswith(("GPU-", "MIG-"))


def use_cpu_without_gpus(
    environ: MutableMapping[str, str], count_present: Callable[[], int] = count_present_gpus
) -> None:
    """Have vLLM, once it is imported, treat this process as one on CPUs if it may use no GPU.

    A build for CUDA without a device refuses to make even a configuration, which an ingress needs.
    """
    if not count_gpus(environ, count_present):
        environ.setdefault(_TARGET_VARIABLE, "cpu")


@contextmanager
def gpu_start_lock(
    environ: Mapping[str, str], is_cancelled: Callable[[], bool], folder: Path | None = None
) -> Iterator[None]:
    """Wait until no other engine starts on this process' GPU; others wait for the body.

    A starting engine measures free GPU memory before and after its first batch, and would count
    memory that another engine takes meanwhile as its own.

    Args:
        environ: Variables of the engine's process.
        is_cancelled: Whether the start was cancelled; the body then runs without the lock.
        folder: Where the locks are.
    """
    device = re.sub(r"[^0-9A-Za-z,-]", "", environ.get("CUDA_VISIBLE_DEVICES", "")) or "any"
    lock_folder = Path(tempfile.gettempdir()) if folder is None else folder
    path = lock_folder / f"baton-gpu-{os.getuid()}-{device}.lock"
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while not _try_lock(lock_fd) and not is_cancelled():
            time.sleep(_RETRY_INTERVAL_S)
        yield
    finally:
        os.close(lock_fd)


def _try_lock(lock_fd: int) -> bool:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
