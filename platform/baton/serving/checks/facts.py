"""Gathers the facts that checks evaluate: of this machine, a configuration's files, and a cluster.

Facts that may take long have a deadline each, and are gathered side by side. Guards of couplings
import vLLM, Ray Serve and NIXL, so they run in a process of their own. An import takes seconds and
may crash, and this process must set the environment of Ray Serve first.
"""

from __future__ import annotations

import contextlib
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
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar, cast

import httpx
import msgspec
import psutil

from baton.config.derive.options import key_files, model_loading_arguments
from baton.config.schema.deployment import DeploymentConfig, ModelConfig
from baton.domain.errors import ClusterFailed
from baton.domain.names.addresses import is_loopback
from baton.domain.names.model_sources import hub_id, is_on_hub
from baton.engine.cuda_home import CannotCompileError, check_compilers
from baton.engine.gpus import count_gpus, driver_cuda_version, use_cpu_without_gpus
from baton.engine.hub_fetch import FetchFailure, access_failure, no_answer_failure
from baton.serving.checks.endpoint import connection_problem
from baton.serving.checks.named_files import (
    NodeFiles,
    inspect_node_files,
    key_findings,
    node_eligibility,
    source_findings,
    tls_findings,
)
from baton.serving.checks.result import Finding, UnknownFact, last_line
from baton.serving.cluster.readiness import local_client
from baton.serving.front.data_path import choose_data_path, port_is_free
from baton.serving.ray.autoscaler import NodeType
from baton.serving.replica.hub_environment import apply_variables
from baton.serving.versions import PACKAGES

T = TypeVar("T")
Progress = Callable[[str], None]
SERVER_PORT: Final = "server.port"
_CONFLICTING_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
_FACT_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 15.0
_HAPROXY_TIMEOUT_S = 15.0
_HUB_TIMEOUT_S = 4.0
"""With the import of the hub's client, and the time for names to be resolved."""
_NO_HUB_VARIABLES = ("HF_HUB_OFFLINE", "VLLM_USE_MODELSCOPE")
"""With either set, no model comes from the hub."""
_IMPORT_TIMEOUT_S = 40.0
"""vLLM takes 6 to 9 s to import on a quiet machine."""
_SLACK_S = 1.0
"""For a process that is ended at its deadline."""
_HTTP_TIMEOUT_S = 3.0
_NODE_TIMEOUT_S = 60.0
"""A node may have to start a worker process first."""
_COUPLINGS_TIMEOUT_S = 180.0
"""Of a start, which waits for them."""
_TIME_ERROR = 5
"""Result of `adjtimex` while no time service synchronizes the clock."""
INGRESS_IMPORT: Final = "baton.engine.vllm.frontend.llm"
"""The ingress's import of vLLM, which moves between versions."""
_IMPORTED = ("torch", "ray", "vllm", "nixl", INGRESS_IMPORT)
_IMPORT_SCRIPT = """
import importlib, json, os, sys
os.nice(10)
results = {}
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
        facts = {"version": str(getattr(module, "__version__", ""))}
        if name == "torch":
            facts["cuda_version"] = module.version.cuda
        results[name] = facts
    except BaseException as error:
        lines = [line for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
        results[name] = {"problem": lines[-1].strip()[:300]}
print("\\n" + json.dumps(results))
"""
_COUPLING_TABLES: Final = {
    "vLLM": "baton.engine.vllm.patches.table",
    "Ray": "baton.serving.ray.couplings",
    "NIXL": "baton.transfer.couplings",
}
_COUPLING_SCRIPT = """
import importlib, json, os, sys
os.nice(10)
from baton.runtime.patch import coupling_report
rows = []
for vendor, table in json.loads(sys.argv[1]).items():
    for row in coupling_report(importlib.import_module(table).PATCHES):
        rows.append({"vendor": vendor, **row})
print("\\n" + json.dumps(rows))
"""


