"""Checks of a configuration on this machine and on a cluster; pure functions of gathered facts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from baton.config.checks.contradictions import contradictions
from baton.config.derive.api_arguments import MIN_VLLM_VERSIONS
from baton.config.derive.options import allows_anonymous, key_files
from baton.config.derive.selectors import matches_labels
from baton.config.derive.start_deadlines import weights_bytes
from baton.config.schema.deployment import DeploymentConfig, EngineKind, PoolConfig
from baton.domain.names.addresses import format_address, is_loopback, is_loopback_address
from baton.domain.names.words import few
from baton.domain.tenant import DEFAULT_TENANT
from baton.serving.checks.autoscaling_capacity import infeasible_findings, too_large_findings
from baton.serving.checks.facts import (
    ClusterFacts,
    FileFact,
    MachineFacts,
    MachineSnapshot,
    PortFact,
    PortListener,
)
from baton.serving.checks.machine import check_versions
from baton.serving.checks.result import (
    Check,
    CheckStatus,
    Finding,
    Topic,
    UnknownFact,
    size_text,
)
from baton.serving.ray.autoscaler import AutoscalingCapacity
from baton.serving.versions import PACKAGES, is_before

Versions = Mapping[str, str | None]
_NODE_ID_LABEL = "ray.io/node-id"

_MIB = 1024**2
_GIB = 1024**3
RAY_BYTES = int(0.6 * _GIB)
"""Ray, the Serve controller and HAProxy. Source: private memory of an idle cluster, Ray 2.60."""
INGRESS_BYTES = int(0.6 * _GIB)
"""One ingress replica. Source: 0.41 GiB private after importing vLLM 0.32's API server, and room
for a tokenizer and streams."""
VLLM_REPLICA_BYTES = int(1.5 * _GIB)
"""A vLLM replica without weights and KV blocks. Source: engines with small models on the CPU are
1.5 to 2.5 GB resident."""
MAX_SHARD_BYTES = 5_000_000_000
"""Of weights on their way to GPUs: workers map one file after the other, and copy tensors out of
it. Source: vLLM 0.32, weight_utils.py, `safetensors_weights_iterator`, lazy by default;
huggingface_hub 2.4, serialization/_base.py, `MAX_SHARD_SIZE`, the size of files."""
SIM_REPLICA_BYTES = int(0.15 * _GIB)
"""A replica with a simulated engine. Source: 80 MB private for an empty replica, Ray 2.60."""
CPU_KV_BYTES = 4 * _GIB
"""vLLM's default for KV blocks on the CPU."""
_GROUP_OTHER_BITS = 0o077
_UCX_DEVICES_VARIABLE = "UCX_NET_DEVICES"
_NIC_MAPPING_VARIABLE = "VLLM_GPU_NIC_PCIE_MAPPING"
_NIC_SELECTION_VARIABLE = "VLLM_NIC_SELECTION_VARS"
_MEMORY = Topic("memory", "a machine without memory kills the process that asks for more")
_GPUS = Topic("GPUs", "replicas wait forever for devices that are not there")
_NICS = Topic("network cards", "eight GPUs that share one card pull at an eighth each")
_MODEL = Topic("model", "engines end at once when there are no weights")
_PORTS = Topic("ports", "two programs cannot listen on one port")
_SECRETS = Topic("token and key files", "any reader of a token has access with it")
_KEYS = Topic("API keys", "callers are known by their keys")
_TLS = Topic("TLS files", "without a certificate that can be read, no client connects")
_ARGUMENTS = Topic("API arguments", "an ingress does not start with an unknown argument")
_EXPOSURE = Topic("exposure", "other machines reach an endpoint that is not on loopback")
_CONTRADICTIONS = Topic("contradictions", "of two such keys, one has no effect")
_NEED_CONFIG = (
    _MEMORY, _GPUS, _PORTS, _MODEL, _TLS, _KEYS, _ARGUMENTS, _EXPOSURE, _CONTRADICTIONS, _NICS,
)  # fmt: skip
_NO_CONFIG = "no configuration was given; name one with -c FILE"


