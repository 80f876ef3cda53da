"""`baton doctor`: all checks in one numbered list with remedies.

Facts are gathered first, each within a deadline; checks are pure functions of facts, so that tests
can show each of them a fault. Those of a running deployment are here, the others in `checks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import psutil

from baton.config.schema.deployment import DeploymentConfig
from baton.domain.errors import BatonError, NotRunning
from baton.domain.names.addresses import format_address, is_loopback
from baton.domain.names.words import few
from baton.policy.resilience.liveness import STALE_AFTER_S
from baton.serving.checks.configuration import check_nodes, check_ray_auth, doctor_checks
from baton.serving.checks.facts import (
    Progress,
    cluster_facts,
    file_fact,
    gather_fact,
    gather_machine,
    health_problem,
    http_problem,
)
from baton.serving.checks.machine import machine_checks
from baton.serving.checks.result import Check, CheckStatus, Topic, UnknownFact
from baton.serving.cluster.cluster_state import ClusterState
from baton.serving.cluster.reaper import marked_processes
from baton.serving.operator.attached import AttachedCluster, attach_deployment, local_state
from baton.serving.ray.auth_probe import probe_ray_auth
from baton.serving.ray.context import get_gcs_address

JsonDict = dict[str, Any]
Report = Mapping[str, object]
_QUERY_TIMEOUT_S = 65.0
"""Each query has a deadline of half of it."""
_NODES_TIMEOUT_S = 65.0
_HTTP_TIMEOUT_S = 6.0
_PORTS_TIMEOUT_S = 10.0
_AUTH_PROBE_TIMEOUT_S = 25.0
_REPORTED = ("name", "status", "detail", "why", "fix")
_MAX_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPort:
    """A port of a deployment's process on an address that other machines may reach."""

    address: str
    port: int
    program: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSnapshot:
    """Answers of a deployment."""

    endpoint: str | None
    """None for a deployment at an address: its public URL is unknown here."""
    health_problem: str | UnknownFact = ""
    """Why `/health` is not healthy; empty when it is."""
    status: Mapping[str, object] | UnknownFact
    links: tuple[JsonDict, ...] | UnknownFact = ()
    metrics_problem: str | UnknownFact | None = None
    """Why the metrics URL does not answer; empty when it does; None: no metrics."""
    versions_by_node: Mapping[str, Mapping[str, str | None]] | UnknownFact
    open_ports: tuple[OpenPort, ...] | UnknownFact
    gcs_address: str
    ray_auth: str | UnknownFact
    """The store's answer to a connection without a token."""


def run_checks(
    config: DeploymentConfig | None, *, address: str | None, progress: Progress
) -> Report:
    """Run all checks; `config` adds those that need one.

    Faults are in the report: it never raises for them.
    """
    state = _running_cluster() if address is None else None
    machine = gather_machine(config, progress)
    if state is not None:
        token = file_fact("token of the Ray cluster", Path(state.token_file))
        machine = replace(machine, secrets=(*machine.secrets, token))
    return build_report(
        (
            ("machine", machine_checks(machine, config)),
            (
                "configuration",
                doctor_checks(machine, config, running_url=_running_url(config, state)),
            ),
            ("deployment", _run_deployment_checks(address, state, progress)),
        )
    )


def _running_cluster() -> ClusterState | None:
    try:
        return local_state()
    except (NotRunning, OSError):
        return None


def _running_url(config: DeploymentConfig | None, state: ClusterState | None) -> str | None:
    """The running endpoint, if it has the port of this configuration."""
    if config is None or state is None:
        return None
    is_same_port = state.http_url.rpartition(":")[2] == str(config.server.port)
    return state.http_url if is_same_port else None


def _run_deployment_checks(
    address: str | None, state: ClusterState | None, progress: Progress
) -> Iterator[Check]:
    try:
        with attach_deployment(address) as deployment:
            snapshot = gather_deployment(deployment, progress)
    except BatonError as error:
        return unreachable_checks(error)
    return deployment_checks(snapshot)


def build_report(areas: Iterable[tuple[str, Iterable[Check]]]) -> Report:
    """Checks in order, with their numbers; `ok` unless one failed."""
    rows = [(area, check) for area, checks in areas for check in checks]
    counts = Counter(check.status for _, check in rows)
    return {
        "ok": not counts[CheckStatus.FAIL],
        "counts": {str(status).lower(): counts[status] for status in CheckStatus},
        "checks": [
            {"number": number, "area": area} | {field: getattr(check, field) for field in _REPORTED}
            for number, (area, check) in enumerate(rows, start=1)
        ],
    }


