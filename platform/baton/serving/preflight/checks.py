"""Checks before a start, each finding in one line.

Checks are pure functions of gathered facts; `check_machine` and `check_cluster` gather and judge.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.config.checks.contradictions import contradictions
from baton.config.derive.api_arguments import MIN_VLLM_VERSIONS
from baton.config.derive.options import key_files
from baton.config.derive.selectors import matches_labels
from baton.config.derive.start_deadlines import weights_bytes
from baton.config.schema.deployment import DeploymentConfig, EngineKind, PoolConfig
from baton.domain.errors import ConfigInvalid, PreflightFailed
from baton.domain.names.addresses import format_address, is_loopback, is_loopback_address
from baton.domain.names.words import few
from baton.domain.tenant import DEFAULT_TENANT
from baton.engine.gpus import driver_problem
from baton.runtime.keys.key_files import load_ring
from baton.serving.preflight.autoscaling_capacity import infeasible_findings
from baton.serving.preflight.couplings import coupling_findings, read_couplings
from baton.serving.preflight.facts import (
    ClusterFacts,
    MachineFacts,
    PortFact,
    PortListener,
    cluster_facts,
    cluster_resources,
    installed_versions,
    machine_facts,
    with_available_resources,
)
from baton.serving.preflight.named_files import collect_node_files, file_findings, source_findings
from baton.serving.preflight.security import exposure_findings, ray_auth_findings, tls_findings
from baton.serving.ray.auth_probe import probe_ray_auth
from baton.serving.ray.autoscaler import AutoscalingCapacity
from baton.serving.ray.context import get_gcs_address
from baton.serving.versions import (
    PACKAGES,
    is_before,
    untested_packages,
    version_errors,
    versions_tested,
)

_GIB = 1024**3
_POLL_S = 0.5
RAY_BYTES = int(0.6 * _GIB)
"""Ray, the Serve controller and HAProxy. Source: private memory of an idle cluster, Ray 2.60."""
INGRESS_BYTES = int(0.6 * _GIB)
"""One ingress replica. Source: 0.41 GiB private after importing vLLM 0.32's API server, and room
for a tokenizer and streams."""
VLLM_REPLICA_BYTES = int(1.5 * _GIB)
"""A vLLM replica without weights and KV blocks. Source: engines with small models on the CPU are
1.5 to 2.5 GB resident."""
_MAX_SHARD_BYTES = 5_000_000_000
"""Of weights on their way to GPUs: workers map one file after the other, and copy tensors out of
it. Source: vLLM 0.32, weight_utils.py, `safetensors_weights_iterator`, lazy by default;
huggingface_hub 2.4, serialization/_base.py, `MAX_SHARD_SIZE`, the size of files."""
SIM_REPLICA_BYTES = int(0.15 * _GIB)
"""A replica with a simulated engine. Source: 80 MB private for an empty replica, Ray 2.60."""
_DEFAULT_CPU_KV_BYTES = 4 * _GIB
"""vLLM's default for KV blocks on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightResult:
    """Errors stop the start, warnings do not."""

    errors: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def check_machine(config: DeploymentConfig, *, warn: Callable[[str], None] | None = None) -> None:
    """Check that this machine can run the whole configuration.

    Raises:
        PreflightFailed: with all errors.
    """
    server = config.server
    facts = machine_facts(server.host, server.port)
    result = evaluate_machine(config, facts)
    # Untested versions start on request; each coupling is then tried first.
    if config.cluster.allow_untested_versions and any(untested_packages(facts.versions)):
        errors, warnings = _coupling_findings()
        result = PreflightResult(
            errors=(*result.errors, *errors), warnings=(*result.warnings, *warnings)
        )
    _raise_or_warn(result, warn)


def _coupling_findings() -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        return coupling_findings(read_couplings())
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return (
            (f"couplings: got {error}, expected a result; run 'baton doctor'",),
            (),
        )


