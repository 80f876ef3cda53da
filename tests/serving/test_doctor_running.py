"""`baton doctor` on a deployment that runs: what each check says of one that is not well."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from baton.domain.errors import AmbiguousDeployment, ClusterFailed, NotRunning, TimedOut
from baton.runtime.link.options import LinkOptions
from baton.serving.checks.endpoint import Client, RequestFact, TlsFact
from baton.serving.checks.facts import DiskFact
from baton.serving.checks.result import Check, CheckStatus, UnknownFact
from baton.serving.doctor import deployment_checks, unreachable_checks
from baton.serving.doctor_facts import DeploymentSnapshot, FrontSnapshot, OpenPort, open_ports
from baton.serving.front.certificates import Certificate

DAY_S = 86_400.0
NOW_S = 1_800_000_000.0
TLS = TlsFact(
    certificate=Certificate(starts_at_s=NOW_S - DAY_S, expires_at_s=NOW_S + 90 * DAY_S), pem=""
)
VIEW: dict[str, Any] = {
    "replica_id": "decode-1",
    "load_age_s": 0.2,
    "void_pulls": 0,
    "cache": {"in_sync": True, "is_stale": False, "sequence": 3},
}
INGRESS: dict[str, Any] = {
    "healthy": True,
    "unjoined": {},
    "replicas": [VIEW],
    "generation": 4,
    "policy": {"name": "predicted"},
    "keys": {"acme": {"valid": 1, "expires_s": None}},
    "tls_expires_s": 90 * DAY_S,
    "unauthorized": {},
}
STATUS: dict[str, Any] = {
    "model": "tiny",
    "baton": "0.1",
    "generation": 4,
    "members": [{"replica_id": "decode-1"}],
    "lost_nodes": [],
    "losses": [],
    "pools": [{"pool": "decode", "desired": 1, "ready": 1}],
    "ingresses": [INGRESS],
    "observability": {"url": "http://127.0.0.1:9400"},
    "autoscaler": {
        "policy": "slo",
        "paused_reason": "",
        "failed_turns": 0,
        "failed_calls": 0,
        "last_failure": "",
    },
}
TROUBLE = "RuntimeError: no weights"
LINK: dict[str, Any] = {"source_id": "p-1", "target_id": "d-1", "state": "ok", "reason": ""}
NODES = {"10.0.0.1": {"vllm": "0.32.0"}}


def running(  # noqa: PLR0913 - each is an answer
    *,
    health: str | UnknownFact = "",
    links: tuple[dict[str, Any], ...] | UnknownFact = (LINK,),
    metrics: str | UnknownFact | None = "",
    nodes: dict[str, Any] | UnknownFact = NODES,
    ports: tuple[OpenPort, ...] | UnknownFact = (),
    door: str | UnknownFact = "guarded",
    request: RequestFact | UnknownFact = RequestFact(status=200),  # noqa: B008 - frozen
    history: tuple[dict[str, Any], ...] = (),
    disk: int = 100 * 1024**3,
    **status: object,
) -> DeploymentSnapshot:
    return DeploymentSnapshot(
        front=FrontSnapshot(
            endpoint=None if isinstance(health, UnknownFact) else "http://h:1",
            health_problem=health,
            tls=TLS,
            request=request,
            at_s=NOW_S,
        ),
        status=STATUS | status,
        links=links,
        history=history,
        disks=(DiskFact(purpose="its files", path="/run", free_bytes=disk),),
        metrics_problem=metrics,
        versions_by_node=nodes,
        open_ports=ports,
        gcs_address="127.0.0.1:6379",
        ray_auth=door,
    )


def check(name: str, now: DeploymentSnapshot) -> Check:
    (found,) = [
        deployment_check
        for deployment_check in deployment_checks(now)
        if deployment_check.name == name
    ]
    return found


def test_a_deployment_that_is_well_passes_every_check() -> None:
    assert {deployment_check.status for deployment_check in deployment_checks(running())} == {
        CheckStatus.PASS
    }


def test_a_pair_with_a_failed_probe_is_named_with_reason_and_remedy() -> None:
    bad = LINK | {"state": "quarantined", "reason": "prefill: no answer within 5 s"}
    found = check("pairs", running(links=(LINK, bad)))
    assert found.status is CheckStatus.FAIL
    assert found.detail == "1 of 2 are quarantined: p-1 -> d-1: prefill: no answer within 5 s"
    assert "open the ports" in found.fix
    assert check("side channels", running(links=(LINK, bad))).status is CheckStatus.PASS


def test_a_side_channel_that_does_not_answer_differs_from_other_failures() -> None:
    deaf = LINK | {"state": "quarantined", "reason": "side channel: connection refused"}
    found = check("side channels", running(links=(deaf,)))
    assert found.status is CheckStatus.FAIL
    assert found.detail == "no answer from p-1"
    assert "replace them" in found.fix


def test_a_replica_that_can_pull_from_no_source_is_named_once_for_all_ingresses() -> None:
    ill = INGRESS | {"broken_agents": {"decode-1": "its transfer agent is broken"}}
    found = check("transfer agents", running(ingresses=[ill, ill]))
    assert found.status is CheckStatus.FAIL
    assert found.detail == "decode-1: its transfer agent is broken"
    assert "replaced by itself" in found.fix


def test_pulls_after_their_lease_are_reported_with_place_and_remedy() -> None:
    late = INGRESS | {"replicas": [VIEW | {"void_pulls": 3}]}
    found = check("leases", running(ingresses=[late, late]))
    assert found.status is CheckStatus.WARN
    assert found.detail.startswith("pulls that came too late, since the start: decode-1 3;")
    assert "transfer.lease" in found.fix


def test_pairs_that_were_not_probed_yet_are_a_warning() -> None:
    found = check("pairs", running(links=(LINK | {"state": "unknown"},)))
    assert (found.status, found.detail) == (CheckStatus.WARN, "1 of 1 are not proven yet")


def test_reports_that_an_idle_replica_sends_every_four_seconds_are_fresh() -> None:
    idle = INGRESS | {"replicas": [VIEW | {"load_age_s": LinkOptions().idle_extra_s + 1.5}]}
    assert check("reports", running(ingresses=[idle])).status is CheckStatus.PASS


@pytest.mark.parametrize(("updates", "verdict"), [(0, CheckStatus.PASS), (1, CheckStatus.WARN)])
def test_a_cache_that_has_reported_nothing_is_not_late(updates: int, verdict: CheckStatus) -> None:
    """It is empty, or `router.index` is `predicted`."""
    cache = {"in_sync": True, "is_stale": True, "sequence": updates}
    ingress = INGRESS | {"replicas": [VIEW | {"cache": cache}]}
    assert check("reports", running(ingresses=[ingress])).status is verdict


def test_of_a_controller_that_does_not_answer_nothing_is_claimed() -> None:
    reason = "controller did not answer 'status' within 5 s"
    mute = {name: STATUS[name] for name in ("ingresses", "losses")} | {"unanswered": [reason]}
    snapshot = replace(running(), status=mute, metrics_problem=None)
    found = check("deployment", snapshot)
    assert (found.status, found.detail) == (CheckStatus.FAIL, reason)
    told_by_it = ("objectives", "replicas joined", "pools", "configuration", "metrics")
    for name in told_by_it:
        assert check(name, snapshot).status is CheckStatus.SKIP, name
    assert check("ingresses", snapshot).status is CheckStatus.PASS


def test_an_ingress_that_does_not_answer_is_named_with_its_process() -> None:
    silent = [{"ingress": "c3d4", "node": "10.0.0.2", "pid": 71}]
    found = check("ingresses", running(unresponsive_ingresses=silent))
    assert found.status is CheckStatus.FAIL
    assert found.detail == "no answer from c3d4 (pid 71 on 10.0.0.2)"


def test_without_an_ingress_it_is_unknown_which_replicas_have_joined() -> None:
    assert check("replicas joined", running(ingresses=[])).status is CheckStatus.SKIP


LOST_NODE = {
    "node": "10.0.0.2",
    "node_id": "36654b5a0ab3a63b0621",
    "age_s": 40.0,
    "reason": "missing too many heartbeats",
    "replicas": ["controller-x", "decode-7"],
}


def test_a_lost_node_is_named_while_the_controller_is_gone_with_it() -> None:
    mute = {name: STATUS[name] for name in ("ingresses", "losses")}
    status = mute | {"lost_nodes": [LOST_NODE]}
    snapshot = replace(running(), status=status, metrics_problem=None)
    found = check("lost nodes", snapshot)
    assert (found.status, found.detail) == (
        CheckStatus.FAIL,
        "40 s ago: node 10.0.0.2 (36654b5a) was lost with controller-x, decode-7,"
        " missing too many heartbeats",
    )
    assert "'baton join'" in found.fix
    assert check("deployment", snapshot).fix == "see 'lost nodes', below"


@pytest.mark.parametrize(
    ("ready", "age_s", "verdict"),
    [
        (1, 40.0, CheckStatus.WARN),
        (1, DAY_S / 2, CheckStatus.PASS),
        (0, DAY_S / 2, CheckStatus.FAIL),
    ],
)
def test_a_lost_node_is_a_failure_only_while_a_replica_is_missing(
    ready: int, age_s: float, verdict: CheckStatus
) -> None:
    pools = [{"pool": "decode", "desired": 1, "ready": ready}]
    snapshot = running(pools=pools, lost_nodes=[LOST_NODE | {"age_s": age_s}])
    assert check("lost nodes", snapshot).status is verdict


def test_without_an_answer_of_the_control_store_no_node_is_called_well() -> None:
    status = {name: value for name, value in STATUS.items() if name != "lost_nodes"}
    assert check("lost nodes", replace(running(), status=status)).status is CheckStatus.SKIP
    late = ["Ray's control store did not answer within 4 s"]
    found = check("control store", replace(running(), status=status | {"unanswered": late}))
    assert (found.status, found.detail) == (CheckStatus.FAIL, late[0])


def test_the_newest_losses_come_first() -> None:
    losses = [
        {"replica_id": f"decode-{age_s}", "age_s": age_s, "detail": "SIGKILL", "reason": "died"}
        for age_s in (900.0, 600.0, 300.0, 5.0)
    ]
    found = check("losses", running(losses=losses))
    assert found.detail.startswith("4 in the last hour: decode-5.0 5 s ago")
    assert "decode-5.0" in found.fix


def test_many_bad_pairs_are_counted_and_a_few_are_named() -> None:
    bad = LINK | {"state": "quarantined", "reason": "x"}
    found = check("pairs", running(links=(bad,) * 40))
    assert found.detail.startswith("40 of 40")
    assert found.detail.endswith("; and 37 more")


@pytest.mark.parametrize(
    ("name", "changes", "verdict", "said"),
    [
        ("endpoint", {"health": "it answers 503"}, CheckStatus.FAIL, "it answers 503"),
        ("endpoint", {"health": UnknownFact("not known here")}, CheckStatus.SKIP, "not known here"),
        ("ingresses", {"ingresses": [INGRESS | {"healthy": False}]}, CheckStatus.FAIL, "1 of 1"),
        ("ingresses", {"ingresses": []}, CheckStatus.FAIL, "there is none"),
        (
            "replicas joined",
            {"ingresses": [INGRESS | {"unjoined": {"d-2": "protocol 3, expected 4"}}]},
            CheckStatus.FAIL,
            "d-2: protocol 3, expected 4",
        ),
        (
            "pools",
            {"pools": [{"pool": "decode", "desired": 2, "ready": 0}]},
            CheckStatus.FAIL,
            "decode: no replica is ready",
        ),
        (
            "pools",
            {"pools": [{"pool": "decode", "desired": 2, "ready": 1}]},
            CheckStatus.WARN,
            "decode has 1 of 2",
        ),
        (
            "pools",
            {"pools": [{"pool": "decode", "desired": 2, "ready": 2, "trouble": TROUBLE}]},
            CheckStatus.FAIL,
            "decode: RuntimeError: no weights",
        ),
        (
            "configuration",
            {"ingresses": [INGRESS, INGRESS | {"generation": 3}]},
            CheckStatus.FAIL,
            "the controller is at generation 4, ingresses are at 3",
        ),
        ("metrics", {"metrics": "ConnectError: refused"}, CheckStatus.FAIL, "refused"),
        ("metrics", {"metrics": UnknownFact("nothing came")}, CheckStatus.FAIL, "nothing came"),
        ("metrics", {"metrics": None}, CheckStatus.SKIP, "not enabled"),
        (
            "autoscaler",
            {"autoscaler": STATUS["autoscaler"] | {"paused_reason": "no coordinator reports"}},
            CheckStatus.WARN,
            "it holds still, because no coordinator reports",
        ),
        (
            "autoscaler",
            {"autoscaler": STATUS["autoscaler"] | {"failed_calls": 2, "last_failure": "why"}},
            CheckStatus.WARN,
            "2 calls failed, the last: why",
        ),
        (
            "autoscaler",
            {
                "autoscaler": STATUS["autoscaler"] | {"cold_start_wait_s": 60.0},
                "pools": [{"pool": "decode", "desired": 1, "ready": 1, "cold_start_s": 90.0}],
            },
            CheckStatus.WARN,
            "requests to a fleet at zero wait: decode 90 s (they wait 60 s)",
        ),
        (
            "reports",
            {"ingresses": [INGRESS | {"replicas": [VIEW | {"load_age_s": 40.0}]}]},
            CheckStatus.FAIL,
            "load reports are old: decode-1 40 s",
        ),
        (
            "reports",
            {
                "ingresses": [
                    INGRESS | {"replicas": [VIEW | {"cache": VIEW["cache"] | {"in_sync": False}}]}
                ]
            },
            CheckStatus.WARN,
            "not known well of decode-1",
        ),
        (
            "placement policy",
            {
                "ingresses": [
                    INGRESS
                    | {"policy": {"name": "own", "failures": 3, "last_failure": "KeyError: 'x'"}}
                ]
            },
            CheckStatus.WARN,
            "own failed 3 times, the last: KeyError: 'x'",
        ),
        (
            "nodes",
            {"nodes": {"a": {"vllm": "0.32.0"}, "b": {"vllm": "0.33.0"}}},
            CheckStatus.FAIL,
            "vllm differs between nodes",
        ),
        (
            "nodes",
            {"nodes": UnknownFact("a node did not answer")},
            CheckStatus.SKIP,
            "did not answer",
        ),
        ("pairs", {"links": UnknownFact("nobody tells")}, CheckStatus.SKIP, "nobody tells"),
    ],
)
def test_a_problem_is_reported_in_its_own_check(
    name: str, changes: dict[str, Any], verdict: CheckStatus, said: str
) -> None:
    found = check(name, running(**changes))
    assert found.status is verdict
    assert said in found.detail
    assert found.fix or verdict is CheckStatus.SKIP


def test_ingresses_that_do_not_tell_their_generation_are_not_suspected() -> None:
    silent = {key: value for key, value in INGRESS.items() if key != "generation"}
    assert check("configuration", running(ingresses=[silent])).status is CheckStatus.PASS


def test_where_the_controller_does_not_answer_the_rest_is_skipped() -> None:
    now = replace(running(), status=UnknownFact("no answer"))
    first, *front, rest_first = list(deployment_checks(now))[:5]
    rest = [rest_first, *list(deployment_checks(now))[5:]]
    assert (first.status, first.detail) == (CheckStatus.FAIL, "no answer")
    assert {other.status for other in front} == {CheckStatus.PASS}
    assert {other.status for other in rest} == {CheckStatus.SKIP}


def test_every_list_has_the_same_checks_for_all_facts() -> None:
    blind = replace(running(), status=UnknownFact("no"))
    nothing = NotRunning("nothing runs", "start one")
    lists = [
        deployment_checks(running()),
        deployment_checks(blind),
        unreachable_checks(nothing),
        unreachable_checks(TimedOut("late", "try again")),
    ]
    (names,) = {tuple(check.name for check in list_) for list_ in lists}
    assert len(names) == len(set(names))


def test_nothing_that_runs_is_no_failure_and_a_cluster_that_refuses_us_is_one() -> None:
    nothing = unreachable_checks(NotRunning("nothing runs", "start one"))
    assert {other.status for other in nothing} == {CheckStatus.SKIP}
    refused, *_ = unreachable_checks(ClusterFailed("it refuses the token", "name its token"))
    assert (refused.status, refused.fix) == (CheckStatus.FAIL, "name its token")


# ---------------------------------------------------------------------- who could come in


STATS = OpenPort(address="0.0.0.0", port=8404, program="haproxy")  # noqa: S104 - what is looked for


def test_a_port_that_others_reach_is_named_with_its_program() -> None:
    found = check("open ports", running(ports=(STATS,)))
    assert found.status is CheckStatus.FAIL
    assert found.detail == "0.0.0.0:8404 (haproxy)"
    assert "firewall" in found.fix


def test_the_endpoint_and_the_metrics_may_be_open() -> None:
    ports = (replace(STATS, port=1), replace(STATS, port=9400))
    found = check("open ports", running(ports=ports))
    assert (found.status, found.detail) == (
        CheckStatus.PASS,
        "only 0.0.0.0:1, 0.0.0.0:9400, as configured",
    )


def test_a_deployment_elsewhere_is_not_said_to_have_no_open_ports() -> None:
    assert check("open ports", running(ports=UnknownFact("elsewhere"))).status is CheckStatus.SKIP


def test_listening_sockets_are_found_unless_they_are_for_this_machine_alone() -> None:
    here = socket.create_server(("127.0.0.1", 0))
    everywhere = socket.create_server(("0.0.0.0", 0))  # noqa: S104 - what is looked for
    state = SimpleNamespace(pid=os.getpid(), run_dir="/nowhere")
    with here, everywhere:
        ports = {port.port for port in open_ports(state)}  # type: ignore[arg-type]  # all it reads
        assert everywhere.getsockname()[1] in ports
        assert here.getsockname()[1] not in ports


# ---------------------------------------------------------------------- what clients get


CHAT: dict[str, Any] = {
    "class": "chat",
    "ttft_s": 0.5,
    "tpot_s": 0.05,
    "target": 0.99,
    "attainment": 0.71,
    "ttft_attainment": 0.72,
    "tpot_attainment": 0.995,
    "window_attainment": 0.9,
}
CHANGE: dict[str, Any] = {"generation": 4, "at_s": NOW_S - 95, "operation": "apply"}
FIRST: dict[str, Any] = {"generation": 0, "at_s": None, "operation": "up"}


def test_missed_objectives_name_the_one_that_is_missed() -> None:
    found = check("objectives", running(classes=[CHAT]))
    assert found.status is CheckStatus.FAIL
    assert found.detail == (
        "chat: 71.0% of the last half minute's requests met every objective"
        " (TTFT 72.0%, TPOT 99.5%), expected 99.0%"
    )
    assert "rollback" not in found.fix


def test_objectives_missed_since_a_change_of_the_configuration_advise_to_go_back() -> None:
    found = check("objectives", running(classes=[CHAT], history=(FIRST, CHANGE)))
    assert found.fix.startswith(
        "the configuration changed 95 s ago (apply, generation 4): 'baton rollback'"
    )
    old = CHANGE | {"at_s": NOW_S - 2 * DAY_S}
    assert "rollback" not in check("objectives", running(classes=[CHAT], history=(old,))).fix


def test_objectives_missed_for_a_moment_are_a_warning_and_idle_classes_are_well() -> None:
    moment = CHAT | {"window_attainment": 0.999}
    assert check("objectives", running(classes=[moment])).status is CheckStatus.WARN
    idle = CHAT | {"attainment": None}
    assert check("objectives", running(classes=[idle])).status is CheckStatus.PASS


def test_a_replica_that_was_lost_is_told_with_how_its_process_ended() -> None:
    loss = {"replica_id": "decode-7", "pool": "decode", "age_s": 40.0, "detail": "SIGSEGV"}
    found = check("losses", running(losses=[loss]))
    assert (found.status, found.detail) == (
        CheckStatus.WARN,
        "1 in the last hour: decode-7 40 s ago: SIGSEGV",
    )
    assert "baton logs --replica decode-7" in found.fix
    assert check("losses", running(losses=[loss | {"age_s": DAY_S}])).status is CheckStatus.PASS


@pytest.mark.parametrize(
    ("left_s", "verdict", "said"),
    [
        (20 * DAY_S, CheckStatus.PASS, "nothing within 14 days"),
        (5 * DAY_S, CheckStatus.WARN, "the last key of tenant 'acme' expires in 5 d"),
        (DAY_S, CheckStatus.FAIL, "the last key of tenant 'acme' expires in 24 h"),
        (-3 * DAY_S, CheckStatus.FAIL, "the last key of tenant 'acme' expired 3 d ago"),
    ],
)
def test_the_last_key_of_a_tenant_is_told_before_it_expires(
    left_s: float, verdict: CheckStatus, said: str
) -> None:
    keys = {"acme": {"valid": 1, "expires_s": left_s}}
    found = check("expiry", running(ingresses=[INGRESS | {"keys": keys}]))
    assert (found.status, found.detail) == (verdict, said)


def test_a_certificate_about_to_expire_is_told_though_it_still_works() -> None:
    found = check("expiry", running(ingresses=[INGRESS | {"tls_expires_s": 3 * DAY_S}]))
    assert (found.status, found.detail) == (CheckStatus.WARN, "the certificate expires in 3 d")


def test_callers_with_expired_keys_are_told_those_without_are_counted() -> None:
    expired = INGRESS | {"unauthorized": {"expired": 4, "missing": 1}}
    found = check("rejected keys", running(ingresses=[expired]))
    assert (found.status, found.detail) == (
        CheckStatus.WARN,
        "since the start: expired 4, missing 1",
    )
    scanners = INGRESS | {"unauthorized": {"missing": 9}}
    assert check("rejected keys", running(ingresses=[scanners])).status is CheckStatus.PASS


def test_the_disk_of_the_deployment_is_checked_not_only_that_of_new_ones() -> None:
    found = check("disks", running(disk=1024**2))
    assert (found.status, found.detail) == (CheckStatus.FAIL, "1 MiB free in /run (its files)")


def test_several_deployments_are_a_question_not_an_absence() -> None:
    first, *_ = unreachable_checks(AmbiguousDeployment("2 run here", "say which"))
    assert (first.status, first.fix) == (CheckStatus.FAIL, "say which")


def test_an_endpoint_is_checked_by_its_url_though_no_deployment_runs_here() -> None:
    front = running(request=RequestFact(status=401, message="expired")).front
    front = replace(front, client=Client(headers={"Authorization": "Bearer x"}))
    checks = {found.name: found for found in unreachable_checks(NotRunning("no", ""), front)}
    assert checks["one request"].status is CheckStatus.FAIL
    assert checks["pools"].status is CheckStatus.SKIP
    assert len(checks) == len(list(deployment_checks(running())))
