"""Checks of the machine; pure functions of gathered facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from baton.config.schema.deployment import DeploymentConfig
from baton.domain.names.distribution import pip_install, pip_install_engine
from baton.engine.gpus import driver_problem
from baton.serving.checks.facts import (
    INGRESS_IMPORT,
    Coupling,
    DiskFact,
    ImportResult,
    MachineFacts,
    MachineSnapshot,
)
from baton.serving.checks.result import Check, CheckStatus, Finding, Topic, UnknownFact, size_text
from baton.serving.versions import FLAG, KEY, PACKAGES, untested_packages, versions_tested

_MIB = 1024**2
_GIB = 1024**3
_MIN_SHM_BYTES = 64 * _MIB
_RECOMMENDED_SHM_BYTES = 512 * _MIB
_MIN_DISK_BYTES = 256 * _MIB
_RECOMMENDED_DISK_BYTES = 2 * _GIB
_MIN_OPEN_FILES = 1024
_RECOMMENDED_OPEN_FILES = 8192
_FRESH_INSTALL = f"in a fresh environment, run {pip_install_engine()}"


def machine_checks(machine: MachineSnapshot, config: DeploymentConfig | None) -> Iterator[Check]:
    """Whether this machine can run baton at all."""
    yield check_versions(
        machine.versions,
        is_allowed=config is not None and config.cluster.allow_untested_versions,
        python=machine.python,
    )
    yield _check_imports(machine)
    yield from check_couplings(machine.couplings)
    yield _check_torch_build(machine, config)
    yield check_driver(machine)
    yield _check_kernels(machine)
    yield _check_conflicting_packages(machine)
    yield _check_shared_memory(machine)
    yield _check_disk(machine)
    yield _check_fd_limits(machine)
    yield _check_haproxy(machine)
    yield _check_clock(machine)


def check_versions(
    versions: Mapping[str, str | None],
    packages: Sequence[str] = PACKAGES,
    *,
    is_allowed: bool,
    python: str = "",
) -> Check:
    """Whether these packages are installed, in versions that were tested.

    Untested versions are a warning where they are allowed.
    """
    topic = Topic(
        "versions",
        "baton uses vLLM's engine protocol and parts of Ray Serve that change with each version",
    )
    summary = ", ".join(f"{name} {versions.get(name) or 'missing'}" for name in packages)
    missing = [name for name in packages if versions.get(name) is None]
    findings = []
    if missing:
        expected = ", ".join(f"{name} {' or '.join(versions_tested(name))}" for name in missing)
        here = f"{summary}; Python {python}" if python else summary
        findings.append(
            Finding(
                f"packages: got {here}, expected {expected}",
                f"install {' and '.join(missing)}: {pip_install_engine()}",
            )
        )
    fix = _FRESH_INSTALL
    if not is_allowed:
        fix += f", or start with {FLAG} ({KEY}) and find out what else is different"
    findings += [Finding(problem, fix) for _, problem in untested_packages(versions, packages)]
    status = CheckStatus.WARN if is_allowed and not missing else CheckStatus.FAIL
    return topic.from_findings(findings, otherwise=summary, status=status)


def _check_imports(machine: MachineSnapshot) -> Check:
    topic = Topic("imports", "what cannot be imported here cannot start in a replica")
    if isinstance(machine.imports, UnknownFact):
        make_check = topic.warned if machine.imports.is_late else topic.failed
        return make_check(
            machine.imports.reason, 'run the import: python -c "import torch, ray, vllm, nixl"'
        )
    problems = {name: result.problem for name, result in machine.imports.items() if result.problem}
    if len(problems) > 1:
        problems.pop(INGRESS_IMPORT, None)  # it imports the others
    findings = [
        Finding(f"the ingress's import of vllm: {problem}", f"{_FRESH_INSTALL}; see also: versions")
        if name == INGRESS_IMPORT
        else Finding(
            f"{name}: {problem}",
            f"install {name} anew: {pip_install_engine('--force-reinstall')}; see also the check of"
            " other packages",
        )
        for name, problem in problems.items()
    ]
    importable = ", ".join(name for name in machine.imports if name != INGRESS_IMPORT)
    passed = f"{importable} can be imported, and what an ingress needs of vllm"
    return topic.from_findings(findings, otherwise=passed)


def check_couplings(couplings: tuple[Coupling, ...] | UnknownFact) -> Iterator[Check]:
    """Whether private names of the vendors are as baton needs them."""
    for vendor in ("vLLM", "Ray", "NIXL"):
        topic = Topic(
            f"couplings to {vendor}",
            "baton calls and replaces private names, which change without notice",
        )
        if isinstance(couplings, UnknownFact):
            yield topic.skipped(couplings.reason)
            continue
        rows = [coupling for coupling in couplings if coupling.vendor == vendor]
        unfit = [coupling for coupling in rows if coupling.problem is not None]
        summary = f"{len(rows) - len(unfit)} of {len(rows)} couplings to {vendor} fit"
        if not unfit:
            yield topic.passed(summary)
            continue
        details = "; ".join(
            f"{coupling.name}: got {coupling.problem}, expected the private names of a tested"
            f" {coupling.package} (otherwise {coupling.fallback})"
            for coupling in unfit
        )
        is_refused = any(coupling.is_required for coupling in unfit)
        make_check = topic.failed if is_refused else topic.warned
        yield make_check(f"{summary}; {details}", _FRESH_INSTALL)


def _check_torch_build(machine: MachineSnapshot, config: DeploymentConfig | None) -> Check:
    topic = Topic("build", "a build for CPUs cannot use GPUs, and one for GPUs needs them")
    torch = _imported_torch(machine)
    if torch is None:
        return topic.skipped("torch cannot be imported")
    build = (
        f"torch {torch.version} for"
        f" {'CUDA ' + torch.cuda_version if torch.cuda_version else 'CPUs'}"
    )
    summary = f"{build}, {machine.gpus} GPUs"
    if machine.gpus and not torch.cuda_version:
        fix = f"in a fresh environment, run {pip_install('gpu')}"
        return topic.failed(summary, fix) if needs_gpus(config) else topic.warned(summary, fix)
    if torch.cuda_version and not machine.gpus and not needs_gpus(config):
        return topic.warned(
            summary, f"show it a GPU, or in a fresh environment run {pip_install('cpu')}"
        )
    return topic.passed(summary)


def check_driver(machine: MachineFacts) -> Check:
    """Whether the driver of this machine's GPUs runs torch."""
    topic = Topic(
        "GPU driver",
        "torch finds no GPU through a driver of an older CUDA, and engines do not start",
    )
    if not machine.gpus:
        return topic.passed("there are no GPUs")
    if (reason := driver_problem(machine.versions.get("torch"), machine.driver_cuda)) is not None:
        problem = Finding.from_line(reason)
        return topic.failed(problem.found, problem.fix)
    if machine.driver_cuda is None:
        return topic.warned("its CUDA version is unknown", "look at 'nvidia-smi'")
    return topic.passed(f"it supports CUDA {machine.driver_cuda[0]}.{machine.driver_cuda[1]}")