def check_submission(
    config: DeploymentConfig, *, warn: Callable[[str], None] | None = None
) -> None:
    """Check from this machine a configuration that other machines will run.

    Raises:
        PreflightFailed: with all errors.
    """
    versions = installed_versions(PACKAGES)
    missing, untested_packages = package_findings(config, versions)
    errors = (*missing, *argument_findings(config, versions))
    warnings = (*untested_packages, *contradictions(config), *keyless_findings(config))
    _raise_or_warn(
        PreflightResult(errors=errors, warnings=(*warnings, *exposure_findings(config))), warn
    )


def check_cluster(
    config: DeploymentConfig,
    *,
    warn: Callable[[str], None] | None = None,
    shared: bool = False,
    capacity: AutoscalingCapacity | None = None,
) -> None:
    """Check that the cluster this process is connected to can run the configuration.

    Args:
        config: The configuration.
        warn: Gets warnings.
        shared: Whether others use the cluster, so that only free resources count.
        capacity: The nodes that may join; None without an autoscaler.

    Raises:
        PreflightFailed: with all errors.
    """
    gcs_address = get_gcs_address()
    ray_auth = "guarded" if is_loopback_address(gcs_address) else probe_ray_auth(gcs_address)
    facts = cluster_facts(PACKAGES)
    result = evaluate_cluster(
        config, with_available_resources(facts) if shared else facts, capacity
    )
    auth_errors, auth_warnings = ray_auth_findings(
        gcs_address, ray_auth, allowed=config.cluster.allow_open
    )
    # On baton's own cluster the readers of files are on this machine, which was checked. A node
    # with another baton may not understand the question.
    checks_files = shared and not result.errors
    missing, differing = file_findings(collect_node_files(config)) if checks_files else ((), ())
    errors = (*result.errors, *auth_errors, *missing)
    _raise_or_warn(
        PreflightResult(errors=errors, warnings=(*result.warnings, *auth_warnings, *differing)),
        warn,
    )


