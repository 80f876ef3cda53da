"""Overrides as they are kept: another process with another clock reads the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.control.autoscaling.autoscaler import Override
from baton.runtime.ports import Clock
from baton.serving.controller.serve_fleet import (
    ClusterControllerStore,
    decode_overrides,
    encode_overrides,
)
from tests.serving.scaled_fleet import Clock as OwnClock

_OVERRIDE = st.builds(
    Override,
    replicas=st.integers(min_value=0, max_value=100),
    until_s=st.none() | st.floats(min_value=0, max_value=1e6),
)


@given(
    overrides=st.dictionaries(st.text(max_size=5), _OVERRIDE, max_size=3),
    now_s=st.floats(min_value=0, max_value=1e6),
    other_s=st.floats(min_value=0, max_value=1e6),
)
def test_an_override_ends_at_the_same_moment_by_another_clock(
    overrides: dict[str, Override], now_s: float, other_s: float
) -> None:
    wall_s = 1.7e9
    kept = encode_overrides(overrides, now_s=now_s, wall_s=wall_s)
    read = decode_overrides(kept, now_s=other_s, wall_s=wall_s + 10.0)
    assert read.keys() == overrides.keys()
    for pool, override in overrides.items():
        assert read[pool].replicas == override.replicas
        if override.until_s is None:
            assert read[pool].until_s is None
        else:
            remaining_s = (read[pool].until_s or 0.0) - other_s
            assert remaining_s == pytest.approx(override.until_s - now_s - 10.0, abs=1e-3)


def test_nothing_kept_is_nothing_said() -> None:
    assert decode_overrides(None, now_s=1.0, wall_s=2.0) == {}


@pytest.mark.parametrize("data", [b"", b"[]", b'{"a": 1}', b'{"a": {"replicas": null}}', b"\xff"])
def test_what_cannot_be_read_is_said(data: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        decode_overrides(data, now_s=1.0, wall_s=2.0)


class Notes:
    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def load(self, name: str) -> bytes | None:
        return self.kept.get(name)

    def save(self, name: str, data: bytes) -> None:
        self.kept[name] = data


def memory(notes: Notes, owner: str, clock: Clock | None = None) -> ClusterControllerStore:
    return ClusterControllerStore(
        notes, owner=owner, clock=clock or OwnClock(), wall_now_s=lambda: 1e9
    )


async def test_the_newest_controller_is_the_one_that_acts() -> None:
    notes = Notes()
    first, second = memory(notes, "first"), memory(notes, "second")
    await first.claim()
    assert await first.is_owner()
    await second.claim()
    assert await second.is_owner()
    assert not await first.is_owner()


async def test_who_claims_hears_whether_another_acted_before() -> None:
    notes = Notes()
    first, second = memory(notes, "first"), memory(notes, "second")
    assert [await first.claim(), await first.claim(), await second.claim()] == [False, False, True]


async def test_a_store_that_has_forgotten_everything_is_claimed_again() -> None:
    notes = Notes()
    first = memory(notes, "first")
    await first.claim()
    notes.kept.clear()
    assert await first.is_owner()
    assert not await memory(notes, "second").is_owner()


async def test_what_one_controller_keeps_the_next_one_reads() -> None:
    notes, later = Notes(), OwnClock()
    later.at_s = 7.0
    await memory(notes, "first").save({"decode": Override(replicas=3, until_s=160.0)})
    read = await memory(notes, "second", later).load()
    assert read == {"decode": Override(replicas=3, until_s=67.0)}


async def test_overrides_that_cannot_be_read_are_lost_and_pools_scaled_all_the_same() -> None:
    notes = Notes()
    await memory(notes, "first").save({"decode": Override(replicas=3)})
    notes.kept = dict.fromkeys(notes.kept, b"garbage")
    assert await memory(notes, "second").load() == {}
