"""Checks of `baton doctor` on a configuration: could this machine run it? Pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from baton.config.schema.deployment import DeploymentConfig
from baton.serving.doctor.facts import FileFact, MachineNow, Unknown
from baton.serving.doctor.result import Check, Topic, size_text
from baton.serving.preflight.checks import (
    gpu_findings,
    key_findings,
    keyless_findings,
    memory_findings,
    port_findings,
)
from baton.serving.preflight.models import source_findings

_OTHERS = 0o077
_CARDS = "UCX_NET_DEVICES"
_CARD_MAPPING = "VLLM_GPU_NIC_PCIE_MAPPING"
_CARD_VARIABLES = "VLLM_NIC_SELECTION_VARS"
_NO_CONFIG = "no configuration was given; name one with -c FILE"


def config_checks(
    machine: MachineNow, config: DeploymentConfig | None, *, runs_at: str | None
) -> Iterator[Check]:
    """Whether it can run this configuration; `runs_at` is the endpoint of what runs here."""
    yield check_memory(machine, config, runs_at=runs_at)
    yield check_gpus(machine, config, runs_at=runs_at)
    yield check_cards(machine, config)
    yield check_model(config)
    yield check_ports(machine, config, runs_at=runs_at)
    yield check_secrets(machine, config)
    yield check_keys(config)


def check_memory(
    machine: MachineNow, config: DeploymentConfig | None, *, runs_at: str | None
) -> Check:
    """Whether everything that starts at once fits into main memory."""
    topic = Topic(name="memory", why="a machine without memory kills whoever asks for more")
    available = machine.available_memory_bytes
    if config is None:
        return topic.skipped(_NO_CONFIG)
    if runs_at is not None:
        return topic.skipped(f"what runs at {runs_at} holds its memory already")
    if isinstance(available, Unknown):
        return topic.skipped(available.why)
    if findings := memory_findings(config, available):
        return topic.said(findings)
    return topic.passed(f"{size_text(available)} available, enough for what starts at once")


def check_gpus(
    machine: MachineNow, config: DeploymentConfig | None, *, runs_at: str | None
) -> Check:
    """Whether there are as many GPUs as start at once."""
    topic = Topic(name="GPUs", why="replicas wait for devices that are not there, for ever")
    if config is None:
        return topic.skipped(_NO_CONFIG)
    if runs_at is not None:
        return topic.skipped(f"what runs at {runs_at} has its devices already")
    if findings := gpu_findings(config, machine.gpus):
        return topic.said(findings)
    return topic.passed(f"{machine.gpus} here, enough for what starts at once")


def check_cards(machine: MachineNow, config: DeploymentConfig | None) -> Check:
    """Whether several workers have to share one of several network cards."""
    topic = Topic(name="network cards", why="eight GPUs that share one card pull at an eighth each")
    if config is None:
        return topic.skipped(_NO_CONFIG)
    halves, shared = [], []
    for name, pool in config.pools.items():
        environment = {**config.transfer.env, **pool.env}
        mapped = [key in environment for key in (_CARD_MAPPING, _CARD_VARIABLES)]
        if any(mapped) and not all(mapped):
            halves.append(name)
        devices = environment.get(_CARDS)
        workers = pool.parallel.workers * pool.replicas.max
        one = isinstance(devices, str) and devices not in {"", "all"} and "," not in devices
        if one and len(machine.cards) > 1 and workers > 1 and pool.resources.gpus:
            shared.append(f"{workers} workers of {name} use {devices}")
    if halves:
        return topic.failed(
            f"{', '.join(halves)}: only one of {_CARD_MAPPING} and {_CARD_VARIABLES} is set, and"
            " workers end without the other",
            "set both, in transfer.env or the pool's env; see docs/operations/transfer.md",
        )
    if shared:
        return topic.warned(
            f"{'; '.join(shared)}, one of {len(machine.cards)} cards here"
            f" ({', '.join(machine.cards)})",
            f"leave {_CARDS} out, and UCX takes those near each GPU; or give each GPU its own with"
            f" {_CARD_MAPPING} and {_CARD_VARIABLES}; see docs/operations/transfer.md",
        )
    return topic.passed(f"{len(machine.cards)} for RDMA here; no worker is tied to another's")


def check_model(config: DeploymentConfig | None) -> Check:
    """Whether models are where the configuration says."""
    topic = Topic(name="model", why="engines end at once when there are no weights")
    if config is None:
        return topic.skipped(_NO_CONFIG)
    if findings := source_findings(config.models):
        return topic.said(findings)
    return topic.passed(", ".join(f"{n}: {m.source}" for n, m in config.models.items()))


def check_ports(
    machine: MachineNow, config: DeploymentConfig | None, *, runs_at: str | None
) -> Check:
    """Whether the ports that the configuration names can be had."""
    topic = Topic(name="ports", why="two programs cannot listen on one port")
    if config is None:
        return topic.skipped(_NO_CONFIG)
    if runs_at is not None:
        return topic.passed(f"held by what runs at {runs_at}")
    if findings := port_findings(machine.ports):
        return topic.said(findings)
    return topic.passed(", ".join(f"{one.port} ({one.key})" for one in machine.ports) + " free")


def check_secrets(machine: MachineNow, config: DeploymentConfig | None) -> Check:
    """Whether files with tokens and keys are there, and nobody else's to read."""
    topic = Topic(name="token and key files", why="whoever reads a token is let in with it")
    if config is None and not machine.secrets:
        return topic.skipped(_NO_CONFIG)
    if lost := [one for one in machine.secrets if _lost(one)]:
        return topic.failed(
            "; ".join(f"{one.path} ({one.what}): {_lost(one)}" for one in lost),
            f"create {' and '.join(one.path for one in lost)} with what it is to hold, as this"
            " user, with mode 600",
        )
    if bare := [one for one in machine.secrets if (one.mode or 0) & _OTHERS]:
        found = "; ".join(
            f"{one.path} ({one.what}) is open to others: {one.mode:04o}" for one in bare
        )
        close = f"chmod 600 {' '.join(one.path for one in bare)}"
        if all(one.only_hashes for one in bare):
            return topic.warned(f"{found}; it holds hashes, no keys", close)
        return topic.failed(found, f"{close}, and replace the tokens in them")
    names = [one.what for one in machine.secrets]
    return topic.passed(f"{', '.join(names)}: this user's alone" if names else "none are named")


def _lost(one: FileFact) -> str:
    if one.problem:
        return one.problem
    if not one.readable:
        return "this user cannot read it"
    return "it is empty" if one.empty and one.what == "observability.token_file" else ""


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
