"""What operators are told of the fleet and its links."""

from __future__ import annotations

import json
from random import Random

import pytest

from baton.config.schema.routing import Policy
from baton.domain.errors import UnknownRequest
from baton.domain.fleet import FleetView, ReplicaView
from baton.perf.fitting.engine_timings import EngineTimings
from baton.policy.links.estimates import LinkTable
from baton.policy.placement.chooser import ChooserPlacer
from baton.policy.placement.port import Disaggregate, PlacementQuery
from baton.policy.placement.predicted import PredictedPlacer
from baton.serving.shared.reports import (
    Row,
    fleet_report,
    link_report,
    lost_node_row,
    lost_node_text,
    lost_replicas,
    merge_link_reports,
    merge_losses,
    merge_rejections,
    policy_report,
    route_report,
    timing_report,
)
from tests.chaos.cases.environment import corrupted_reports, paused_while
from tests.fakes.facts import replica_facts
from tests.fakes.timings import placement_context


def view(replica_id: str, pool: str = "decode") -> ReplicaView:
    return ReplicaView(facts=replica_facts(replica_id, pool=pool), load_received_at_s=9.5)


def fleet(*views: ReplicaView) -> FleetView:
    return FleetView(at_s=10.0, replicas={view.replica_id: view for view in views})


def test_replicas_are_told_in_order_of_pool_and_id() -> None:
    rows = fleet_report(fleet(view("a", "prefill"), view("c"), view("b")))
    assert [row["replica_id"] for row in rows] == ["b", "c", "a"]
    assert [row["load_age_s"] for row in rows] == [0.5] * 3


def test_cache_and_leases_are_reported_with_each_replica() -> None:
    known: dict[str, Row] = {"a": {"in_step": True}}
    first, second = fleet_report(fleet(view("a"), view("b")), caches=known, leases={"b": 3})
    assert (first["cache"], first["leases"]) == ({"in_step": True}, 0)
    assert ("cache" in second, second["leases"]) == (False, 3)


def test_an_ingress_without_leases_says_so() -> None:
    (row,) = fleet_report(fleet(view("a")), leases={})
    assert row["leases"] == 0


def test_unrequested_fields_are_not_reported() -> None:
    (row,) = fleet_report(fleet(view("a")))
    assert not {"cache", "leases"} & row.keys()


def test_failures_of_a_policy_that_is_a_function_are_told() -> None:
    def broken(*_question: object) -> int:
        raise LookupError("no table")

    mine = ChooserPlacer("own:code", broken, disaggregate=Disaggregate.ALWAYS, rng=Random(0))
    quiet = {"name": "own:code", "failures": 0, "last_failure": ""}
    assert policy_report("own:code", mine) == quiet
    mine.place(PlacementQuery(prompt_tokens=1), placement_context(view("a")))
    row = policy_report("own:code", mine)
    assert row["failures"] == 1
    assert "raised LookupError: no table" in str(row["last_failure"])
    assert json.loads(json.dumps(row)) == row


def test_batons_own_policy_has_no_function_that_could_fail() -> None:
    assert policy_report(Policy.PREDICTED, PredictedPlacer()) == {"name": "predicted"}


def test_how_good_predictions_were_is_told_for_each_pool() -> None:
    book = EngineTimings()
    book.of(view("a"))
    book.observe_ttft("decode", predicted_s=0.1, actual_s=0.2)
    (row,) = timing_report(book.quality())
    assert (row["pool"], row["predictions"], row["reports"]) == ("decode", 1, 0)
    assert (row["ttft_error_fraction"], row["ttft_bias_fraction"]) == (0.5, -0.5)


def link(
    source: str, target: str, *, age_s: float | None, state: str = "ok", told_by: str = "a"
) -> Row:
    pair: dict[str, object] = {
        "source_id": source,
        "target_id": target,
        "state": state,
        "probed_age_s": age_s,
        "told_by": told_by,
    }
    return pair | {"failed_handoffs": 1, "flows": 2, "pulls": 7}


def told_by(rows: list[Row]) -> list[object]:
    return [row["told_by"] for row in rows]


