"""Checks of `baton doctor` on the machine: pure functions of what was found on it."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.schema.deployment import DeploymentConfig
from baton.engine.gpus import old_driver
from baton.serving.doctor.facts import INGRESS, Imported, MachineNow, Unknown
from baton.serving.doctor.result import Check, Topic, size_text
from baton.serving.versions import FLAG, PACKAGES, untested

_MIB = 1024**2
_GIB = 1024**3
_LEAST_SHM_BYTES = 64 * _MIB
_GOOD_SHM_BYTES = 512 * _MIB
_LEAST_DISK_BYTES = 256 * _MIB
_GOOD_DISK_BYTES = 2 * _GIB
_LEAST_FILES = 1024
_GOOD_FILES = 8192


def machine_checks(machine: MachineNow, config: DeploymentConfig | None) -> Iterator[Check]:
    """Whether this machine can run baton at all."""
    yield check_versions(machine, config)
    yield check_imports(machine)
    yield check_builds(machine, config)
    yield check_driver(machine)
    yield check_kernels(machine)
    yield check_unwanted(machine)
    yield check_shared_memory(machine)
    yield check_disk(machine)
    yield check_descriptors(machine)
    yield check_front(machine)
    yield check_clock(machine)


def check_versions(machine: MachineNow, config: DeploymentConfig | None) -> Check:
    """Whether the packages are of versions that work with this baton, and with each other."""
    topic = Topic(
        name="versions",
        why="baton speaks vLLM's engine protocol and uses parts of Ray Serve that change with"
        " each version",
    )
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in _known(machine))
    missing = [name for name, version in _known(machine) if version is None]
    if missing:
        return topic.failed(
            f"{found}; Python {machine.python}",
            f"install {' and '.join(missing)}: pip install 'baton[cpu]' or 'baton[gpu]'",
        )
    if wrong := dict(untested(machine.versions)):
        allowed = config is not None and config.cluster.allow_untested_versions
        judge = topic.warned if allowed else topic.failed
        return judge(
            "; ".join(wrong.values()),
            "install 'baton[cpu]' or 'baton[gpu]' in a fresh environment"
            + ("" if allowed else f", or start with {FLAG}"),
        )
    return topic.passed(found)


def _known(machine: MachineNow) -> list[tuple[str, str | None]]:
    return [(name, machine.versions.get(name)) for name in PACKAGES]


def check_imports(machine: MachineNow) -> Check:
    """Whether the packages can be imported."""
    topic = Topic(name="imports", why="what cannot be imported here cannot start in a replica")
    if isinstance(machine.imports, Unknown):
        return topic.failed(
            machine.imports.why, 'try by hand: python -c "import torch, ray, vllm, nixl"'
        )
    broken = {name: one.problem for name, one in machine.imports.items() if one.problem}
    if INGRESS in broken and len(broken) == 1:
        return topic.failed(
            f"what an ingress imports of vllm: {broken[INGRESS]}",
            "install 'baton[cpu]' or 'baton[gpu]' in a fresh environment; see also: versions",
        )
    if broken:
        broken.pop(INGRESS, None)  # it imports the others
        return topic.failed(
            "; ".join(f"{name}: {problem}" for name, problem in broken.items()),
            f"install {' and '.join(broken)} anew: pip install --force-reinstall 'baton[cpu]' or"
            " 'baton[gpu]'; see also the check of other packages",
        )
    found = [name for name in machine.imports if name != INGRESS]
    return topic.passed(f"{', '.join(found)} can be imported, and what an ingress needs of vllm")


def check_builds(machine: MachineNow, config: DeploymentConfig | None) -> Check:
    """Whether torch was built for the devices that are here."""
    topic = Topic(name="build", why="a build for CPUs cannot use GPUs, and one for GPUs needs them")
    torch = _torch(machine)
    if torch is None:
        return topic.skipped("torch cannot be imported")
    build = f"torch {torch.version} for {'CUDA ' + torch.cuda if torch.cuda else 'CPUs'}"
    found = f"{build}, {machine.gpus} GPUs"
    if machine.gpus and not torch.cuda:
        fix = "install baton[gpu] in a fresh environment"
        return topic.failed(found, fix) if _wants_gpus(config) else topic.warned(found, fix)
    if torch.cuda and not machine.gpus and not _wants_gpus(config):
        return topic.warned(found, "install baton[cpu] in a fresh environment, or show it a GPU")
    return topic.passed(found)


def check_driver(machine: MachineNow) -> Check:
    """Whether the GPUs' driver runs what torch was built for."""
    topic = Topic(
        name="GPU driver",
        why="torch finds no GPU through a driver of an older CUDA, and engines do not start",
    )
    if not machine.gpus:
        return topic.passed("there are no GPUs")
    if (why := old_driver(machine.versions.get("torch"), machine.driver_cuda)) is not None:
        found, _, fix = why.partition("; ")
        return topic.failed(found, fix)
    if machine.driver_cuda is None:
        return topic.warned("it does not say which CUDA it speaks", "look at 'nvidia-smi'")
    return topic.passed(f"it speaks CUDA {machine.driver_cuda[0]}.{machine.driver_cuda[1]}")


