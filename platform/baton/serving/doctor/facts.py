"""Gathers the facts that `baton doctor` judges, each within a deadline of its own."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

import httpx

from baton.config.derive.options import key_files
from baton.config.schema.deployment import DeploymentConfig
from baton.engine.cuda_home import CannotCompileError, check_compilers
from baton.engine.gpus import count_gpus, driver_cuda_version, use_cpu_without_gpus
from baton.serving.cluster.readiness import local_client
from baton.serving.front.data_path import choose_data_path
from baton.serving.preflight.couplings import (
    COUPLINGS_TIMEOUT_S,
    Coupling,
    read_couplings,
)
from baton.serving.preflight.facts import (
    SERVER_PORT,
    PortFact,
    available_memory_bytes,
    installed_versions,
    port_fact,
)
from baton.serving.versions import PACKAGES

T = TypeVar("T")
Progress = Callable[[str], None]
_CONFLICTING_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
_FACT_TIMEOUT_S = 5.0
_HAPROXY_TIMEOUT_S = 15.0
_IMPORT_TIMEOUT_S = 180.0
"""vLLM takes 6 to 9 s to import on a quiet machine."""
_HTTP_TIMEOUT_S = 3.0
_TIME_ERROR = 5
"""Result of `adjtimex` while no time service synchronizes the clock."""
INGRESS_IMPORT = "baton.engine.vllm.frontend.llm"
"""The ingress's import of vLLM, which moves between versions."""
_IMPORT_SCRIPT = """
import importlib, json, sys
told = {}
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
        said = {"version": str(getattr(module, "__version__", ""))}
        if name == "torch":
            said["cuda"] = module.version.cuda
        told[name] = said
    except BaseException as error:
        told[name] = {"problem": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
print("\\n" + json.dumps(told))
"""