def gather_deployment(deployment: AttachedCluster, progress: Progress) -> DeploymentSnapshot:
    """Ask the deployment, its endpoint and its nodes."""
    progress("asking the deployment")
    state = deployment.state
    endpoint = None if state is None else state.http_url
    status = gather_fact(_QUERY_TIMEOUT_S, "the deployment", deployment.status)
    links = gather_fact(_QUERY_TIMEOUT_S, "its links", deployment.links)
    metrics_url = _metrics_url(status)
    gcs_address = get_gcs_address()
    return DeploymentSnapshot(
        endpoint=endpoint,
        health_problem=UnknownFact("its public address is not known here")
        if endpoint is None
        else gather_fact(_HTTP_TIMEOUT_S, endpoint, lambda: health_problem(endpoint)),
        status=status,
        links=links
        if isinstance(links, UnknownFact)
        else tuple(cast("list[JsonDict]", links["links"])),
        metrics_problem=None
        if metrics_url is None
        else gather_fact(_HTTP_TIMEOUT_S, metrics_url, lambda: http_problem(metrics_url)),
        versions_by_node=gather_fact(
            _NODES_TIMEOUT_S, "its nodes", lambda: cluster_facts().versions
        ),
        open_ports=UnknownFact("its processes run elsewhere: look there with 'baton doctor'")
        if state is None
        else gather_fact(_PORTS_TIMEOUT_S, "its processes", lambda: open_ports(state)),
        gcs_address=gcs_address,
        ray_auth=gather_fact(
            _AUTH_PROBE_TIMEOUT_S, gcs_address, lambda: probe_ray_auth(gcs_address)
        ),
    )


def _metrics_url(status: Mapping[str, object] | UnknownFact) -> str | None:
    if isinstance(status, UnknownFact):
        return None
    observability = cast("JsonDict", status.get("observability") or {})
    url = observability.get("url")
    return str(url) if url else None


# ---------------------------------------------------------------------------------------- checks
def unreachable_checks(error: BatonError) -> Iterator[Check]:
    """Skip all checks without a deployment; fail for an unreachable deployment."""
    if isinstance(error, NotRunning):
        yield from _skip_all("nothing runs here")
        return
    topic = Topic("deployment", "a deployment that cannot be joined cannot be operated")
    message = getattr(error, "why", str(error))
    yield topic.failed(str(message), str(getattr(error, "remedy", "look at 'baton status'")))
    yield from islice(_skip_all("the deployment cannot be joined"), 1, None)


def _skip_all(why: str) -> Iterator[Check]:
    """Each check of a deployment, as skipped; named by those of a deployment without content."""
    nothing = DeploymentSnapshot(
        endpoint=None,
        status={},
        versions_by_node={},
        open_ports=(),
        gcs_address="",
        ray_auth=UnknownFact(why),
    )
    for check in deployment_checks(nothing):
        yield Topic(check.name, "").skipped(why)


def deployment_checks(snapshot: DeploymentSnapshot) -> Iterator[Check]:
    """Whether the running deployment is well."""
    topic = Topic("deployment", "the controller scales pools and deals out limits")
    status = snapshot.status
    if isinstance(status, UnknownFact):
        yield topic.failed(status.why, "look into its logs with 'baton logs --controller'")
        yield _check_endpoint(snapshot)
        yield from islice(_skip_all("the deployment does not answer"), 2, None)
        return
    fields = cast("JsonDict", status)
    yield topic.passed(f"{fields.get('model')}, baton {fields.get('baton')}")
    yield _check_endpoint(snapshot)
    yield _check_ingresses(fields)
    yield _check_joined(fields)
    yield _check_pools(fields)
    yield _check_pairs(snapshot.links)
    yield _check_side_channels(snapshot.links)
    yield _check_agents(fields)
    yield _check_leases(fields)
    yield _check_generation(fields)
    yield _check_metrics(snapshot, fields)
    yield _check_autoscaler(fields)
    yield _check_reports(fields)
    yield _check_policy(fields)
    yield check_nodes(snapshot.versions_by_node)
    yield check_open_ports(
        snapshot.open_ports, endpoint=snapshot.endpoint, metrics_url=_metrics_url(snapshot.status)
    )
    yield check_ray_auth(snapshot.ray_auth, snapshot.gcs_address)