def check_kernels(machine: MachineNow) -> Check:
    """Whether kernels can be compiled that engines compile where they run."""
    topic = Topic(
        name="kernels",
        why="without compilers vLLM does without FlashInfer's and DeepGEMM's kernels, in silence",
    )
    if not machine.gpus:
        return topic.passed("there are no GPUs")
    if machine.kernels:
        found, _, fix = machine.kernels.partition("; ")
        return topic.warned(found, fix)
    return topic.passed("g++ and nvcc are found")


def _torch(machine: MachineNow) -> Imported | None:
    if isinstance(machine.imports, Unknown):
        return None
    torch = machine.imports.get("torch")
    return None if torch is None or torch.problem else torch


def _wants_gpus(config: DeploymentConfig | None) -> bool:
    return config is not None and any(pool.resources.gpus for pool in config.pools.values())


def check_unwanted(machine: MachineNow) -> Check:
    """Whether packages are installed that break others."""
    topic = Topic(
        name="other packages",
        why="beside torch for CPUs, builds of these for GPUs break 'import transformers'",
    )
    there = {
        name: version
        for name, version in machine.unwanted.items()
        if version is not None and not version.endswith("+cpu")
    }
    torch = _torch(machine)
    on_cpus = "cpu" in (machine.versions.get("torch") or "") or (
        torch is not None and not torch.cuda
    )
    if there and on_cpus:
        named = ", ".join(f"{name} {version}" for name, version in there.items())
        return topic.failed(f"{named} beside torch for CPUs", f"pip uninstall {' '.join(there)}")
    return topic.passed("nothing that breaks others")


def check_shared_memory(machine: MachineNow) -> Check:
    """Whether /dev/shm has room."""
    topic = Topic(
        name="shared memory",
        why="Ray's object store, vLLM's workers and transfers on one machine share memory there",
    )
    free = machine.shared_memory_bytes
    if isinstance(free, Unknown):
        return topic.skipped(free.why)
    found = f"{size_text(free)} free in /dev/shm"
    fix = "give it more: 'docker run --shm-size 2g', or 'mount -o remount,size=2g /dev/shm'"
    if free < _LEAST_SHM_BYTES:
        return topic.failed(found, fix)
    return topic.warned(found, fix) if free < _GOOD_SHM_BYTES else topic.passed(found)


def check_disk(machine: MachineNow) -> Check:
    """Whether there is room for a session and its logs."""
    topic = Topic(name="disk", why="Ray's session and all logs are kept there")
    free = machine.disk_bytes
    if isinstance(free, Unknown):
        return topic.skipped(free.why)
    found = f"{size_text(free)} free in {machine.disk_path}"
    fix = f"make room in {machine.disk_path}, or set TMPDIR to a larger disk"
    if free < _LEAST_DISK_BYTES:
        return topic.failed(found, fix)
    return topic.warned(found, fix) if free < _GOOD_DISK_BYTES else topic.passed(found)


def check_descriptors(machine: MachineNow) -> Check:
    """Whether processes may open as many files as there are streams."""
    topic = Topic(
        name="file descriptors", why="each stream takes one in the ingress, two in HAProxy"
    )
    limits = machine.descriptors
    found = f"{limits.soft:,} per process, at most {limits.hard:,}"
    fix = f"raise the limit: 'ulimit -n {_GOOD_FILES * 8}', or LimitNOFILE of the service"
    if limits.hard < _LEAST_FILES:
        return topic.failed(found, fix)
    return topic.warned(found, fix) if limits.soft < _GOOD_FILES else topic.passed(found)


def check_front(machine: MachineNow) -> Check:
    """Whether HAProxy can carry the tokens."""
    topic = Topic(name="front", why="tokens go through HAProxy, or half as fast through Python")
    warning = machine.front_warning
    if isinstance(warning, Unknown):
        return topic.skipped(warning.why)
    if warning is None:
        return topic.passed("HAProxy runs here")
    found, _, fix = warning.rpartition("; ")
    return topic.warned(found, fix)


def check_clock(machine: MachineNow) -> Check:
    """Whether something keeps the clock right."""
    topic = Topic(
        name="clock",
        why="logs and traces of several machines are put in order by their clocks; what baton"
        " decides does not depend on them",
    )
    kept = machine.clock_kept
    if isinstance(kept, Unknown):
        return topic.skipped(kept.why)
    if kept:
        return topic.passed("a time service keeps it right")
    return topic.warned(
        "the kernel says that nothing keeps it right",
        "run a time service: 'timedatectl set-ntp true', or chrony",
    )