def test_of_several_ingresses_the_one_that_probed_last_is_believed() -> None:
    old, new = link("p", "d", age_s=9.0, told_by="a"), link("p", "d", age_s=0.0, told_by="b")
    assert told_by(merge_link_reports([[old], [new]])) == ["b"]
    assert told_by(merge_link_reports([[new], [old]])) == ["b"]


def test_a_report_of_a_probe_wins_over_one_without() -> None:
    never, old = link("p", "d", age_s=None, told_by="a"), link("p", "d", age_s=1e6, told_by="b")
    assert told_by(merge_link_reports([[never], [old]])) == ["b"]
    assert told_by(merge_link_reports([[old], [never]])) == ["b"]


@pytest.mark.parametrize("state", ["ok", "quarantined"])
def test_an_ingress_whose_probe_told_nothing_does_not_overrule_one_that_knows(state: str) -> None:
    unclear = link("p", "d", age_s=0.1, state="unknown", told_by="a")
    known = link("p", "d", age_s=3.0, state=state, told_by="b")
    assert told_by(merge_link_reports([[unclear], [known]])) == ["b"]
    assert told_by(merge_link_reports([[known], [unclear]])) == ["b"]


def test_pairs_that_only_some_ingresses_know_are_all_told_in_order() -> None:
    one = [link("p-2", "d-1", age_s=1.0), link("p-1", "d-1", age_s=None)]
    rows = merge_link_reports([one, [], [link("p-1", "d-2", age_s=1.0)]])
    assert [(row["source_id"], row["target_id"]) for row in rows] == [
        ("p-1", "d-1"),
        ("p-1", "d-2"),
        ("p-2", "d-1"),
    ]


def test_the_two_directions_of_a_pair_are_two_links() -> None:
    assert len(merge_link_reports([[link("a", "b", age_s=1.0), link("b", "a", age_s=1.0)]])) == 2


def test_pulls_are_told_once_and_each_ingress_own_counts_are_added_up() -> None:
    (row,) = merge_link_reports([[link("p", "d", age_s=1.0)], [link("p", "d", age_s=2.0)]])
    assert (row["pulls"], row["failed_handoffs"], row["flows"]) == (7, 2, 4)


def test_a_link_is_reported_as_strict_json() -> None:
    book = LinkTable()
    for replica_id in ("p", "d-1", "d-2"):
        book.add_replica(replica_id)
    book.record_probe_failure("p", "d-1", 10.0, "no listener")
    book.record_failure("p", "d-2", 11.0)
    told = link_report(book.rows(12.5))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    probed, unprobed = told
    assert {
        name: probed[name] for name in ("state", "reason", "probed_age_s", "p50_s", "pulls")
    } == {
        "state": "quarantined",
        "reason": "no listener",
        "probed_age_s": 2.5,
        "p50_s": None,
        "pulls": 0,
    }
    assert (unprobed["state"], unprobed["probed_age_s"]) == ("unknown", None)
    assert (probed["failed_handoffs"], unprobed["failed_handoffs"]) == (0, 1)


def test_without_an_answer_there_are_no_links() -> None:
    assert merge_link_reports([]) == []


def test_a_request_is_explained_by_every_ingress_that_knows_it() -> None:
    report = route_report("r", [[], [{"a": 1}, {"b": 2}], [{"c": 3}]])
    assert report == {"request_id": "r", "requests": [{"a": 1}, {"b": 2}, {"c": 3}]}


def test_a_request_that_no_ingress_knows_is_an_error_that_names_it() -> None:
    with pytest.raises(UnknownRequest, match="no request 'r-1'"):
        route_report("r-1", [[], []])


# -------------------------------------------------------------------- reports that cannot be read


SOME = (
    "absent",
    "stale",
    "demand.requests nan",
    "pool.kv_used_fraction inf",
    "queued -1",
    "at_s nan",
)


@pytest.mark.parametrize("way", SOME)
async def test_the_loop_holds_while_a_report_is_spoilt_and_goes_on_after_it(way: str) -> None:
    assert await paused_while(corrupted_reports()[way]) == (True, True)


