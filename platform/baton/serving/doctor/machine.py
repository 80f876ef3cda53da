"""Checks of the machine, and of a configuration on it; pure functions of gathered facts."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.schema.deployment import DeploymentConfig
from baton.engine.gpus import driver_problem
from baton.serving.doctor.facts import (
    INGRESS_IMPORT,
    FileFact,
    ImportResult,
    MachineSnapshot,
    UnknownFact,
)
from baton.serving.doctor.result import Check, Topic, size_text
from baton.serving.preflight.checks import (
    gpu_findings,
    key_findings,
    keyless_findings,
    memory_findings,
    port_findings,
)
from baton.serving.preflight.named_files import source_findings
from baton.serving.versions import FLAG, PACKAGES, untested_packages

_MIB = 1024**2
_GIB = 1024**3
_MIN_SHM_BYTES = 64 * _MIB
_RECOMMENDED_SHM_BYTES = 512 * _MIB
_MIN_DISK_BYTES = 256 * _MIB
_RECOMMENDED_DISK_BYTES = 2 * _GIB
_MIN_OPEN_FILES = 1024
_RECOMMENDED_OPEN_FILES = 8192
_GROUP_OTHER_BITS = 0o077
_UCX_DEVICES_VARIABLE = "UCX_NET_DEVICES"
_NIC_MAPPING_VARIABLE = "VLLM_GPU_NIC_PCIE_MAPPING"
_NIC_SELECTION_VARIABLE = "VLLM_NIC_SELECTION_VARS"
_NO_CONFIG = "no configuration was given; name one with -c FILE"


def machine_checks(machine: MachineSnapshot, config: DeploymentConfig | None) -> Iterator[Check]:
    """Whether this machine can run baton at all."""
    yield _check_versions(machine, config)
    yield _check_imports(machine)
    yield from _check_couplings(machine)
    yield _check_torch_build(machine, config)
    yield _check_driver(machine)
    yield _check_kernels(machine)
    yield _check_conflicting_packages(machine)
    yield _check_shared_memory(machine)
    yield _check_disk(machine)
    yield _check_fd_limits(machine)
    yield _check_haproxy(machine)
    yield _check_clock(machine)


def _check_versions(machine: MachineSnapshot, config: DeploymentConfig | None) -> Check:
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


def _check_imports(machine: MachineSnapshot) -> Check:
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


def _check_couplings(machine: MachineSnapshot) -> Iterator[Check]:
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


def _check_torch_build(machine: MachineSnapshot, config: DeploymentConfig | None) -> Check:
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


def _check_driver(machine: MachineSnapshot) -> Check:
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


def _check_kernels(machine: MachineSnapshot) -> Check:
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


def _check_conflicting_packages(machine: MachineSnapshot) -> Check:
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


def _check_shared_memory(machine: MachineSnapshot) -> Check:
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


def _check_disk(machine: MachineSnapshot) -> Check:
    topic = Topic(name="disk", why="Ray's session and all logs are kept there")
    free = machine.free_disk_bytes
    if isinstance(free, UnknownFact):
        return topic.skipped(free.why)
    summary = f"{size_text(free)} free in {machine.disk_path}"
    fix = f"make room in {machine.disk_path}, or set TMPDIR to a larger disk"
    if free < _MIN_DISK_BYTES:
        return topic.failed(summary, fix)
    return topic.warned(summary, fix) if free < _RECOMMENDED_DISK_BYTES else topic.passed(summary)


def _check_fd_limits(machine: MachineSnapshot) -> Check:
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


def _check_haproxy(machine: MachineSnapshot) -> Check:
    topic = Topic(name="front", why="tokens go through HAProxy, or half as fast through Python")
    warning = machine.haproxy_warning
    if isinstance(warning, UnknownFact):
        return topic.skipped(warning.why)
    if warning is None:
        return topic.passed("HAProxy runs here")
    problem, _, fix = warning.rpartition("; ")
    return topic.warned(problem, fix)


def _check_clock(machine: MachineSnapshot) -> Check:
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


def config_checks(
    machine: MachineSnapshot, config: DeploymentConfig | None, *, running_url: str | None
) -> Iterator[Check]:
    """Whether this machine can run the configuration; `running_url` is the running endpoint."""
    yield _check_memory(machine, config, running_url=running_url)
    yield _check_gpus(machine, config, running_url=running_url)
    yield _check_nics(machine, config)
    yield _check_model(config)
    yield check_ports(machine, config, running_url=running_url)
    yield _check_secrets(machine, config)
    yield _check_keys(config)


def _check_memory(
    machine: MachineSnapshot, config: DeploymentConfig | None, *, running_url: str | None
) -> Check:
    topic = Topic(name="memory", why="a machine without memory kills whoever asks for more")
    available = machine.available_memory_bytes
    if config is None:
        return topic.skipped(_NO_CONFIG)
    if running_url is not None:
        return topic.skipped(f"what runs at {running_url} holds its memory already")
    if isinstance(available, UnknownFact):
        return topic.skipped(available.why)
    if findings := memory_findings(config, available):
        return topic.from_findings(findings)
    return topic.passed(f"{size_text(available)} available, enough for what starts at once")


def _check_gpus(
    machine: MachineSnapshot, config: DeploymentConfig | None, *, running_url: str | None
) -> Check:
    topic = Topic(name="GPUs", why="replicas wait for devices that are not there, for ever")
    if config is None:
        return topic.skipped(_NO_CONFIG)
    if running_url is not None:
        return topic.skipped(f"what runs at {running_url} has its devices already")
    if findings := gpu_findings(config, machine.gpus):
        return topic.from_findings(findings)
    return topic.passed(f"{machine.gpus} here, enough for what starts at once")


def _check_nics(machine: MachineSnapshot, config: DeploymentConfig | None) -> Check:
    topic = Topic(name="network cards", why="eight GPUs that share one card pull at an eighth each")
    if config is None:
        return topic.skipped(_NO_CONFIG)
    incomplete_pools, shared_nics = [], []
    for name, pool in config.pools.items():
        environment = {**config.transfer.env, **pool.env}
        has_variable = [
            key in environment for key in (_NIC_MAPPING_VARIABLE, _NIC_SELECTION_VARIABLE)
        ]
        if any(has_variable) and not all(has_variable):
            incomplete_pools.append(name)
        devices = environment.get(_UCX_DEVICES_VARIABLE)
        workers = pool.parallel.workers * pool.replicas.max
        is_single_nic = (
            isinstance(devices, str) and devices not in {"", "all"} and "," not in devices
        )
        if is_single_nic and len(machine.nics) > 1 and workers > 1 and pool.resources.gpus:
            shared_nics.append(f"{workers} workers of {name} use {devices}")
    if incomplete_pools:
        return topic.failed(
            f"{', '.join(incomplete_pools)}: only one of {_NIC_MAPPING_VARIABLE} and"
            f" {_NIC_SELECTION_VARIABLE} is set, and"
            " workers end without the other",
            "set both, in transfer.env or the pool's env; see docs/operations/transfer.md",
        )
    if shared_nics:
        return topic.warned(
            f"{'; '.join(shared_nics)}, one of {len(machine.nics)} cards here"
            f" ({', '.join(machine.nics)})",
            f"leave {_UCX_DEVICES_VARIABLE} out, and UCX takes those near each GPU; or give"
            " each GPU its own with"
            f" {_NIC_MAPPING_VARIABLE} and {_NIC_SELECTION_VARIABLE}; see"
            " docs/operations/transfer.md",
        )
    return topic.passed(f"{len(machine.nics)} for RDMA here; no worker is tied to another's")


def _check_model(config: DeploymentConfig | None) -> Check:
    topic = Topic(name="model", why="engines end at once when there are no weights")
    if config is None:
        return topic.skipped(_NO_CONFIG)
    if findings := source_findings(config.models):
        return topic.from_findings(findings)
    return topic.passed(", ".join(f"{n}: {m.source}" for n, m in config.models.items()))


def check_ports(
    machine: MachineSnapshot, config: DeploymentConfig | None, *, running_url: str | None
) -> Check:
    """Whether the ports that the configuration names are free."""
    topic = Topic(name="ports", why="two programs cannot listen on one port")
    if config is None:
        return topic.skipped(_NO_CONFIG)
    if running_url is not None:
        return topic.passed(f"held by what runs at {running_url}")
    if findings := port_findings(machine.ports):
        return topic.from_findings(findings)
    return topic.passed(", ".join(f"{port.port} ({port.key})" for port in machine.ports) + " free")


def _check_secrets(machine: MachineSnapshot, config: DeploymentConfig | None) -> Check:
    topic = Topic(name="token and key files", why="whoever reads a token is let in with it")
    if config is None and not machine.secrets:
        return topic.skipped(_NO_CONFIG)
    if unusable := [secret for secret in machine.secrets if _file_problem(secret)]:
        return topic.failed(
            "; ".join(
                f"{file_fact.path} ({file_fact.purpose}): {_file_problem(file_fact)}"
                for file_fact in unusable
            ),
            f"create {' and '.join(file_fact.path for file_fact in unusable)} with what it is"
            " to hold, as this"
            " user, with mode 600",
        )
    if exposed := [secret for secret in machine.secrets if (secret.mode or 0) & _GROUP_OTHER_BITS]:
        problem = "; ".join(
            f"{file_fact.path} ({file_fact.purpose}) is open to others: {file_fact.mode:04o}"
            for file_fact in exposed
        )
        fix = f"chmod 600 {' '.join(file_fact.path for file_fact in exposed)}"
        if all(file_fact.only_hashes for file_fact in exposed):
            return topic.warned(f"{problem}; it holds hashes, no keys", fix)
        return topic.failed(problem, f"{fix}, and replace the tokens in them")
    names = [secret.purpose for secret in machine.secrets]
    return topic.passed(f"{', '.join(names)}: this user's alone" if names else "none are named")


def _file_problem(file: FileFact) -> str:
    if file.problem:
        return file.problem
    if not file.readable:
        return "this user cannot read it"
    return "it is empty" if file.empty and file.purpose == "observability.token_file" else ""


def _check_keys(config: DeploymentConfig | None) -> Check:
    topic = Topic(name="API keys", why="callers are known by their keys")
    if config is None:
        return topic.skipped(_NO_CONFIG)
    if findings := key_findings(config):
        return topic.failed("; ".join(findings), "correct these lines; see 'baton keys list'")
    if findings := keyless_findings(config):
        first = findings[0].partition("; ")
        return topic.warned("; ".join(line.partition(";")[0] for line in findings), first[2])
    return topic.passed(f"{len(config.tenants)} tenants, every key file can be read")
