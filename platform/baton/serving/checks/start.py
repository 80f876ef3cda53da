"""Checks of a start: a failure refuses it, a warning is printed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from baton.config.schema.deployment import DeploymentConfig
from baton.domain.errors import PreflightFailed
from baton.domain.names.addresses import is_loopback, is_loopback_address
from baton.serving.checks.configuration import (
    check_keys,
    check_ray_auth,
    cluster_checks,
    config_checks,
    missing_resources,
    needed_versions_check,
    node_version_checks,
    placement_findings,
    submission_checks,
)
from baton.serving.checks.facts import (
    SERVER_PORT,
    ClusterFacts,
    MachineFacts,
    cluster_facts,
    cluster_resources,
    collect_node_files,
    gather_start,
    installed_versions,
    read_couplings,
    with_available_resources,
)
from baton.serving.checks.machine import check_couplings, check_driver, needs_gpus
from baton.serving.checks.named_files import check_node_files, key_findings
from baton.serving.checks.result import Check, CheckStatus, Topic, lines_with
from baton.serving.ray.auth_probe import probe_ray_auth
from baton.serving.ray.autoscaler import AutoscalingCapacity, read_autoscaling_capacity
from baton.serving.ray.context import get_gcs_address
from baton.serving.versions import PACKAGES, untested_packages

Warn = Callable[[str], None]
_POLL_S = 0.5


def check_machine(config: DeploymentConfig, *, warn: Warn) -> None:
    """Check that this machine can run the whole configuration.

    Raises:
        PreflightFailed: with all errors.
    """
    facts = gather_start(config)
    checks = [*start_checks(config, facts)]
    # Untested versions start on request; each coupling is then tried first.
    if config.cluster.allow_untested_versions and any(untested_packages(facts.versions)):
        checks += _coupling_checks()
    _refuse_or_warn(checks, warn)


def start_checks(config: DeploymentConfig, facts: MachineFacts) -> Iterator[Check]:
    """Whether this machine can run all of the configuration."""
    server_ports = tuple(port for port in facts.ports if port.key == SERVER_PORT)
    # Where other nodes may join, `await_nodes` waits for missing resources.
    of_nodes = () if is_loopback(config.cluster.node_address) else ("memory", "GPUs")
    for check in config_checks(replace(facts, ports=server_ports), config):
        if check.name not in of_nodes:
            yield check
    yield needed_versions_check(config, facts.versions, python=facts.python)
    if needs_gpus(config):
        yield check_driver(facts)


def _coupling_checks() -> Iterator[Check]:
    try:
        yield from check_couplings(read_couplings())
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        topic = Topic("couplings", "an untested version may lack what baton calls")
        yield topic.failed(f"couplings: got {error}, expected a result", "run 'baton doctor'")


def check_submission(config: DeploymentConfig, *, warn: Warn) -> None:
    """Check from this machine a configuration that other machines will run.

    Raises:
        PreflightFailed: with all errors.
    """
    versions = installed_versions(PACKAGES)
    checks = (needed_versions_check(config, versions), *submission_checks(config, versions))
    _refuse_or_warn(checks, warn)


def check_cluster(
    config: DeploymentConfig,
    *,
    warn: Warn,
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
    access = _check_access(config)
    facts = cluster_facts()
    checks = [
        *cluster_checks(config, with_available_resources(facts) if shared else facts, capacity)
    ]
    # On baton's own cluster the readers of files are on this machine, which was checked. A node
    # with another baton may not understand the question.
    if shared and not lines_with(CheckStatus.FAIL, checks):
        checks += check_node_files(collect_node_files(config))
    _refuse_or_warn([*checks, access], warn)


def placement_warnings(config: DeploymentConfig) -> tuple[str, ...]:
    """Pools of which no node of the connected cluster can run a replica.

    Raises:
        ClusterFailed: its head does not answer.
    """
    findings = placement_findings(config, cluster_resources(), read_autoscaling_capacity())
    return tuple(map(str, findings))


def check_declared(config: DeploymentConfig, *, warn: Warn) -> None:
    """Check everything that does not depend on the number of nodes: more may join on demand.

    Raises:
        PreflightFailed: with all errors.
    """
    checks = (
        _check_access(config),
        check_keys(config, key_findings(config)),
        *node_version_checks(config, cluster_facts().versions),
    )
    _refuse_or_warn(checks, warn)


def _check_access(config: DeploymentConfig) -> Check:
    """Whether Ray accepts other machines; on loopback none reaches it, and it is not checked."""
    address = get_gcs_address()
    auth = "guarded" if is_loopback_address(address) else probe_ray_auth(address)
    return check_ray_auth(auth, address, is_allowed=config.cluster.allow_open)


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
    while missing := tuple(map(str, missing_resources(config, read_capacity()))):
        if time.monotonic() > deadline_at_s:
            raise PreflightFailed(missing)
        if missing != reported:
            progress(f"waiting for nodes ('baton join' says how one joins): {'; '.join(missing)}")
            reported = missing
        sleep(_POLL_S)


def _refuse_or_warn(checks: Iterable[Check], warn: Warn) -> None:
    checks = tuple(checks)
    if errors := lines_with(CheckStatus.FAIL, checks):
        raise PreflightFailed(errors)
    for line in lines_with(CheckStatus.WARN, checks):
        warn(line)