def loss(replica_id: str, age_s: float, reason: str = "disconnected", detail: str = "") -> Row:
    return {"replica_id": replica_id, "age_s": age_s, "reason": reason, "detail": detail}


def process(replica_id: str, age_s: float, detail: str) -> Row:
    return {"replica_id": replica_id, "age_s": age_s, "detail": detail}


def test_a_loss_is_told_once_with_when_it_was_noticed_first_and_how_it_ended() -> None:
    ingresses: list[Row] = [
        {"losses": [loss("a", 9.0), loss("b", 4.0, "unresponsive")]},
        {"losses": [loss("a", 9.5), loss("c", 2.0, "engine_dead", "signal SIGKILL")]},
        {},
    ]
    rows = merge_losses(ingresses, [process("a", 9.6, "its node has died")])
    assert [(row["replica_id"], row["age_s"], row["detail"]) for row in rows] == [
        ("a", 9.5, "its connection broke; its node has died"),
        ("b", 4.0, "it sent no heartbeat"),
        ("c", 2.0, "signal SIGKILL"),
    ]


def test_of_a_replica_that_was_lost_twice_the_last_time_counts() -> None:
    ingresses: list[Row] = [
        {"losses": [loss("a", 300.0, "unresponsive"), loss("a", 4.0)]},
        {"losses": [loss("a", 301.0, "unresponsive"), loss("a", 5.0)]},
        {"losses": [loss("a", 299.0, "unresponsive")]},
    ]
    (row,) = merge_losses(ingresses, [])
    assert (row["age_s"], row["reason"]) == (5.0, "disconnected")


def test_a_reconnected_replica_differs_from_an_ended_one() -> None:
    replicas: list[Row] = [{"replica_id": "a"}, {"replica_id": "b"}]
    lost = [loss("a", 9.0, "unresponsive"), loss("b", 4.0, "unresponsive")]
    ended = [process("b", 3.0, "its node has died")]
    first, second = merge_losses([{"losses": lost, "replicas": replicas}], ended)
    assert first["detail"] == "it sent no heartbeat; it is connected again"
    assert second["detail"] == "it sent no heartbeat; its node has died"


def test_replicas_of_a_lost_node_are_losses_that_say_so_once() -> None:
    row = lost_node_row(
        {
            "node_id": "36654b5a0ab3",
            "address": "10.0.0.2",
            "ended_at_s": 60.0,
            "reason": "x",
            "replicas": ("a", "b", "c"),
        },
        now_s=100.0,
    )
    assert lost_node_text(row) == "node 10.0.0.2 (36654b5a) was lost with a, b, c"
    known = [process("b", 41.0, "its node has died")]
    rows = merge_losses([{"losses": [loss("a", 44.0)]}], [*known, *lost_replicas([row], known)])
    assert [(row["replica_id"], row["detail"]) for row in rows] == [
        ("a", "its connection broke; its node was lost"),
        ("b", "its node has died"),
        ("c", "its node was lost"),
    ]


def test_a_loss_that_no_ingress_has_noticed_is_told() -> None:
    (row,) = merge_losses([], [process("ingress-x", 5.0, "its node has died")])
    assert (row["replica_id"], row["reason"]) == ("ingress-x", "died")


def test_rejections_of_all_ingresses_are_added_up_by_cause_with_the_last_of_them() -> None:
    def row(cause: str, requests: int, last_age_s: float, reason: str) -> Row:
        counts = {"cause": cause, "status": 429, "requests": requests}
        return counts | {"last_age_s": last_age_s, "reason": reason}

    ingresses: list[Row] = [
        {"rejections": [row("queue_full", 3, 9.0, "old"), row("rate_limited", 1, 5.0, "rate")]},
        {"rejections": [row("queue_full", 4, 2.0, "new")]},
    ]
    assert merge_rejections(ingresses) == [
        row("queue_full", 7, 2.0, "new"),
        row("rate_limited", 1, 5.0, "rate"),
    ]
