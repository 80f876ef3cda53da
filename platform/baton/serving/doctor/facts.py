"""Gathers what `baton doctor` looks at: each fact by itself, within a deadline of its own."""

from __future__ import annotations

import ctypes
import importlib.metadata
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

import httpx

from baton.config.derive.options import key_files
from baton.config.schema.deployment import DeploymentConfig
from baton.engine.cuda_home import CannotCompileError, check_compilers
from baton.engine.gpus import compute_on_cpus, count_gpus, driver_cuda
from baton.serving.cluster.readiness import own_client
from baton.serving.front.data_path import choose_data_path
from baton.serving.preflight.facts import (
    SERVER_PORT,
    PortFact,
    available_memory_bytes,
    installed_versions,
    port_fact,
)

T = TypeVar("T")
Progress = Callable[[str], None]
VENDORS = ("ray", "vllm", "nixl", "torch")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_FACT_S = 5.0
_HAPROXY_S = 15.0
_IMPORT_S = 180.0
"""vLLM takes 6 to 9 s to import on a quiet machine."""
_HTTP_S = 3.0
_CLOCK_ERROR = 5
"""What `adjtimex` returns while nothing keeps the clock right."""
INGRESS = "baton.engine.vllm.frontend.llm"
"""What an ingress imports of vLLM, which has moved from one version to the next."""
_IMPORTS = """
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
class Unknown:
    """A fact that could not be found out."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What came of importing a package."""

    version: str = ""
    problem: str = ""
    """Empty when it could be imported."""
    cuda: str | None = None
    """Of torch: the CUDA that it was built for; None for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFact:
    """A file that holds a secret, or what stands for one."""

    path: str
    what: str
    mode: int | None = None
    """Its permission bits; None when it could not be looked at."""
    readable: bool = True
    """By this user."""
    empty: bool = False
    only_hashes: bool = False
    """Whoever reads it learns who may call, and cannot call with it."""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Limits of this user on open files of a process."""

    soft: int
    hard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineNow:
    """This machine, as far as it could be found out."""

    python: str
    versions: Mapping[str, str | None]
    unwanted: Mapping[str, str | None]
    imports: Mapping[str, Imported] | Unknown
    gpus: int
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that their driver speaks; None: there is none, or nobody knows."""
    kernels: str = ""
    """Why kernels for GPUs cannot be compiled; empty when they can be, or there are no GPUs."""
    available_memory_bytes: int | Unknown
    shared_memory_bytes: int | Unknown
    """Free in /dev/shm."""
    disk_bytes: int | Unknown
    """Free where Ray keeps its session and its logs."""
    disk_path: str
    descriptors: Descriptors
    front_warning: str | Unknown | None
    """Why HAProxy cannot carry the tokens; None when it can."""
    clock_kept: bool | Unknown
    """Whether something keeps the clock right."""
    cards: tuple[str, ...] = ()
    """Network cards that can do RDMA, by the names that UCX_NET_DEVICES takes."""
    ports: tuple[PortFact, ...] = ()
    secrets: tuple[FileFact, ...] = ()


def machine_now(config: DeploymentConfig | None, progress: Progress) -> MachineNow:
    """Look at this machine; with a configuration, also at the ports and files that it names."""
    progress("importing " + ", ".join(VENDORS) + " in a process of its own")
    folder = tempfile.gettempdir()
    return MachineNow(
        python=platform.python_version(),
        versions=installed_versions(VENDORS),
        unwanted=_distributions(UNWANTED),
        imports=within(_IMPORT_S + _FACT_S, "importing them", _imports),
        gpus=count_gpus(os.environ),
        driver_cuda=driver_cuda(),
        kernels=_cannot_compile() if count_gpus(os.environ) else "",
        available_memory_bytes=within(_FACT_S, "the memory", available_memory_bytes),
        shared_memory_bytes=within(
            _FACT_S, "/dev/shm", lambda: shutil.disk_usage("/dev/shm").free  # noqa: S108 - looked at
        ),
        disk_bytes=within(_FACT_S, folder, lambda: shutil.disk_usage(folder).free),
        disk_path=folder,
        descriptors=_descriptors(),
        front_warning=within(
            _HAPROXY_S, "HAProxy", lambda: choose_data_path(os.environ).warning
        ),
        clock_kept=within(_FACT_S, "the clock", _clock_kept),
        cards=rdma_cards(Path("/sys/class/infiniband")),
        ports=() if config is None else port_facts(config),
        secrets=() if config is None else secret_files(config),
    )  # fmt: skip


def within(deadline_s: float, what: str, find: Callable[[], T]) -> T | Unknown:
    """A fact, or why it is not known: it took too long, or could not be had."""
    answers: SimpleQueue[T | Unknown] = SimpleQueue()

    def look() -> None:
        try:
            answers.put(find())
        except Exception as error:  # noqa: BLE001 - a fact that cannot be had is one, too
            answers.put(Unknown(f"{what}: {type(error).__name__}: {error}".splitlines()[0]))

    # A daemon: a disk that hangs must not keep the command from ending.
    threading.Thread(target=look, name=f"look at {what}", daemon=True).start()
    try:
        return answers.get(timeout=deadline_s)
    except Empty:
        return Unknown(f"{what}: nothing came within {deadline_s:g} s")


def port_facts(config: DeploymentConfig) -> tuple[PortFact, ...]:
    """The ports that a configuration names; 0 is any that is free."""
    metrics = config.observability.metrics
    wanted = [(SERVER_PORT, config.server.host, config.server.port)]
    if metrics.enabled:
        wanted.append(("observability.metrics.port", metrics.host, metrics.port))
    return tuple(port_fact(key, host, port) for key, host, port in wanted if port)


def secret_files(config: DeploymentConfig) -> tuple[FileFact, ...]:
    """Files with tokens and keys that a configuration names."""
    found = [
        replace(file_fact(f"keys of tenant {name}", path), only_hashes=True)
        for name, path in key_files(config).items()
    ]
    if (token_file := config.observability.token_file) is not None:
        found.append(file_fact("observability.token_file", Path(token_file)))
    if (key_file := config.security.tls.key_file) is not None:
        found.append(file_fact("security.tls.key_file", Path(key_file)))
    return tuple(found)


def file_fact(what: str, path: Path) -> FileFact:
    """One file; nothing of what is in it."""
    try:
        found = path.stat()
    except OSError as error:
        return FileFact(path=str(path), what=what, problem=error.strerror or str(error))
    return FileFact(
        path=str(path),
        what=what,
        mode=stat.S_IMODE(found.st_mode),
        readable=os.access(path, os.R_OK),
        empty=found.st_size == 0,
    )


def answers_health(url: str) -> str:
    """Why `/health` of an endpoint does not say that it is well; empty when it does."""
    try:
        with own_client(url) as client:
            answer = client.get("/health", timeout=_HTTP_S)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return "" if answer.is_success else f"it answers {answer.status_code}"


def answers_at(url: str) -> str:
    """Why nothing answers HTTP there; empty when something does, whatever it says."""
    try:
        httpx.get(url, timeout=_HTTP_S, trust_env=False)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _distributions(names: Sequence[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _imports() -> dict[str, Imported]:
    """In another process: an import may crash, hang, or take gigabytes."""
    environ = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    compute_on_cpus(environ)
    done = subprocess.run(  # noqa: S603 - this Python, a program of our own
        [sys.executable, "-c", _IMPORTS, "torch", "ray", "vllm", "nixl", INGRESS],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=_IMPORT_S,
        check=False,
        env=environ,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"the process that imports ended with {done.returncode}: {last}")
    told = cast("dict[str, dict[str, str | None]]", json.loads(lines[-1]))
    return {
        name: Imported(
            version=said.get("version") or "",
            problem=said.get("problem") or "",
            cuda=said.get("cuda"),
        )
        for name, said in told.items()
    }


def _cannot_compile() -> str:
    try:
        check_compilers(os.environ)
    except CannotCompileError as error:
        return str(error)
    return ""


def rdma_cards(folder: Path) -> tuple[str, ...]:
    """The network cards that the kernel lists there; none where there is no such folder."""
    try:
        return tuple(sorted(card.name for card in folder.iterdir()))
    except OSError:
        return ()


def _descriptors() -> Descriptors:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 30
    return Descriptors(
        soft=most if soft == resource.RLIM_INFINITY else soft,
        hard=most if hard == resource.RLIM_INFINITY else hard,
    )


def _clock_kept() -> bool:
    """As the kernel has it: whether a time service has set the clock lately.

    Source: adjtimex(2); `TIME_ERROR` is returned while the clock is not synchronized.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # `struct timex` is 208 bytes on 64-bit Linux; all zeros asks and changes nothing.
    state: int = libc.adjtimex(ctypes.create_string_buffer(512))
    if state < 0:
        raise OSError(ctypes.get_errno(), "the kernel does not say")
    return state != _CLOCK_ERROR