def doctor_checks(
    machine: MachineSnapshot, config: DeploymentConfig | None, *, running_url: str | None
) -> Iterator[Check]:
    """All checks of a configuration; `running_url` is the running endpoint with its port."""
    if config is None:
        for topic in _NEED_CONFIG:
            yield topic.skipped(_NO_CONFIG)
        yield _check_secrets(machine) if machine.secrets else _SECRETS.skipped(_NO_CONFIG)
        return
    held = {}
    if running_url is not None:
        held = {
            _MEMORY: _MEMORY.skipped(f"what runs at {running_url} holds its memory already"),
            _GPUS: _GPUS.skipped(f"what runs at {running_url} has its devices already"),
            _PORTS: _PORTS.passed(f"held by what runs at {running_url}"),
        }
    for check in config_checks(machine, config):
        yield held.get(Topic(check.name, check.why), check)
    yield _check_nics(machine, config)
    yield _check_secrets(machine)


def config_checks(machine: MachineFacts, config: DeploymentConfig) -> Iterator[Check]:
    """Whether this machine can run the configuration; for a start and for the doctor."""
    yield _check_memory(machine, config)
    yield _GPUS.from_findings(
        _missing_gpus(config, machine.gpus),
        otherwise=f"{machine.gpus} here, enough for what starts at once",
    )
    yield check_ports(machine.ports)
    yield _MODEL.from_findings(
        machine.model_findings,
        otherwise=", ".join(f"{name}: {model.source}" for name, model in config.models.items()),
    )
    yield _TLS.from_findings(machine.tls_findings, otherwise="every file that is named can be used")
    yield from submission_checks(config, machine.versions, machine.key_findings)


def submission_checks(
    config: DeploymentConfig, versions: Versions, key_findings: tuple[Finding, ...] = ()
) -> Iterator[Check]:
    """Checks that need no fact of the machines that will run the configuration."""
    yield check_keys(config, key_findings)
    yield _check_arguments(config, versions)
    yield check_exposure(config)
    yield _CONTRADICTIONS.from_findings(
        map(Finding.from_line, contradictions(config)), otherwise="none", status=CheckStatus.WARN
    )


def _check_memory(machine: MachineFacts, config: DeploymentConfig) -> Check:
    available = machine.available_memory_bytes
    if isinstance(available, UnknownFact):
        return _MEMORY.skipped(available.reason)
    parts = {
        f"{pool.replicas.initial} x {name}": pool.replicas.initial * replica_bytes(config, pool)
        for name, pool in config.pools.items()
    }
    parts["ingress"] = config.server.replicas.min * INGRESS_BYTES
    parts["ray"] = RAY_BYTES
    needed_bytes = sum(parts.values())
    if needed_bytes <= available:
        return _MEMORY.passed(f"{size_text(available)} available, enough for what starts at once")
    breakdown = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
    return _MEMORY.failed(
        f"not enough memory: about {size_text(needed_bytes)} is needed ({breakdown}),"
        f" {size_text(available)} is available",
        "lower engine.kv_cache or replicas.initial, or use a larger machine",
    )


def replica_bytes(config: DeploymentConfig, pool: PoolConfig, *, hosts: int = 1) -> int:
    """Main memory of one replica: the pool's setting, else an estimate from its parts.

    On several hosts it is the sum; weights pass through the memory of each.
    """
    if pool.resources.memory_bytes is not None:
        return pool.resources.memory_bytes
    if pool.engine.kind is EngineKind.SIM:
        return SIM_REPLICA_BYTES
    known_bytes = weights_bytes(config.models[pool.model].source)
    # In whole MiB, as a chart's values write it.
    model_bytes = None if known_bytes is None else math.ceil(known_bytes / _MIB) * _MIB
    if pool.resources.gpus > 0:
        # Weights and KV blocks are on the GPUs; weights pass through the host's memory.
        staging_bytes = (
            MAX_SHARD_BYTES if model_bytes is None else min(model_bytes, MAX_SHARD_BYTES)
        )
        offload_bytes = pool.engine.offload.host_memory_bytes or 0
        return pool.parallel.workers * VLLM_REPLICA_BYTES + hosts * staging_bytes + offload_bytes
    kv_bytes = pool.engine.kv_cache_bytes or CPU_KV_BYTES
    return VLLM_REPLICA_BYTES + pool.parallel.workers * kv_bytes + (model_bytes or 0)


