"""Lists in messages."""

from __future__ import annotations

from baton.domain.names.words import few


def test_a_long_list_is_cut_and_counted() -> None:
    assert few(["a", "b"]) == "a; b"
    assert few(["a", "b", "c", "d", "e"]) == "a; b; c; and 2 more"
    assert few(["a", "b", "c"], 2, separator=", ") == "a, b, and 1 more"
