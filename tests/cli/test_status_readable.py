"""What `baton status` shows to a person."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from baton.cli.status import readable

MEMBER = {"replica_id": "decode-1", "role": "decode", "node": "10.0.0.1", "pid": 7, "link": "tcp"}
VIEW = {
    "replica_id": "decode-1",
    "draining": False,
    "engine": "sim 0.1.0",
    "running_requests": 2,
    "queued_requests": 0,
    "kv_used_fraction": 0.5,
    "pulls": 3,
    "moved_bytes": 300,
}


def report(*views: dict[str, object]) -> dict[str, object]:
    ingress = {
        "healthy": True,
        "replicas": list(views),
        "in_flight": {"decode": 2},
        "ended": {"finished": 5, "resumes": 0},
        "unjoined": {},
    }
    return {"endpoint": "http://x", "wanted": {}, "members": [MEMBER], "ingresses": [ingress]}


def rows(shown: Mapping[str, object], name: str) -> list[dict[str, object]]:
    return cast("list[dict[str, object]]", shown[name])


def test_a_replica_is_one_row_with_its_state_and_load() -> None:
    shown = readable(report(VIEW))
    assert shown["endpoint"] == "http://x"
    (row,) = rows(shown, "replicas")
    assert (row["replica_id"], row["state"], row["running"], row["pid"]) == (
        "decode-1",
        "ready",
        2,
        7,
    )


def test_a_member_that_no_ingress_has_reached_is_shown_as_such() -> None:
    (row,) = rows(readable(report()), "replicas")
    assert row["state"] == "not joined"


def test_an_ingress_is_one_line() -> None:
    (row,) = rows(readable(report(VIEW)), "ingresses")
    assert (row["in_flight"], row["ended"]) == ("2 decode", "5 finished")


def test_nothing_that_runs_is_shown_as_nothing() -> None:
    assert readable({"endpoint": "http://x"})["replicas"] == []