def _missing_gpus(config: DeploymentConfig, gpus: float) -> tuple[Finding, ...]:
    """GPUs of the initial replicas beyond those that are there."""
    needed_gpus = sum(pool.resources.gpus * pool.replicas.initial for pool in config.pools.values())
    if needed_gpus <= gpus:
        return ()
    return (
        Finding(
            f"the pools ask for {needed_gpus:g} GPUs to start with, {gpus:g} are there",
            "lower pools.*.replicas.initial or resources.gpus, or add GPUs",
        ),
    )


def _check_nics(machine: MachineSnapshot, config: DeploymentConfig) -> Check:
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
        return _NICS.failed(
            f"{', '.join(incomplete_pools)}: only one of {_NIC_MAPPING_VARIABLE} and"
            f" {_NIC_SELECTION_VARIABLE} is set, and"
            " workers end without the other",
            "set both, in transfer.env or the pool's env",
        )
    if shared_nics:
        return _NICS.warned(
            f"{'; '.join(shared_nics)}, one of {len(machine.nics)} cards here"
            f" ({', '.join(machine.nics)})",
            f"leave {_UCX_DEVICES_VARIABLE} out, and UCX takes those near each GPU; or give"
            " each GPU its own with"
            f" {_NIC_MAPPING_VARIABLE} and {_NIC_SELECTION_VARIABLE}",
        )
    return _NICS.passed(f"{len(machine.nics)} for RDMA here; no worker is tied to another's")


def check_ports(ports: Sequence[PortFact]) -> Check:
    """Whether the ports that the configuration names are free."""
    used = (
        Finding(
            f"{format_address(port.host, port.port)} ({port.key}) {_held(port.listener)}",
            f"stop it, or set {port.key} to another",
        )
        for port in ports
        if not port.free
    )
    listing = ", ".join(f"{port.port} ({port.key})" for port in ports)
    return _PORTS.from_findings(used, otherwise=f"{listing} free")


def _held(listener: PortListener | None) -> str:
    if listener is None:
        return "is in use, or the address is not this machine's"
    if listener.pid is None:
        return "is held by another user's process"
    return f"is held by {listener.program} (pid {listener.pid})"


