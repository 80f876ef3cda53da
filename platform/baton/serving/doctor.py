"""`baton doctor`: all checks in one numbered list with remedies; the deployment first.

Theory of operation: facts are gathered first (`doctor_facts`, `checks.facts`), side by side, each
within a deadline, so that all are there within a minute even when everything hangs. Checks are pure
functions of facts, so that tests can show each of them a fault. Those of a running deployment are
here, the others in `checks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from baton.config.schema.deployment import DeploymentConfig
from baton.domain.errors import AmbiguousDeployment, BatonError, NotRunning, OperatorError
from baton.domain.names.addresses import format_address
from baton.domain.names.words import count_text, few
from baton.policy.resilience.liveness import STALE_AFTER_S
from baton.serving.checks.configuration import check_nodes, check_ray_auth, doctor_checks
from baton.serving.checks.endpoint import (
    CRITICAL_S,
    WARNING_S,
    Client,
    check_request,
    check_tls,
    days_text,
)
from baton.serving.checks.facts import (
    DiskFact,
    MachineSnapshot,
    PendingFact,
    Progress,
    file_fact,
    gather_machine,
)
from baton.serving.checks.machine import check_disks, machine_checks
from baton.serving.checks.result import (
    Check,
    CheckStatus,
    Finding,
    Topic,
    UnknownFact,
)
from baton.serving.cluster.cluster_state import ClusterState
from baton.serving.doctor_facts import (
    DEFAULT_CLIENT,
    DeploymentSnapshot,
    FrontSnapshot,
    OpenPort,
    gather_deployment,
    gather_front,
    metrics_url_in,
)
from baton.serving.operator.attached import find_local_state
from baton.serving.ray.membership import STORE_NAME
from baton.serving.shared.reports import lost_node_text

JsonDict = dict[str, Any]
Report = Mapping[str, object]
_RUN_TIMEOUT_S = 50.0
"""Of all facts; with the start of the command, `baton doctor` ends within a minute."""
_REPORTED = ("name", "status", "detail", "why", "fix")
_MAX_LISTED = 5
_RECENT_S = 3_600.0
"""A change or a loss so long ago may be the cause of a present problem."""
_WORST_FIRST = (CheckStatus.FAIL, CheckStatus.WARN, CheckStatus.PASS, CheckStatus.SKIP)
_FRONT_CHECKS = 3
_EXPIRY_REMEDY = (
    "renew the certificate's files; make a key with 'baton keys create' and give it to its clients"
)
_REJECTED_REMEDY = "'baton keys list' shows expired and revoked keys; give their clients new ones"


def run_checks(
    config: DeploymentConfig | None,
    *,
    address: str | None,
    progress: Progress,
    on_checks: Callable[[Report], None] = lambda _report: None,
    client: Client = DEFAULT_CLIENT,
) -> Report:
    """Run all checks within a minute; `config` adds those that need one.

    `on_checks` gets a report of the deployment's checks while those of the machine still run.
    Faults are in the report: it never raises for them.
    """
    machine = PendingFact(_RUN_TIMEOUT_S, "this machine", lambda: gather_machine(config, progress))
    state, problem = _find_deployment(address)
    if problem is None:
        progress("asking the deployment")
        snapshot = PendingFact(
            _RUN_TIMEOUT_S,
            "the deployment",
            lambda: gather_deployment(state, address, client=client, config=config),
        ).wait()
        if isinstance(snapshot, UnknownFact):
            problem = OperatorError(snapshot.reason, "look at 'baton status' and 'baton logs'")
        elif isinstance(snapshot, BatonError):
            problem = snapshot
    if problem is not None:
        front = None if client.url is None else gather_front(client.url, client).wait()
        deployment = unreachable_checks(problem, None if isinstance(front, UnknownFact) else front)
    else:
        deployment = deployment_checks(cast("DeploymentSnapshot", snapshot))
    areas: list[tuple[str, Iterable[Check]]] = [("deployment", list(deployment))]
    on_checks(build_report(areas))
    return build_report([*areas, *_local_areas(machine.wait(), config, state)])


def _local_areas(
    machine: MachineSnapshot | UnknownFact,
    config: DeploymentConfig | None,
    state: ClusterState | None,
) -> list[tuple[str, Iterable[Check]]]:
    if isinstance(machine, UnknownFact):
        topic = Topic("machine", "nothing starts on a machine that cannot be looked at")
        fix = "see whether a disk or a driver hangs: 'dmesg', 'nvidia-smi', 'df'"
        return [("machine", [topic.failed(machine.reason, fix)])]
    if state is not None:
        token = file_fact("token of the Ray cluster", Path(state.token_file))
        machine = replace(machine, secrets=(*machine.secrets, token))
    running_url = _running_url(config, state)
    return [
        ("machine", machine_checks(machine, config)),
        ("configuration", doctor_checks(machine, config, running_url=running_url)),
    ]


def _find_deployment(address: str | None) -> tuple[ClusterState | None, BatonError | None]:
    """The deployment if it is on this machine, and why none can be asked."""
    try:
        return find_local_state(address), None
    except BatonError as error:
        return None, error
    except OSError as error:
        return None, OperatorError(str(error), "set XDG_RUNTIME_DIR to a folder of your own")


def _running_url(config: DeploymentConfig | None, state: ClusterState | None) -> str | None:
    """The running endpoint, if it has the port of this configuration."""
    if config is None or state is None:
        return None
    is_same_port = state.http_url.rpartition(":")[2] == str(config.server.port)
    return state.http_url if is_same_port else None


def build_report(areas: Iterable[tuple[str, Iterable[Check]]]) -> Report:
    """Checks in order, with their numbers; `ok` unless one failed. Counts have the worst first."""
    rows = [(area, check) for area, checks in areas for check in checks]
    counts = Counter(check.status for _, check in rows)
    return {
        "ok": not counts[CheckStatus.FAIL],
        "counts": {str(status).lower(): counts[status] for status in _WORST_FIRST},
        "checks": [
            {"number": number, "area": area} | {field: getattr(check, field) for field in _REPORTED}
            for number, (area, check) in enumerate(rows, start=1)
        ],
    }


# ---------------------------------------------------------------------------------------- checks
def unreachable_checks(error: BatonError, front: FrontSnapshot | None = None) -> Iterator[Check]:
    """Skip all checks without a deployment; fail for an unreachable deployment.

    `front` has the answers of an endpoint that the operator named.
    """
    topic = Topic("deployment", "a deployment that cannot be joined cannot be operated")
    if isinstance(error, NotRunning) and not isinstance(error, AmbiguousDeployment):
        reason = "nothing runs here"
        yield topic.skipped(reason)
    else:
        reason = "the deployment cannot be joined"
        message = getattr(error, "reason", str(error))
        yield topic.failed(str(message), str(getattr(error, "remedy", "look at 'baton status'")))
    skipped = _skip_all(reason)
    yield from (
        islice(skipped, 1, None)
        if front is None
        else (
            *_front_checks(front),
            *islice(skipped, 1 + _FRONT_CHECKS, None),
        )
    )


def _skip_all(reason: str) -> Iterator[Check]:
    """Each check of a deployment, as skipped; named by those of a deployment without content."""
    nothing = DeploymentSnapshot(
        front=FrontSnapshot(endpoint=None, request=UnknownFact(reason), at_s=0.0),
        status={},
        versions_by_node={},
        open_ports=(),
        gcs_address="",
        ray_auth=UnknownFact(reason),
    )
    for check in deployment_checks(nothing):
        yield Topic(check.name, "").skipped(reason)


def deployment_checks(snapshot: DeploymentSnapshot) -> Iterator[Check]:
    """Whether the running deployment is well; first what its clients notice."""
    topic = Topic("deployment", "the controller scales pools and deals out limits")
    status = snapshot.status
    if isinstance(status, UnknownFact):
        yield topic.failed(status.reason, "look into its logs with 'baton logs --controller'")
        yield from _front_checks(snapshot.front)
        yield from islice(_skip_all("the deployment does not answer"), 1 + _FRONT_CHECKS, None)
        return
    fields = cast("JsonDict", status)
    if "baton" in fields:
        yield topic.passed(f"{fields.get('model')}, baton {fields['baton']}")
    else:
        fix = "end its process, if it stays so: Ray starts another; see 'baton logs --controller'"
        yield topic.failed(
            "; ".join(fields.get("unanswered") or ["the controller does not answer"]),
            "see 'lost nodes', below" if fields.get("lost_nodes") else fix,
        )
    yield from _front_checks(snapshot.front)
    yield _check_control_store(fields)
    yield _check_lost_nodes(fields)
    yield _if_controller(fields, _check_objectives(fields, snapshot))
    yield _check_ingresses(fields)
    yield _if_controller(fields, _check_joined(fields))
    yield _if_controller(fields, _check_pools(fields))
    yield _check_losses(fields)
    yield _check_expiries(fields)
    yield _check_unauthorized(fields)
    yield _check_deployment_disks(snapshot.disks)
    yield _check_pairs(snapshot.links)
    yield _check_side_channels(snapshot.links)
    yield _check_agents(fields)
    yield _check_leases(fields)
    yield _if_controller(fields, _check_generation(fields))
    yield _if_controller(fields, _check_metrics(snapshot, fields))
    yield _check_autoscaler(fields)
    yield _check_reports(fields)
    yield _check_policy(fields)
    yield check_nodes(snapshot.versions_by_node)
    yield check_open_ports(
        snapshot.open_ports,
        endpoint=snapshot.front.endpoint,
        metrics_url=metrics_url_in(snapshot.status),
    )
    yield check_ray_auth(snapshot.ray_auth, snapshot.gcs_address)


def _if_controller(status: JsonDict, check: Check) -> Check:
    """A check of answers of the controller; skipped if there are none."""
    if "baton" in status:
        return check
    return Topic(check.name, check.why).skipped("the controller does not answer")


def _front_checks(front: FrontSnapshot) -> tuple[Check, ...]:
    return (
        _check_endpoint(front),
        check_tls(front.tls, front.client, now_s=front.at_s),
        check_request(front.request, front.client),
    )


def _check_endpoint(front: FrontSnapshot) -> Check:
    topic = Topic("endpoint", "it is what clients talk to")
    if isinstance(front.health_problem, UnknownFact):
        if front.endpoint is None:
            return topic.skipped(front.health_problem.reason)
        return topic.failed(front.health_problem.reason, "see 'baton logs --ingress'")
    if front.health_problem:
        return topic.failed(
            f"{front.endpoint}/health: {front.health_problem}",
            "see the ingresses below, and 'baton logs --ingress'; where all of them can serve, the"
            " proxy before them has ended: Ray Serve starts another within 30 s",
        )
    return topic.passed(f"{front.endpoint} says that it is well")


def _check_objectives(status: JsonDict, snapshot: DeploymentSnapshot) -> Check:
    topic = Topic("objectives", "clients wait longer than their objectives")
    missed, is_lasting = [], False
    rows = cast("list[JsonDict]", status.get("classes") or [])
    for row in rows:
        recent, window, target = row["attainment"], row["window_attainment"], row["target"]
        if recent is None or recent >= target:
            continue
        is_lasting = is_lasting or (window is not None and window < target)
        parts = [
            f"{name.upper()} {row[f'{name}_attainment']:.1%}"
            for name in ("ttft", "tpot")
            if row.get(f"{name}_attainment") is not None and row.get(f"{name}_s") is not None
        ]
        parts_text = f" ({', '.join(parts)})" if parts else ""
        missed.append(
            f"{row['class']}: {recent:.1%} of the last half minute's requests met every objective"
            f"{parts_text}, expected {target:.1%}"
        )
    if not missed:
        classes = [row["class"] for row in rows if row["attainment"] is not None]
        return topic.passed(f"{', '.join(classes)}: met" if classes else "no request has ended")
    make_check = topic.failed if is_lasting else topic.warned
    return make_check(few(missed), _objectives_remedy(snapshot))


def _objectives_remedy(snapshot: DeploymentSnapshot) -> str:
    """Go back, if the configuration has just changed; else find out what the time goes into."""
    look = (
        "see 'baton status' for the load, and 'baton trace --order slowest' for what takes the time"
    )
    if isinstance(snapshot.history, UnknownFact):
        return look
    changes = [row for row in snapshot.history if row["at_s"] is not None and row["generation"]]
    if not changes or (age_s := snapshot.front.at_s - changes[-1]["at_s"]) > _RECENT_S:
        return look
    last = changes[-1]
    return (
        f"the configuration changed {age_s:.0f} s ago ({last['operation']}, generation"
        f" {last['generation']}): 'baton rollback' returns to the one before; else {look}"
    )


def _check_control_store(status: JsonDict) -> Check:
    topic = Topic("control store", "without it Ray starts nothing, and ends what runs in a minute")
    if "lost_nodes" in status:
        return topic.passed("it answers")
    failures = [reason for reason in status.get("unanswered") or () if STORE_NAME in reason]
    if not failures:
        return topic.skipped("the deployment does not tell")
    return topic.failed(
        few(failures),
        "see whether the head node runs, and its process gcs_server; unless it comes back within a"
        " minute, start the deployment again with 'baton up'",
    )


def _check_lost_nodes(status: JsonDict) -> Check:
    """Fails while something is missing, for this may be why."""
    topic = Topic("lost nodes", "what ran there starts again only where another node has room")
    if "lost_nodes" not in status:
        return topic.skipped(f"{STORE_NAME} does not answer")
    pools = cast("list[JsonDict]", status.get("pools") or [])
    is_complete = "baton" in status and all(pool["ready"] >= pool["desired"] for pool in pools)
    recent_s = _RECENT_S if is_complete else 24 * _RECENT_S
    lines = [
        f"{days_text(row['age_s'])} ago: {lost_node_text(row)}, {row['reason']}"
        for row in status["lost_nodes"]
        if row["age_s"] <= recent_s
    ]
    if not lines:
        return topic.passed("none")
    make_check = topic.warned if is_complete else topic.failed
    return make_check(
        few(lines),
        "see whether its machine runs and can be reached, then start Ray on it again ('baton join'"
        " prints how), or add another; replicas and controller then start by themselves",
    )


def _check_losses(status: JsonDict) -> Check:
    topic = Topic("losses", "requests of a replica that ends are computed again elsewhere")
    if "losses" not in status:
        return topic.skipped("the controller does not tell")
    recent = (loss for loss in status["losses"] if loss["age_s"] <= _RECENT_S)
    losses = sorted(recent, key=itemgetter("age_s"))
    if not losses:
        return topic.passed("no replica ended by itself in the last hour")
    lines = [
        f"{loss['replica_id']} {days_text(loss['age_s'])} ago: {loss['detail']}" for loss in losses
    ]
    fix = f"see 'baton logs --replica {losses[0]['replica_id']} --all'"
    if any("memory" in loss["detail"] for loss in losses):
        fix += (
            "; 'dmesg' of its node names processes that were killed for want of memory: lower"
            " engine.kv_cache or replicas.max, or use a larger machine"
        )
    return topic.warned(f"{len(losses)} in the last hour: {few(lines)}", fix)


def _check_expiries(status: JsonDict) -> Check:
    topic = Topic("expiry", "a certificate or a last key that expires locks clients out")
    ingresses = [ingress for ingress in _ingresses(status) if "keys" in ingress]
    if not ingresses:
        return topic.skipped("no ingress tells")
    left_s: dict[str, float] = {}
    for ingress in ingresses:
        for tenant, keys in ingress["keys"].items():
            if keys["expires_s"] is not None:
                subject = f"the last key of tenant {tenant!r}"
                left_s[subject] = min(left_s.get(subject, keys["expires_s"]), keys["expires_s"])
        if ingress.get("tls_expires_s") is not None:
            left_s["the certificate"] = ingress["tls_expires_s"]
    soon = {subject: left for subject, left in left_s.items() if left < WARNING_S}
    findings = [
        Finding(_expiry_text(subject, left), _EXPIRY_REMEDY) for subject, left in soon.items()
    ]
    status_ = (
        CheckStatus.FAIL if min(soon.values(), default=WARNING_S) < CRITICAL_S else CheckStatus.WARN
    )
    return topic.from_findings(findings, otherwise="nothing within 14 days", status=status_)


def _expiry_text(subject: str, left_s: float) -> str:
    if left_s > 0:
        return f"{subject} expires in {days_text(left_s)}"
    return f"{subject} expired {days_text(-left_s)} ago"


def _check_unauthorized(status: JsonDict) -> Check:
    topic = Topic("rejected keys", "clients with a bad key get nothing but status 401")
    counts = Counter[str]()
    for ingress in _ingresses(status):
        counts.update(cast("Mapping[str, int]", ingress.get("unauthorized") or {}))
    if not counts:
        return topic.passed("none since the start")
    listing = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
    return topic.from_findings(
        [Finding(f"since the start: {listing}", _REJECTED_REMEDY)]
        if counts.keys() & {"expired", "revoked"}
        else [],
        otherwise=f"since the start: {listing}",
        status=CheckStatus.WARN,
    )


def _check_deployment_disks(disks: tuple[DiskFact, ...] | UnknownFact) -> Check:
    topic = Topic("disks", "without room no log, no state and no model can be written")
    if isinstance(disks, UnknownFact):
        return topic.warned(disks.reason, "see whether a disk hangs: 'df', 'dmesg'")
    if not disks:
        return topic.skipped("its folders are on other machines: look there with 'baton doctor'")
    return check_disks(topic, disks, remedy="or start it with TMPDIR on a larger disk")


def _check_ingresses(status: JsonDict) -> Check:
    topic = Topic("ingresses", "requests at an ingress that cannot serve fail, or hang")
    ingresses = _ingresses(status)
    if silent := cast("list[JsonDict]", status.get("unresponsive_ingresses") or []):
        names = [f"{row['ingress']} (pid {row['pid']} on {row['node']})" for row in silent]
        return topic.failed(
            f"no answer from {few(names)}",
            "end its process, if it stays so: Ray starts another; see 'baton logs --ingress'",
        )
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
        f"{replica}: {reason}"
        for ingress in _ingresses(status)
        for replica, reason in sorted(ingress["unjoined"].items())
    ]
    if unreachable:
        return topic.failed(
            few(list(dict.fromkeys(unreachable))),
            "open the ports between nodes where it cannot connect; where it is refused, the"
            " replica is of another version: replace it",
        )
    if not _ingresses(status):
        return topic.skipped("no ingress tells")
    members = cast("list[JsonDict]", status.get("members") or [])
    return topic.passed(f"{len(members)} replicas, reached by every ingress")


def _check_pools(status: JsonDict) -> Check:
    topic = Topic("pools", "what is missing is missing from what can be served")
    pools = cast("list[JsonDict]", status.get("pools") or [])
    failing = [f"{pool['pool']}: {pool['trouble']}" for pool in pools if pool.get("trouble")]
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
        return topic.skipped(links.reason)
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
        return topic.skipped(links.reason)
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
    topic = Topic("transfer agents", "an engine that cannot fetch blocks computes every prompt")
    broken_agents = {
        f"{replica_id}: {reason}"
        for ingress in _ingresses(status)
        for replica_id, reason in (ingress.get("broken_agents") or {}).items()
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
    # Each ingress shows what the replicas say of themselves.
    expired = {
        str(view["replica_id"]): int(view.get("expired_leases") or 0)
        for ingress in _ingresses(status)
        for view in ingress["replicas"]
    }
    noun = count_text(sum(expired.values()), "lease", "leases")
    return topic.passed(f"no pull came too late; {noun} expired unused since the start")


def _check_generation(status: JsonDict) -> Check:
    topic = Topic(
        "configuration", "ingresses with different configurations admit different requests"
    )
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
    topic = Topic("metrics", "without them no alert fires on a missed objective")
    observability = cast("JsonDict", status.get("observability") or {})
    if snapshot.metrics_problem is None:
        return topic.skipped("not enabled; see observability.metrics")
    problem = snapshot.metrics_problem
    if isinstance(problem, UnknownFact):
        problem = problem.reason
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
    return topic.passed(", ".join(names) or "no ingress reports one")


def _ingresses(status: JsonDict) -> list[JsonDict]:
    return cast("list[JsonDict]", status.get("ingresses") or [])


def check_open_ports(
    ports: tuple[OpenPort, ...] | UnknownFact, *, endpoint: str | None, metrics_url: str | None
) -> Check:
    """Whether only the intended ports are reachable by others."""
    topic = Topic(
        "open ports",
        "links and engines serve only the deployment; statistics and side channels serve every"
        " client",
    )
    if isinstance(ports, UnknownFact):
        return topic.skipped(ports.reason)
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
