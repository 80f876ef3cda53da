"""What `baton doctor` asks of a deployment that runs, and judges: questions here, checks pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from baton.domain.errors import BatonError, NotRunning
from baton.domain.words import few
from baton.policy.resilience.liveness import REST_S
from baton.serving.cluster.cluster_state import ClusterState
from baton.serving.doctor.facts import Unknown, answers_at, answers_health, within
from baton.serving.doctor.result import Check, Topic
from baton.serving.doctor.security import (
    OpenPort,
    check_open_ports,
    check_ray_door,
    open_ports,
)
from baton.serving.operator.attached import Joined
from baton.serving.preflight.checks import node_version_findings
from baton.serving.preflight.facts import cluster_facts
from baton.serving.ray.auth_probe import ray_door
from baton.serving.ray.context import control_store
from baton.serving.versions import PACKAGES

Told = dict[str, Any]
Progress = Callable[[str], None]
_ASK_S = 65.0
"""Each question has a deadline of half of it."""
_NODES_S = 65.0
_HTTP_S = 6.0
_PORTS_S = 10.0
_DOOR_S = 25.0
_OLD_LOAD_S = 2.0 + REST_S
"""Replicas report four times a second while they have work, else every 4 s."""
_NAMES = (
    "deployment",
    "endpoint",
    "ingresses",
    "replicas joined",
    "pools",
    "pairs",
    "side channels",
    "transfer agents",
    "leases",
    "configuration",
    "metrics",
    "autoscaler",
    "reports",
    "placement policy",
    "nodes",
    "open ports",
    "Ray's door",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningNow:
    """A deployment, as it told of itself."""

    endpoint: str | None
    """None for one that was joined at an address: its public URL is not known here."""
    health: str | Unknown = ""
    """Why its endpoint does not say that it is well; empty when it does."""
    status: Mapping[str, object] | Unknown
    links: tuple[Told, ...] | Unknown = ()
    metrics: str | Unknown | None = None
    """Why nothing answers at its metrics' URL; empty when something does; None: it has none."""
    nodes: Mapping[str, Mapping[str, str | None]] | Unknown
    """Versions of packages by node."""
    ports: tuple[OpenPort, ...] | Unknown
    """Of its processes, where others may reach them."""
    store: str
    """Address of Ray's control store."""
    door: str | Unknown
    """How that store meets somebody without a token."""


def running_now(deployment: Joined, progress: Progress) -> RunningNow:
    """Ask the deployment, its endpoint and its nodes."""
    progress("asking the deployment")
    endpoint = None if deployment.state is None else deployment.state.http_url
    status = within(_ASK_S, "the deployment", deployment.status)
    links = within(_ASK_S, "its links", deployment.links)
    url = _metrics_url(status)
    store = control_store()
    return RunningNow(
        endpoint=endpoint,
        health=_health(endpoint),
        status=status,
        links=links if isinstance(links, Unknown) else tuple(cast("list[Told]", links["links"])),
        metrics=None if url is None else within(_HTTP_S, url, lambda: answers_at(url)),
        nodes=within(_NODES_S, "its nodes", lambda: cluster_facts(PACKAGES).versions),
        ports=_ports(deployment.state),
        store=store,
        door=within(_DOOR_S, store, lambda: ray_door(store)),
    )


def _ports(state: ClusterState | None) -> tuple[OpenPort, ...] | Unknown:
    if state is None:
        return Unknown("its processes run elsewhere: look there with 'baton doctor'")
    return within(_PORTS_S, "its processes", lambda: open_ports(state))


def _health(endpoint: str | None) -> str | Unknown:
    if endpoint is None:
        return Unknown("its public address is not known here")
    return within(_HTTP_S, endpoint, lambda: answers_health(endpoint))


def _metrics_url(status: Mapping[str, object] | Unknown) -> str | None:
    if isinstance(status, Unknown):
        return None
    seen_at = cast("Told", status.get("observability") or {})
    url = seen_at.get("url")
    return str(url) if url else None


# ---------------------------------------------------------------------------------------- checks


