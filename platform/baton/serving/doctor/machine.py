"""Checks of `baton doctor` on the machine: pure functions of what was found on it."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.schema.deployment import DeploymentConfig
from baton.engine.gpus import driver_problem
from baton.serving.doctor.facts import INGRESS_IMPORT, ImportResult, MachineSnapshot, UnknownFact
from baton.serving.doctor.result import Check, Topic, size_text
from baton.serving.versions import FLAG, PACKAGES, untested_packages

_MIB = 1024**2
_GIB = 1024**3
_MIN_SHM_BYTES = 64 * _MIB
_RECOMMENDED_SHM_BYTES = 512 * _MIB
_MIN_DISK_BYTES = 256 * _MIB
_RECOMMENDED_DISK_BYTES = 2 * _GIB
_MIN_OPEN_FILES = 1024
_RECOMMENDED_OPEN_FILES = 8192


def machine_checks(machine: MachineSnapshot, config: DeploymentConfig | None) -> Iterator[Check]:
    """Whether this machine can run baton at all."""
    yield check_versions(machine, config)
    yield check_imports(machine)
    yield from check_couplings(machine)
    yield check_torch_build(machine, config)
    yield check_driver(machine)
    yield check_kernels(machine)
    yield check_conflicting_packages(machine)
    yield check_shared_memory(machine)
    yield check_disk(machine)
    yield check_fd_limits(machine)
    yield check_haproxy(machine)
    yield check_clock(machine)


def check_versions(machine: MachineSnapshot, config: DeploymentConfig | None) -> Check:
    """Whether the packages are of versions that work with this baton, and with each other."""
    topic = Topic(
        name="versions",
        why="baton speaks vLLM's engine protocol and uses parts of Ray Serve that change with"
        " each version",
    )
    summary = ", ".join(
        f"{name} {version or 'missing'}" for name, version in _package_versions(machine)
    )
    missing = [name for name, version in _package_versions(machine) if version is None]
    if missing:
        return topic.failed(
            f"{summary}; Python {machine.python}",
            f"install {' and '.join(missing)}: pip install 'baton[cpu]' or 'baton[gpu]'",
        )
    if untested_versions := dict(untested_packages(machine.versions)):
        allowed = config is not None and config.cluster.allow_untested_versions
        make_check = topic.warned if allowed else topic.failed
        return make_check(
            "; ".join(untested_versions.values()),
            "install 'baton[cpu]' or 'baton[gpu]' in a fresh environment"
            + ("" if allowed else f", or start with {FLAG}"),
        )
    return topic.passed(summary)


def _package_versions(machine: MachineSnapshot) -> list[tuple[str, str | None]]:
    return [(name, machine.versions.get(name)) for name in PACKAGES]


def check_imports(machine: MachineSnapshot) -> Check:
    """Whether the packages can be imported."""
    topic = Topic(name="imports", why="what cannot be imported here cannot start in a replica")
    if isinstance(machine.imports, UnknownFact):
        return topic.failed(
            machine.imports.why, 'try by hand: python -c "import torch, ray, vllm, nixl"'
        )
    failed_imports = {
        name: import_.problem for name, import_ in machine.imports.items() if import_.problem
    }
    if INGRESS_IMPORT in failed_imports and len(failed_imports) == 1:
        return topic.failed(
            f"what an ingress imports of vllm: {failed_imports[INGRESS_IMPORT]}",
            "install 'baton[cpu]' or 'baton[gpu]' in a fresh environment; see also: versions",
        )
    if failed_imports:
        failed_imports.pop(INGRESS_IMPORT, None)  # it imports the others
        return topic.failed(
            "; ".join(f"{name}: {problem}" for name, problem in failed_imports.items()),
            f"install {' and '.join(failed_imports)} anew: pip install --force-reinstall"
            " 'baton[cpu]' or"
            " 'baton[gpu]'; see also the check of other packages",
        )
    importable = [name for name in machine.imports if name != INGRESS_IMPORT]
    return topic.passed(
        f"{', '.join(importable)} can be imported, and what an ingress needs of vllm"
    )


def check_couplings(machine: MachineSnapshot) -> Iterator[Check]:
    """Whether private names of each vendor are as they were when baton was tested."""
    for vendor in ("vLLM", "Ray", "NIXL"):
        topic = Topic(
            name=f"couplings to {vendor}",
            why="baton calls and replaces private names, which change without notice",
        )
        if isinstance(machine.couplings, UnknownFact):
            yield topic.skipped(machine.couplings.why)
            continue
        couplings = [coupling for coupling in machine.couplings if coupling.vendor == vendor]
        unfit = [coupling for coupling in couplings if coupling.problem is not None]
        summary = f"{len(couplings) - len(unfit)} of {len(couplings)} fit"
        if not unfit:
            yield topic.passed(summary)
            continue
        details = "; ".join(
            f"{coupling.name}: {coupling.problem} ({coupling.fallback})" for coupling in unfit
        )
        is_refused = any(coupling.is_required for coupling in unfit)
        make_check = topic.failed if is_refused else topic.warned
        yield make_check(
            f"{summary}; {details}",
            "install 'baton[cpu]' or 'baton[gpu]' in a fresh environment",
        )


def check_torch_build(machine: MachineSnapshot, config: DeploymentConfig | None) -> Check:
    """Whether torch was built for the devices that are here."""
    topic = Topic(name="build", why="a build for CPUs cannot use GPUs, and one for GPUs needs them")
    torch = _imported_torch(machine)
    if torch is None:
        return topic.skipped("torch cannot be imported")
    build = (
        f"torch {torch.version} for"
        f" {'CUDA ' + torch.cuda_version if torch.cuda_version else 'CPUs'}"
    )
    summary = f"{build}, {machine.gpus} GPUs"
    if machine.gpus and not torch.cuda_version:
        fix = "install baton[gpu] in a fresh environment"
        return topic.failed(summary, fix) if _needs_gpus(config) else topic.warned(summary, fix)
    if torch.cuda_version and not machine.gpus and not _needs_gpus(config):
        return topic.warned(summary, "install baton[cpu] in a fresh environment, or show it a GPU")
    return topic.passed(summary)


def check_driver(machine: MachineSnapshot) -> Check:
    """Whether the GPUs' driver runs what torch was built for."""
    topic = Topic(
        name="GPU driver",
        why="torch finds no GPU through a driver of an older CUDA, and engines do not start",
    )
    if not machine.gpus:
        return topic.passed("there are no GPUs")
    if (why := driver_problem(machine.versions.get("torch"), machine.driver_cuda)) is not None:
        problem, _, fix = why.partition("; ")
        return topic.failed(problem, fix)
    if machine.driver_cuda is None:
        return topic.warned("it does not say which CUDA it speaks", "look at 'nvidia-smi'")
    return topic.passed(f"it speaks CUDA {machine.driver_cuda[0]}.{machine.driver_cuda[1]}")


