"""Events out of bytes, however they are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.client.client import EventReader, StreamInvalid

STREAM = (
    b": a comment\n\n"
    b'data: {"a": 1}\n\n'
    b"event: note\r\nid: 7\r\ndata: two\r\ndata:  lines\r\n\r\n"
    b"data:tight\n\n\n\n"
    b"data:\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"two\n lines", b"tight", b"[DONE]"]


def read(pieces: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


def test_only_data_is_kept_and_an_event_without_any_is_none() -> None:
    assert read([STREAM]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_it_does_not_matter_how_a_stream_is_cut(cuts: list[int]) -> None:
    at = [0, *sorted(cuts), len(STREAM)]
    assert read([STREAM[a:b] for a, b in pairwise(at)]) == EVENTS


def test_an_event_comes_as_soon_as_it_ends_and_not_before() -> None:
    reader = EventReader()
    assert reader.feed(b"data: x\n") == []
    assert reader.feed(b"\n") == [b"x"]


def test_a_last_event_without_a_blank_line_is_not_lost() -> None:
    reader = EventReader()
    assert reader.feed(b"data: x") == []
    assert reader.close() == [b"x"]
    assert reader.close() == []


def test_characters_that_other_readers_take_for_line_ends_are_text() -> None:
    text = "data: a\u2028b\x0bc\n\n".encode()
    assert read([text[:9], text[9:]]) == ["a\u2028b\x0bc".encode()]


def test_bytes_without_end_are_no_stream() -> None:
    reader = EventReader()
    with pytest.raises(StreamInvalid, match="more than 16,777,216 bytes"):
        reader.feed(b"data: " + b"x" * (17 << 20))