def nothing_runs(why: BatonError) -> Iterator[Check]:
    """Without a deployment there is nothing to look at; one that cannot be joined is a failure."""
    if isinstance(why, NotRunning):
        for name in _NAMES:
            yield Topic(name=name, why="").skipped("nothing runs here")
        return
    topic = Topic(name=_NAMES[0], why="a deployment that cannot be joined cannot be operated")
    told = getattr(why, "why", str(why))
    yield topic.failed(str(told), str(getattr(why, "remedy", "look at 'baton status'")))
    for name in _NAMES[1:]:
        yield Topic(name=name, why="").skipped("the deployment cannot be joined")


def running_checks(running: RunningNow) -> Iterator[Check]:
    """Whether what runs is well."""
    topic = Topic(name="deployment", why="the controller scales pools and deals out limits")
    status = running.status
    if isinstance(status, Unknown):
        yield topic.failed(status.why, "look into its logs with 'baton logs --controller'")
        yield check_endpoint(running)
        for name in _NAMES[2:]:
            yield Topic(name=name, why="").skipped("the deployment does not answer")
        return
    told = cast("Told", status)
    yield topic.passed(f"{told.get('model')}, baton {told.get('baton')}")
    yield check_endpoint(running)
    yield check_ingresses(told)
    yield check_joined(told)
    yield check_pools(told)
    yield check_pairs(running.links)
    yield check_side_channels(running.links)
    yield check_agents(told)
    yield check_leases(told)
    yield check_generation(told)
    yield check_metrics(running, told)
    yield check_autoscaler(told)
    yield check_reports(told)
    yield check_policy(told)
    yield check_nodes(running.nodes)
    yield check_open_ports(
        running.ports, endpoint=running.endpoint, metrics=_metrics_url(running.status)
    )
    yield check_ray_door(running.door, running.store)


def check_endpoint(running: RunningNow) -> Check:
    """Whether clients are served."""
    topic = Topic(name="endpoint", why="it is what clients talk to")
    if isinstance(running.health, Unknown):
        return topic.skipped(running.health.why)
    if running.health:
        return topic.failed(
            f"{running.endpoint}/health: {running.health}",
            "see the ingresses below, and 'baton logs --ingress'",
        )
    return topic.passed(f"{running.endpoint} says that it is well")


def check_ingresses(told: Told) -> Check:
    """Whether every ingress can serve."""
    topic = Topic(name="ingresses", why="an ingress without a replica to decode refuses everything")
    ingresses = _ingresses(told)
    ill = sum(not one["healthy"] for one in ingresses)
    if ill or not ingresses:
        none = "; ".join(told.get("unanswered") or ["there is none"])
        return topic.failed(
            f"{ill} of {len(ingresses)} cannot serve" if ingresses else none,
            "see whether replicas have joined, below; then 'baton logs --ingress'",
        )
    return topic.passed(f"all {len(ingresses)} can serve")


def check_joined(told: Told) -> Check:
    """Whether every ingress reaches every replica."""
    topic = Topic(name="replicas joined", why="a replica that has not joined gets no work")
    lost = [
        f"{replica}: {why}"
        for one in _ingresses(told)
        for replica, why in sorted(one["unjoined"].items())
    ]
    if lost:
        return topic.failed(
            few(list(dict.fromkeys(lost))),
            "open the ports between nodes where it cannot connect; where it is refused, the"
            " replica is of another version: replace it",
        )
    members = cast("list[Told]", told.get("members") or [])
    return topic.passed(f"{len(members)} replicas, reached by every ingress")


def check_pools(told: Told) -> Check:
    """Whether pools have as many replicas as they should."""
    topic = Topic(name="pools", why="what is missing is missing from what can be served")
    pools = cast("list[Told]", told.get("pools") or [])
    troubled = [
        f"{pool['pool']}: {str(pool['trouble']).partition(chr(10))[0]}"
        for pool in pools
        if pool.get("trouble")
    ]
    if troubled:
        return topic.failed(few(troubled), "see 'baton logs --level warning' for why they end")
    empty = [pool["pool"] for pool in pools if pool["want"] and not pool["ready"]]
    if empty:
        return topic.failed(
            f"{', '.join(empty)}: no replica is ready",
            "wait while they start ('baton status --watch'); else see 'baton logs'",
        )
    short = [
        f"{p['pool']} has {p['ready']} of {p['want']}" for p in pools if p["ready"] < p["want"]
    ]
    if short:
        return topic.warned(
            few(short), "wait while they start; else add nodes, or see 'baton logs'"
        )
    return topic.passed(", ".join(f"{pool['pool']} {pool['ready']}" for pool in pools) or "none")