def _check_kernels(machine: MachineSnapshot) -> Check:
    topic = Topic(
        "kernels",
        "without compilers vLLM does without FlashInfer's and DeepGEMM's kernels, without an error",
    )
    if not machine.gpus:
        return topic.passed("there are no GPUs")
    if machine.kernel_compile_error:
        problem = Finding.from_line(machine.kernel_compile_error)
        return topic.warned(problem.found, problem.fix)
    return topic.passed("g++ and nvcc are found")


def _imported_torch(machine: MachineSnapshot) -> ImportResult | None:
    if isinstance(machine.imports, UnknownFact):
        return None
    torch = machine.imports.get("torch")
    return None if torch is None or torch.problem else torch


def needs_gpus(config: DeploymentConfig | None) -> bool:
    """Whether any pool runs on GPUs."""
    return config is not None and any(pool.resources.gpus for pool in config.pools.values())


def _check_conflicting_packages(machine: MachineSnapshot) -> Check:
    topic = Topic(
        "other packages",
        "beside torch for CPUs, builds of these for GPUs break 'import transformers'",
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


def _check_shared_memory(machine: MachineSnapshot) -> Check:
    topic = Topic(
        "shared memory",
        "Ray's object store, vLLM's workers and transfers on one machine share memory there",
    )
    free = machine.free_shared_memory_bytes
    if isinstance(free, UnknownFact):
        return topic.skipped(free.reason)
    summary = f"{size_text(free)} free in /dev/shm"
    fix = "give it more: 'docker run --shm-size 2g', or 'mount -o remount,size=2g /dev/shm'"
    if free < _MIN_SHM_BYTES:
        return topic.failed(summary, fix)
    return topic.warned(summary, fix) if free < _RECOMMENDED_SHM_BYTES else topic.passed(summary)


def _check_disk(machine: MachineSnapshot) -> Check:
    return check_disks(
        Topic("disk", "Ray's session, all logs and models are kept there"),
        machine.disks,
        remedy="or set TMPDIR or cluster.model_cache.path to a larger disk",
    )


def check_disks(topic: Topic, disks: Sequence[DiskFact], *, remedy: str) -> Check:
    """Whether the file system of each folder has room; the worst of them decides."""
    full, low, unknown = [], [], []
    for disk in disks:
        free = disk.free_bytes
        if isinstance(free, UnknownFact):
            unknown.append(free.reason)
            continue
        line = f"{size_text(free)} free in {disk.path} ({disk.purpose})"
        if free < _MIN_DISK_BYTES:
            full.append(Finding(line, f"make room in {disk.path}, {remedy}"))
        elif free < _RECOMMENDED_DISK_BYTES:
            low.append(Finding(line, f"make room in {disk.path}, {remedy}"))
    if full:
        return topic.from_findings([*full, *low])
    if unknown:
        return topic.warned("; ".join(unknown), "see whether that disk hangs: 'df', 'dmesg'")
    room = ", ".join(
        f"{size_text(disk.free_bytes)} free in {disk.path}"
        for disk in disks
        if isinstance(disk.free_bytes, int)
    )
    return topic.from_findings(low, otherwise=room, status=CheckStatus.WARN)


def _check_fd_limits(machine: MachineSnapshot) -> Check:
    topic = Topic("file descriptors", "each stream takes one in the ingress, two in HAProxy")
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


def _check_haproxy(machine: MachineSnapshot) -> Check:
    topic = Topic("front", "tokens go through HAProxy, or half as fast through Python")
    warning = machine.haproxy_warning
    if isinstance(warning, UnknownFact):
        return topic.skipped(warning.reason)
    if warning is None:
        return topic.passed("HAProxy runs here")
    problem = Finding.from_line(warning)
    return topic.warned(problem.found, problem.fix)


def _check_clock(machine: MachineSnapshot) -> Check:
    topic = Topic(
        "clock",
        "logs and traces of several machines are put in order by their clocks; what baton"
        " decides does not depend on them",
    )
    synchronized = machine.clock_synchronized
    if isinstance(synchronized, UnknownFact):
        return topic.skipped(synchronized.reason)
    if synchronized:
        return topic.passed("a time service keeps it right")
    return topic.warned(
        "the kernel says that nothing keeps it right",
        "run a time service: 'timedatectl set-ntp true', or chrony",
    )
