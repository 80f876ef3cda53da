"""What is known of replicas that name blocks in different ways."""

from __future__ import annotations

from baton.control.fleet.fleet_model import _MultiFamilyHits
from tests.fakes.timings import KnownHits


def test_who_holds_most_is_told_first_whichever_way_it_names_blocks() -> None:
    hits = _MultiFamilyHits(
        {
            ("tiny", 16): KnownHits({"a": 20, "b": 5}),
            ("tiny", 64): KnownHits({"c": 10, "d": 1}),
        }
    )
    assert list(hits.holders(9)) == ["c", "a", "b", "d"], "by tokens: 640, 320, 80, 64"
    assert list(hits.holders(2)) == ["c", "a"]
    assert list(hits.holders(0)) == []
    assert [hits.of(replica_id).blocks for replica_id in "abcde"] == [20, 5, 10, 1, 0]