def check_pairs(links: tuple[Told, ...] | Unknown) -> Check:
    """Whether KV blocks can move between every pair that may have to."""
    topic = Topic(name="pairs", why="over a pair that is quarantined nothing is handed off")
    if isinstance(links, Unknown):
        return topic.skipped(links.why)
    bad = [row for row in links if row["state"] == "quarantined"]
    if bad:
        named = [f"{row['source_id']} -> {row['target_id']}: {row['why']}" for row in bad]
        return topic.failed(
            f"{len(bad)} of {len(links)} are quarantined: {few(named)}",
            "open the ports between their nodes and look at 'baton links'; they are probed again"
            " by themselves, 30 s apart at most",
        )
    new = sum(row["state"] == "unknown" for row in links)
    if new:
        return topic.warned(
            f"{new} of {len(links)} are not proven yet",
            "wait some seconds; a fleet under load proves them by its own handoffs",
        )
    return topic.passed(f"{len(links)} work" if links else "nothing is handed off here")


def check_side_channels(links: tuple[Told, ...] | Unknown) -> Check:
    """Whether engines answer those who want to fetch from them."""
    topic = Topic(name="side channels", why="engines agree on them about what is to be fetched")
    if isinstance(links, Unknown):
        return topic.skipped(links.why)
    deaf = sorted(
        {str(row["source_id"]) for row in links if str(row["why"]).startswith("side channel")}
    )
    if deaf:
        return topic.failed(
            f"no answer from {few(deaf)}",
            "replace them (their processes live, their listener does not), or open their ports",
        )
    return topic.passed("every source answers" if links else "nothing is handed off here")


def check_agents(told: Told) -> Check:
    """Whether every engine can fetch from those that serve others."""
    topic = Topic(name="transfer agents", why="an engine that fetches from nobody computes it all")
    broken = {
        f"{replica_id}: {why}"
        for one in _ingresses(told)
        for replica_id, why in (one.get("broken_agents") or {}).items()
    }
    if broken:
        return topic.failed(
            few(sorted(broken)),
            "wait a minute, for it is replaced by itself; where several are broken at once none"
            " is: look for what they have in common (driver, network cards, UCX's settings)",
        )
    return topic.passed("every target fetches, or its sources are at fault")


def check_leases(told: Told) -> Check:
    """Whether blocks are kept for as long as somebody waits for them."""
    topic = Topic(name="leases", why="blocks that are read after their lease are another prompt's")
    void = {
        str(view["replica_id"]): int(view["void_pulls"])
        for one in _ingresses(told)
        for view in one["replicas"]
        if view["void_pulls"]
    }
    if void:
        named = [f"{replica_id} {count}" for replica_id, count in sorted(void.items())]
        return topic.warned(
            f"pulls that came too late, since the start: {few(named)}; their prompts were computed"
            " again",
            "raise transfer.lease above the longest step of an engine, or look for engines that"
            " stood still with 'baton logs --level warning'",
        )
    return topic.passed("no pull came too late")


def check_generation(told: Told) -> Check:
    """Whether everybody goes by the same configuration."""
    topic = Topic(name="configuration", why="processes of two minds refuse what others let in")
    number = told.get("generation")
    others = [one["generation"] for one in _ingresses(told) if one.get("generation") is not None]
    differ = sorted({other for other in others if other != number})
    if differ:
        return topic.failed(
            f"the controller is at generation {number}, ingresses are at"
            f" {', '.join(map(str, differ))}",
            "wait two seconds; else apply it again with 'baton apply -c FILE'",
        )
    return topic.passed(f"generation {number}, everywhere")


def check_metrics(running: RunningNow, told: Told) -> Check:
    """Whether Prometheus could ask."""
    topic = Topic(name="metrics", why="without them nobody is told that a promise is broken")
    seen_at = cast("Told", told.get("observability") or {})
    if running.metrics is None:
        return topic.skipped("not enabled; see observability.metrics")
    if isinstance(running.metrics, Unknown) or running.metrics:
        why = running.metrics.why if isinstance(running.metrics, Unknown) else running.metrics
        return topic.failed(
            f"{seen_at['url']}: {why}",
            "see whether its port is taken ('baton logs --controller'), or set"
            " observability.metrics.port; from another machine it must not be bound to loopback",
        )
    return topic.passed(f"{seen_at['url']} answers")


