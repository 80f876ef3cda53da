"""What operators are told of the fleet and its links."""

from __future__ import annotations

import pytest

from baton.domain.errors import UnknownRequest
from baton.serving.reports import Row, explained, merged_links


def link(source: str, target: str, *, age_s: float | None, told_by: str = "a") -> dict[str, object]:
    return {"source_id": source, "target_id": target, "probed_age_s": age_s, "told_by": told_by}


def told_by(rows: list[Row]) -> list[object]:
    return [row["told_by"] for row in rows]


def test_of_several_ingresses_the_one_that_probed_last_is_believed() -> None:
    old, new = link("p", "d", age_s=9.0, told_by="a"), link("p", "d", age_s=0.0, told_by="b")
    assert told_by(merged_links([[old], [new]])) == ["b"]
    assert told_by(merged_links([[new], [old]])) == ["b"]


def test_whoever_probed_is_believed_over_whoever_never_did() -> None:
    never, old = link("p", "d", age_s=None, told_by="a"), link("p", "d", age_s=1e6, told_by="b")
    assert told_by(merged_links([[never], [old]])) == ["b"]
    assert told_by(merged_links([[old], [never]])) == ["b"]


def test_pairs_that_only_some_ingresses_know_are_all_told_in_order() -> None:
    one = [link("p-2", "d-1", age_s=1.0), link("p-1", "d-1", age_s=None)]
    rows = merged_links([one, [], [link("p-1", "d-2", age_s=1.0)]])
    assert [(row["source_id"], row["target_id"]) for row in rows] == [
        ("p-1", "d-1"),
        ("p-1", "d-2"),
        ("p-2", "d-1"),
    ]


def test_the_two_directions_of_a_pair_are_two_links() -> None:
    assert len(merged_links([[link("a", "b", age_s=1.0), link("b", "a", age_s=1.0)]])) == 2


def test_without_an_answer_there_are_no_links() -> None:
    assert merged_links([]) == []


def test_a_request_is_explained_by_every_ingress_that_knows_it() -> None:
    report = explained("r", [[], [{"a": 1}, {"b": 2}], [{"c": 3}]])
    assert report == {"request_id": "r", "requests": [{"a": 1}, {"b": 2}, {"c": 3}]}


def test_a_request_that_no_ingress_knows_is_an_error_that_names_it() -> None:
    with pytest.raises(UnknownRequest, match="no request 'r-1'"):
        explained("r-1", [[], []])