def _check_endpoint(snapshot: DeploymentSnapshot) -> Check:
    topic = Topic("endpoint", "it is what clients talk to")
    if isinstance(snapshot.health_problem, UnknownFact):
        return topic.skipped(snapshot.health_problem.why)
    if snapshot.health_problem:
        return topic.failed(
            f"{snapshot.endpoint}/health: {snapshot.health_problem}",
            "see the ingresses below, and 'baton logs --ingress'",
        )
    return topic.passed(f"{snapshot.endpoint} says that it is well")


def _check_ingresses(status: JsonDict) -> Check:
    topic = Topic("ingresses", "an ingress without a replica to decode refuses everything")
    ingresses = _ingresses(status)
    unhealthy = sum(not ingress["healthy"] for ingress in ingresses)
    if unhealthy or not ingresses:
        reason = "; ".join(status.get("unanswered") or ["there is none"])
        return topic.failed(
            f"{unhealthy} of {len(ingresses)} cannot serve" if ingresses else reason,
            "see whether replicas have joined, below; then 'baton logs --ingress'",
        )
    return topic.passed(f"all {len(ingresses)} can serve")


def _check_joined(status: JsonDict) -> Check:
    topic = Topic("replicas joined", "a replica that has not joined gets no work")
    unreachable = [
        f"{replica}: {why}"
        for ingress in _ingresses(status)
        for replica, why in sorted(ingress["unjoined"].items())
    ]
    if unreachable:
        return topic.failed(
            few(list(dict.fromkeys(unreachable))),
            "open the ports between nodes where it cannot connect; where it is refused, the"
            " replica is of another version: replace it",
        )
    members = cast("list[JsonDict]", status.get("members") or [])
    return topic.passed(f"{len(members)} replicas, reached by every ingress")


def _check_pools(status: JsonDict) -> Check:
    topic = Topic("pools", "what is missing is missing from what can be served")
    pools = cast("list[JsonDict]", status.get("pools") or [])
    failing = [
        f"{pool['pool']}: {str(pool['trouble']).partition(chr(10))[0]}"
        for pool in pools
        if pool.get("trouble")
    ]
    if failing:
        return topic.failed(few(failing), "see 'baton logs --level warning' for why they end")
    empty = [pool["pool"] for pool in pools if pool["desired"] and not pool["ready"]]
    if empty:
        return topic.failed(
            f"{', '.join(empty)}: no replica is ready",
            "wait while they start ('baton status --watch'); else see 'baton logs'",
        )
    below_target = [
        f"{p['pool']} has {p['ready']} of {p['desired']}"
        for p in pools
        if p["ready"] < p["desired"]
    ]
    if below_target:
        return topic.warned(
            few(below_target), "wait while they start; else add nodes, or see 'baton logs'"
        )
    return topic.passed(", ".join(f"{pool['pool']} {pool['ready']}" for pool in pools) or "none")


def _check_pairs(links: tuple[JsonDict, ...] | UnknownFact) -> Check:
    topic = Topic("pairs", "over a pair that is quarantined nothing is handed off")
    if isinstance(links, UnknownFact):
        return topic.skipped(links.why)
    quarantined = [row for row in links if row["state"] == "quarantined"]
    if quarantined:
        details = [
            f"{row['source_id']} -> {row['target_id']}: {row['reason']}" for row in quarantined
        ]
        return topic.failed(
            f"{len(quarantined)} of {len(links)} are quarantined: {few(details)}",
            "open the ports between their nodes and look at 'baton links'; they are probed again"
            " by themselves, 30 s apart at most",
        )
    unproven = sum(row["state"] == "unknown" for row in links)
    if unproven:
        return topic.warned(
            f"{unproven} of {len(links)} are not proven yet",
            "wait some seconds; a fleet under load proves them by its own handoffs",
        )
    return topic.passed(f"{len(links)} work" if links else "nothing is handed off here")