class ImportResult(msgspec.Struct, frozen=True, kw_only=True):
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
class DiskFact:
    """The file system of a folder."""

    purpose: str
    path: str
    free_bytes: int | UnknownFact


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDescriptorLimits:
    """Limits of this user on open files of a process."""

    soft: int
    hard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PortListener:
    """The process that listens on a port; without a pid if it is another user's."""

    pid: int | None
    program: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFact:
    """A port in a configuration."""

    key: str
    host: str
    port: int
    free: bool
    listener: PortListener | None = None


class Coupling(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a table, and whether it fits."""

    vendor: str
    name: str
    package: str
    problem: str | None
    """Why it does not fit; None where it does."""
    fallback: str
    is_required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Facts of this machine, and of the files and ports that a configuration names on it."""

    python: str
    versions: Mapping[str, str | None]
    """None: not installed."""
    gpus: int
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA of the driver; None: no driver, or unknown."""
    available_memory_bytes: int | UnknownFact
    ports: tuple[PortFact, ...] = ()
    model_findings: tuple[Finding, ...] = ()
    key_findings: tuple[Finding, ...] = ()
    tls_findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSnapshot(MachineFacts):
    """All facts of this machine, also those that no start needs."""

    conflicting_packages: Mapping[str, str | None]
    imports: Mapping[str, ImportResult] | UnknownFact
    kernel_compile_error: str = ""
    """Why kernels for GPUs cannot be compiled; empty when they can, or without GPUs."""
    free_shared_memory_bytes: int | UnknownFact
    disks: tuple[DiskFact, ...]
    """Where a deployment that starts here keeps its session, its logs and its models."""
    fd_limits: FileDescriptorLimits
    haproxy_warning: str | UnknownFact | None
    """Why HAProxy cannot carry the tokens; None when it can."""
    clock_synchronized: bool | UnknownFact
    couplings: tuple[Coupling, ...] | UnknownFact = ()
    nics: tuple[str, ...] = ()
    """Network cards with RDMA, by the names that UCX_NET_DEVICES takes."""
    secrets: tuple[FileFact, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """A running Ray cluster."""

    cpus: float
    gpus: float
    versions: Mapping[str, Mapping[str, str | None]]
    labels: tuple[Mapping[str, str], ...] = ({},)
    """Of each node."""
    node_resources: tuple[Mapping[str, float], ...] = ()
    """Of each node; empty if unknown."""


def gather_start(config: DeploymentConfig | None) -> MachineFacts:
    """The facts that a start needs; nothing is imported for them."""
    facts = MachineFacts(
        python=platform.python_version(),
        versions=installed_versions(PACKAGES),
        gpus=count_gpus(os.environ),
        driver_cuda=driver_cuda_version(),
        available_memory_bytes=gather_fact(_FACT_TIMEOUT_S, "the memory", available_memory_bytes),
    )
    if config is None:
        return facts
    return replace(
        facts,
        ports=port_facts(config),
        model_findings=(*source_findings(config.models), *hub_findings(config, os.environ)),
        key_findings=key_findings(config),
        tls_findings=tls_findings(config),
    )


def gather_machine(
    config: DeploymentConfig | None, progress: Progress
) -> MachineSnapshot | UnknownFact:
    """Look at this machine and, with a configuration, at the ports and files that it names.

    All facts are gathered side by side: it returns within the longest of their deadlines.
    """
    progress("importing " + ", ".join(PACKAGES) + " in processes of their own")
    couplings = PendingFact(
        _IMPORT_TIMEOUT_S + _SLACK_S, "couplings", lambda: read_couplings(_IMPORT_TIMEOUT_S)
    )
    imports = PendingFact(_IMPORT_TIMEOUT_S + _SLACK_S, "importing them", try_imports)
    start = PendingFact(_START_TIMEOUT_S, "this machine", lambda: gather_start(config))
    shared_memory = PendingFact(
        _FACT_TIMEOUT_S, "/dev/shm", lambda: shutil.disk_usage("/dev/shm").free  # noqa: S108 - looked at
    )  # fmt: skip
    disks = gather_disks(start_folders(config))
    haproxy = PendingFact(
        _HAPROXY_TIMEOUT_S, "HAProxy", lambda: choose_data_path(os.environ).warning
    )
    clock = PendingFact(_FACT_TIMEOUT_S, "the clock", _is_clock_synchronized)
    compilers = PendingFact(_FACT_TIMEOUT_S, "compilers", _kernel_compile_error)
    secrets = PendingFact(
        _FACT_TIMEOUT_S,
        "token and key files",
        lambda: () if config is None else secret_files(config),
    )
    facts = start.wait()
    if isinstance(facts, UnknownFact):
        return facts
    compile_error, files = compilers.wait(), secrets.wait()
    if isinstance(compile_error, UnknownFact):
        compile_error = f"{compile_error.reason}; see whether g++ and nvcc start"
    return MachineSnapshot(
        **{field.name: getattr(facts, field.name) for field in fields(facts)},
        conflicting_packages=installed_versions(_CONFLICTING_PACKAGES),
        imports=imports.wait(),
        kernel_compile_error=compile_error if facts.gpus else "",
        free_shared_memory_bytes=shared_memory.wait(),
        disks=disks,
        fd_limits=_fd_limits(),
        haproxy_warning=haproxy.wait(),
        clock_synchronized=clock.wait(),
        nics=rdma_nics(Path("/sys/class/infiniband")),
        secrets=(FileFact(path="files", purpose="keys and tokens", problem=files.reason),)
        if isinstance(files, UnknownFact)
        else files,
        couplings=couplings.wait(),
    )


class PendingFact(Generic[T]):
    """A fact that a thread of its own finds out, from now until its deadline."""

    def __init__(self, deadline_s: float, label: str, read_fact: Callable[[], T]) -> None:
        self._deadline_s = deadline_s
        self._until_s = time.monotonic() + deadline_s
        self._label = label
        self._answers: SimpleQueue[T | UnknownFact] = SimpleQueue()
        self._lock = threading.Lock()
        # A daemon: a disk that hangs must not keep the command from ending.
        threading.Thread(
            target=self._read, args=(read_fact,), name=f"look at {label}", daemon=True
        ).start()

    def wait(self) -> T | UnknownFact:
        """The fact, or why it is unknown: an error, or the deadline."""
        with self._lock:
            try:
                answer = self._answers.get(timeout=max(0.0, self._until_s - time.monotonic()))
            except Empty:
                return UnknownFact(
                    f"{self._label}: nothing came within {self._deadline_s:g} s", is_late=True
                )
            self._answers.put(answer)  # for the next who waits
            return answer

    def _read(self, read_fact: Callable[[], T]) -> None:
        try:
            self._answers.put(read_fact())
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            late = f"nothing came within {self._deadline_s:g} s"
            reason = late if isinstance(error, subprocess.TimeoutExpired) else str(error) or late
            self._answers.put(UnknownFact(f"{self._label}: {reason}", is_late=True))
        except Exception as error:  # noqa: BLE001 - a fact that cannot be had is one, too
            reason = last_line(f"{type(error).__name__}: {error}")
            kind = type(error).__name__
            self._answers.put(
                UnknownFact(
                    f"{self._label}: {reason if reason.startswith(kind) else f'{kind}: {reason}'}"
                )
            )


def gather_fact(deadline_s: float, label: str, read_fact: Callable[[], T]) -> T | UnknownFact:
    """A fact, or why it is unknown: an error, or the deadline."""
    return PendingFact(deadline_s, label, read_fact).wait()


def start_folders(config: DeploymentConfig | None) -> dict[str, Path]:
    """The folders of a deployment that starts here, by their purpose."""
    folders = {"Ray's session and logs": Path(tempfile.gettempdir())}
    if config is not None and (cache := config.cluster.model_cache.path) is not None:
        folders["the model cache"] = Path(cache).expanduser()
    return folders


def gather_disks(folders: Mapping[str, Path]) -> tuple[DiskFact, ...]:
    """The file systems of folders, which are given by their purpose; each has a deadline."""
    pending = [
        (purpose, path, PendingFact(_FACT_TIMEOUT_S, str(path), partial(_free_bytes, path)))
        for purpose, path in folders.items()
    ]
    return tuple(
        DiskFact(purpose=purpose, path=str(path), free_bytes=fact.wait())
        for purpose, path, fact in pending
    )


def _free_bytes(folder: Path) -> int:
    """For this user, in the file system of a folder or of its nearest parent that exists."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def hub_findings(
    config: DeploymentConfig, environ: Mapping[str, str], *, timeout_s: float = _HUB_TIMEOUT_S
) -> tuple[Finding, ...]:
    """Models that a deployment of this machine alone would not get from their hub.

    Other nodes may reach a hub that this machine does not.
    """
    is_local = config.cluster.address is None and is_loopback(config.cluster.node_address)
    if not is_local or any(environ.get(name) for name in _NO_HUB_VARIABLES):
        return ()
    models = [
        model
        for model in config.models.values()
        if is_on_hub(model.source) and not Path(model.source).is_dir()
    ]
    if not models:
        return ()
    apply_variables(os.environ, {}, ())  # as in replicas: no proxy for a hub of this machine
    with ThreadPoolExecutor(len(models)) as executor:
        failures = executor.map(
            lambda model: _hub_failure(config, model, environ, timeout_s), models
        )
        return tuple(Finding(*failure) for failure in failures if failure is not None)


