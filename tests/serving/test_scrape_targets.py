"""Whom Prometheus is told to ask."""

from __future__ import annotations

from collections.abc import Mapping

from baton.serving.controller.http_server import target_groups
from baton.serving.ray.membership import Member
from baton.serving.shared.names import INGRESS, METRICS_ADDRESS, REPLICA_ID
from baton.telemetry.catalogue import CATALOGUE, Component


def member(name: str, deployment: str, **metadata: str | None) -> Member:
    return Member(
        replica_id=name, deployment=deployment, metadata=metadata, node_ip=f"10.0.0.{len(name)}"
    )


def replica(name: str, pool: str, address: str | None = "10.0.0.1:5") -> Member:
    return member(name, pool, **{REPLICA_ID: f"{pool}-{name}", METRICS_ADDRESS: address})


def ingress(name: str, address: str | None = "10.0.0.2:6") -> Member:
    return member(name, INGRESS, **{METRICS_ADDRESS: address})


def labels(*members: Member, controller: str | None = None) -> list[Mapping[str, str]]:
    groups = target_groups(members, controller=controller, node="10.0.0.9")
    return [group["labels"] for group in groups]  # type: ignore[misc]


def test_every_process_is_named_with_what_it_is() -> None:
    groups = target_groups(
        [replica("ab", "decode"), ingress("xyz")], controller="10.0.0.9:9400", node="10.0.0.9"
    )
    path = {"__metrics_path__": "/metrics"}
    assert groups == [
        {
            "targets": ["10.0.0.9:9400"],
            "labels": path | {"component": "controller", "node": "10.0.0.9"},
        },
        {
            "targets": ["10.0.0.1:5"],
            "labels": path
            | {
                "component": "replica",
                "node": "10.0.0.2",
                "pool": "decode",
                "replica": "decode-ab",
            },
        },
        {
            "targets": ["10.0.0.2:6"],
            "labels": path | {"component": "ingress", "node": "10.0.0.3", "replica": "xyz"},
        },
    ]


def test_who_serves_no_metrics_is_not_named() -> None:
    assert labels(replica("a", "decode", None), ingress("b", None), member("c", "decode")) == []


def test_the_order_is_always_the_same() -> None:
    members = [replica(name, pool) for name in "cab" for pool in ("prefill", "decode")]
    assert labels(*members) == labels(*reversed(members))
    assert [label["replica"] for label in labels(*members)][:2] == ["decode-a", "decode-b"]


def test_no_label_of_a_target_hides_one_of_a_metric_that_comes_from_there() -> None:
    told = labels(replica("a", "decode"), ingress("b"), controller="10.0.0.9:9400")
    assert {entry["component"] for entry in told} == set(Component)
    for target in told:
        own = {
            str(label)
            for metric in CATALOGUE
            if metric.component == target["component"]
            for label in metric.labels
        }
        assert not own & target.keys()