def _check_side_channels(links: tuple[JsonDict, ...] | UnknownFact) -> Check:
    topic = Topic("side channels", "engines agree on them about what is to be fetched")
    if isinstance(links, UnknownFact):
        return topic.skipped(links.why)
    unresponsive = sorted(
        {str(row["source_id"]) for row in links if str(row["reason"]).startswith("side channel")}
    )
    if unresponsive:
        return topic.failed(
            f"no answer from {few(unresponsive)}",
            "replace them (their processes live, their listener does not), or open their ports",
        )
    return topic.passed("every source answers" if links else "nothing is handed off here")


def _check_agents(status: JsonDict) -> Check:
    topic = Topic("transfer agents", "an engine that fetches from nobody computes it all")
    broken_agents = {
        f"{replica_id}: {why}"
        for ingress in _ingresses(status)
        for replica_id, why in (ingress.get("broken_agents") or {}).items()
    }
    if broken_agents:
        return topic.failed(
            few(sorted(broken_agents)),
            "wait a minute, for it is replaced by itself; where several are broken at once none"
            " is: look for what they have in common (driver, network cards, UCX's settings)",
        )
    return topic.passed("every target fetches, or its sources are at fault")


def _check_leases(status: JsonDict) -> Check:
    topic = Topic("leases", "blocks that are read after their lease are another prompt's")
    late_pulls = {
        str(view["replica_id"]): int(view["void_pulls"])
        for ingress in _ingresses(status)
        for view in ingress["replicas"]
        if view["void_pulls"]
    }
    if late_pulls:
        details = [f"{replica_id} {count}" for replica_id, count in sorted(late_pulls.items())]
        return topic.warned(
            f"pulls that came too late, since the start: {few(details)}; their prompts were"
            " computed"
            " again",
            "raise transfer.lease above the longest step of an engine, or look for engines that"
            " stood still with 'baton logs --level warning'",
        )
    return topic.passed("no pull came too late")


def _check_generation(status: JsonDict) -> Check:
    topic = Topic("configuration", "processes of two minds refuse what others let in")
    controller_generation = status.get("generation")
    ingress_generations = [
        ingress["generation"]
        for ingress in _ingresses(status)
        if ingress.get("generation") is not None
    ]
    differing = sorted({other for other in ingress_generations if other != controller_generation})
    if differing:
        return topic.failed(
            f"the controller is at generation {controller_generation}, ingresses are at"
            f" {', '.join(map(str, differing))}",
            "wait two seconds; else apply it again with 'baton apply -c FILE'",
        )
    return topic.passed(f"generation {controller_generation}, everywhere")


def _check_metrics(snapshot: DeploymentSnapshot, status: JsonDict) -> Check:
    topic = Topic("metrics", "without them nobody is told that a promise is broken")
    observability = cast("JsonDict", status.get("observability") or {})
    if snapshot.metrics_problem is None:
        return topic.skipped("not enabled; see observability.metrics")
    problem = snapshot.metrics_problem
    if isinstance(problem, UnknownFact):
        problem = problem.why
    if problem:
        return topic.failed(
            f"{observability['url']}: {problem}",
            "see whether its port is taken ('baton logs --controller'), or set"
            " observability.metrics.port; from another machine it must not be bound to loopback",
        )
    return topic.passed(f"{observability['url']} answers")


def _check_autoscaler(status: JsonDict) -> Check:
    topic = Topic("autoscaler", "while it holds still, pools stay as they are")
    scaling = cast("JsonDict", status.get("autoscaler") or {})
    if not scaling:
        return topic.skipped("the controller does not tell")
    if pause_reason := scaling["paused_reason"]:
        return topic.warned(
            f"it holds still, because {pause_reason}",
            "wait a minute after a start; else see the reports below, and 'baton explain scale'",
        )
    if slow_starts := _slow_starts(status, scaling.get("cold_start_wait_s")):
        return topic.warned(
            f"replicas take longer to start than requests to a fleet at zero wait: {slow_starts}",
            "raise admission.cold_start_timeout, and admission.timeouts.total above it",
        )
    failures = scaling["failed_turns"] + scaling["failed_calls"]
    if failures:
        return topic.warned(
            f"{failures} calls failed, the last: {scaling['last_failure']}",
            "see 'baton logs --controller'; what failed is tried again every turn",
        )
    return topic.passed(str(scaling["policy"]))


