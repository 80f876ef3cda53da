"""A deployment's link keys: made once, found by all, and shown by nobody."""

from __future__ import annotations

import pytest

from baton.domain.errors import EngineStartFailed
from baton.runtime.link.keys import FleetKeys
from baton.serving.store.link_keys import fleet_keys
from tests.fakes.head_store import HeadStore


class Raced(HeadStore):
    """A store in which another process is a moment earlier."""

    def __init__(self, first: FleetKeys) -> None:
        super().__init__()
        self._first = first

    def put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        super().put(key, self._first.to_bytes(), overwrite=True)
        return super().put(key, value, overwrite=overwrite)


def test_later_processes_get_the_keys_of_the_first() -> None:
    store = HeadStore()
    made = fleet_keys(store)
    assert fleet_keys(store) == made
    assert fleet_keys(HeadStore()) != made


def test_two_processes_that_make_keys_at_once_both_use_the_first_ones() -> None:
    first = FleetKeys.generate()
    assert fleet_keys(Raced(first)) == first


def test_a_restarted_deployment_has_new_keys() -> None:
    store = HeadStore()
    before = fleet_keys(store)
    store.delete("", by_prefix=True)  # as `forget_all` does
    assert fleet_keys(store) != before


def test_keys_that_cannot_be_read_are_refused_and_not_shown() -> None:
    store = HeadStore()
    fleet_keys(store)
    (name,) = store.values
    store.values[name] = b'["a-secret", "another"]'
    with pytest.raises(EngineStartFailed, match="link key") as caught:
        fleet_keys(store)
    assert "a-secret" not in f"{caught.value} {caught.value.args} {caught.value.__cause__}"