def _check_secrets(machine: MachineSnapshot) -> Check:
    if unusable := [secret for secret in machine.secrets if _file_problem(secret)]:
        return _SECRETS.failed(
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
            return _SECRETS.warned(f"{problem}; it holds hashes, no keys", fix)
        return _SECRETS.failed(problem, f"{fix}, and replace the tokens in them")
    names = [secret.purpose for secret in machine.secrets]
    return _SECRETS.passed(f"{', '.join(names)}: this user's alone" if names else "none are named")


def _file_problem(file: FileFact) -> str:
    if file.problem:
        return file.problem
    if not file.readable:
        return "this user cannot read it"
    return "it is empty" if file.empty and file.purpose == "observability.token_file" else ""


def check_keys(config: DeploymentConfig, key_findings: tuple[Finding, ...]) -> Check:
    """Whether the files of API keys can be used, and every tenant has keys."""
    if key_findings:
        return _KEYS.from_findings(key_findings)
    keyless = (
        Finding(
            f"no client can call as tenant '{name}', for it has no keys",
            f"make one with 'baton keys create --tenant {name} --file FILE' and set its keys_file",
        )
        for name in config.tenants
        if name != DEFAULT_TENANT and name not in key_files(config)
    )
    passed = f"{len(config.tenants)} tenants, every key file can be read"
    return _KEYS.from_findings(keyless, otherwise=passed, status=CheckStatus.WARN)


def _check_arguments(config: DeploymentConfig, versions: Versions) -> Check:
    version = versions.get("vllm")
    if version is None:
        return _ARGUMENTS.skipped("vllm is not installed")
    unknown = (
        Finding(
            f"models.{name}.api.{argument}: got vllm {version}, expected"
            f" {'.'.join(map(str, since))} or later",
            "remove it, or install that",
        )
        for name, model in config.models.items()
        for argument in model.api
        if (since := MIN_VLLM_VERSIONS.get(argument)) is not None and is_before(version, since)
    )
    return _ARGUMENTS.from_findings(unknown, otherwise="every one is known")


def check_exposure(config: DeploymentConfig) -> Check:
    """Whether other machines need a key, and TLS."""
    server, tls = config.server, config.security.tls
    address = format_address(server.host, server.port)
    if is_loopback(server.host):
        return _EXPOSURE.passed(f"only this machine reaches {address}")
    if allows_anonymous(config):
        return _EXPOSURE.warned(
            f"{address} serves every client, without a key",
            "give tenants keys with 'baton keys create', or set server.host to 127.0.0.1",
        )
    if tls.cert_file is None and not tls.required:
        return _EXPOSURE.warned(
            f"keys come to {address} in clear",
            "set security.tls.cert_file and key_file, or end TLS on this machine and refuse the"
            " rest with security.tls.required",
        )
    return _EXPOSURE.passed(f"clients of {address} need a key, and it comes by TLS")


def cluster_checks(
    config: DeploymentConfig, facts: ClusterFacts, capacity: AutoscalingCapacity | None = None
) -> Iterator[Check]:
    """Whether a running cluster can run the configuration.

    With an autoscaler, only resources that no node will ever bring are missing.
    """
    yield from node_version_checks(config, facts.versions)
    topic = Topic("resources", "replicas wait forever for resources that no node has")
    missing = (
        missing_resources(config, facts)
        if capacity is None
        else infeasible_findings(config, capacity)
    )
    yield topic.from_findings(missing, otherwise="enough for what starts at once")
    if capacity is None:
        of_nodes = Topic("nodes' sizes", "a replica that fits on no node never starts")
        yield of_nodes.from_findings(
            too_large_findings(config, facts.node_resources),
            otherwise="a replica of each pool fits on a node",
            status=CheckStatus.WARN,
        )


def node_version_checks(
    config: DeploymentConfig, versions_by_node: Mapping[str, Versions]
) -> Iterator[Check]:
    """Whether nodes have the same packages, and those that the configuration needs.

    Untested versions that are allowed are a warning of the machine that starts, not of nodes.
    """
    nodes = check_nodes(versions_by_node)
    yield nodes
    if nodes.status is CheckStatus.PASS and versions_by_node:
        versions = needed_versions_check(config, next(iter(versions_by_node.values())))
        if versions.status is CheckStatus.FAIL:
            yield versions


def needed_versions_check(
    config: DeploymentConfig, versions: Versions, *, python: str = ""
) -> Check:
    """Whether the packages that the configuration needs are there, in versions that were tested."""
    uses_vllm = any(pool.engine.kind is EngineKind.VLLM for pool in config.pools.values())
    # The ingress is vLLM's API server with any engine.
    needed = [package for package in PACKAGES if uses_vllm or package != "nixl"]
    is_allowed = config.cluster.allow_untested_versions
    return check_versions(versions, needed, is_allowed=is_allowed, python=python)


def check_nodes(versions_by_node: Mapping[str, Versions] | UnknownFact) -> Check:
    """Whether all nodes have the same packages."""
    topic = Topic("nodes", "replicas of two versions do not understand each other's blocks")
    if isinstance(versions_by_node, UnknownFact):
        return topic.skipped(versions_by_node.reason)
    findings = []
    packages = sorted({package for versions in versions_by_node.values() for package in versions})
    for package in packages:
        nodes: dict[str, list[str]] = {}
        for node, versions in sorted(versions_by_node.items()):
            nodes.setdefault(versions.get(package) or "none", []).append(node)
        if len(nodes) > 1:
            versions_text = ", ".join(
                f"{version} on {few(names, separator=', ')}"
                for version, names in sorted(nodes.items())
            )
            findings.append(
                Finding(
                    f"package {package} differs between nodes: {versions_text}",
                    "install one version everywhere",
                )
            )
    return topic.from_findings(
        findings, otherwise=f"{len(versions_by_node)} with the same packages"
    )


def missing_resources(config: DeploymentConfig, facts: ClusterFacts) -> tuple[Finding, ...]:
    """The resources that more nodes would have to bring for every replica to start."""
    findings = [*_missing_gpus(config, facts.gpus)]
    cpus = sum(pool.resources.cpus * pool.replicas.initial for pool in config.pools.values())
    if cpus > facts.cpus:
        findings.append(
            Finding(
                f"the pools ask for {cpus:g} CPUs to start with, the cluster has {facts.cpus:g}",
                "add nodes, or lower pools.*.resources.cpus or replicas.initial",
            )
        )
    findings.extend(label_findings(config, facts.labels))
    return tuple(findings)


def label_findings(
    config: DeploymentConfig, labels_by_node: Sequence[Mapping[str, str]]
) -> Iterator[Finding]:
    """Pools whose labels no node has, with the values that nodes have."""
    for name, pool in config.pools.items():
        asked = pool.placement.labels
        if any(matches_labels(asked, labels) for labels in labels_by_node):
            continue
        asked_text = ", ".join(f"{label}: {selector}" for label, selector in asked.items())
        having = "; ".join(_label_values(label, labels_by_node) for label in asked)
        yield Finding(
            f"no node has the labels that pool {name!r} asks for ({asked_text}): {having}",
            f"start Ray there with --labels, or change pools.{name}.placement.labels",
        )


def _label_values(label: str, labels_by_node: Sequence[Mapping[str, str]]) -> str:
    """The values that nodes have of a label; without any the labels that they have."""
    if values := sorted({labels[label] for labels in labels_by_node if label in labels}):
        return f"nodes have {label}: {few(values, separator=', ')}"
    names = {name for labels in labels_by_node for name in labels} - {_NODE_ID_LABEL}
    others = f", they have {few(sorted(names), separator=', ')}" if names else ""
    return f"no node has a label {label}{others}"


def placement_findings(
    config: DeploymentConfig, facts: ClusterFacts, capacity: AutoscalingCapacity | None
) -> tuple[Finding, ...]:
    """Pools of which no node can run a replica; with an autoscaler, also no node to come."""
    if capacity is not None:
        return infeasible_findings(config, capacity)
    return (
        *label_findings(config, facts.labels),
        *too_large_findings(config, facts.node_resources),
    )


def check_ray_auth(
    auth: str | UnknownFact, gcs_address: str, *, is_allowed: bool | None = None
) -> Check:
    """Whether Ray asks for a token: without it every peer can run code on every node.

    Args:
        auth: The answer to a connection without a token (`auth_probe`).
        gcs_address: Of the store of Ray's head.
        is_allowed: Whether the configuration allows an open Ray; None without one.
    """
    topic = Topic("Ray access", "every client of Ray can run code and read every key")
    if isinstance(auth, UnknownFact):
        return topic.skipped(auth.reason)
    if auth == "guarded":
        return topic.passed(f"{gcs_address} asks for a token")
    if auth != "open":
        return topic.skipped(f"{gcs_address}: {auth}")
    problem = (
        f"the Ray cluster at {gcs_address} accepts connections without a token, and its clients"
        " can run code on every node"
    )
    if is_allowed:
        return topic.warned(problem, "cluster.allow_open permits it")
    fix = (
        "start Ray with RAY_AUTH_MODE=token on every node, and give each the token's file with"
        " mode 600"
    )
    if is_allowed is not None:
        fix += ", or permit it with cluster.allow_open: true"
    make_check = topic.warned if is_loopback_address(gcs_address) else topic.failed
    return make_check(problem, fix)