def _slow_starts(status: JsonDict, wait_s: float | None) -> str:
    if wait_s is None:
        return ""
    pools = cast("list[JsonDict]", status.get("pools") or [])
    starts = ((pool["pool"], pool.get("cold_start_s") or 0.0) for pool in pools)
    slow = [f"{name} {start_s:.0f} s" for name, start_s in starts if start_s > wait_s]
    return f"{few(slow)} (they wait {wait_s:.0f} s)" if slow else ""


def _check_reports(status: JsonDict) -> Check:
    topic = Topic("reports", "requests are placed by how loaded replicas say they are")
    views = [view for ingress in _ingresses(status) for view in ingress["replicas"]]
    stale_loads = [
        f"{view['replica_id']} {view['load_age_s']:.0f} s"
        for view in views
        if view["load_age_s"] > STALE_AFTER_S
    ]
    if stale_loads:
        return topic.failed(
            f"load reports are old: {few(stale_loads)}",
            "see whether the replicas' nodes are overloaded; 'baton logs --replica ID'",
        )
    out_of_sync = sorted(
        {
            view["replica_id"]
            for view in views
            if (cache := view.get("cache")) and _is_out_of_sync(cast("JsonDict", cache))
        }
    )
    if out_of_sync:
        return topic.warned(
            f"what is cached is not known well of {few(out_of_sync)}",
            "wait a minute; else set router.index to predicted, or see 'baton status'",
        )
    return topic.passed(f"of {len({view['replica_id'] for view in views})} replicas, fresh")


def _is_out_of_sync(cache: JsonDict) -> bool:
    """Whether reports of this cache are missing or late.

    A cache without any update is empty, or does not report (`router.index: predicted`).
    """
    return not cache["in_sync"] or (cache["is_stale"] and cache["sequence"] > 0)


def _check_policy(status: JsonDict) -> Check:
    topic = Topic("placement policy", "where it fails, the least loaded replica is taken")
    policies = [ingress["policy"] for ingress in _ingresses(status) if "policy" in ingress]
    failures = sum(policy.get("failures", 0) for policy in policies)
    if failures:
        last = next(policy["last_failure"] for policy in policies if policy.get("failures"))
        return topic.warned(
            f"{policies[0]['name']} failed {failures} times, the last: {last}",
            "correct it, then apply the configuration again",
        )
    names = sorted({str(policy["name"]) for policy in policies})
    return topic.passed(", ".join(names) or "none is told")


def _ingresses(status: JsonDict) -> list[JsonDict]:
    return cast("list[JsonDict]", status.get("ingresses") or [])


def open_ports(state: ClusterState) -> tuple[OpenPort, ...]:
    """Ports of a local deployment's processes on other addresses than loopback."""
    ports: dict[tuple[str, int], OpenPort] = {}
    for pid in sorted({state.pid, *marked_processes(state.run_dir)}):
        try:
            process = psutil.Process(pid)
            listeners = [
                net_connection
                for net_connection in process.net_connections(kind="tcp")
                if net_connection.status == psutil.CONN_LISTEN
            ]
            program = process.name()
        except psutil.Error:  # it has ended, or belongs to another user
            continue
        for listener in listeners:
            host, port = listener.laddr
            if not is_loopback(host):
                open_port = OpenPort(address=host, port=port, program=program)
                ports.setdefault((host, port), open_port)
    return tuple(ports[key] for key in sorted(ports))


def check_open_ports(
    ports: tuple[OpenPort, ...] | UnknownFact, *, endpoint: str | None, metrics_url: str | None
) -> Check:
    """Whether only the intended ports are reachable by others."""
    topic = Topic(
        "open ports",
        "links and engines serve whoever belongs to the deployment, statistics and side"
        " channels whoever asks",
    )
    if isinstance(ports, UnknownFact):
        return topic.skipped(ports.why)
    expected_ports = {urlsplit(url).port for url in (endpoint, metrics_url) if url}
    unexpected = [port for port in ports if port.port not in expected_ports]
    if unexpected:
        return topic.failed(
            few(
                [
                    f"{format_address(port.address, port.port)} ({port.program})"
                    for port in unexpected
                ],
                _MAX_LISTED,
            ),
            "keep others from these ports by the firewall or a network policy; a HAProxy that was"
            " not started by baton needs 'bind 127.0.0.1:PORT' for statistics and metrics",
        )
    listing = ", ".join(f"{format_address(port.address, port.port)}" for port in ports)
    return topic.passed(f"only {listing}, as configured" if listing else "none")