def check_autoscaler(told: Told) -> Check:
    """Whether pools are scaled."""
    topic = Topic(name="autoscaler", why="while it holds still, pools stay as they are")
    scaling = cast("Told", told.get("autoscaler") or {})
    if not scaling:
        return topic.skipped("the controller does not tell")
    if held := scaling["held"]:
        return topic.warned(
            f"it holds still, because {held}",
            "wait a minute after a start; else see the reports below, and 'baton explain scale'",
        )
    if slow := _slow_starts(told, scaling.get("cold_start_wait_s")):
        return topic.warned(
            f"replicas take longer to start than requests to a fleet at zero wait: {slow}",
            "raise admission.max_cold_start_wait, and admission.timeouts.total above it",
        )
    failures = scaling["failed_turns"] + scaling["failed_calls"]
    if failures:
        return topic.warned(
            f"{failures} calls failed, the last: {scaling['last_failure']}",
            "see 'baton logs --controller'; what failed is tried again every turn",
        )
    return topic.passed(str(scaling["policy"]))


def _slow_starts(told: Told, wait_s: float | None) -> str:
    """The pools whose cold start is longer than that; empty where there are none."""
    if wait_s is None:
        return ""
    pools = cast("list[Told]", told.get("pools") or [])
    starts = ((pool["pool"], pool.get("cold_start_s") or 0.0) for pool in pools)
    slow = [f"{name} {start_s:.0f} s" for name, start_s in starts if start_s > wait_s]
    return f"{few(slow)} (they wait {wait_s:.0f} s)" if slow else ""


def check_reports(told: Told) -> Check:
    """Whether ingresses know lately how loaded replicas are, and what they cache."""
    topic = Topic(name="reports", why="requests are placed by how loaded replicas say they are")
    views = [view for one in _ingresses(told) for view in one["replicas"]]
    old = [
        f"{view['replica_id']} {view['load_age_s']:.0f} s"
        for view in views
        if view["load_age_s"] > _OLD_LOAD_S
    ]
    if old:
        return topic.failed(
            f"load reports are old: {few(old)}",
            "see whether the replicas' nodes are overloaded; 'baton logs --replica ID'",
        )
    astray = sorted(
        {
            view["replica_id"]
            for view in views
            if (cache := view.get("cache")) and _is_astray(cast("Told", cache))
        }
    )
    if astray:
        return topic.warned(
            f"what is cached is not known well of {few(astray)}",
            "wait a minute; else set router.index to predicted, or see 'baton status'",
        )
    return topic.passed(f"of {len({view['replica_id'] for view in views})} replicas, fresh")


def _is_astray(cache: Told) -> bool:
    """Whether reports of this cache are missing or late.

    A cache that has reported no update is empty, or is not to report (`router.index: predicted`).
    """
    return not cache["in_step"] or (cache["stale"] and cache["sequence"] > 0)


def check_policy(told: Told) -> Check:
    """Whether a placement policy of the user's own works."""
    topic = Topic(name="placement policy", why="where it fails, the least loaded replica is taken")
    policies = [one["policy"] for one in _ingresses(told) if "policy" in one]
    failures = sum(policy.get("failures", 0) for policy in policies)
    if failures:
        last = next(policy["last_failure"] for policy in policies if policy.get("failures"))
        return topic.warned(
            f"{policies[0]['name']} failed {failures} times, the last: {last}",
            "correct it, then apply the configuration again",
        )
    names = sorted({str(policy["name"]) for policy in policies})
    return topic.passed(", ".join(names) or "none is told")


def check_nodes(nodes: Mapping[str, Mapping[str, str | None]] | Unknown) -> Check:
    """Whether all nodes have the same packages."""
    topic = Topic(
        name="nodes", why="replicas of two versions do not understand each other's blocks"
    )
    if isinstance(nodes, Unknown):
        return topic.skipped(nodes.why)
    if findings := node_version_findings(nodes):
        return topic.said(findings)
    return topic.passed(f"{len(nodes)} with the same packages")


def _ingresses(told: Told) -> list[Told]:
    return cast("list[Told]", told.get("ingresses") or [])