def check_kernels(machine: MachineSnapshot) -> Check:
    """Whether kernels can be compiled that engines compile where they run."""
    topic = Topic(
        name="kernels",
        why="without compilers vLLM does without FlashInfer's and DeepGEMM's kernels, in silence",
    )
    if not machine.gpus:
        return topic.passed("there are no GPUs")
    if machine.kernel_compile_error:
        problem, _, fix = machine.kernel_compile_error.partition("; ")
        return topic.warned(problem, fix)
    return topic.passed("g++ and nvcc are found")


def _imported_torch(machine: MachineSnapshot) -> ImportResult | None:
    if isinstance(machine.imports, UnknownFact):
        return None
    torch = machine.imports.get("torch")
    return None if torch is None or torch.problem else torch


def _needs_gpus(config: DeploymentConfig | None) -> bool:
    return config is not None and any(pool.resources.gpus for pool in config.pools.values())


def check_conflicting_packages(machine: MachineSnapshot) -> Check:
    """Whether packages are installed that break others."""
    topic = Topic(
        name="other packages",
        why="beside torch for CPUs, builds of these for GPUs break 'import transformers'",
    )
    conflicting = {
        name: version
        for name, version in machine.conflicting_packages.items()
        if version is not None and not version.endswith("+cpu")
    }
    torch = _imported_torch(machine)
    on_cpus = "cpu" in (machine.versions.get("torch") or "") or (
        torch is not None and not torch.cuda_version
    )
    if conflicting and on_cpus:
        listing = ", ".join(f"{name} {version}" for name, version in conflicting.items())
        return topic.failed(
            f"{listing} beside torch for CPUs", f"pip uninstall {' '.join(conflicting)}"
        )
    return topic.passed("nothing that breaks others")