def _hub_failure(
    config: DeploymentConfig, model: ModelConfig, environ: Mapping[str, str], timeout_s: float
) -> FetchFailure | None:
    repository = hub_id(model.source)
    folder = model_loading_arguments(model).get("download_dir")
    if folder is None and config.cluster.model_cache.path is not None:
        folder = Path(config.cluster.model_cache.path).expanduser() / "hub"
    failure = gather_fact(
        timeout_s,
        "its hub",
        lambda: access_failure(
            repository,
            model.revision,
            environ,
            folder=None if folder is None else Path(str(folder)),
        ),
    )
    if isinstance(failure, UnknownFact):
        return no_answer_failure(repository, environ, failure.reason)
    return failure


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
        return connection_problem(error)
    return "" if answer.is_success else f"it answers {answer.status_code}"


def http_problem(url: str) -> str:
    """Why no HTTP server answers there; empty after any answer."""
    try:
        httpx.get(url, timeout=_HTTP_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        return connection_problem(error)
    return ""


def try_imports(timeout_s: float = _IMPORT_TIMEOUT_S) -> dict[str, ImportResult]:
    """Import each package in a process of its own; blocks for seconds.

    Raises:
        RuntimeError: the process failed.
        subprocess.TimeoutExpired: it did not end.
    """
    answer = _run_python(_IMPORT_SCRIPT, *_IMPORTED, timeout_s=timeout_s)
    return msgspec.json.decode(answer, type=dict[str, ImportResult])


def read_couplings(timeout_s: float = _COUPLINGS_TIMEOUT_S) -> tuple[Coupling, ...]:
    """Try every row of the tables of couplings; blocks for seconds.

    Raises:
        RuntimeError: the process that tries them failed.
        subprocess.TimeoutExpired: it did not end.
    """
    answer = _run_python(_COUPLING_SCRIPT, json.dumps(_COUPLING_TABLES), timeout_s=timeout_s)
    return msgspec.json.decode(answer, type=tuple[Coupling, ...])


def _run_python(script: str, *arguments: str, timeout_s: float) -> str:
    """The last line of a script in another process: an import may crash, hang, or take gigabytes.

    Raises:
        RuntimeError: the process failed.
        subprocess.TimeoutExpired: it did not end.
    """
    environ = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    use_cpu_without_gpus(environ)
    completed = subprocess.run(  # noqa: S603 - this Python, a program of our own
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environ,
    )
    lines = completed.stdout.strip().splitlines()
    if completed.returncode or not lines:
        last = (completed.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the process that imports ended with {completed.returncode}: {last}")
    return lines[-1]


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


def port_fact(key: str, host: str, port: int) -> PortFact:
    """Whether the port that a key sets is free on this machine, and else its listener."""
    free = port_is_free(host, port)
    listener = None if free else port_listener(port)
    return PortFact(key=key, host=host, port=port, free=free, listener=listener)


def port_listener(port: int) -> PortListener | None:
    """The process that listens on a TCP port of this machine; None if none is visible."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:  # macOS shows them to root only
        return None
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or connection.laddr[1:] != (port,):
            continue
        if connection.pid is None:
            return PortListener(pid=None)
        with contextlib.suppress(psutil.Error):
            return PortListener(pid=connection.pid, program=psutil.Process(connection.pid).name())
    return None


def available_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory for new processes: the machine's, or the container's if that is less."""
    available: int = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit
        return available
    return min(available, max(0, limit - used))


def installed_versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Versions from the packages' metadata: nothing is imported."""
    return {package: _version(package) for package in packages}


def _version(package: str) -> str | None:
    # The CPU build of vLLM is a distribution of its own.
    for distribution in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def cluster_facts() -> ClusterFacts:
    """The connected cluster, from a small task on every node; raises as `call_on_nodes`."""
    import ray

    arguments = {str(node["NodeID"]): (PACKAGES,) for node in ray.nodes() if node["Alive"]}
    return replace(cluster_resources(), versions=call_on_nodes(installed_versions, arguments))


def call_on_nodes(
    call: Callable[..., T], arguments: Mapping[str, tuple[object, ...]]
) -> Mapping[str, T]:
    """The results of a call on these nodes, by their names; all nodes run it at once.

    Args:
        call: Runs on each node, in a process of its own.
        arguments: Of the call, by the id of the node.

    Raises:
        TimeoutError: a node did not answer.
        ClusterFailed: a node cannot run baton.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote_call = ray.remote(num_cpus=0)(call)
    refs = {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})": remote_call.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(*arguments[node["NodeID"]])
        for node in ray.nodes()
        if node["NodeID"] in arguments
    }
    deadline_at_s = time.monotonic() + _NODE_TIMEOUT_S
    return {name: _node_result(name, ref, deadline_at_s) for name, ref in refs.items()}


def _node_result(node: str, ref: object, deadline_at_s: float) -> Any:  # noqa: ANN401 - as the node has it
    import ray

    try:
        return ray.get(ref, timeout=max(0.0, deadline_at_s - time.monotonic()))
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(f"node {node} did not answer") from error
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ClusterFailed(
            f"node {node} cannot run baton: {reason}",
            "install the same baton there, for the Python that Ray runs on",
        ) from error


def cluster_resources() -> ClusterFacts:
    """The resources of the connected cluster, without versions."""
    import ray

    totals = cast("dict[str, float]", ray.cluster_resources())
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return ClusterFacts(
        cpus=totals.get("CPU", 0.0),
        gpus=totals.get("GPU", 0.0),
        versions={},
        labels=tuple(node["Labels"] for node in nodes),
        node_resources=tuple(node["Resources"] for node in nodes),
    )


def with_available_resources(facts: ClusterFacts) -> ClusterFacts:
    """The facts of a shared cluster: only free resources count."""
    import ray

    available = cast("dict[str, float]", ray.available_resources())
    return replace(facts, cpus=available.get("CPU", 0.0), gpus=available.get("GPU", 0.0))


def collect_node_files(config: DeploymentConfig) -> Mapping[str, NodeFiles]:
    """The files of every node of the connected cluster; raises as `call_on_nodes`."""
    import ray

    arguments = {}
    for node in ray.nodes():
        node_type = NodeType(name="", resources=node["Resources"], labels=node["Labels"])
        if node["Alive"]:
            arguments[str(node["NodeID"])] = (config, node_eligibility(config, node_type))
    return call_on_nodes(inspect_node_files, arguments)
