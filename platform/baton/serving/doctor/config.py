"""Checks of `baton doctor` on a configuration: could this machine run it? Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.schema.deployment import DeploymentConfig
from baton.serving.doctor.facts import FileFact, MachineSnapshot, UnknownFact
from baton.serving.doctor.result import Check, Topic, size_text
from baton.serving.preflight.checks import (
    gpu_findings,
    key_findings,
    keyless_findings,
    memory_findings,
    port_findings,
)
from baton.serving.preflight.models import source_findings

_GROUP_OTHER_BITS = 0o077
_UCX_DEVICES_VARIABLE = "UCX_NET_DEVICES"
_NIC_MAPPING_VARIABLE = "VLLM_GPU_NIC_PCIE_MAPPING"
_NIC_SELECTION_VARIABLE = "VLLM_NIC_SELECTION_VARS"
_NO_CONFIG = "no configuration was given; name one with -c FILE"


def config_checks(
    machine: MachineSnapshot, config: DeploymentConfig | None, *, running_url: str | None
) -> Iterator[Check]:
    """Whether it can run this configuration; `running_url` is the endpoint of what runs here."""
    yield check_memory(machine, config, running_url=running_url)
    yield check_gpus(machine, config, running_url=running_url)
    yield check_nics(machine, config)
    yield check_model(config)
    yield check_ports(machine, config, running_url=running_url)
    yield check_secrets(machine, config)
    yield check_keys(config)


def check_memory(
    machine: MachineSnapshot, config: DeploymentConfig | None, *, running_url: str | None
) -> Check:
    """Whether everything that starts at once fits into main memory."""
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


def check_gpus(
    machine: MachineSnapshot, config: DeploymentConfig | None, *, running_url: str | None
) -> Check:
    """Whether there are as many GPUs as start at once."""
    topic = Topic(name="GPUs", why="replicas wait for devices that are not there, for ever")
    if config is None:
        return topic.skipped(_NO_CONFIG)
    if running_url is not None:
        return topic.skipped(f"what runs at {running_url} has its devices already")
    if findings := gpu_findings(config, machine.gpus):
        return topic.from_findings(findings)
    return topic.passed(f"{machine.gpus} here, enough for what starts at once")


def check_nics(machine: MachineSnapshot, config: DeploymentConfig | None) -> Check:
    """Whether several workers have to share one of several network cards."""
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


def check_model(config: DeploymentConfig | None) -> Check:
    """Whether models are where the configuration says."""
    topic = Topic(name="model", why="engines end at once when there are no weights")
    if config is None:
        return topic.skipped(_NO_CONFIG)
    if findings := source_findings(config.models):
        return topic.from_findings(findings)
    return topic.passed(", ".join(f"{n}: {m.source}" for n, m in config.models.items()))


def check_ports(
    machine: MachineSnapshot, config: DeploymentConfig | None, *, running_url: str | None
) -> Check:
    """Whether the ports that the configuration names can be had."""
    topic = Topic(name="ports", why="two programs cannot listen on one port")
    if config is None:
        return topic.skipped(_NO_CONFIG)
    if running_url is not None:
        return topic.passed(f"held by what runs at {running_url}")
    if findings := port_findings(machine.ports):
        return topic.from_findings(findings)
    return topic.passed(", ".join(f"{port.port} ({port.key})" for port in machine.ports) + " free")


def check_secrets(machine: MachineSnapshot, config: DeploymentConfig | None) -> Check:
    """Whether files with tokens and keys are there, and nobody else's to read."""
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


def check_keys(config: DeploymentConfig | None) -> Check:
    """Whether the keys can be read, and every tenant has one."""
    topic = Topic(name="API keys", why="callers are known by their keys")
    if config is None:
        return topic.skipped(_NO_CONFIG)
    if findings := key_findings(config):
        return topic.failed("; ".join(findings), "correct these lines; see 'baton keys list'")
    if findings := keyless_findings(config):
        first = findings[0].partition("; ")
        return topic.warned("; ".join(line.partition(";")[0] for line in findings), first[2])
    return topic.passed(f"{len(config.tenants)} tenants, every key file can be read")