def check_shared_memory(machine: MachineSnapshot) -> Check:
    """Whether /dev/shm has room."""
    topic = Topic(
        name="shared memory",
        why="Ray's object store, vLLM's workers and transfers on one machine share memory there",
    )
    free = machine.free_shared_memory_bytes
    if isinstance(free, UnknownFact):
        return topic.skipped(free.why)
    summary = f"{size_text(free)} free in /dev/shm"
    fix = "give it more: 'docker run --shm-size 2g', or 'mount -o remount,size=2g /dev/shm'"
    if free < _MIN_SHM_BYTES:
        return topic.failed(summary, fix)
    return topic.warned(summary, fix) if free < _RECOMMENDED_SHM_BYTES else topic.passed(summary)


def check_disk(machine: MachineSnapshot) -> Check:
    """Whether there is room for a session and its logs."""
    topic = Topic(name="disk", why="Ray's session and all logs are kept there")
    free = machine.free_disk_bytes
    if isinstance(free, UnknownFact):
        return topic.skipped(free.why)
    summary = f"{size_text(free)} free in {machine.disk_path}"
    fix = f"make room in {machine.disk_path}, or set TMPDIR to a larger disk"
    if free < _MIN_DISK_BYTES:
        return topic.failed(summary, fix)
    return topic.warned(summary, fix) if free < _RECOMMENDED_DISK_BYTES else topic.passed(summary)


def check_fd_limits(machine: MachineSnapshot) -> Check:
    """Whether processes may open as many files as there are streams."""
    topic = Topic(
        name="file descriptors", why="each stream takes one in the ingress, two in HAProxy"
    )
    limits = machine.fd_limits
    summary = f"{limits.soft:,} per process, at most {limits.hard:,}"
    fix = (
        f"raise the limit: 'ulimit -n {_RECOMMENDED_OPEN_FILES * 8}', or LimitNOFILE of the service"
    )
    if limits.hard < _MIN_OPEN_FILES:
        return topic.failed(summary, fix)
    return (
        topic.warned(summary, fix)
        if limits.soft < _RECOMMENDED_OPEN_FILES
        else topic.passed(summary)
    )


def check_haproxy(machine: MachineSnapshot) -> Check:
    """Whether HAProxy can carry the tokens."""
    topic = Topic(name="front", why="tokens go through HAProxy, or half as fast through Python")
    warning = machine.haproxy_warning
    if isinstance(warning, UnknownFact):
        return topic.skipped(warning.why)
    if warning is None:
        return topic.passed("HAProxy runs here")
    problem, _, fix = warning.rpartition("; ")
    return topic.warned(problem, fix)


def check_clock(machine: MachineSnapshot) -> Check:
    """Whether something keeps the clock right."""
    topic = Topic(
        name="clock",
        why="logs and traces of several machines are put in order by their clocks; what baton"
        " decides does not depend on them",
    )
    synchronized = machine.clock_synchronized
    if isinstance(synchronized, UnknownFact):
        return topic.skipped(synchronized.why)
    if synchronized:
        return topic.passed("a time service keeps it right")
    return topic.warned(
        "the kernel says that nothing keeps it right",
        "run a time service: 'timedatectl set-ntp true', or chrony",
    )
