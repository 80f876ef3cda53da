"""NVIDIA GPUs that this process may use, asked of the driver: no CUDA context is made for it."""

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

_DRIVER = Path("/proc/driver/nvidia/gpus")
_TARGET = "VLLM_TARGET_DEVICE"
_LOOK_AGAIN_S = 0.1


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
        return len(_uuids(nvml))
    finally:
        nvml.nvmlShutdown()


def _uuids(nvml: Any) -> list[str]:  # noqa: ANN401 - a module without types
    """Of the GPUs; of one that is cut into slices (MIG), of each slice."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        try:
            cut = nvml.nvmlDeviceGetMigMode(gpu)[0] == nvml.NVML_DEVICE_MIG_ENABLE
        except (nvml.NVMLError, AttributeError):  # a GPU, or a driver, that knows no slices
            cut = False
        slices = range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)) if cut else ()
        for number in slices:
            with suppress(nvml.NVMLError):  # fewer are made than there may be
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
                found.append(_text(nvml.nvmlDeviceGetUUID(part)))
        if not cut:
            found.append(_text(nvml.nvmlDeviceGetUUID(gpu)))
    return found


def _text(said: str | bytes) -> str:
    return said.decode() if isinstance(said, bytes) else said


def slices(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Devices by name, for Ray to hand out, where some of them are slices of a GPU; else none.

    A CUDA program that is not told otherwise sees the first slice alone, and Ray counts GPUs.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [one.strip() for one in visible.split(",")]
    else:
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception:  # noqa: BLE001 - a library of others, which may be there by halves
            return ()
        try:
            named = _uuids(nvml)
        finally:
            nvml.nvmlShutdown()
    return tuple(named) if any(one.startswith("MIG-") for one in named) else ()


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver speaks, as (13, 0); None without a driver, or unknown."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - a library of others, which may be there by halves
        return None
    try:
        spoken = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    return spoken // 1000, spoken % 1000 // 10


def old_driver(torch: str | None, driver: tuple[int, int] | None) -> str | None:
    """Why the driver cannot run this torch; None where it can, or it is not known.

    Source: CUDA Compatibility, minor version compatibility: a driver runs what was built for any
    CUDA of its major version.
    """
    built = re.search(r"\+cu(\d+)(\d)$", torch or "")
    if built is None or driver is None or driver[0] >= int(built[1]):
        return None
    wanted = f"{built[1]}.{built[2]}"
    return (
        f"the GPU's driver speaks CUDA {driver[0]}.{driver[1]}, and torch {torch} is built for"
        f" {wanted}; install a driver for CUDA {wanted} (580 or newer for 13.0)"
    )


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


@contextmanager
def turn_on_gpu(
    environ: Mapping[str, str], given_up: Callable[[], bool], folder: Path | None = None
) -> Iterator[None]:
    """Wait until no other engine starts on this process's GPU; others wait while this one does.

    A starting engine measures how much of the GPU's memory is free, before and after its first
    batch: what another one takes meanwhile it would count as its own.

    Args:
        environ: Variables of the engine's process.
        given_up: Whether nobody waits for the start any more; then the body runs without a turn.
        folder: Where the locks are.
    """
    device = re.sub(r"[^0-9A-Za-z,-]", "", environ.get("CUDA_VISIBLE_DEVICES", "")) or "any"
    where = Path(tempfile.gettempdir()) if folder is None else folder
    path = where / f"baton-gpu-{os.getuid()}-{device}.lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while not _locked(lock) and not given_up():
            time.sleep(_LOOK_AGAIN_S)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