@dataclass(frozen=True, slots=True)
class UnknownFact:
    """A fact that could not be found out."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """The result of importing a package."""

    version: str = ""
    problem: str = ""
    """Empty after a successful import."""
    cuda_version: str | None = None
    """Of torch: the CUDA that it was built for; None for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFact:
    """A file that holds a secret, or hashes of secrets."""

    path: str
    purpose: str
    mode: int | None = None
    """Its permission bits; None if it could not be read."""
    readable: bool = True
    empty: bool = False
    only_hashes: bool = False
    """A reader learns who may call, but cannot call with it."""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDescriptorLimits:
    """Limits of this user on open files of a process."""

    soft: int
    hard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSnapshot:
    """Facts of this machine."""

    python: str
    versions: Mapping[str, str | None]
    conflicting_packages: Mapping[str, str | None]
    imports: Mapping[str, ImportResult] | UnknownFact
    gpus: int
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA of the driver; None: no driver, or unknown."""
    kernel_compile_error: str = ""
    """Why kernels for GPUs cannot be compiled; empty when they can, or without GPUs."""
    available_memory_bytes: int | UnknownFact
    free_shared_memory_bytes: int | UnknownFact
    free_disk_bytes: int | UnknownFact
    """Where Ray keeps its session and its logs."""
    disk_path: str
    fd_limits: FileDescriptorLimits
    haproxy_warning: str | UnknownFact | None
    """Why HAProxy cannot carry the tokens; None when it can."""
    clock_synchronized: bool | UnknownFact
    couplings: tuple[Coupling, ...] | UnknownFact = ()
    nics: tuple[str, ...] = ()
    """Network cards with RDMA, by the names that UCX_NET_DEVICES takes."""
    ports: tuple[PortFact, ...] = ()
    secrets: tuple[FileFact, ...] = ()


def gather_machine(config: DeploymentConfig | None, progress: Progress) -> MachineSnapshot:
    """Look at this machine and, with a configuration, at the ports and files that it names."""
    progress("importing " + ", ".join(PACKAGES) + " in processes of their own")
    folder = tempfile.gettempdir()
    with ThreadPoolExecutor(1) as executor:
        couplings = executor.submit(
            gather_fact, COUPLINGS_TIMEOUT_S + _FACT_TIMEOUT_S, "couplings", read_couplings
        )
        machine = _gather_machine(config, folder)
        return replace(machine, couplings=couplings.result())


def _gather_machine(config: DeploymentConfig | None, folder: str) -> MachineSnapshot:
    return MachineSnapshot(
        python=platform.python_version(),
        versions=installed_versions(PACKAGES),
        conflicting_packages=installed_versions(_CONFLICTING_PACKAGES),
        imports=gather_fact(_IMPORT_TIMEOUT_S + _FACT_TIMEOUT_S, "importing them", _try_imports),
        gpus=count_gpus(os.environ),
        driver_cuda=driver_cuda_version(),
        kernel_compile_error=_kernel_compile_error() if count_gpus(os.environ) else "",
        available_memory_bytes=gather_fact(_FACT_TIMEOUT_S, "the memory", available_memory_bytes),
        free_shared_memory_bytes=gather_fact(
            _FACT_TIMEOUT_S, "/dev/shm", lambda: shutil.disk_usage("/dev/shm").free  # noqa: S108 - looked at
        ),
        free_disk_bytes=gather_fact(
            _FACT_TIMEOUT_S, folder, lambda: shutil.disk_usage(folder).free
        ),
        disk_path=folder,
        fd_limits=_fd_limits(),
        haproxy_warning=gather_fact(
            _HAPROXY_TIMEOUT_S, "HAProxy", lambda: choose_data_path(os.environ).warning
        ),
        clock_synchronized=gather_fact(_FACT_TIMEOUT_S, "the clock", _is_clock_synchronized),
        nics=rdma_nics(Path("/sys/class/infiniband")),
        ports=() if config is None else port_facts(config),
        secrets=() if config is None else secret_files(config),
    )  # fmt: skip


def gather_fact(deadline_s: float, label: str, read_fact: Callable[[], T]) -> T | UnknownFact:
    """A fact, or why it is unknown: an error, or the deadline."""
    answers: SimpleQueue[T | UnknownFact] = SimpleQueue()

    def worker() -> None:
        try:
            answers.put(read_fact())
        except Exception as error:  # noqa: BLE001 - a fact that cannot be had is one, too
            answers.put(UnknownFact(f"{label}: {type(error).__name__}: {error}".splitlines()[0]))

    # A daemon: a disk that hangs must not keep the command from ending.
    threading.Thread(target=worker, name=f"look at {label}", daemon=True).start()
    try:
        return answers.get(timeout=deadline_s)
    except Empty:
        return UnknownFact(f"{label}: nothing came within {deadline_s:g} s")


def port_facts(config: DeploymentConfig) -> tuple[PortFact, ...]:
    """The ports that a configuration names, without 0 (any free port)."""
    metrics = config.observability.metrics
    requested = [(SERVER_PORT, config.server.host, config.server.port)]
    if metrics.enabled:
        requested.append(("observability.metrics.port", metrics.host, metrics.port))
    return tuple(port_fact(key, host, port) for key, host, port in requested if port)


def secret_files(config: DeploymentConfig) -> tuple[FileFact, ...]:
    """Files with tokens and keys that a configuration names."""
    files = [
        replace(file_fact(f"keys of tenant {name}", path), only_hashes=True)
        for name, path in key_files(config).items()
    ]
    if (token_file := config.observability.token_file) is not None:
        files.append(file_fact("observability.token_file", Path(token_file)))
    if (key_file := config.security.tls.key_file) is not None:
        files.append(file_fact("security.tls.key_file", Path(key_file)))
    return tuple(files)


def file_fact(purpose: str, path: Path) -> FileFact:
    """Metadata of one file; its content is not read."""
    try:
        file_stat = path.stat()
    except OSError as error:
        return FileFact(path=str(path), purpose=purpose, problem=error.strerror or str(error))
    return FileFact(
        path=str(path),
        purpose=purpose,
        mode=stat.S_IMODE(file_stat.st_mode),
        readable=os.access(path, os.R_OK),
        empty=file_stat.st_size == 0,
    )


def health_problem(url: str) -> str:
    """Why `/health` of an endpoint is not healthy; empty when it is."""
    try:
        with local_client(url) as client:
            answer = client.get("/health", timeout=_HTTP_TIMEOUT_S)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return "" if answer.is_success else f"it answers {answer.status_code}"


def http_problem(url: str) -> str:
    """Why no HTTP server answers there; empty after any answer."""
    try:
        httpx.get(url, timeout=_HTTP_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _try_imports() -> dict[str, ImportResult]:
    """In another process: an import may crash, hang, or take gigabytes."""
    environ = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    use_cpu_without_gpus(environ)
    completed = subprocess.run(  # noqa: S603 - this Python, a program of our own
        [sys.executable, "-c", _IMPORT_SCRIPT, "torch", "ray", "vllm", "nixl", INGRESS_IMPORT],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=_IMPORT_TIMEOUT_S,
        check=False,
        env=environ,
    )
    lines = completed.stdout.strip().splitlines()
    if completed.returncode or not lines:
        last = (completed.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"the process that imports ended with {completed.returncode}: {last}")
    results = cast("dict[str, dict[str, str | None]]", json.loads(lines[-1]))
    return {
        name: ImportResult(
            version=result.get("version") or "",
            problem=result.get("problem") or "",
            cuda_version=result.get("cuda"),
        )
        for name, result in results.items()
    }


def _kernel_compile_error() -> str:
    try:
        check_compilers(os.environ)
    except CannotCompileError as error:
        return str(error)
    return ""


def rdma_nics(folder: Path) -> tuple[str, ...]:
    """The network cards in this folder of the kernel; none without the folder."""
    try:
        return tuple(sorted(nic.name for nic in folder.iterdir()))
    except OSError:
        return ()


def _fd_limits() -> FileDescriptorLimits:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = 1 << 30
    return FileDescriptorLimits(
        soft=unlimited if soft == resource.RLIM_INFINITY else soft,
        hard=unlimited if hard == resource.RLIM_INFINITY else hard,
    )


def _is_clock_synchronized() -> bool:
    """Whether a time service has set the clock recently.

    Source: adjtimex(2); `TIME_ERROR` is returned while the clock is not synchronized.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # `struct timex` is 208 bytes on 64-bit Linux; all zeros asks and changes nothing.
    state: int = libc.adjtimex(ctypes.create_string_buffer(512))
    if state < 0:
        raise OSError(ctypes.get_errno(), "the kernel does not say")
    return state != _TIME_ERROR
