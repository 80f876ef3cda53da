"""`baton doctor` on a deployment that runs: what each check says of one that is not well."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from baton.domain.errors import ClusterFailed, NotRunning, TimedOut
from baton.runtime.link.options import LinkOptions
from baton.serving.checks.result import Check, CheckStatus, UnknownFact
from baton.serving.doctor import (
    DeploymentSnapshot,
    OpenPort,
    deployment_checks,
    open_ports,
    unreachable_checks,
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
}
STATUS: dict[str, Any] = {
    "model": "tiny",
    "baton": "0.1",
    "generation": 4,
    "members": [{"replica_id": "decode-1"}],
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
LINK: dict[str, Any] = {"source_id": "p-1", "target_id": "d-1", "state": "ok", "reason": ""}
UNASKED: dict[str, Any] = {
    "open_ports": (),
    "gcs_address": "127.0.0.1:6379",
    "ray_auth": UnknownFact("no"),
}
NODES = {"10.0.0.1": {"vllm": "0.32.0"}}


def running(
    *,
    health: str | UnknownFact = "",
    links: tuple[dict[str, Any], ...] | UnknownFact = (LINK,),
    metrics: str | UnknownFact | None = "",
    nodes: dict[str, Any] | UnknownFact = NODES,
    ports: tuple[OpenPort, ...] | UnknownFact = (),
    door: str | UnknownFact = "guarded",
    **status: object,
) -> DeploymentSnapshot:
    return DeploymentSnapshot(
        endpoint="http://h:1",
        health_problem=health,
        status=STATUS | status,
        links=links,
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


def test_a_pair_whose_probe_fails_is_named_with_why_and_what_to_do() -> None:
    bad = LINK | {"state": "quarantined", "reason": "prefill: no answer within 5 s"}
    found = check("pairs", running(links=(LINK, bad)))
    assert found.status is CheckStatus.FAIL
    assert found.detail == "1 of 2 are quarantined: p-1 -> d-1: prefill: no answer within 5 s"
    assert "open the ports" in found.fix
    assert check("side channels", running(links=(LINK, bad))).status is CheckStatus.PASS


def test_a_side_channel_that_does_not_answer_is_told_apart_from_other_failures() -> None:
    deaf = LINK | {"state": "quarantined", "reason": "side channel: connection refused"}
    found = check("side channels", running(links=(deaf,)))
    assert found.status is CheckStatus.FAIL
    assert found.detail == "no answer from p-1"
    assert "replace them" in found.fix


def test_a_replica_that_can_pull_from_nobody_is_named_once_for_all_ingresses() -> None:
    ill = INGRESS | {"broken_agents": {"decode-1": "its transfer agent is broken"}}
    found = check("transfer agents", running(ingresses=[ill, ill]))
    assert found.status is CheckStatus.FAIL
    assert found.detail == "decode-1: its transfer agent is broken"
    assert "replaced by itself" in found.fix


def test_pulls_that_came_after_their_lease_are_told_with_where_and_what_to_do() -> None:
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
            {"pools": [{"pool": "decode", "desired": 2, "ready": 2, "trouble": "it died\nwhy"}]},
            CheckStatus.FAIL,
            "decode: it died",
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
def test_what_is_not_well_is_said_in_its_own_check(
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
    now = DeploymentSnapshot(
        endpoint="http://h:1", status=UnknownFact("no answer"), versions_by_node={}, **UNASKED
    )
    first, second, *rest = deployment_checks(now)
    assert (first.status, first.detail) == (CheckStatus.FAIL, "no answer")
    assert second.status is CheckStatus.PASS
    assert {other.status for other in rest} == {CheckStatus.SKIP}


def test_every_list_has_the_same_checks_whatever_is_found() -> None:
    blind = DeploymentSnapshot(
        endpoint=None, status=UnknownFact("no"), versions_by_node={}, **UNASKED
    )
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