def await_nodes(
    config: DeploymentConfig,
    *,
    deadline_at_s: float,
    progress: Callable[[str], None],
    read_capacity: Callable[[], ClusterFacts] = cluster_resources,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until nodes have joined with all resources that the pools ask for.

    A cluster of one node is not waited for.

    Raises:
        PreflightFailed: with the resources that are still missing at the deadline.
    """
    if is_loopback(config.cluster.node_address):
        return
    reported: tuple[str, ...] = ()
    while missing := missing_resources(config, read_capacity()):
        if time.monotonic() > deadline_at_s:
            raise PreflightFailed(missing)
        if missing != reported:
            progress(f"waiting for nodes ('baton join' says how one joins): {'; '.join(missing)}")
            reported = missing
        sleep(_POLL_S)


def _raise_or_warn(findings: PreflightResult, warn: Callable[[str], None] | None) -> None:
    if findings.errors:
        raise PreflightFailed(findings.errors)
    for line in findings.warnings:
        if warn is not None:
            warn(line)


def evaluate_machine(config: DeploymentConfig, facts: MachineFacts) -> PreflightResult:
    """The findings of running `config` on one machine."""
    missing, untested_packages = package_findings(config, facts.versions)
    is_single_node = is_loopback(config.cluster.node_address)
    return PreflightResult(
        errors=(
            *port_findings([facts.port]),
            *source_findings(config.models),
            *missing,
            *argument_findings(config, facts.versions),
            # Where other nodes may join, `await_nodes` waits for missing resources.
            *(memory_findings(config, facts.available_memory_bytes) if is_single_node else ()),
            *(gpu_findings(config, facts.gpus) if is_single_node else ()),
            *driver_findings(config, facts),
            *key_findings(config),
            *tls_findings(config),
        ),
        warnings=(
            *untested_packages,
            *contradictions(config),
            *keyless_findings(config),
            *exposure_findings(config),
        ),
    )


def evaluate_cluster(
    config: DeploymentConfig, facts: ClusterFacts, capacity: AutoscalingCapacity | None = None
) -> PreflightResult:
    """The findings of running `config` on a running cluster.

    With an autoscaler, only resources that no node will ever bring are missing.
    """
    versions = cluster_version_findings(config, facts.versions)
    if capacity is None:
        return PreflightResult(errors=(*versions, *missing_resources(config, facts)))
    return PreflightResult(errors=(*versions, *infeasible_findings(config, capacity)))


def missing_resources(config: DeploymentConfig, facts: ClusterFacts) -> tuple[str, ...]:
    """The resources that more nodes would have to bring for every replica to start."""
    errors = [*gpu_findings(config, facts.gpus)]
    cpus = sum(pool.resources.cpus * pool.replicas.initial for pool in config.pools.values())
    if cpus > facts.cpus:
        errors.append(
            f"the pools ask for {cpus:g} CPUs to start with, the cluster has {facts.cpus:g}; "
            "add nodes, or lower pools.*.resources.cpus or replicas.initial"
        )
    for name, pool in config.pools.items():
        required_labels = pool.placement.labels
        if not any(matches_labels(required_labels, labels) for labels in facts.labels):
            labels_text = ", ".join(
                f"{label}: {selector}" for label, selector in required_labels.items()
            )
            errors.append(
                f"no node has the labels that pool {name!r} asks for ({labels_text}); start Ray"
                " there"
                f" with --labels, or change pools.{name}.placement.labels"
            )
    return tuple(errors)


def key_findings(config: DeploymentConfig) -> tuple[str, ...]:
    """Files of API keys that cannot be read, and their bad lines."""
    try:
        load_ring(key_files(config))
    except ConfigInvalid as error:
        return error.problems
    return ()


def keyless_findings(config: DeploymentConfig) -> tuple[str, ...]:
    """Tenants without keys."""
    return tuple(
        f"nobody can call as tenant '{name}', for it has no keys;"
        f" make one with 'baton keys create --tenant {name} --file FILE' and set its keys_file"
        for name in config.tenants
        if name != DEFAULT_TENANT and name not in key_files(config)
    )


def port_findings(ports: Sequence[PortFact]) -> tuple[str, ...]:
    """Ports that are in use."""
    return tuple(
        f"{format_address(port.host, port.port)} ({port.key}) {_held(port.listener)};"
        f" stop it, or set {port.key} to another"
        for port in ports
        if not port.free
    )


def _held(listener: PortListener | None) -> str:
    if listener is None:
        return "is in use, or the address is not this machine's"
    if listener.pid is None:
        return "is held by another user's process"
    return f"is held by {listener.program} (pid {listener.pid})"


def package_findings(
    config: DeploymentConfig, versions: Mapping[str, str | None]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Packages that stop a start, and untested packages that the configuration allows."""
    uses_vllm = any(pool.engine.kind is EngineKind.VLLM for pool in config.pools.values())
    # The ingress is vLLM's API server with any engine.
    needed = ["ray", "vllm", "torch", *(["nixl"] if uses_vllm else [])]
    missing = tuple(
        f"package {package} is not installed; install baton[cpu] or baton[gpu],"
        f" with {package} {' or '.join(versions_tested(package))}"
        for package in needed
        if versions.get(package) is None
    )
    if config.cluster.allow_untested_versions:
        return missing, tuple(
            f"{problem}: nobody has tried" for _, problem in untested_packages(versions, needed)
        )
    return (*missing, *version_errors(versions, needed)), ()


def argument_findings(
    config: DeploymentConfig, versions: Mapping[str, str | None]
) -> tuple[str, ...]:
    """Arguments of API servers that the installed vLLM does not have yet."""
    version = versions.get("vllm")
    if version is None:
        return ()
    return tuple(
        f"models.{name}.api.{argument}: got vllm {version}, expected {'.'.join(map(str, since))} or"
        " later; remove it, or install that"
        for name, model in config.models.items()
        for argument in model.api
        if (since := MIN_VLLM_VERSIONS.get(argument)) is not None and is_before(version, since)
    )


def memory_findings(config: DeploymentConfig, available_bytes: int) -> tuple[str, ...]:
    """Whether the initial replicas fit into main memory."""
    parts = {
        f"{pool.replicas.initial} x {name}": pool.replicas.initial * replica_bytes(config, pool)
        for name, pool in config.pools.items()
    }
    parts["ingress"] = config.server.replicas.min * INGRESS_BYTES
    parts["ray"] = RAY_BYTES
    needed_bytes = sum(parts.values())
    if needed_bytes <= available_bytes:
        return ()
    breakdown = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
    return (
        f"not enough memory: about {_gib(needed_bytes)} is needed ({breakdown}), "
        f"{_gib(available_bytes)} is available; lower engine.kv_cache or replicas.initial, "
        "or use a larger machine",
    )


def replica_bytes(config: DeploymentConfig, pool: PoolConfig, *, hosts: int = 1) -> int:
    """Main memory of one replica: the pool's setting, else an estimate from its parts.

    On several hosts it is the sum; weights pass through the memory of each.
    """
    if pool.resources.memory_bytes is not None:
        return pool.resources.memory_bytes
    if pool.engine.kind is EngineKind.SIM:
        return SIM_REPLICA_BYTES
    model_bytes = weights_bytes(config.models[pool.model].source)
    if pool.resources.gpus > 0:
        # Weights and KV blocks are on the GPUs; weights pass through the host's memory.
        staging_bytes = (
            _MAX_SHARD_BYTES if model_bytes is None else min(model_bytes, _MAX_SHARD_BYTES)
        )
        offload_bytes = pool.engine.offload.host_memory_bytes or 0
        return (
            pool.parallel.workers * VLLM_REPLICA_BYTES
            + hosts * math.ceil(staging_bytes)
            + offload_bytes
        )
    kv_bytes = pool.engine.kv_cache_bytes or _DEFAULT_CPU_KV_BYTES
    return VLLM_REPLICA_BYTES + pool.parallel.workers * kv_bytes + math.ceil(model_bytes or 0)


def driver_findings(config: DeploymentConfig, facts: MachineFacts) -> tuple[str, ...]:
    """A driver of this machine's GPUs that is too old for torch."""
    uses_gpus = facts.gpus and any(pool.resources.gpus for pool in config.pools.values())
    why = driver_problem(facts.versions.get("torch"), facts.driver_cuda) if uses_gpus else None
    return () if why is None else (why,)


def gpu_findings(config: DeploymentConfig, gpus: float) -> tuple[str, ...]:
    """Whether there are GPUs for the initial replicas."""
    needed_gpus = sum(pool.resources.gpus * pool.replicas.initial for pool in config.pools.values())
    if needed_gpus <= gpus:
        return ()
    return (
        f"the pools ask for {needed_gpus:g} GPUs to start with, {gpus:g} are there; "
        "lower pools.*.replicas.initial or resources.gpus, or add GPUs",
    )


def cluster_version_findings(
    config: DeploymentConfig, by_node: Mapping[str, Mapping[str, str | None]]
) -> tuple[str, ...]:
    """Packages that differ between nodes, are missing there, or not tested."""
    if differing := node_version_findings(by_node):
        return differing
    (versions, *_) = by_node.values() or ({},)
    return package_findings(config, versions)[0] if by_node else ()


def node_version_findings(
    by_node: Mapping[str, Mapping[str, str | None]],
) -> tuple[str, ...]:
    """Packages that differ between nodes."""
    findings = []
    packages = sorted({package for versions in by_node.values() for package in versions})
    for package in packages:
        nodes: dict[str, list[str]] = {}
        for node, versions in sorted(by_node.items()):
            nodes.setdefault(versions.get(package) or "none", []).append(node)
        if len(nodes) > 1:
            versions_text = ", ".join(
                f"{version} on {few(names, separator=', ')}"
                for version, names in sorted(nodes.items())
            )
            findings.append(
                f"package {package} differs between nodes: {versions_text}; install one version"
                " everywhere"
            )
    return tuple(findings)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB"
